"""Sentence encoders of Hugging Face."""

from zoo.texts.importers.huggingface import importer

IMPORTER = importer(scorer=False)
