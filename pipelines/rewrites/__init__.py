"""Float graph rewrites, one pass a file, and the driver that applies them to a fixed point.

Imports `core` and `graph`.
"""
