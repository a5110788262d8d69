"""Recommenders that read the user's history as a sequence of items: layers, and one file a family.

layers      torch layers: lookups of sequences, Dice, target attention
din         Deep Interest Network: ranking by target attention

"""
