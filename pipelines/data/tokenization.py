"""Constants of the tokenization of texts, in encoders and in translation."""

TRIAL = "A text: é ½ ﬁ １ 漢字 🙂"  # tokenized when a tokenizer is opened, as its normalizers may fail then
MAX_TOKEN_CHARACTERS = 100  # for each token of the limit; more characters of a text are not tokenized at first
