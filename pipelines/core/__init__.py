"""Foundations of all packages: errors, batches of arrays, files, progress, the machine, the user's settings.

The package imports no other package of the project.
"""
