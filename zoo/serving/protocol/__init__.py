"""Request and response bodies: Open Inference Protocol, content types and encodings, OpenAPI."""
