"""Lowering of networks on the fields of a sample: gates, bilinear forms, and attention between fields."""
