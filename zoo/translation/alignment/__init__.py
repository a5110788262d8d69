"""Word alignments of translations, the scores of their words, and markup and placeholders that are put back by them.

forced: cross-attention and log probabilities; spans: characters of tokens; words: alignment of a line; markup: tags and
placeholders of a text; placement: where they go in its translation; results: all of it for the lines of a pipeline.
"""
