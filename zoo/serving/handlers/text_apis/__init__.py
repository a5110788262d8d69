"""Text APIs of others, answered by a text model: requests to tokens, outputs of the model to responses."""
