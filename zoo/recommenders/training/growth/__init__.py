"""Fine-tuning on ids that are new: counts of ids, admission and eviction, and the rows of grown embedding tables."""
