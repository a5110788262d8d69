"""A small masked language model of random weights, with a vocabulary of own texts.

    python scripts/examples/start_model.py OUTPUT TEXTS... [--set layers=3]
    zoo import OUTPUT -o start
    zoo finetune start --data texts.txt -o encoder     # learns the language

TEXTS are text files, or .jsonl with {"text"}. OUTPUT is a folder as transformers writes it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
SIZES = {"vocabulary": 4096, "width": 128, "layers": 3, "heads": 4, "positions": 512}
DROPOUT = 0.1


def read(paths: list[Path]) -> Iterator[str]:
    """Yields texts.

    Args:
        paths: Files.
    """
    for path in paths:
        for line in path.read_text().splitlines():
            yield json.loads(line)["text"] if path.suffix == ".jsonl" else line


def tokenizer(texts: Iterator[str], size: int) -> Any:
    """Returns a byte-level BPE tokenizer, which divides numbers into digits.

    Args:
        texts: Texts of the vocabulary.
        size: Number of its tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    ends = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends),
        ]
    )
    return made


def main(output: Path, texts: list[Path], settings: dict[str, int]) -> None:
    """Writes the folder.

    Args:
        output: Folder.
        texts: Files of the vocabulary.
        settings: Changes of `SIZES`.
    """
    import torch
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    sizes = {**SIZES, **settings}
    made = tokenizer(read(texts), sizes["vocabulary"])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=sizes["positions"], **SPECIAL)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=made.get_vocab_size(),
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=4 * sizes["width"],
        max_position_embeddings=sizes["positions"],
        type_vocab_size=1,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        pad_token_id=0,
    )
    BertForMaskedLM(config).save_pretrained(output)
    fast.save_pretrained(output)
    made.save(str(output / "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help=f"one of {', '.join(SIZES)}")
    args = parser.parse_args()
    main(args.output, args.texts, {name: int(value) for name, value in (setting.split("=") for setting in args.set)})
