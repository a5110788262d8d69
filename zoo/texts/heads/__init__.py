"""Heads of text networks: one file a task, with its import, its layers, its pipeline, its metric and its family.

base                     what all heads declare; weights of a head
task_pipeline            what all their pipelines share
sequence_classification  labels of texts and of pairs of texts
token_classification     entities; entities.py merges tokens to them
labelled                 labelled data of evaluation and fine-tuning, accuracy and F1
"""
