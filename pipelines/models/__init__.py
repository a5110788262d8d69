"""Model folders: the declaration of a family, the files, the build stages, the pipeline.

The package imports every other package.
"""
