"""Controls of a search: rules of scores, phrases, and the options that set them."""
