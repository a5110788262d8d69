"""Imports TensorFlow graphs of feature columns as lookups and layers, with one rule per operator."""
