"""Deltas: the difference of two model folders as a file, for servers and copies of the older one.

tables       where the files of a model hold tables, and how many bytes a row has
pieces       difference of two files: tables by rows, text by lines
scales       scales of the older model for the newer one, so that few rows differ
delta        the file: a zip of a JSON manifest and arrays, with the digests of both models
application  a delta applied to a copy of the older folder, or to its files in place
transport    where deltas are published: a folder, a URL, or Redis
"""
