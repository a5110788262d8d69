"""Sequences in the graphs of imported rankers: found by their structure, and written in the form of `export`.

graph_sequences     all of them in a graph
operators           layers, and operators that only move entries
attention_units     target attention (DIN), and activations
attention_form      target attention in the form of `export.sequence_parts`
transformer_units   the transformer layer of a target and its history (BST)
transformer_form    the transformer layer in the form of `export.sequence_blocks`
"""
