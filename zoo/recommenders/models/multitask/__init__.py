"""Recommenders that predict several labels: mmoe.py, ple.py, esmm.py, and their common layers.py and outputs.py."""
