"""Image classification: data, networks, training, export, evaluation and the time from photo to label."""
