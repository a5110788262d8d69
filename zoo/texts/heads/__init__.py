"""Heads of text networks: one file a task, with its import, its layers, its pipeline and its metric.

task_pipeline            what the pipelines of tasks share
sequence_classification  labels of texts and of pairs of texts
zero_shot                labels of a call, by natural language inference
token_classification     entities; entities.py merges tokens to them
question_answering       spans of contexts
masked_language          layers before the vocabulary; fill_mask.py has their pipeline
sparse_encoder           weights of the vocabulary (SPLADE)
late_interaction/        vectors of tokens, and MaxSim (ColBERT)
ranking                  scores of pairs by cross-encoders
labelled                 labelled data, accuracy and F1
"""
