"""Training of image classifiers: recipe, distillation, pruning and quantization-aware training."""
