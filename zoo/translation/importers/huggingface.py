"""Importer of transformers folders (`save_pretrained`) with an architecture of `architectures`."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import not_installed, one_line
from zoo.translation.data.tokenizers import has_moses
from zoo.translation.data.vocabularies import SOURCE, TARGET
from zoo.translation.importers.architectures.base import QUICK, SIDES
from zoo.translation.importers.imported import ImportedModel, Renumbering
from zoo.translation.importers.original import ORIGINAL, pack
from zoo.translation.models.config import ModelConfig, sinusoids
from zoo.translation.models.transformer import Transformer
from zoo.translation.search.config import SearchConfig

if TYPE_CHECKING:
    import torch
from zoo.translation.importers.huggingface_folder import CONFIG, GENERATION, SIZES
from zoo.translation.importers.huggingface_vocabulary import Vocabulary, VocabularyFolder

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # suffix of the index of sharded weights
OTHER_WEIGHTS = ("*.onnx", "onnx/*.onnx", "*.h5", "*.msgpack", "*.gguf", "*.ot")


def recognizes(folder: Path) -> bool:
    """Returns whether a path holds a model of this format.

    Args:
        folder: Folder.
    """
    return (folder / CONFIG).is_file()


def supports(folder: Path) -> bool:
    """Returns whether the architecture of a folder is supported.

    Args:
        folder: Folder.
    """
    return _Reader(folder, {})._find_architecture() is not None


def read(folder: Path, *, source_language: str = "", target_language: str = "") -> ImportedModel:
    """Reads a model; nothing in it is executed.

    Args:
        folder: The folder.
        source_language: Source language of a multilingual model.
        target_language: Target language of a multilingual model.

    Returns:
        The model.

    Raises:
        RequestError: The model is not supported; the message lists every reason.
    """
    return _Reader(folder, {SOURCE: source_language, TARGET: target_language}).read()


class _Reader(VocabularyFolder):
    """Reads a folder and collects its errors."""

    def read(self) -> ImportedModel:
        """See `read`."""
        architecture = self._find_architecture()
        if architecture is None:
            raise self.refusal()
        self.architecture = architecture
        model_config = architecture.read(self)
        sound = not self.faults
        nothing = Vocabulary("sentencepiece", [], {}, -1, "", set(), {})
        vocabulary, tensors = self._try_read("its vocabulary", self._vocabulary, nothing), self._weights()
        if vocabulary.kind == "moses" and not has_moses():  # running on text needs sacremoses, too
            self.faults.append(str(not_installed("its text", "sacremoses", "int8-zoo[moses]")))
        end, start = self._token("eos_token_id"), self._start(vocabulary)
        tables = self._tables(tensors, model_config) if tensors and sound else None
        size = len(vocabulary.target) if tables is None else len(tables[1])
        rules = self._try_read(
            GENERATION, lambda: self._rules(size, vocabulary.unknown, end, start), SearchConfig("transformers")
        )
        if tables is not None:
            self._fits(vocabulary, tables, end)
        if self.faults or tables is None:
            raise self.refusal()
        source, target = (Renumbering(len(table), vocabulary.unknown, end) for table in tables[:2])
        model_config, state = self._state(tensors, model_config, tables, (source, target), start)
        if self.faults:
            raise self.refusal()
        framing, pieces = vocabulary.framed(source, target, rules, self.languages)
        if framing.prefixed:
            rules = replace(rules, prefix=())
        about = {"architecture": self.config["architectures"][0], "format": "huggingface", **self._licence()}
        return ImportedModel(
            model_config,
            architecture.pre_norm,
            {name: np.ascontiguousarray(array) for name, array in state.items()},
            framing,
            pieces,
            {**vocabulary.files, ORIGINAL: pack(self.path)},
            rules,
            min(model_config.positions[0], self._most_tokens()),
            vocabulary.pair or "-".join(filter(None, (framing.source_language, framing.target_language))),
            about,
        )

    def _licence(self) -> dict[str, str]:
        """Returns the licence in the model's README."""
        path = self.path / "README.md"
        text = path.read_text("utf-8", "replace") if path.is_file() else ""
        match = re.search(r"\A---\n(?:.*\n)*?license:\s*(\S+)", text)
        return {"licence": match[1]} if match else {}

    # ------------------------------------------------------------------------------------------------- configuration

    def _start(self, vocabulary: Vocabulary) -> int:
        """Returns the token that starts translations; for mBART that of the target language."""
        start = self._token("decoder_start_token_id")
        start = self._token("bos_token_id") if start < 0 else start
        if vocabulary.starts and self.languages[TARGET]:
            start = vocabulary.languages.get(self.languages[TARGET], start)
        if start < 0:
            self.faults.append("found no decoder_start_token_id")
        return start

    # ------------------------------------------------------------------------------------------------------- weights

    def _weights(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name."""
        for name in WEIGHTS:
            if (self.path / name).is_file():
                return self._tensors(name)
            if (self.path / f"{name}{INDEX}").is_file():
                places = self.read_json(f"{name}{INDEX}", dict).get("weight_map")
                if not isinstance(places, dict) or not all(
                    isinstance(name, str) and Path(name).name == name for name in places.values()
                ):
                    self.faults.append(f"{name}{INDEX} names no files")
                    return {}
                tensors: dict[str, torch.Tensor] = {}
                for part in sorted(set(places.values())):
                    tensors |= self._tensors(part)
                return tensors
        others = sorted(path.name for pattern in OTHER_WEIGHTS for path in self.path.glob(pattern))
        weights = f"{', '.join(others[:3])}, but no weights of PyTorch" if others else "no weights"
        self.faults.append(f"found {weights}, expected {' or '.join(WEIGHTS)}")
        return {}

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        import torch

        path = self.path / name
        try:
            if path.suffix == ".safetensors":
                import safetensors.torch

                return safetensors.torch.load_file(path)
            with warnings.catch_warnings(action="ignore"):  # about the protocol of pickles
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
        except ModuleNotFoundError as error:
            self.faults.append(str(not_installed(name, error.name, "int8-zoo[import]")))
        except pickle.UnpicklingError:
            self.faults.append(f"{name} is damaged or holds code, which is not executed")
        except Exception as error:  # the error classes depend on the libraries' versions
            self.faults.append(f"{name} is damaged ({one_line(error)})")
        else:
            if isinstance(tensors, dict) and all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
                return tensors
            self.faults.append(f"{name} holds values other than tensors")
        return {}

    def _array(
        self, tensors: Mapping[str, torch.Tensor], names: Sequence[str], shape: tuple[int, ...]
    ) -> NDArray[np.float32]:
        """Returns the first of these tensors that exists, float32. shape: -1 for any size."""
        name = next((name for name in names if name in tensors), names[0])
        return self.fitted(name, tensors[name].detach().float().numpy() if name in tensors else None, shape)

    def _tables(
        self, tensors: Mapping[str, torch.Tensor], model_config: ModelConfig
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]] | None:
        """Returns the embeddings of source and target, and the output weights, [tokens, width] each."""
        before, shape = len(self.faults), (-1, model_config.width)
        source, target, shared, output = self.architecture.tables
        tied = self.config.get("tie_word_embeddings", True)
        if not self.architecture.tied:
            names = ((source, shared), (target, shared), (output, shared))
            encoder, decoder, last = (self._array(tensors, pair, shape) for pair in names)
            tables = encoder, decoder, last
        elif tied and self.config.get("share_encoder_decoder_embeddings", True):
            table = self._array(tensors, (shared, source, target, output), shape)
            tables = table, table, table
        else:
            decoder = self._array(tensors, (target, output) if tied else (target, shared), shape)
            encoder = self._array(tensors, (source, shared), shape)
            tables = encoder, decoder, decoder if tied else self._array(tensors, (output,), decoder.shape)
        return tables if len(self.faults) == before else None

    def _fits(self, vocabulary: Vocabulary, tables: Sequence[NDArray[np.float32]], end: int) -> None:
        """Checks that the vocabulary belongs to the weights."""
        for table, pieces in zip(tables, (vocabulary.source, vocabulary.target), strict=False):
            if not pieces:
                continue  # reported before
            spare = len(table) - len(pieces)
            without = {*pieces[len(table) :]}  # such as <mask>, which no text has
            if spare > vocabulary.spare or not without <= {None, *vocabulary.hidden}:
                self.faults.append(f"the vocabulary has {len(pieces)} tokens, the weights {len(table)}")
            elif not 0 <= end < len(pieces) or pieces[end] != vocabulary.end:
                self.faults.append(f"eos_token_id is {end}, which is not {vocabulary.end} in the vocabulary")

    def _state(
        self,
        tensors: Mapping[str, torch.Tensor],
        model_config: ModelConfig,
        tables: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
        renumbered: tuple[Renumbering, Renumbering],
        start: int,
    ) -> tuple[ModelConfig, dict[str, NDArray[np.float32]]]:
        """Returns the configuration and the state dict."""
        encoder, decoder, output = tables
        source, target = renumbered
        if not start < len(decoder):
            self.faults.append(f"decoder_start_token_id is {start}, the vocabulary has {len(decoder)} tokens")
            return model_config, {}
        shared = encoder is decoder or np.array_equal(encoder, decoder)
        tied = output is decoder or np.array_equal(output, decoder)
        model_config = replace(model_config, shared_source=shared, tied_output=tied)
        bias = np.zeros(len(decoder), np.float32)
        if "final_logits_bias" in tensors:
            bias = self._array(tensors, ("final_logits_bias",), (1, len(decoder)))[0]
        state = {"embedding.weight": target.table(decoder, start), "output_bias": target.bias(bias)}
        if self.architecture.positions:
            tables_of = {side: self._positions(tensors, side, model_config, start) for side in SIDES}
            state |= {"source_positions": tables_of["encoder"], "positions": tables_of["decoder"]}
            model_config = replace(model_config, positions=tuple(len(table) for table in tables_of.values()))
        if not shared:
            state["source_embedding.weight"] = source.table(encoder)
        if not tied:
            state["output_weight"] = target.table(output)
        for name, shape in _shapes(model_config, len(target.ours), self.architecture.pre_norm).items():
            if name not in state:
                state[name] = self._array(tensors, (self.architecture.name(name, model_config),), shape)
        if self.config.get("activation_function") == "quick_gelu":
            for name, factor in (("inner.weight", QUICK), ("inner.bias", QUICK), ("outer.weight", 1 / QUICK)):
                for key in [key for key in state if key.endswith(f".feed.{name}")]:
                    state[key] = state[key] * np.float32(factor)
        layer = re.compile(
            re.escape(self.architecture.layer).replace(r"\{side\}", "(encoder|decoder)").replace(r"\{i\}", r"(\d+)")
        )
        found_layers = {name: layer.match(name) for name in tensors}
        if more := [name for name, m in found_layers.items() if m and int(m[2]) >= getattr(model_config, m[1])]:
            self.faults.append(f"found {more[0]}, but {CONFIG} has fewer layers")
        return model_config, state

    def _positions(
        self,
        tensors: Mapping[str, torch.Tensor],
        side: str,
        model_config: ModelConfig,
        start: int,
    ) -> NDArray[np.float32]:
        """Returns position encodings [tokens, width] of the encoder or the decoder. start: original start token."""
        length, width = model_config.positions[0], model_config.width
        if self.architecture.positions == "learned":
            name = f"model.{side}.embed_positions.weight"
            return self._array(tensors, (name,), (-1, width))[self.architecture.offset :]
        if self.architecture.positions == "sinusoids":
            pad = self.config.get("pad_token_id", 1)
            if not isinstance(pad, int) or not 0 <= pad <= SIZES or pad == self.config.get("eos_token_id"):
                self.faults.append(f"{CONFIG} has pad_token_id {pad!r}, expected a token other than the end")
                pad = 1
            first = pad + 1  # padding has no position
            table = sinusoids(length + first, width)[first:]
            if side == "decoder" and start == pad:
                table[0] = 0
            return table
        angles = np.arange(length)[:, None] / np.power(10_000, 2 * np.arange(width // 2) / width)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _shapes(config: ModelConfig, tokens: int, pre_norm: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a network. tokens: size of its vocabulary."""
    import torch

    with torch.device("meta"):
        network = Transformer(config, tokens, pre_norm=pre_norm, dropout=0.0)
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
