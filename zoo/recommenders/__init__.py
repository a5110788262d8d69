"""Click logs with columns of their own: reading them by name (`logs`), what their columns are (`schema`, `infer`),
training on them, cutting what was trained, and rankers from ONNX files of others.

The families of recommenders share it; it imports `pipelines`, no family.
"""

SUMMARY = "{rows:,} rows, {clicks:,} clicks predicted, {rows_per_second:,.0f} rows/s, {precision} in {engine}"
BOUND = 0.003  # what int8 may move a probability by on the rows calibrated on, so that it is 0.005 on rows to come
