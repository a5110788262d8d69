"""Two-tower retrieval: item index, recall metrics and inference."""
