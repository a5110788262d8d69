"""What the image classifiers share."""
