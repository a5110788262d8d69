"""What sentence encoders and cross-encoders share: BERT-shaped networks from the folders of Hugging Face to vectors.

`form` says what a network is, `weights` reads it, `freeze` writes its graph; `tokens`, `reading`, `predict` and
`vectors` lead from texts to files of results, `train` goes on training one, `metrics` judges them.
"""
