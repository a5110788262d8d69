"""Scoring, training and serving on Ray clusters, and the configuration of clusters (`manifests`).

Its library is the extra `ray`, imported at first use.
"""
