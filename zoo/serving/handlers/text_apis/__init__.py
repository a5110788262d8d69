"""OpenAI, text-embeddings-inference and Cohere APIs: requests to tokens, outputs of a text model to responses."""
