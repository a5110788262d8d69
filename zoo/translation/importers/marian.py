"""Importer of models of Marian, Bergamot and Firefox."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zoo.translation.data.tokens import POSITIONS, UNKNOWN
from zoo.translation.data.vocabularies import Framing
from zoo.translation.importers.imported import ImportedModel, Renumbering
from zoo.translation.importers.marian_file import Tensor, candidates, is_model
from zoo.translation.importers.marian_folder import Folder, Vocabulary
from zoo.translation.importers.model_reader import refuse_languages
from zoo.translation.models.config import ModelConfig
from zoo.translation.search.config import SearchConfig
from zoo.translation.search.shortlist import MAGIC, SHORTLIST, Shortlist, read_binary, read_text

EPSILON = 1e-6
ALPHA = "_QuantMultA"
# Defaults of Firefox
FIREFOX = SearchConfig(kind="marian", beam=1, length_penalty=1.0, growth=2.0, banned=(UNKNOWN,))
# Defaults of marian-decoder
MARIAN_DECODER = SearchConfig(kind="marian", beam=12, length_penalty=0.0, growth=3.0, banned=(UNKNOWN,))
DECODERS = {"self-attention": "attention", "rnn": "ssru", "average-attention": "average"}
# Options of the network: {name: supported values}
SUPPORTED = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": tuple(DECODERS),
    "transformer-ffn-activation": ("relu", "swish", "gelu"),
    "transformer-ffn-depth": ("2",),
    "transformer-decoder-ffn-depth": ("0", "2"),
    "transformer-attention-mask": ("default",),
    **dict.fromkeys(
        (
            "transformer-disable-position-embeddings",
            "transformer-pool",
            "transformer-rnn-projection",
            "layer-normalization",
            "right-left",
            "ulr",
        ),
        ("false",),
    ),
    "lemma-dim-emb": ("0",),
    "factors-dim-emb": ("0",),
}
# Defaults of operations around layers, embeddings and the top: d dropout, a residual, n normalization
OPERATIONS = {"preprocess": "", "postprocess": "dan", "postprocess-emb": "d", "postprocess-top": ""}
# Options of average attention
SUPPORTED_AVERAGE = {
    "transformer-aan-activation": ("relu", "swish", "gelu"),
    "transformer-aan-depth": ("2",),
    "transformer-aan-nogate": ("false",),
}
CONTROL = tuple(f"<0x{i:02X}>" for i in range(32))  # pieces that Marian never chooses


def recognizes(path: Path) -> bool:
    """Returns whether a path holds a model of this format.

    Args:
        path: Folder or file.
    """
    return any(is_model(file) for file in candidates(path))


def read(path: Path, *, source_language: str = "", target_language: str = "") -> ImportedModel:
    """Reads a model; nothing in it is executed.

    Args:
        path: The folder, or a model file beside its vocabularies.
        source_language: Not supported; a model of Marian has one of each.
        target_language: Not supported.

    Returns:
        The model.

    Raises:
        RequestError: The model is not supported; the message lists every reason.
    """
    refuse_languages("a model of Marian", source_language, target_language)
    return _Reader(path).read()


class _Reader(Folder):
    """Reads a model and collects its errors."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.used: set[str] = set()
        self.int8: set[str] = set()
        self.magnitudes: dict[str, float] = {}

    def read(self) -> ImportedModel:
        """See `read`."""
        if not self.tensors or not self.options:
            raise self.refusal()
        vocabularies = self._vocabularies()
        model_config, pre_norm = self._model_config()
        if self.faults:
            raise self.refusal()
        state, renumbered, model_config = self._state(model_config, pre_norm, vocabularies)
        left = self.tensors.keys() - self.used - {name for name in self.tensors if name.endswith(ALPHA)}
        if left:
            self.faults.append(f"found {', '.join(sorted(left)[:5])}, which is not supported")
        rules = self._rules(vocabularies[-1], renumbered[-1])
        pieces = tuple(numbering.pieces(one.pieces) for numbering, one in zip(renumbered, vocabularies, strict=True))
        files = {name: content for vocabulary in vocabularies for name, content in vocabulary.files.items()}
        framing = Framing(vocabularies[0].kind, tuple(files))
        alignment = self._alignment()
        if shortlist := self._shortlist(vocabularies, renumbered):
            files[SHORTLIST] = shortlist.to_bytes()
        if self.faults:
            raise self.refusal()
        version = self._option("version").split(" ")[0]
        about = {"format": "marian", "architecture": self._option("type"), "version": version}
        return ImportedModel(
            model_config,
            pre_norm,
            {name: np.ascontiguousarray(array) for name, array in state.items()},
            framing,
            pieces,
            files,
            rules,
            POSITIONS,
            self._languages(),
            about | ({"int8": f"{len(self.int8)} matrices"} if self.int8 else {}),
            self.magnitudes,
            alignment,
        )

    def _alignment(self) -> dict[str, object]:
        """Returns the layer and the head of guided alignment, which Marian aligns by in every model."""
        name = "transformer-guided-alignment-layer"
        return {"layer": -1 if self._option(name, "last") == "last" else self._whole(name) - 1, "heads": [0]}

    def _model_config(self) -> tuple[ModelConfig, bool]:
        """Returns the configuration, and whether layers are pre-LN; unsupported options become errors."""
        autoregression = self._option("transformer-decoder-autoreg", "self-attention")
        self._require_supported(autoregression)
        pre_norm, embedding_norm, final_norm = self._norms(autoregression)
        width, heads = self._whole("dim-emb"), self._whole("transformer-heads", "8")
        if width % heads or width % 2 or width < 4:
            self.faults.append(f"dim-emb {width} cannot be shared by transformer-heads {heads}")
        hidden, other = self._whole("transformer-dim-ffn", "2048"), self._whole("transformer-decoder-dim-ffn", "0", 0)
        everywhere = self.flag("tied-embeddings-all")
        model_config = ModelConfig(
            self._whole("enc-depth", "1"),
            self._whole("dec-depth", "1"),
            width,
            hidden,
            heads,
            decoder_hidden=0 if other == hidden else other,
            activation=self._option("transformer-ffn-activation", "swish"),
            autoregression=DECODERS.get(autoregression, "attention"),
            embedding_norm=embedding_norm,
            final_norm=final_norm,
            shared_source=everywhere or self.flag("tied-embeddings-src"),
            tied_output=everywhere or self.flag("tied-embeddings"),
            output_bias=True,
            epsilon=EPSILON,
        )
        if model_config.autoregression == "average":
            hidden, activation = (
                self._whole("transformer-dim-aan", "2048"),
                self._option("transformer-aan-activation", "swish"),
            )
            model_config = replace(model_config, average_hidden=hidden, average_activation=activation)
        return model_config, pre_norm

    def _require_supported(self, autoregression: str) -> None:
        """Adds options with values that are not supported to the faults."""
        supported = dict(SUPPORTED)
        if autoregression == "rnn":
            supported["dec-cell"] = ("ssru",)
        if autoregression == "average-attention":
            supported |= SUPPORTED_AVERAGE
        for name, values in supported.items():
            value = self._option(name, values[0])
            if value not in values:
                self.faults.append(f"{name}: {value} is not supported, expected {' or '.join(values)}")
        if "Wpos" in self.tensors:
            self.faults.append(
                "transformer-train-positions is not supported: Marian decodes every token at the first one"
            )

    def _norms(self, autoregression: str) -> tuple[bool, bool, bool]:
        """Returns whether layers are pre-LN, and whether norms follow the embeddings and the last layer."""
        before, after, embedded, top = (
            re.sub("d", "", self._option(f"transformer-{name}", default)) for name, default in OPERATIONS.items()
        )
        if (before, after) not in (("", "an"), ("n", "a")):
            self.faults.append(
                f"transformer-preprocess: {before!r} with transformer-postprocess: {after!r} is not supported, "
                "expected '' with 'dan', or 'n' with 'da'"
            )
        for name, value in (("postprocess-emb", embedded), ("postprocess-top", top)):
            if value not in ("", "n"):
                self.faults.append(f"transformer-{name}: {value} is not supported, expected 'd' or 'n'")
        if before == "n":
            self._normalizes_before(autoregression)
        return before == "n", embedded == "n", top == "n"

    def _normalizes_before(self, autoregression: str) -> None:
        version = re.match(r"v1\.(\d+)", self._option("version"))
        if version is None or int(version[1]) < 11:
            self.faults.append(
                f"transformer-preprocess: n of Marian {self._option('version', 'without a version')} is not supported: "
                "before v1.11 keys and values were not normalized"
            )
        if autoregression == "self-attention":
            self.faults.append(
                "transformer-preprocess: n with transformer-decoder-autoreg: self-attention is not supported: Marian "
                "decodes with keys and values that it did not train with"
            )
        if autoregression == "average-attention":
            self.faults.append(
                "transformer-preprocess: n with transformer-decoder-autoreg: average-attention is not supported"
            )

    def _rules(self, vocabulary: Vocabulary, renumbered: Renumbering) -> SearchConfig:
        """Returns the search options of decoder.yml; without one those of Firefox for .bin, else Marian's defaults."""
        if not self.decoding:
            assert self.file is not None
            plain = FIREFOX if self.file.suffix == ".bin" else MARIAN_DECODER
        else:
            plain = MARIAN_DECODER

        def number(name: str, default: float) -> float:
            value = self.decoding.get(name, default)
            try:
                return float(value)
            except (TypeError, ValueError):
                self.faults.append(f"{name} is {value}, expected a number")
                return default

        banned = () if self.decoding.get("allow-unk") == "true" else plain.banned
        if self.decoding.get("allow-special") != "true":
            ours = renumbered.ours
            banned += tuple(int(ours[i]) for i, piece in enumerate(vocabulary.pieces) if piece in CONTROL)
        return SearchConfig(
            "marian",
            beam=max(int(number("beam-size", plain.beam)), 1),
            length_penalty=number("normalize", plain.length_penalty),
            word_penalty=number("word-penalty", 0.0),
            growth=number("max-length-factor", plain.growth),
            banned=banned,
        )

    def _shortlist(self, vocabularies: Sequence[Vocabulary], renumbered: Sequence[Renumbering]) -> Shortlist | None:
        """Returns the shortlist of the folder with the zoo's token numbers; None without one."""
        name, *numbers = self._listed(self.decoding, "shortlist") or [""]
        paths = sorted(path for path in self.folder.glob("lex*") if ".s2t" in path.name or path.suffix == ".bin")
        if name:
            paths = [self.folder / Path(name).name]
        if len(paths) > 1:
            self.faults.append(f"found the shortlists {', '.join(path.name for path in paths)}, expected one")
        if len(paths) != 1:
            return None
        path = paths[0]
        (source, target), shared = (vocabularies[0], vocabularies[-1]), len(vocabularies) == 1
        try:
            content = path.read_bytes()
            if content[:8] == MAGIC.to_bytes(8, "little"):
                list_ = read_binary(content, renumbered[0].size, renumbered[-1].size, shared)
            else:
                options = dict(zip(("first", "best"), map(int, numbers[:2]), strict=False))
                if path.suffix == ".gz":
                    content = gzip.decompress(content)
                list_ = read_text(
                    content.decode("utf-8").splitlines(),
                    source.tokens,
                    target.tokens,
                    (source.unknown, target.unknown),
                    **options,
                    threshold=float(numbers[2]) if len(numbers) > 2 else 0.0,
                    shared=shared,
                )
        except OSError as error:
            self.faults.append(f"cannot read {path.name} ({error.strerror or error})")
        except (ValueError, EOFError, zlib.error) as error:
            self.faults.append(f"{path.name} cannot be used ({error})")
        else:
            return list_.renumbered(renumbered[0].ours, renumbered[-1].ours)
        return None

    def _languages(self) -> str:
        """Returns "en-de" for a Firefox model whose file name has "ende"."""
        assert self.file is not None
        match = re.search(r"\.([a-z]{2})([a-z]{2})\.", self.file.name)
        return f"{match[1]}-{match[2]}" if match else ""

    # ------------------------------------------------------------------------------------------------------- weights

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor of this shape; leading dimensions of 1 are dropped."""
        self.used.add(name)
        tensor = self.tensors.get(name)
        values = None if tensor is None else tensor.values
        while values is not None and values.ndim > len(shape) and len(values) == 1:
            values = values[0]
        return Tensor(self.fitted(name, values, shape), tensor.multiplier if tensor else 0.0)

    def _state(
        self, model_config: ModelConfig, pre_norm: bool, vocabularies: Sequence[Vocabulary]
    ) -> tuple[dict[str, NDArray[np.float32]], tuple[Renumbering, ...], ModelConfig]:
        """Returns the state dict, the renumbering of tokens, and the configuration."""
        width, state = model_config.width, {}
        tables = ["Wemb"] if model_config.shared_source else ["encoder_Wemb", "decoder_Wemb"]
        sizes = [len(self.tensors[name].values) if name in self.tensors else 1 for name in tables]
        originals = [self.tensor(name, size, width) for name, size in zip(tables, sizes, strict=True)]
        if len(vocabularies) > len(tables):
            self.faults.append("found two vocabularies and one table of embeddings")
        if self.faults:
            raise self.refusal()
        for vocabulary, size in zip(vocabularies, sizes, strict=False):
            vocabulary.fit(size, self.faults)
        vocabularies = [vocabularies[0], vocabularies[-1]][: len(tables)]
        if self.faults:
            raise self.refusal()
        renumbered = [Renumbering(size, side.unknown, side.end) for side, size in zip(vocabularies, sizes, strict=True)]
        source, target = renumbered[0], renumbered[-1]
        state["embedding.weight"] = target.table(originals[-1].values)
        self.note_quantized(
            "embedding.weight", originals[-1], *([tables[-1], "none"] if model_config.tied_output else [])
        )
        if not model_config.shared_source:
            state["source_embedding.weight"] = source.table(originals[0].values)
            self.note_quantized("source_embedding.weight", originals[0])
        out = "decoder_ff_logit_out"
        if not model_config.tied_output:
            if f"{out}_W" in self.tensors:
                one = self.tensor(f"{out}_W", width, sizes[-1])
                output = Tensor(one.values.T, one.multiplier)
            else:
                output = self.tensor(f"{out}_Wt", sizes[-1], width)
            state["output_weight"] = target.table(output.values)
            self.note_quantized("output_weight", output, f"{out}_Wt", f"{out}_W", "none")
        omitted = self.flag("output-omit-bias")
        state["output_bias"] = target.bias(
            np.zeros(sizes[-1], np.float32) if omitted else self.tensor(f"{out}_b", sizes[-1]).values
        )
        return state | self._layers(model_config, pre_norm), tuple(renumbered), model_config

    def _layers(self, model_config: ModelConfig, pre_norm: bool) -> dict[str, NDArray[np.float32]]:
        """Returns the state dict of the encoder and decoder layers."""
        layers = _Layers(self, model_config, pre_norm)
        for i in range(model_config.encoder):
            layers.attention(f"encoder.{i}", "attention", f"encoder_l{i + 1}_self")
            layers.feed(f"encoder.{i}", f"encoder_l{i + 1}_ffn", model_config.hidden)
        tied = self._listed(self.options, "transformer-tied-layers") or [
            str(i + 1) for i in range(model_config.decoder)
        ]
        if len(tied) != model_config.decoder:
            self.faults.append(f"transformer-tied-layers has {len(tied)} layers, dec-depth is {model_config.decoder}")
        for i, layer in enumerate(tied[: model_config.decoder]):
            layers.autoregression(f"decoder.{i}", f"decoder_l{layer}")
            layers.attention(f"decoder.{i}", "cross", f"decoder_l{layer}_context")
            layers.feed(f"decoder.{i}", f"decoder_l{layer}_ffn", model_config.decoder_hidden or model_config.hidden)
        for side, other in (("encoder", "source"), ("decoder", "target")):
            if model_config.embedding_norm:
                layers.norm(f"{other}_norm", f"{side}_emb", "_pre")
            if model_config.final_norm:
                layers.norm(f"{side}_norm", f"{side}_top")
        return layers.state

    def note_quantized(self, parameter: str, weight: Tensor, *names: str) -> None:
        """Registers a quantized weight, and the maximum magnitude of its input if the file has its multiplier."""
        if weight.multiplier:
            self.int8.add(parameter)
            alpha = next((tensor.values for name in names if (tensor := self.tensors.get(name + ALPHA))), np.zeros(1))
            if 0 < (multiplier := float(alpha.ravel()[0])) < np.inf:
                self.magnitudes[parameter] = 127 / multiplier


class _Layers:
    """State dict of layers, read under Marian's names.

    Attributes:
        state: {name in the zoo's network: array} of the layers read so far.
    """

    def __init__(self, reader: _Reader, model_config: ModelConfig, pre_norm: bool) -> None:
        self.reader, self.config, self.pre_norm, self.width = reader, model_config, pre_norm, model_config.width
        self.unbiased, self.plain = reader.flag("transformer-no-bias"), reader.flag("transformer-no-affine")
        self.state: dict[str, NDArray[np.float32]] = {}

    def linear(self, parameter: str, prefix: str, suffix: str, rows: int, columns: int, bias: bool = True) -> None:
        """Reads a linear layer with a weight [rows, columns]."""
        weight = self.reader.tensor(f"{prefix}_W{suffix}", rows, columns)
        self.state[f"{parameter}.weight"] = weight.values.T
        self.reader.note_quantized(f"{parameter}.weight", weight, f"{prefix}_W{suffix}")
        if bias:
            name, default = f"{prefix}_b{suffix}", np.zeros(columns, np.float32)
            present = not self.unbiased or name in self.reader.tensors
            self.state[f"{parameter}.bias"] = self.reader.tensor(name, columns).values if present else default

    def norm(self, parameter: str, prefix: str, suffix: str = "") -> None:
        """Reads a layer normalization; an absent scale is 1, an absent bias 0."""
        for part, theirs in (("weight", "scale"), ("bias", "bias")):
            name, default = f"{prefix}_ln_{theirs}{suffix}", np.full(self.width, part == "weight", np.float32)
            present = name in self.reader.tensors or not (self.plain or (self.unbiased and part == "bias"))
            self.state[f"{parameter}.{part}"] = self.reader.tensor(name, self.width).values if present else default

    def around(self, parameter: str, before: str, after: str) -> None:
        """Reads the normalization of a sublayer, before it (pre-LN) or after it."""
        self.norm(f"{parameter}.norm", before if self.pre_norm else after, "_pre" if self.pre_norm else "")

    def attention(self, parameter: str, name: str, prefix: str) -> None:
        """Reads an attention sublayer; without projection the output layer is the identity."""
        for part, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            if part == "output" and self.reader.flag("transformer-no-projection"):
                self.state[f"{parameter}.{name}.output.weight"] = np.eye(self.width, dtype=np.float32)
                self.state[f"{parameter}.{name}.output.bias"] = np.zeros(self.width, np.float32)
            else:
                self.linear(f"{parameter}.{name}.{part}", prefix, theirs, self.width, self.width)
        self.around(f"{parameter}.around_{name}", f"{prefix}_Wo", f"{prefix}_Wo")

    def feed(self, parameter: str, prefix: str, hidden: int) -> None:
        """Reads a feed-forward sublayer."""
        self.linear(f"{parameter}.feed.inner", prefix, "1", self.width, hidden)
        self.linear(f"{parameter}.feed.outer", prefix, "2", hidden, self.width)
        self.around(f"{parameter}.around_feed", f"{prefix}_ffn", f"{prefix}_ffn")

    def autoregression(self, parameter: str, stored: str) -> None:
        """Reads the first sublayer of a decoder layer: a recurrence, an average or self-attention."""
        width, hidden = self.width, self.config.average_hidden
        if self.config.autoregression == "ssru":
            self.linear(f"{parameter}.attention.value", f"{stored}_rnn", "", width, width, bias=False)
            self.linear(f"{parameter}.attention.forget", f"{stored}_rnn", "f", width, width)
            self.around(f"{parameter}.around_attention", f"{stored}_rnn", f"{stored}_rnn_ffn")
        elif self.config.autoregression == "average":
            prefix = f"{stored}_aan"
            self.linear(f"{parameter}.attention.inner", prefix, "1", width, hidden)
            self.linear(f"{parameter}.attention.outer", prefix, "2", hidden, width)
            self.linear(f"{parameter}.attention.input", prefix, "i", width, width)
            self.linear(f"{parameter}.attention.forget", prefix, "f", width, width)
            self.around(f"{parameter}.around_attention", f"{prefix}_ffn", f"{prefix}_ffn")
        else:
            self.attention(parameter, "attention", f"{stored}_self")
