"""Fine-tuning of sentence encoders and cross-encoders on pairs of texts."""
