"""Import of Hugging Face folders of text encoders as model folders."""
