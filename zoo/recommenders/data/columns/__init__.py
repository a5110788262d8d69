"""Inference of the columns of a log: statistics of their values, times, kinds and labels."""
