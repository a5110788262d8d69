"""Click logs with columns of their own: reading them by name (`logs`), what their columns are (`schema`, `infer`),
training on them, cutting what was trained, and rankers from ONNX files of others.

The families of recommenders share it; it imports `pipelines`, no family.
"""
