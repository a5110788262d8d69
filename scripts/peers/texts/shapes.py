"""Networks with random weights in the shapes of public text encoders, as sentence-transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.data.sample_texts import calibration_texts

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROWS, POSITIONS = 4096, 8192  # of the embeddings
LABELS = {"classify": 28, "tag": 9}  # as those of GoEmotions and of CoNLL 2003
CLASSES = {
    "embed": "AutoModel",
    "classify": "AutoModelForSequenceClassification",
    "tag": "AutoModelForTokenClassification",
}
USUAL = {"vocab_size": ROWS, "max_position_embeddings": POSITIONS, "pad_token_id": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "modernbert": {
        "model_type": "modernbert",
        "bos_token_id": 2,
        "cls_token_id": 2,
        "eos_token_id": 3,
        "sep_token_id": 3,
    },
    "deberta-v3": {
        "model_type": "deberta-v2",
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "position_buckets": 256,
        "relative_attention": True,
        "share_att_key": True,
        "type_vocab_size": 0,
    },
    "nomic": {"model_type": "nomic_bert", "type_vocab_size": 2},
    "gte": {"model_type": "gte", "type_vocab_size": 1},
    "qwen3-0.6b": {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1000000, "tie_word_embeddings": True},
}
WIDTHS = {"small": 384, "base": 768}
HIDDEN = {"modernbert": 1.5, "qwen3-0.6b": 3}  # units of the feed-forward, in widths; others 4
DONE = "written"  # a file in a folder that is whole
POOLING = {"qwen3-0.6b": "lasttoken"}


def config(shape: str, size: str, layers: int) -> dict[str, Any]:
    """Returns the config.json of a network.

    Args:
        shape: A key of `SHAPES`.
        size: A key of `WIDTHS`.
        layers: Number of layers.
    """
    width = WIDTHS[size]
    heads: dict[str, Any] = {"num_attention_heads": width // 64}
    if shape == "qwen3-0.6b":
        width = {"small": 512, "base": 1024}[size]
        heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    hidden = int(width * HIDDEN.get(shape, 4))
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers}
    return {**USUAL, **SHAPES[shape], **sizes, **heads}


def words() -> list[str]:
    """Returns the words of the texts that ship, in small Latin letters."""
    vocabulary = {word.lower() for text in calibration_texts() for word in text.split()}
    return sorted(word for word in vocabulary if word.isascii() and word.isalpha())


def text(rng: np.random.Generator, tokens: int) -> str:
    """Returns a random text.

    Args:
        rng: Random numbers.
        tokens: Its number of tokens with the two special ones.
    """
    return " ".join(rng.choice(words(), tokens - 2))


def tokenizer() -> Any:
    """Returns a tokenizer of words, which frames texts as BERT's does."""
    import tokenizers

    tokens = (*SPECIAL, *words())
    ids = {word: i for i, word in enumerate((*tokens, *(f"[unused{i}]" for i in range(len(tokens), ROWS))))}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ends = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return made


def write(folder: Path, shape: str, size: str, task: str, layers: int) -> None:
    """Writes a network with the initial weights of transformers, if it is not there.

    Args:
        folder: Folder of the network.
        shape: A key of `SHAPES`.
        size: A key of `WIDTHS`.
        task: A key of `CLASSES`.
        layers: Number of layers.
    """
    if (folder / DONE).exists():
        return
    import torch
    import transformers

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    values = config(shape, size, layers) | ({"num_labels": LABELS[task]} if task in LABELS else {})
    described = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    network = getattr(transformers, CLASSES[task]).from_config(described)
    network.float().eval().save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    if task == "embed":
        _write_modules(folder, network.config.hidden_size, POOLING.get(shape, "mean"))
    (folder / DONE).touch()


def _write_modules(folder: Path, width: int, pooling: str) -> None:
    """Writes the files of sentence-transformers beside a network."""
    listed = []
    for i, name in enumerate(("Transformer", "Pooling", "Normalize")):
        place = f"{i}_{name}" if i else ""
        listed.append({"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"})
        (folder / place).mkdir(exist_ok=True)
    about = {"word_embedding_dimension": width, "pooling_mode": pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(about))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": POSITIONS, "do_lower_case": False}))
    (folder / "modules.json").write_text(json.dumps(listed))
