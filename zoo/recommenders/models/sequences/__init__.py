"""Recommenders that read the user's history as a sequence of items: layers, and one file a family.

layers          lookups of sequences, Dice, target attention
blocks          self-attention over sequences
target_network  what din and bst have in common
din             Deep Interest Network: ranking by target attention
bst             Behavior Sequence Transformer: ranking by a transformer layer over history and candidate
sasrec          self-attentive next-item recommendation
item_columns    vectors of the items' own columns, in the training of sasrec
"""
