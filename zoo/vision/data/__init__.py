"""Labelled images from folders, archives and data sets, and augmentation."""
