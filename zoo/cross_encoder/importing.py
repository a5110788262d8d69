"""Cross-encoders of Hugging Face."""

from zoo.texts.importing import importer

IMPORTER = importer(scorer=True)
