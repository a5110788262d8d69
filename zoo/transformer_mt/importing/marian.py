"""Models of Marian: model.npz, and the .bin of Bergamot and Firefox, whose matrices may be int8.

A .bin (marian-dev, src/common/binary.cpp) is, little-endian: uint64 version 1; uint64 n; n times uint64 length of the
name, type, dimensions, bytes; the names, each with a zero at its end; the dimensions, int32; uint64 c and c bytes of
padding; the bytes of every tensor. A quantized one (intgemm8, intgemm16) holds the integers of the transposed matrix
row by row, of a table of embeddings those of the table itself, then float32 m: a weight is an integer / m. The float32
NAME_QuantMultA, where there is one, is the m of what the matrix NAME is multiplied with.
"""

from __future__ import annotations

import gzip
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.transformer_mt.data import POSITIONS, UNKNOWN
from zoo.transformer_mt.decode import Rules
from zoo.transformer_mt.importing.imported import Imported, Renumbering
from zoo.transformer_mt.model import Form
from zoo.transformer_mt.shortlist import MAGIC, SHORTLIST, Shortlist, read_binary, read_text
from zoo.transformer_mt.vocabularies import Framing

CONFIG = "special:model.yml"  # the tensor that holds the options
EPSILON = 1e-6
VERSION = struct.pack("<Q", 1)  # what a .bin begins with
PLAIN = {0x101: "<i1", 0x402: "<f2", 0x404: "<f4", 0x408: "<f8"}
QUANTIZED = {0x4101: "<i1", 0x10001: "<i1", 0x4102: "<i2", 0x10002: "<i2"}  # of browsermt's and of Marian's own
ALPHA = "_QuantMultA"
FIREFOX = Rules(kind="marian", beam=1, length_penalty=1.0, growth=2.0, banned=(UNKNOWN,))  # how a browser decodes
OWN = Rules(kind="marian", beam=12, length_penalty=0.0, growth=3.0, banned=(UNKNOWN,))  # Marian's defaults
DECODERS = {"self-attention": "attention", "rnn": "ssru", "average-attention": "average"}
# Options with which a model computes what is not computed here: {name: values that are}
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
# Around layers, the embeddings and all: d is dropout, a adds what came in, n normalizes
OPERATIONS = {"preprocess": "", "postprocess": "dan", "postprocess-emb": "d", "postprocess-top": ""}
# Of averaged attention alone
SUPPORTED_AVERAGE = {
    "transformer-aan-activation": ("relu", "swish", "gelu"),
    "transformer-aan-depth": ("2",),
    "transformer-aan-nogate": ("false",),
}
CONTROL = tuple(f"<0x{i:02X}>" for i in range(32))  # pieces that Marian never chooses


@dataclass(frozen=True)
class Tensor:
    """A tensor. values: float32, of a quantized one what its integers stand for. multiplier: of a quantized one."""

    values: NDArray[np.float32]
    multiplier: float = 0.0


def recognized(path: Path) -> bool:
    """Whether it is a model of Marian or a folder with one."""
    return any(_is_model(each) for each in _candidates(path))


def read(path: Path, *, source_language: str = "", target_language: str = "") -> Imported:
    """The model in a folder, or a file beside its vocabularies. Nothing in it is executed.

    Raises RequestError with all that is wrong with it, and for a language: a model of Marian has one of each.
    """
    for side, name in (("source", source_language), ("target", target_language)):
        if name:
            raise RequestError(f"found --{side}-language {name}; a model of Marian has no languages to choose from")
    return _Reader(path).read()


def tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a model by name, and its options, YAML. Raises RequestError for a file that is none such."""
    try:
        return _of_npz(path) if path.suffix == ".npz" else _of_bin(path.read_bytes())
    except OSError as error:
        raise RequestError(f"cannot read {path.name}: {error.strerror or error}") from error
    except (ValueError, KeyError, EOFError, struct.error, zipfile.BadZipFile) as error:
        raise RequestError(f"{path.name} is damaged ({error})") from error


def _of_npz(path: Path) -> tuple[dict[str, Tensor], str]:
    with np.load(path, allow_pickle=False) as archive:
        found = {name: archive[name] for name in archive.files}
    options = found.pop(CONFIG, np.zeros(0, np.int8)).tobytes()
    if other := [name for name, each in found.items() if each.dtype.kind != "f"]:
        raise ValueError(f"{other[0]} has the type {found[other[0]].dtype}")
    return {name: Tensor(each.astype(np.float32)) for name, each in found.items()}, _text(options)


def _text(options: bytes) -> str:
    return options.rstrip(b"\0").decode("utf-8")


def _of_bin(content: bytes) -> tuple[dict[str, Tensor], str]:
    """See the module."""
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        if not 0 <= count <= len(content) - at:
            raise ValueError(f"it ends after {len(content):,} bytes, which is too early")
        at += count
        return content[at - count : at]

    def whole() -> int:
        return int.from_bytes(take(8), "little")

    if take(8) != VERSION:
        raise ValueError("it is no .bin of Marian, version 1")
    headers = list(struct.iter_unpack("<4Q", take(32 * whole())))
    names = [take(length)[:-1].decode("utf-8") for length, *_ in headers]
    shapes = [struct.unpack(f"<{count}i", take(4 * count)) for _, _, count, _ in headers]
    take(whole())
    found, options = {}, ""
    for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True):
        part, elements = take(size), prod(shape)
        dtype = PLAIN.get(kind) or QUANTIZED.get(kind)
        if name == CONFIG:
            options = _text(part)
            continue
        if dtype is None or (dtype == "<i1" and kind in PLAIN):
            raise ValueError(
                f"{name} has the type {kind:#x}: wanted float32, or what marian-conv --gemm-type intgemm8 writes"
            )
        if min(shape, default=1) < 1 or len(part) < elements * int(dtype[2]) + 4 * (kind in QUANTIZED):
            raise ValueError(f"{name} has {len(part)} bytes for {' x '.join(map(str, shape))}")
        values = np.frombuffer(part, dtype, elements)
        if kind in PLAIN:
            found[name] = Tensor(values.reshape(shape).astype(np.float32))
            continue
        (multiplier,) = struct.unpack_from("<f", part, values.nbytes)
        if not 0 < multiplier < float("inf"):
            raise ValueError(f"{name} has the multiplier {multiplier}")
        rows = shape[-1]
        table = values.reshape(shape) if "Wemb" in name else values.reshape(rows, -1).T
        found[name] = Tensor(table.astype(np.float32) / np.float32(multiplier), multiplier)
    return found, options


def _candidates(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(each for each in path.glob("*") if each.suffix in (".npz", ".bin") and ".optimizer." not in each.name)


def _is_model(path: Path) -> bool:
    if path.suffix == ".npz":
        try:
            with zipfile.ZipFile(path) as archive:
                return f"{CONFIG}.npy" in archive.namelist() or any("Wemb" in name for name in archive.namelist())
        except (OSError, zipfile.BadZipFile):
            return False
    try:
        with path.open("rb") as file:
            return file.read(8) == VERSION
    except OSError:
        return False


class _Reader:
    """Reads one model, and gathers what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.folder = path if path.is_dir() else path.parent
        self.faults: list[str] = []
        self.path = path
        self.used: set[str] = set()
        self.int8: set[str] = set()
        self.magnitudes: dict[str, float] = {}
        self.decoding = self._decoding()
        self.file = path if path.is_file() else self._chosen()
        self.tensors: dict[str, Tensor] = {}
        self.options: Mapping[str, Any] = {}
        if self.file:
            try:
                self.tensors, text = tensors(self.file)
                beside = Path(f"{self.file}.yml")
                self.options = self._yaml(text or beside.read_text("utf-8"), CONFIG if text else beside.name)
            except (OSError, UnicodeDecodeError):
                self.faults.append(f"found neither {CONFIG} in {self.file.name} nor {self.file.name}.yml")
            except RequestError as error:
                self.faults.append(str(error))

    def read(self) -> Imported:
        """See `read`."""
        if not self.tensors or not self.options:
            raise self._refusal()
        vocabularies = self._vocabularies()
        form, pre_norm = self._form()
        if self.faults:
            raise self._refusal()
        state, renumbered, form = self._state(form, pre_norm, vocabularies)
        left = self.tensors.keys() - self.used - {name for name in self.tensors if name.endswith(ALPHA)}
        if left:
            self.faults.append(f"found {', '.join(sorted(left)[:5])}, which is not known here")
        rules = self._rules(vocabularies[-1], renumbered[-1])
        pieces = tuple(each.pieces(one.pieces) for each, one in zip(renumbered, vocabularies, strict=True))
        files = {name: content for each in vocabularies for name, content in each.files.items()}
        framing = Framing(vocabularies[0].kind, tuple(files))
        if shortlist := self._shortlist(vocabularies, renumbered):
            files[SHORTLIST] = shortlist.to_bytes()
        if self.faults:
            raise self._refusal()
        version = self._option("version").split(" ")[0]
        about = {"format": "marian", "architecture": self._option("type"), "version": version}
        return Imported(
            form,
            pre_norm,
            {name: np.ascontiguousarray(each) for name, each in state.items()},
            framing,
            pieces,
            files,
            rules,
            POSITIONS,
            self._languages(),
            about | ({"int8": f"{len(self.int8)} matrices"} if self.int8 else {}),
            self.magnitudes,
        )

    def _refusal(self) -> RequestError:
        return RequestError(f"{self.path} cannot be imported: {'; '.join(dict.fromkeys(self.faults))}")

    # ------------------------------------------------------------------------------------------------- configuration

    def _yaml(self, text: str, name: str) -> dict[str, Any]:
        """A file of options; every value is text, a list or a dict."""
        try:
            import yaml  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            self.faults.append(f"{name} is read by PyYAML, which is not installed; run: pip install 'int8-zoo[import]'")
            return {}
        try:
            found = yaml.load(text, getattr(yaml, "CBaseLoader", yaml.BaseLoader))  # makes text, lists and dicts alone
        except (yaml.YAMLError, RecursionError):
            found = None
        if isinstance(found, dict) and all(isinstance(key, str) for key in found):
            return found
        self.faults.append(f"{name} is no YAML of options")
        return {}

    def _decoding(self) -> Mapping[str, Any]:
        """The options of marian-decoder in the folder, empty where there are none."""
        for path in sorted(self.folder.glob("*.yml")):
            text = path.read_text("utf-8", "replace")
            if re.search(r"^models:", text, re.MULTILINE):
                return self._yaml(text, path.name)
        return {}

    def _listed(self, options: Mapping[str, Any], name: str) -> list[str]:
        found = options.get(name) or []
        return [str(each) for each in (found if isinstance(found, list) else [found])]

    def _chosen(self) -> Path | None:
        """The model's file."""
        names = [Path(each).name for each in self._listed(self.decoding, "models")]
        if len(names) > 1:
            self.faults.append(
                f"models: {', '.join(names)} are an ensemble, which is not supported; name one of the files"
            )
            return None
        found = [each for each in _candidates(self.folder) if each.name in names] or [
            each for each in _candidates(self.folder) if _is_model(each)
        ]
        if len(found) == 1:
            return found[0]
        self.faults.append(
            f"found the models {', '.join(each.name for each in found)}; name one of them"
            if found
            else f"found no model of Marian in {self.folder}, wanted a .npz or .bin"
        )
        return None

    def _option(self, name: str, default: str = "") -> str:
        return str(self.options.get(name, default))

    def _whole(self, name: str, default: str = "", least: int = 1) -> int:
        found = self._option(name, default)
        if found.isdecimal() and least <= int(found) < 1 << 30:
            return int(found)
        self.faults.append(f"{name} is {found or 'missing'}, wanted a whole number from {least} on")
        return least

    def _flag(self, name: str) -> bool:
        return self._option(name, "false") == "true"

    def _form(self) -> tuple[Form, bool]:
        """The form, and whether layers normalize before. What is not supported becomes a fault by its option's name."""
        autoregression = self._option("transformer-decoder-autoreg", "self-attention")
        wanted = dict(SUPPORTED)
        if autoregression == "rnn":
            wanted["dec-cell"] = ("ssru",)
        if autoregression == "average-attention":
            wanted |= SUPPORTED_AVERAGE
        for name, values in wanted.items():
            found = self._option(name, values[0])
            if found not in values:
                self.faults.append(f"{name}: {found} is not supported, wanted {' or '.join(values)}")
        before, after, embedded, top = (
            re.sub("d", "", self._option(f"transformer-{name}", default)) for name, default in OPERATIONS.items()
        )
        if (before, after) not in (("", "an"), ("n", "a")):
            self.faults.append(
                f"transformer-preprocess: {before!r} with transformer-postprocess: {after!r} is not supported, "
                "wanted '' with 'dan', or 'n' with 'da'"
            )
        for name, found in (("postprocess-emb", embedded), ("postprocess-top", top)):
            if found not in ("", "n"):
                self.faults.append(f"transformer-{name}: {found} is not supported, wanted 'd' or 'n'")
        if before == "n":
            self._normalizes_before(autoregression)
        if "Wpos" in self.tensors:
            self.faults.append(
                "transformer-train-positions is not supported: Marian decodes every token at the first one"
            )
        width, heads = self._whole("dim-emb"), self._whole("transformer-heads", "8")
        if width % heads or width % 2 or width < 4:
            self.faults.append(f"dim-emb {width} cannot be shared by transformer-heads {heads}")
        hidden, other = self._whole("transformer-dim-ffn", "2048"), self._whole("transformer-decoder-dim-ffn", "0", 0)
        everywhere = self._flag("tied-embeddings-all")
        form = Form(
            self._whole("enc-depth", "1"),
            self._whole("dec-depth", "1"),
            width,
            hidden,
            heads,
            decoder_hidden=0 if other == hidden else other,
            activation=self._option("transformer-ffn-activation", "swish"),
            autoregression=DECODERS.get(autoregression, "attention"),
            embedding_norm=embedded == "n",
            final_norm=top == "n",
            shared_source=everywhere or self._flag("tied-embeddings-src"),
            tied_output=everywhere or self._flag("tied-embeddings"),
            output_bias=True,
            epsilon=EPSILON,
        )
        if form.autoregression == "average":
            hidden, activation = (
                self._whole("transformer-dim-aan", "2048"),
                self._option("transformer-aan-activation", "swish"),
            )
            form = replace(form, average_hidden=hidden, average_activation=activation)
        return form, before == "n"

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

    def _rules(self, vocabulary: _Vocabulary, renumbered: Renumbering) -> Rules:
        """Those of marian-decoder's options in the folder; of a browser where there are none beside a .bin."""
        if not self.decoding:
            assert self.file is not None
            plain = FIREFOX if self.file.suffix == ".bin" else OWN
        else:
            plain = OWN

        def number(name: str, default: float) -> float:
            found = self.decoding.get(name, default)
            try:
                return float(found)
            except (TypeError, ValueError):
                self.faults.append(f"{name} is {found}, wanted a number")
                return default

        banned = () if self.decoding.get("allow-unk") == "true" else plain.banned
        if self.decoding.get("allow-special") != "true":
            ours = renumbered.ours
            banned += tuple(int(ours[i]) for i, piece in enumerate(vocabulary.pieces) if piece in CONTROL)
        return Rules(
            "marian",
            beam=max(int(number("beam-size", plain.beam)), 1),
            length_penalty=number("normalize", plain.length_penalty),
            word_penalty=number("word-penalty", 0.0),
            growth=number("max-length-factor", plain.growth),
            banned=banned,
        )

    def _shortlist(self, vocabularies: Sequence[_Vocabulary], renumbered: Sequence[Renumbering]) -> Shortlist | None:
        """The one in the folder, in the zoo's tokens; None where there is none."""
        name, *numbers = self._listed(self.decoding, "shortlist") or [""]
        found = sorted(each for each in self.folder.glob("lex*") if ".s2t" in each.name or each.suffix == ".bin")
        if name:
            found = [self.folder / Path(name).name]
        if len(found) > 1:
            self.faults.append(f"found the shortlists {', '.join(each.name for each in found)}, wanted one")
        if len(found) != 1:
            return None
        path = found[0]
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
        """ "en-de" of the "ende" in the name of a model of Firefox."""
        assert self.file is not None
        found = re.search(r"\.([a-z]{2})([a-z]{2})\.", self.file.name)
        return f"{found[1]}-{found[2]}" if found else ""

    # ------------------------------------------------------------------------------------------------------- weights

    def _tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape, which may stand in the file with further sizes of 1 before."""
        self.used.add(name)
        found = self.tensors.get(name)
        if found is None:
            self.faults.append(f"{name} is missing")
            return Tensor(np.zeros(shape, np.float32))
        values = found.values
        while values.ndim > len(shape) and len(values) == 1:
            values = values[0]
        if values.shape != shape:
            sizes, wanted = (" x ".join(map(str, each)) for each in (found.values.shape, shape))
            self.faults.append(f"{name} is {sizes}, wanted {wanted}")
            return Tensor(np.zeros(shape, np.float32))
        if not np.isfinite(values).all():
            self.faults.append(f"{name} holds NaN or infinity")
        return Tensor(values, found.multiplier)

    def _state(
        self, form: Form, pre_norm: bool, vocabularies: Sequence[_Vocabulary]
    ) -> tuple[dict[str, NDArray[np.float32]], tuple[Renumbering, ...], Form]:
        """The state dict of the zoo's network, and how tokens are renumbered."""
        width, found = form.width, {}
        tables = ["Wemb"] if form.shared_source else ["encoder_Wemb", "decoder_Wemb"]
        sizes = [len(self.tensors[name].values) if name in self.tensors else 1 for name in tables]
        originals = [self._tensor(name, size, width) for name, size in zip(tables, sizes, strict=True)]
        if len(vocabularies) > len(tables):
            self.faults.append("found two vocabularies and one table of embeddings")
        if self.faults:
            raise self._refusal()
        for each, size in zip(vocabularies, sizes, strict=False):
            each.fit(size, self.faults)
        vocabularies = [vocabularies[0], vocabularies[-1]][: len(tables)]
        if self.faults:
            raise self._refusal()
        renumbered = [Renumbering(size, each.unknown, each.end) for each, size in zip(vocabularies, sizes, strict=True)]
        source, target = renumbered[0], renumbered[-1]
        found["embedding.weight"] = target.table(originals[-1].values)
        self._quantized("embedding.weight", originals[-1], *([tables[-1], "none"] if form.tied_output else []))
        if not form.shared_source:
            found["source_embedding.weight"] = source.table(originals[0].values)
            self._quantized("source_embedding.weight", originals[0])
        out = "decoder_ff_logit_out"
        if not form.tied_output:
            if f"{out}_W" in self.tensors:
                one = self._tensor(f"{out}_W", width, sizes[-1])
                output = Tensor(one.values.T, one.multiplier)
            else:
                output = self._tensor(f"{out}_Wt", sizes[-1], width)
            found["output_weight"] = target.table(output.values)
            self._quantized("output_weight", output, f"{out}_Wt", f"{out}_W", "none")
        omitted = self._flag("output-omit-bias")
        found["output_bias"] = target.bias(
            np.zeros(sizes[-1], np.float32) if omitted else self._tensor(f"{out}_b", sizes[-1]).values
        )

        unbiased, plain = self._flag("transformer-no-bias"), self._flag("transformer-no-affine")

        def linear(ours: str, prefix: str, suffix: str, rows: int, columns: int, bias: bool = True) -> None:
            weight = self._tensor(f"{prefix}_W{suffix}", rows, columns)
            found[f"{ours}.weight"] = weight.values.T
            self._quantized(f"{ours}.weight", weight, f"{prefix}_W{suffix}")
            if bias:
                given = not unbiased or f"{prefix}_b{suffix}" in self.tensors
                found[f"{ours}.bias"] = (
                    self._tensor(f"{prefix}_b{suffix}", columns).values if given else np.zeros(columns, np.float32)
                )

        def norm(ours: str, prefix: str, suffix: str = "") -> None:
            for part, theirs in (("weight", "scale"), ("bias", "bias")):
                name = f"{prefix}_ln_{theirs}{suffix}"
                given = name in self.tensors or not (plain or (unbiased and part == "bias"))
                found[f"{ours}.{part}"] = (
                    self._tensor(name, width).values if given else np.full(width, part == "weight", np.float32)
                )

        def around(ours: str, before: str, after: str) -> None:
            norm(f"{ours}.norm", before if pre_norm else after, "_pre" if pre_norm else "")

        def attention(ours: str, name: str, prefix: str) -> None:
            for part, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
                if part == "output" and self._flag("transformer-no-projection"):
                    found[f"{ours}.{name}.output.weight"] = np.eye(width, dtype=np.float32)
                    found[f"{ours}.{name}.output.bias"] = np.zeros(width, np.float32)
                else:
                    linear(f"{ours}.{name}.{part}", prefix, theirs, width, width)
            around(f"{ours}.around_{name}", f"{prefix}_Wo", f"{prefix}_Wo")

        def feed(ours: str, prefix: str, hidden: int) -> None:
            linear(f"{ours}.feed.inner", prefix, "1", width, hidden)
            linear(f"{ours}.feed.outer", prefix, "2", hidden, width)
            around(f"{ours}.around_feed", f"{prefix}_ffn", f"{prefix}_ffn")

        for i in range(form.encoder):
            attention(f"encoder.{i}", "attention", f"encoder_l{i + 1}_self")
            feed(f"encoder.{i}", f"encoder_l{i + 1}_ffn", form.hidden)
        tied = self._listed(self.options, "transformer-tied-layers") or [str(i + 1) for i in range(form.decoder)]
        if len(tied) != form.decoder:
            self.faults.append(f"transformer-tied-layers has {len(tied)} layers, dec-depth is {form.decoder}")
        for i, layer in enumerate(tied[: form.decoder]):
            ours, theirs = f"decoder.{i}", f"decoder_l{layer}"
            if form.autoregression == "ssru":
                linear(f"{ours}.attention.value", f"{theirs}_rnn", "", width, width, bias=False)
                linear(f"{ours}.attention.forget", f"{theirs}_rnn", "f", width, width)
                around(f"{ours}.around_attention", f"{theirs}_rnn", f"{theirs}_rnn_ffn")
            elif form.autoregression == "average":
                prefix = f"{theirs}_aan"
                linear(f"{ours}.attention.inner", prefix, "1", width, form.average_hidden)
                linear(f"{ours}.attention.outer", prefix, "2", form.average_hidden, width)
                linear(f"{ours}.attention.input", prefix, "i", width, width)
                linear(f"{ours}.attention.forget", prefix, "f", width, width)
                around(f"{ours}.around_attention", f"{prefix}_ffn", f"{prefix}_ffn")
            else:
                attention(ours, "attention", f"{theirs}_self")
            attention(ours, "cross", f"{theirs}_context")
            feed(ours, f"{theirs}_ffn", form.decoder_hidden or form.hidden)
        for side, other in (("encoder", "source"), ("decoder", "target")):
            if form.embedding_norm:
                norm(f"{other}_norm", f"{side}_emb", "_pre")
            if form.final_norm:
                norm(f"{side}_norm", f"{side}_top")
        return found, tuple(renumbered), form

    def _quantized(self, ours: str, weight: Tensor, *names: str) -> None:
        """Note a quantized weight, and the greatest magnitude of what it is multiplied with, where the file has that
        one's multiplier.
        """
        if weight.multiplier:
            self.int8.add(ours)
            alpha = next((each.values for name in names if (each := self.tensors.get(name + ALPHA))), np.zeros(1))
            if 0 < (multiplier := float(alpha.ravel()[0])) < np.inf:
                self.magnitudes[ours] = 127 / multiplier

    # ---------------------------------------------------------------------------------------------------- vocabulary

    def _vocabularies(self) -> list[_Vocabulary]:
        """Of the source, and of the target where it is another."""
        named: list[str] = []
        assert self.file is not None
        beside = Path(f"{self.file}.yml")
        training = self._yaml(beside.read_text("utf-8", "replace"), beside.name) if beside.is_file() else {}
        for options in (self.decoding, training):
            names = [Path(each).name for each in self._listed(options, "vocabs")]
            if not named and names and all((self.folder / each).is_file() for each in names):
                named = names
        if not named:
            each_side = [sorted(each.name for each in self.folder.glob(f"{side}vocab*.spm")) for side in ("src", "trg")]
            both = sorted(each.name for each in self.folder.glob("*vocab*") if each.suffix in (".spm", ".yml", ".json"))
            named = [each[0] for each in each_side] if all(len(each) == 1 for each in each_side) else both
            if len(named) != 1 and named is both:
                self.faults.append(
                    f"found the vocabularies {', '.join(both) or 'none'} in {self.folder}, "
                    "wanted vocab.spm or vocab.yml, or the names under vocabs: in decoder.yml"
                )
                return []
        if len(named) > 2:  # one for each of several sources
            self.faults.append(f"vocabs: {', '.join(named)} are of several sources, which is not supported")
        sides: list[tuple[str, ...]] = [("source",), ("target",)] if len(set(named)) > 1 else [("source", "target")]
        return [self._vocabulary(name, side) for name, side in zip(dict.fromkeys(named), sides, strict=False)]

    def _vocabulary(self, name: str, sides: Sequence[str]) -> _Vocabulary:
        """The vocabulary in a file. sides: whose spm cuts text where it is YAML."""
        try:
            content = (self.folder / name).read_bytes()
        except OSError as error:
            self.faults.append(f"cannot read {name} ({error.strerror or error})")
            return _Vocabulary("", [], 0, 0, {})
        if name.endswith(".spm"):
            return self._of_sentencepiece(name, content)
        found = self._yaml(content.decode("utf-8", "replace"), name)
        if not all(isinstance(each, str) and each.isdecimal() and int(each) < 1 << 24 for each in found.values()):
            self.faults.append(f"{name} numbers no words")
            found = {}
        pieces: list[str | None] = [None] * (max(map(int, found.values()), default=-1) + 1)
        for piece, token in found.items():
            pieces[int(token)] = piece

        def special(text: str, nematus: str, token: int) -> int:
            if token < len(pieces) and pieces[token] in (None, "", nematus):
                return token
            if text not in pieces:
                self.faults.append(f"{name} has no {text}")
                return 0
            return pieces.index(text)

        end, unknown = special("</s>", "eos", 0), special("<unk>", "UNK", 1)
        paths = [self.folder / f"{side}.spm" for side in sides]
        files = {each.name: each.read_bytes() for each in paths if each.is_file()}
        if files and len(files) < len(paths):
            self.faults.append(f"found {', '.join(files)} alone, wanted {' and '.join(each.name for each in paths)}")
        return _Vocabulary("sentencepiece" if files else "words", pieces, unknown, end, files, spare=-1)

    def _of_sentencepiece(self, name: str, content: bytes) -> _Vocabulary:
        import sentencepiece

        try:
            model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            self.faults.append(f"{name} is no vocabulary of sentencepiece")
            return _Vocabulary("", [], 0, 0, {})
        if model.eos_id() < 0:
            self.faults.append(f"{name} has no end of a sentence")
        pieces = [model.id_to_piece(i) for i in range(len(model))]
        return _Vocabulary("sentencepiece", pieces, model.unk_id(), model.eos_id(), {name: content})


@dataclass
class _Vocabulary:
    """A vocabulary in the original's tokens. spare: rows of the table that no piece has, at most; -1: pieces beyond the
    table are left out, as Marian does with dim-vocabs.
    """

    kind: str
    pieces: Sequence[str | None]
    unknown: int
    end: int
    files: Mapping[str, bytes]
    spare: int = 64

    @property
    def tokens(self) -> dict[str, int]:
        """{piece: token}."""
        return {piece: token for token, piece in enumerate(self.pieces) if piece is not None}

    def fit(self, rows: int, faults: list[str]) -> None:
        """Whether it is the vocabulary of a table of so many rows."""
        if self.spare < 0:
            self.pieces = self.pieces[:rows]
        spare = self.spare if self.spare >= 0 else rows
        if not 0 <= rows - len(self.pieces) <= spare or max(self.unknown, self.end) >= rows:
            faults.append(f"the vocabulary has {len(self.pieces)} pieces, the weights {rows}")
