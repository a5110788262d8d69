"""Description of text encoders, their architectures, and their weights under shared names."""
