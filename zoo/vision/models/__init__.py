"""Image classifiers in torch, one file a family."""
