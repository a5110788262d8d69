"""Click models from elsewhere: a frozen graph of TensorFlow feature columns read, by rules for its operators, as
lookups and layers.
"""
