"""Text encoders: sentence encoders and cross-encoders.

`models` describes networks, one file an architecture, `export` writes fp32.onnx, `importers` reads Hugging Face
folders, `data` reads texts and tokenizes them, `inference` computes embeddings and scores, `training` fine-tunes,
`metrics` evaluates.
"""
