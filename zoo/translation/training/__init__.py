"""Training of translation models: recipe, trainer, distillation, pruning and quantization-aware training."""
