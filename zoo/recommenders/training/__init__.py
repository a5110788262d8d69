"""Training of recommenders: recipe, trainer, sparse optimizer, pruning, distillation, quantization-aware training."""
