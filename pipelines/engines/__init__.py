"""Sessions: engines behind one protocol, the choice among them by timing, plan files; `catalog.load` opens them all.

Imports `core`, `graph` and `kernels`.
"""
