"""Modules of sentence-transformers that run text encoders and cross-encoders on this project's kernels.

`modules.json` names them, see `zoo.texts.export.modules`. `SentenceTransformer(folder, trust_remote_code=True)` opens a
folder with a `NativeEncoder`, `CrossEncoder` one with a `NativeRanker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import tokenizers
import torch
from sentence_transformers.base.modules import InputModule

import zoo
from zoo.texts.data import tokenizer
from zoo.texts.export.modules import SETTINGS, copy_model
from zoo.texts.text_pipeline import TextPipeline


class NativeModule(InputModule):  # type: ignore[misc]  # a class without types
    """Tokenizes texts or pairs, and computes the outputs of a model folder.

    Args:
        folder: Model folder.
        precision: "int8" or "fp32".
        engine: Inference engine, or "auto".
        threads: Number of intra-op threads.

    Attributes:
        pipeline: Pipeline of the model.
        max_seq_length: Maximum number of tokens of a text.
        tokenizer: Tokenizer of the model.
        RESULT: Feature that the module computes.
    """

    RESULT: ClassVar[str]
    config_file_name = SETTINGS
    config_keys = ("precision", "engine", "threads")
    save_in_root = False

    def __init__(self, folder: str | Path, precision: str = "int8", engine: str = "auto", threads: int = 1) -> None:
        super().__init__()
        self.pipeline = cast(TextPipeline, zoo.pipeline(str(folder), precision, engine, threads))
        self.precision, self.engine, self.threads = precision, engine, threads
        self.max_seq_length = self.pipeline.max_length
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / tokenizer.FILE))

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **options: Any) -> dict[str, Any]:
        """Tokenizes texts, or pairs of texts.

        Args:
            inputs: Texts, or pairs.
            prompt: Prefix of every text, or of the first text of a pair.
            **options: Options of other modules.

        Returns:
            "tokens" of `forward`, and "input_ids" and "attention_mask", int64 [texts, longest].
        """
        length = self.pipeline.tokenizer.require_length(self.max_seq_length, self.pipeline.TEXTS_PER_ROW > 1)
        rows = [(text,) if isinstance(text, str) else tuple(text) for text in inputs]
        tokens = self.pipeline.tokenize(rows, prompt or "", length)
        padded = tokens.padded(self.pipeline.config.inputs)
        return {"tokens": tokens, **{name: torch.from_numpy(array) for name, array in padded.items()}}

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Computes the results of texts or pairs.

        Args:
            features: What `preprocess` returns.
            **options: Options of other modules.

        Returns:
            The features, with `RESULT`, float32 [texts, width].
        """
        results = torch.from_numpy(self.pipeline.compute(features.pop("tokens")))
        features[self.RESULT] = results.to(features["input_ids"].device)
        return features

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **options: Any) -> Self:
        """Opens the module of a folder or of a repository on the Hugging Face Hub.

        Args:
            model_name_or_path: The folder or the repository.
            subfolder: Folder of the module in it.
            **options: `token`, `cache_folder`, `revision` and `local_files_only` for the Hub; `model_kwargs` may have
                "precision", "engine" and "threads".

        Returns:
            The module.
        """
        names = ("token", "cache_folder", "revision", "local_files_only")
        hub = {name: options[name] for name in names if name in options}
        config = cls.load_config(model_name_or_path, subfolder=subfolder, **hub)
        extra = {name: value for name, value in (options.get("model_kwargs") or {}).items() if name in cls.config_keys}
        folder = cls.load_dir_path(model_name_or_path, subfolder=subfolder, **hub)
        return cls(str(folder), **{**config, **extra})

    def save(self, output_path: str, *arguments: Any, **options: Any) -> None:
        """Writes the module.

        Args:
            output_path: Folder of the module.
            *arguments: Not used.
            **options: Not used.
        """
        output = Path(output_path)
        if output.resolve() != self.pipeline.folder.path.resolve():
            copy_model(self.pipeline.folder, output, self.precision)
        self.save_config(output_path)


class NativeEncoder(NativeModule):
    """Computes "sentence_embedding": encoder, pooling and normalization of a sentence encoder."""

    RESULT: ClassVar[str] = "sentence_embedding"

    def get_embedding_dimension(self) -> int:
        """Returns the number of components of an embedding."""
        return self.pipeline.config.output_size


class NativeRanker(NativeModule):
    """Computes "scores", logits of pairs, of a cross-encoder with one score."""

    RESULT: ClassVar[str] = "scores"
