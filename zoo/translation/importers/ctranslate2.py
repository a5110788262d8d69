"""Importer of CTranslate2 folders, which its converters write of models of fairseq, OpenNMT-py and OpenNMT-tf as well.

model.bin, version 6 (ctranslate2/specs/model_spec.py), is, little-endian: uint32 version; the kind of model, a name;
uint32 revision; uint32 n; n times the name of a tensor, uint8 dimensions, uint32 each, uint8 type, uint32 bytes, the
bytes; uint32 m; m times the name of an alias and that of its tensor. Text is uint16 length, bytes and a zero, which the
length counts. An int8 matrix q has float32 NAME_scale s of its rows, an int16 one a single s: a weight is q / s.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.translation.data.tokens import END, POSITIONS
from zoo.translation.data.vocabularies import Framing
from zoo.translation.importers.imported import ImportedModel, Renumbering
from zoo.translation.importers.model_reader import ModelReader, refuse_languages
from zoo.translation.models.config import ModelConfig, sinusoids
from zoo.translation.search.config import SearchConfig

MODEL, CONFIG = "model.bin", "config.json"
VERSION, KIND = 6, "TransformerSpec"
TYPES = ("<f4", "|i1", "<i2", "<i4", "<f2", "bfloat16")
ACTIVATIONS = {0: "relu", 2: "swish", 3: "gelu"}
MAX_INPUT_LENGTH, MAX_DECODING_LENGTH = 1024, 256  # defaults of Translator.translate_batch
# Scalars without effect on translations, and those without effect if they are zero
HARMLESS = ("alignment_layer", "alignment_heads", "embeddings_merge", "alibi_use_positive_positions")
ZERO = ("alibi", "scale_alibi", "sliding_window", "multi_query_attention")

Array = NDArray[Any]


def recognizes(path: Path) -> bool:
    """Returns whether a path holds a model of this format.

    Args:
        path: Folder.
    """
    try:
        with (path / MODEL).open("rb") as file:
            head = file.read(64)
    except OSError:
        return False
    return len(head) > 8 and 2 <= head[0] <= 32 and not any(head[1:4]) and b"Spec\0" in head


def read(folder: Path, *, source_language: str = "", target_language: str = "") -> ImportedModel:
    """Reads a model; nothing in it is executed. Its search rules are CTranslate2's, but a translation may be empty.

    Args:
        folder: The folder.
        source_language: Not supported; such folders have no languages to choose.
        target_language: Not supported.

    Returns:
        The model.

    Raises:
        RequestError: The model is not supported; the message lists every reason.
    """
    refuse_languages("a folder of CTranslate2", source_language, target_language)
    return _Reader(folder).read()


def tensors(content: bytes) -> tuple[str, dict[str, Array]]:
    """Reads model.bin.

    Args:
        content: The file.

    Returns:
        The kind of model, and {name: tensor}; quantized tensors are dequantized to float32.

    Raises:
        ValueError: The file is damaged or of another version.
    """
    offset = 0

    def take(count: int) -> bytes:
        nonlocal offset
        if count > len(content) - offset:
            raise ValueError(f"it ends after {len(content):,} bytes, which is too early")
        offset += count
        return content[offset - count : offset]

    def number(kind: str) -> int:
        return int(struct.unpack(f"<{kind}", take(struct.calcsize(kind)))[0])

    def text() -> str:
        return take(number("H"))[:-1].decode("utf-8")

    if (version := number("I")) != VERSION:
        raise ValueError(f"it has version {version}, expected {VERSION}; convert the model again")
    kind, _ = text(), number("I")
    tensors: dict[str, Array] = {}
    for _ in range(number("I")):
        name, dimensions = text(), number("B")
        shape = struct.unpack(f"<{dimensions}I", take(4 * dimensions))
        type_, part = number("B"), take(number("I"))
        if type_ >= len(TYPES):
            raise ValueError(f"{name} has the type {type_}")
        if TYPES[type_] == "bfloat16":
            values = (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(part, TYPES[type_])
        if values.size != prod(shape):
            raise ValueError(f"{name} has {len(part)} bytes for {' x '.join(map(str, shape))}")
        tensors[name] = values.reshape(shape)
    for _ in range(number("I")):
        alias, name = text(), text()
        tensors[alias] = tensors[name]
        if f"{name}_scale" in tensors:
            tensors.setdefault(f"{alias}_scale", tensors[f"{name}_scale"])
    for name in [name for name in tensors if name.endswith("_scale") and name.removesuffix("_scale") in tensors]:
        scale, quantized = tensors.pop(name).astype(np.float32), tensors[name.removesuffix("_scale")]
        if quantized.dtype.kind == "i":
            scale = scale.reshape(-1, *[1] * (quantized.ndim - 1)) if scale.size > 1 else scale
            tensors[name.removesuffix("_scale")] = quantized.astype(np.float32) / scale
    return kind, tensors


class _Reader(ModelReader):
    """Reads a folder and collects its errors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.used: set[str] = set()
        self.config = self.read_json(CONFIG, dict)
        try:
            self.kind, self.tensors = tensors((folder / MODEL).read_bytes())
        except OSError as error:
            raise RequestError(f"cannot read {folder / MODEL}: {error.strerror or error}") from error
        except (ValueError, KeyError, struct.error) as error:
            raise RequestError(f"{folder} cannot be imported: {MODEL} is damaged ({error})") from error

    def read(self) -> ImportedModel:
        """See `read`."""
        if self.kind != KIND:
            raise RequestError(f"{self.folder} cannot be imported: found a {self.kind}, expected a {KIND}")
        vocabularies = self._vocabularies()
        model_config, pre_norm = self._model_config()
        if self.faults:
            raise self.refusal()
        model_config, state, renumbered, start = self._state(model_config, vocabularies)
        if left := sorted(name for name in self.tensors.keys() - self.used if not name.endswith(HARMLESS)):
            self.faults.append(f"found {', '.join(left[:5])}, which is not supported")
        if self.faults:
            raise self.refusal()
        source = renumbered[0]
        before = (
            [int(source.ours[vocabularies[0].index(self._token("bos_token"))])] if self._flag("add_source_bos") else []
        )
        kind, files = self._pieces()
        framing = Framing(kind, tuple(files), tuple(before), (END,) if self._flag("add_source_eos") else ())
        tables = (
            zip(renumbered, vocabularies, strict=True)
            if not model_config.shared_source
            else [(source, vocabularies[0])]
        )
        return ImportedModel(
            model_config,
            pre_norm,
            {name: np.ascontiguousarray(array) for name, array in state.items()},
            framing,
            tuple(renumbering.pieces(vocabulary) for renumbering, vocabulary in tables),
            files,
            SearchConfig(beam=2, most=MAX_DECODING_LENGTH),
            min(model_config.positions[0], MAX_INPUT_LENGTH),
            about={"format": "ctranslate2", "architecture": self.kind, "start": start},
            alignment=self._alignment(),
        )

    def _alignment(self) -> dict[str, Any]:
        """Returns the layer and the heads that CTranslate2 aligns by, the first ones; {}: the file names none."""
        if "decoder/alignment_layer" not in self.tensors:
            return {}
        layer, heads = (int(self._scalar(f"decoder/alignment_{name}")) for name in ("layer", "heads"))
        return {"layer": layer, "heads": list(range(heads))}

    # ------------------------------------------------------------------------------------------- configuration, pieces

    def _flag(self, name: str) -> bool:
        return self.config.get(name) is True

    def _token(self, name: str) -> str:
        return str(self.config.get(name) or "")

    def _vocabularies(self) -> list[list[str]]:
        """Returns the tokens of the source and of the target."""
        vocabularies = []
        for side in ("source", "target"):
            names = [f"{which}_vocabulary.{suffix}" for which in (side, "shared") for suffix in ("json", "txt")]
            name = next((name for name in names if (self.folder / name).is_file()), names[0])
            if name.endswith(".json"):
                pieces = self.read_json(name, list)
            else:
                pieces = (self.folder / name).read_text("utf-8", "replace").removesuffix("\n").split("\n")
            if not all(isinstance(piece, str) for piece in pieces):
                self.faults.append(f"{name} holds values other than text")
            vocabularies.append([str(piece) for piece in pieces])
        return vocabularies

    def _pieces(self) -> tuple[str, dict[str, bytes]]:
        """Returns the tokenizer: sentencepiece models of the folder; without them text is split at spaces."""
        both = [self.folder / f"{side}.spm" for side in ("source", "target")]
        paths = (
            both if all(path.is_file() for path in both) else [*self.folder.glob("*.spm"), *self.folder.glob("*.model")]
        )
        if len(paths) > 2 or (len(paths) == 2 and paths is not both):
            self.faults.append(
                f"found the models {', '.join(path.name for path in paths)}, expected one, or source.spm and target.spm"
            )
        return "sentencepiece" if paths else "words", {path.name: path.read_bytes() for path in paths}

    # ----------------------------------------------------------------------------------------------------- the network

    def _scalar(self, name: str, default: float = 0) -> float:
        self.used.add(name)
        tensor = self.tensors.get(name)
        if tensor is not None and tensor.size != 1:
            self.faults.append(f"{name} is no number")
        return default if tensor is None or tensor.size != 1 else float(tensor.ravel()[0])

    def _shared(self, name: str, default: float | None = None) -> float:
        """Returns a number that encoder and decoder have in common."""
        values = [
            self._scalar(f"{side}/{name}", math.nan if default is None else default) for side in ("encoder", "decoder")
        ]
        if values[0] != values[1]:
            self.faults.append(f"{name} is {values[0]:g} in the encoder and {values[1]:g} in the decoder, expected one")
        return values[0]

    def _layers(self, side: str) -> int:
        return len(
            {name.split("/")[1] for name in self.tensors if name.startswith(f"{side}/layer_") and name.count("/") > 2}
        )

    def _model_config(self) -> tuple[ModelConfig, bool]:
        """Returns the configuration without its tables, and whether layers are pre-LN."""
        for side in ("encoder", "decoder"):
            for name in ZERO:
                if self._scalar(f"{side}/{name}"):
                    self.faults.append(f"{side}/{name} is not supported")
        activation = self._shared("activation", 0)
        if activation not in ACTIVATIONS:
            self.faults.append(f"activation {activation:g} is not supported, expected relu, swish or gelu")
        table = self.tensors.get("decoder/embeddings/weight", np.zeros((1, 1)))
        width = table.shape[-1]
        scale = {side: self._scalar(f"{side}/scale_embeddings", 1) for side in ("encoder", "decoder")}
        flags = [flag for side in scale if (flag := self.tensors.get(f"{side}/scale_embeddings")) is not None]
        scaled = [
            bool(factor) if flags and flags[0].dtype.kind == "i" else math.isclose(factor, width**0.5, rel_tol=1e-5)
            for factor in scale.values()
        ]
        if len({*scaled}) > 1 or (
            flags and flags[0].dtype.kind == "f" and not scaled[0] and {*scale.values()} != {1.0}
        ):
            self.faults.append(
                f"scale_embeddings is {', '.join(f'{factor:g}' for factor in scale.values())}, expected a flag"
            )
        norms = ["/".join((side, "layer_norm/gamma")) in self.tensors for side in ("encoder", "decoder")]
        embedded = ["/".join((side, "layernorm_embedding/gamma")) in self.tensors for side in ("encoder", "decoder")]
        if norms[0] != norms[1] or embedded[0] != embedded[1]:
            self.faults.append(
                "the encoder has a layer_norm or layernorm_embedding that the decoder has not, or the reverse"
            )
        heads = [int(self._scalar(f"{side}/num_heads", 8)) for side in ("encoder", "decoder")]
        if any(count < 1 or width % count for count in heads):
            self.faults.append(f"{width} units cannot be shared by {', '.join(map(str, heads))} heads")
        hidden = [self._hidden(side) for side in ("encoder", "decoder")]
        epsilon = self.config.get("layer_norm_epsilon")
        model_config = ModelConfig(
            self._layers("encoder"),
            self._layers("decoder"),
            width,
            hidden[0],
            heads[0],
            decoder_hidden=0 if hidden[1] == hidden[0] else hidden[1],
            decoder_heads=0 if heads[1] == heads[0] else heads[1],
            activation=ACTIVATIONS.get(int(activation), "relu"),
            scaled=scaled[0],
            embedding_norm=embedded[0],
            final_norm=norms[0],
            output_bias=True,
            epsilon=float(epsilon) if isinstance(epsilon, int | float) else 1e-5,
        )
        return model_config, bool(self._shared("pre_norm", 1))

    def _hidden(self, side: str) -> int:
        return len(self.tensors.get(f"{side}/layer_0/ffn/linear_0/weight", np.zeros((1, 1))))

    def _array(self, name: str, *shape: int) -> Array:
        self.used.add(name)
        return self.fitted(name, self.tensors.get(name), shape)

    def _state(
        self, model_config: ModelConfig, vocabularies: Sequence[Sequence[str]]
    ) -> tuple[ModelConfig, dict[str, Array], list[Renumbering], str]:
        """Returns the configuration, the state dict, the renumbering of tokens, and the start token."""
        width = model_config.width
        names = [
            "encoder/embeddings_0/weight"
            if "encoder/embeddings_0/weight" in self.tensors
            else "encoder/embeddings/weight"
        ]
        names += ["decoder/embeddings/weight", "decoder/projection/weight"]
        rows = [len(self.tensors[name]) if name in self.tensors else 1 for name in names]
        source, target, output = (self._array(name, count, width) for name, count in zip(names, rows, strict=True))
        special = [self._token(name) for name in ("unk_token", "eos_token")]
        start, zero = self._token("decoder_start_token"), bool(self._scalar("decoder/start_from_zero_embedding"))
        for pieces, count in zip(vocabularies, rows, strict=False):
            if count != len(pieces):
                self.faults.append(f"the vocabulary has {len(pieces)} tokens, the weights {count}")
        if missing := [token for token in special if any(token not in pieces for pieces in vocabularies)]:
            self.faults.append(f"the vocabulary has no {', '.join(missing)}")
        if not zero and start not in vocabularies[-1]:
            self.faults.append(f"decoder_start_token is {start or 'missing'}, expected a token of the vocabulary")
        if len(output) != len(target):
            self.faults.append(f"the output has {len(output)} rows, the target's table {len(target)}")
        if self.faults:
            raise self.refusal()
        numbered = [
            Renumbering(count, *(pieces.index(token) for token in special))
            for pieces, count in zip(vocabularies, rows, strict=False)
        ]
        positions = tuple(self._positions(side, width) for side in ("encoder", "decoder"))
        model_config = replace(
            model_config,
            shared_source=vocabularies[0] == vocabularies[1] and np.array_equal(source, target),
            tied_output=np.array_equal(target, output),
            positions=tuple(len(table) for table in positions),
        )
        bias = "decoder/projection/bias"
        state = {
            "embedding.weight": numbered[1].table(target, -1 if zero else vocabularies[1].index(start)),
            "source_positions": positions[0],
            "positions": positions[1],
            "output_bias": numbered[1].bias(
                self._array(bias, rows[1]) if bias in self.tensors else np.zeros(rows[1], np.float32)
            ),
        }
        if not model_config.shared_source:
            state["source_embedding.weight"] = numbered[0].table(source)
        if not model_config.tied_output:
            state["output_weight"] = numbered[1].table(output)
        state |= self._layer_state(model_config)
        return model_config, state, numbered, "" if zero else start

    def _layer_state(self, model_config: ModelConfig) -> dict[str, Array]:
        """Returns the weights of the layers and norms."""
        width, state = model_config.width, dict[str, Array]()

        def norm(parameter: str, stored: str) -> None:
            state[f"{parameter}.weight"] = self._array(f"{stored}/gamma", width)
            state[f"{parameter}.bias"] = self._array(f"{stored}/beta", width)

        def linear(parameter: Sequence[str], stored: str, outputs: int, inputs: int) -> None:
            """A linear layer, or several that are one there."""
            weight = self._array(f"{stored}/weight", len(parameter) * outputs, inputs)
            has_bias = f"{stored}/bias" in self.tensors
            offset = self._array(f"{stored}/bias", len(weight)) if has_bias else np.zeros(len(weight), np.float32)
            for name, part, more in zip(
                parameter, np.split(weight, len(parameter)), np.split(offset, len(parameter)), strict=True
            ):
                state[f"{name}.weight"], state[f"{name}.bias"] = part, more

        for side, other, layers, hidden in (
            ("encoder", "source", model_config.encoder, model_config.hidden),
            ("decoder", "target", model_config.decoder, model_config.decoder_hidden or model_config.hidden),
        ):
            for i in range(layers):
                ours, theirs = f"{side}.{i}", f"{side}/layer_{i}"
                own = [f"{ours}.attention.{part}" for part in ("query", "key", "value")]
                linear(own, f"{theirs}/self_attention/linear_0", width, width)
                linear([f"{ours}.attention.output"], f"{theirs}/self_attention/linear_1", width, width)
                norm(f"{ours}.around_attention.norm", f"{theirs}/self_attention/layer_norm")
                if side == "decoder":
                    linear([f"{ours}.cross.query"], f"{theirs}/attention/linear_0", width, width)
                    pair = [f"{ours}.cross.{part}" for part in ("key", "value")]
                    linear(pair, f"{theirs}/attention/linear_1", width, width)
                    linear([f"{ours}.cross.output"], f"{theirs}/attention/linear_2", width, width)
                    norm(f"{ours}.around_cross.norm", f"{theirs}/attention/layer_norm")
                linear([f"{ours}.feed.inner"], f"{theirs}/ffn/linear_0", hidden, width)
                linear([f"{ours}.feed.outer"], f"{theirs}/ffn/linear_1", width, hidden)
                norm(f"{ours}.around_feed.norm", f"{theirs}/ffn/layer_norm")
            if model_config.embedding_norm:
                norm(f"{other}_norm", f"{side}/layernorm_embedding")
            if model_config.final_norm:
                norm(f"{side}_norm", f"{side}/layer_norm")
        return state

    def _positions(self, side: str, width: int) -> Array:
        """Returns position encodings [tokens, width]; without them sinusoids from the second position on."""
        name = f"{side}/position_encodings/encodings"
        if name not in self.tensors:
            return sinusoids(POSITIONS + 1, width)[1:]
        return self._array(name, len(self.tensors[name]), width)
