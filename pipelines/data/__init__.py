"""What people have and what they get: image files to pixels, result rows to tables.

Imports `core`, `kernels` and the types of `engines`.
"""
