"""Input data and result files: images to pixels, text files, result rows to tables.

The package imports `core`, `kernels` and the types of `engines`.
"""
