"""Deltas: the difference of two model folders as a file, for servers and copies of the older one.

tables       where the files of a model hold tables, and how many bytes a row has
pieces       difference of two files: tables by rows, text by lines
delta        the file: a zip of a JSON manifest and arrays, with the digests of the older model and of the newer
application  a delta applied to a copy of the older folder, or to its files in place
"""
