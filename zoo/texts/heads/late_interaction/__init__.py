"""Late interaction: vectors of tokens, and MaxSim (Khattab and Zaharia 2020, "ColBERT").

head      what is imported: folders of Stanford's ColBERT, PyLate and sentence-transformers
roles     tokens of queries and documents: markers, lengths, query expansion, skipped tokens
pipeline  texts to vectors of tokens, and documents in the order of their scores
"""
