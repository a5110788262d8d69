"""Graphs, models and data that tests share."""
