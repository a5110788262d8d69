"""A model of random weights in Marian's format, in the shape of Firefox's, and its int8 form; needs pymarian."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

SHAPE = {  # "tiny" of Bogoychev et al. 2020 and of Firefox: 6 layers of the encoder, 2 of the decoder with SSRU
    "type": "transformer",
    "enc_depth": 6,
    "dec_depth": 2,
    "dim_emb": 256,
    "transformer_dim_ffn": 1536,
    "transformer_heads": 8,
    "transformer_ffn_activation": "relu",
    "transformer_decoder_autoreg": "rnn",
    "dec_cell": "ssru",
    "tied_embeddings_all": "true",
}
MODEL, INT8, VOCABULARY = "model.npz", "model.intgemm8.bin", "vocab.spm"
NEVER = -1e4  # the end's bias: every translation is as long as it may be


def random_model(folder: Path, vocabulary: bytes, pieces: int, growth: float) -> None:
    """Trains one update from random weights by Marian.

    Args:
        folder: Folder of the model for Marian's decoder.
        vocabulary: sentencepiece model, the end first.
        pieces: Its number of pieces.
        growth: Tokens of a translation for each token of its source; no translation ends earlier.
    """
    import pymarian

    folder.mkdir(parents=True)
    (folder / VOCABULARY).write_bytes(vocabulary)
    text = folder / "text"
    text.write_text("▁\n" * 8, encoding="utf8")
    names = [str(folder / VOCABULARY)] * 2
    training = {"after": "1u", "mini_batch": 4, "workspace": 512, "cpu_threads": 1, "seed": 1, "quiet": "true"}
    pymarian.Trainer(
        **SHAPE,
        **training,
        model=str(folder / MODEL),
        vocabs=names,
        dim_vocabs=[pieces] * 2,
        train_sets=[str(text)] * 2,
    ).train()
    text.unlink()
    with np.load(folder / MODEL) as archive:
        weights = {name: archive[name] for name in archive.files}
    weights["decoder_ff_logit_out_b"][0, 0] = NEVER
    np.savez(folder / MODEL, **weights)
    (folder / f"{MODEL}.decoder.yml").write_text(
        f"models: [{MODEL}]\nvocabs: [{VOCABULARY}, {VOCABULARY}]\nnormalize: 0\nmax-length-factor: {growth}\n"
    )


def convert(folder: Path) -> None:
    """Writes the int8 form of a folder's model beside it, by Marian's own tool."""
    tool = [sys.executable, "-m", "pymarian", "convert", "-g", "intgemm8"]
    subprocess.run([*tool, "-f", str(folder / MODEL), "-t", str(folder / INT8)], check=True)
