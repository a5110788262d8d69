"""Image networks that people bring as ONNX files: detection, segmentation, classification and embeddings.

`conventions` recognizes a network by its inputs, outputs and metadata; `transforms` are the preprocessings, `boxes` and
`masks` decode outputs, `drawing` draws results, `pipeline` chains them, `family` opens the file.
"""
