"""Folders of transformers (`save_pretrained`): Marian, M2M-100 and NLLB, mBART, BART."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, one_line
from zoo.transformer_mt.data import END, SHOWN
from zoo.transformer_mt.decode import Rules
from zoo.transformer_mt.importing.imported import Imported, Renumbering
from zoo.transformer_mt.model import Form, sinusoids
from zoo.transformer_mt.vocabularies import SOURCE, TARGET, Framing

if TYPE_CHECKING:
    import torch

Made = TypeVar("Made")
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
FAST, PIECES = "tokenizer.json", "sentencepiece.bpe.model"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # after the name of weights that lie in several files
OFFSET = 2  # rows of a table of positions that stand before the first
LAYERS, SIZES = 1000, 1 << 20  # of a network, at most
SPARE = 128  # rows of a table, at most, that no token has
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}


@dataclass(frozen=True)
class Family:
    """What models of an architecture share. positions: where their encodings come from. activation, scaled: where the
    configuration says nothing.
    """

    pre_norm: bool
    embedding_norm: bool
    positions: str
    activation: str = "gelu"
    scaled: bool = False


FAMILIES = {
    "MarianMTModel": Family(False, False, "interleaved rates"),
    "M2M100ForConditionalGeneration": Family(True, False, "sinusoids", "relu", True),
    "MBartForConditionalGeneration": Family(True, True, "learned"),
    "BartForConditionalGeneration": Family(False, True, "learned"),
}
REFUSED = {
    **dict.fromkeys(
        ("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"),
        "its relative positions are added to attention scores, which a decoding step here has not",
    ),
    "NllbMoeForConditionalGeneration": "it mixes experts",
}
# What of generation_config.json chooses tokens and has no form here: {name: values with which it does nothing}
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "repetition_penalty": (1, 1.0),
    "encoder_repetition_penalty": (1, 1.0),
    "encoder_no_repeat_ngram_size": (0,),
    "diversity_penalty": (0, 0.0),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "guidance_scale": (1, 1.0),
    **dict.fromkeys(
        (
            "begin_suppress_tokens",
            "constraints",
            "dola_layers",
            "exponential_decay_length_penalty",
            "force_words_ids",
            "forced_decoder_ids",
            "max_time",
            "prompt_lookup_num_tokens",
            "sequence_bias",
            "stop_strings",
            "watermarking_config",
        ),
        ((), {}),
    ),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values", "token_healing", "use_mtp"), (False,)),
}
# What it may say besides: read here, or without influence on the tokens of a search that draws none
HARMLESS = (
    "max_length max_new_tokens min_length min_new_tokens early_stopping num_beams length_penalty no_repeat_ngram_size "
    "bad_words_ids suppress_tokens forced_bos_token_id forced_eos_token_id decoder_start_token_id eos_token_id "
    "pad_token_id bos_token_id use_cache cache_implementation cache_config max_cache_len temperature top_k top_p min_p "
    "top_h typical_p epsilon_cutoff eta_cutoff num_return_sequences output_attentions output_hidden_states "
    "output_scores output_logits return_dict_in_generate is_assistant num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold max_matching_ngram_size assistant_early_exit "
    "assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type compile_config disable_compile "
    "continuous_batching_config low_memory prefill_chunk_size transformers_version return_legacy_cache "
    "_from_model_config _commit_hash trust_remote_code generation_kwargs"
)
SUPPORTED = frozenset(HARMLESS.split())
# Languages of M2M-100 and of its WMT21 models, in the order of their tokens, which stand in no file of their folders
M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy "
    "id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru "
    "sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
CODES = {"m2m100": M2M100, "wmt21": "en ha is ja cs ru zh de"}
LANGUAGE = re.compile(r"__([a-z]{2,3})__|>>(.+)<<|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})")
FIRST_LANGUAGE = {
    "M2M100Tokenizer": "en",
    "NllbTokenizer": "eng_Latn",
    "MBartTokenizer": "en_XX",
    "MBart50Tokenizer": "en_XX",
}


def recognized(folder: Path) -> bool:
    """Whether it is a folder of transformers."""
    return (folder / CONFIG).is_file()


def read(folder: Path, *, source_language: str = "", target_language: str = "") -> Imported:
    """The model in a folder. Nothing in it is executed.

    source_language, target_language: those it translates from and into, of a model that has several. Raises
    RequestError with all that is wrong with the folder.
    """
    return _Reader(folder, {SOURCE: source_language, TARGET: target_language}).read()


class _Reader:
    """Reads one folder, and gathers what is wrong with it."""

    def __init__(self, path: Path, languages: Mapping[str, str]) -> None:
        self.path, self.languages = path, languages
        self.faults: list[str] = []
        self.config = self._json(CONFIG)
        own = self._json(GENERATION) if (path / GENERATION).is_file() else {}
        self.generation = own or {
            key: each for key, each in self.config.items() if key in SUPPORTED | UNSUPPORTED.keys()
        }
        self.tokenizer = self._json(TOKENIZER) if (path / TOKENIZER).is_file() else {}

    def read(self) -> Imported:
        """See `read`."""
        family = self._family()
        if family is None:
            raise self._refusal()
        form = self._form(family)
        sound = not self.faults
        nothing = _Vocabulary("sentencepiece", [], {}, -1, "", set(), {})
        vocabulary, tensors = self._guarded("its vocabulary", self._vocabulary, nothing), self._weights()
        end, start = self._token("eos_token_id"), self._start(vocabulary)
        tables = self._tables(tensors, form) if tensors and sound else None
        size = len(vocabulary.target) if tables is None else len(tables[1])
        rules = self._guarded(GENERATION, lambda: self._rules(size, vocabulary.unknown, end), Rules("transformers"))
        if tables is not None:
            self._fits(vocabulary, tables, end)
        if self.faults or tables is None:
            raise self._refusal()
        source, target = (Renumbering(len(each), vocabulary.unknown, end) for each in tables[:2])
        form, state = self._state(tensors, form, family, tables, (source, target), start)
        if self.faults:
            raise self._refusal()
        framing, pieces = vocabulary.framed(source, target, rules, self.languages)
        if framing.prefixed:
            rules = replace(rules, prefix=())
        about = {"architecture": self.config["architectures"][0], "format": "huggingface", **self._licence()}
        return Imported(
            form,
            family.pre_norm,
            {name: np.ascontiguousarray(each) for name, each in state.items()},
            framing,
            pieces,
            vocabulary.files,
            rules,
            min(form.positions[0], self._most_tokens()),
            "-".join(filter(None, (framing.source_language, framing.target_language))),
            about,
        )

    def _guarded(self, what: str, make: Callable[[], Made], otherwise: Made) -> Made:
        """What `make` makes; `otherwise`, with a fault, where a file holds values of other kinds than transformers
        writes.
        """
        try:
            return make()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.faults.append(f"{what} is not as transformers writes it ({one_line(error)})")
            return otherwise

    def _refusal(self) -> RequestError:
        faults = list(dict.fromkeys(self.faults))
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        return RequestError(f"{self.path} cannot be imported: {'; '.join([*faults[:SHOWN], *more])}")

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except OSError as error:
            self.faults.append(f"cannot read {name} ({error.strerror or error})")
        except (ValueError, RecursionError) as error:
            self.faults.append(f"{name} is not valid JSON ({error})")
        else:
            if isinstance(found, dict):
                return found
            self.faults.append(f"{name} holds no object")
        return {}

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            self.faults.append(f"cannot read {name} ({error.strerror or error})")
            return b""

    def _licence(self) -> dict[str, str]:
        """What the model's README says of its licence."""
        path = self.path / "README.md"
        text = path.read_text("utf-8", "replace") if path.is_file() else ""
        found = re.search(r"\A---\n(?:.*\n)*?license:\s*(\S+)", text)
        return {"licence": found[1]} if found else {}

    # ------------------------------------------------------------------------------------------------- configuration

    def _family(self) -> Family | None:
        """The family of its architecture; None, with a fault, for one that cannot be read."""
        names = self.config.get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        if name in FAMILIES:
            return FAMILIES[name]
        if self.faults:
            return None
        kind = name or f"the model type {self.config.get('model_type')}"
        why = REFUSED.get(name) or (
            "it is a decoder alone, which translates nothing"
            if name.endswith(("CausalLM", "LMHeadModel")) or not self.config.get("is_encoder_decoder")
            else "it is none that is read here"
        )
        self.faults.append(f"found {kind}, wanted {', '.join(FAMILIES)}: {why}")
        return None

    def _whole(self, key: str, default: int | None = None) -> int:
        found = self.config.get(key, default)
        most = LAYERS if key.endswith("layers") else SIZES
        if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= most:
            return found
        self.faults.append(f"{CONFIG} has {key} {found!r}, wanted a whole number from 1 to {most:,}")
        return 1

    def _form(self, family: Family) -> Form:
        """The sizes that the configuration gives; the tables are looked at later."""
        sizes: dict[str, Any] = {
            name: self._whole(key)
            for name, key in {
                "encoder": "encoder_layers",
                "decoder": "decoder_layers",
                "width": "d_model",
                "hidden": "encoder_ffn_dim",
                "heads": "encoder_attention_heads",
                "decoder_hidden": "decoder_ffn_dim",
                "decoder_heads": "decoder_attention_heads",
            }.items()
        }
        for heads in {sizes["heads"], sizes["decoder_heads"]}:
            if sizes["width"] % heads or sizes["width"] % 2:
                self.faults.append(f"{CONFIG} has d_model {sizes['width']}, which {heads} heads cannot share")
        activation = self.config.get("activation_function", family.activation)
        if activation not in ACTIVATIONS:
            self.faults.append(f"found the activation {activation}, wanted one of {', '.join(ACTIVATIONS)}")
        if sizes["decoder_hidden"] == sizes["hidden"]:
            sizes["decoder_hidden"] = 0
        if sizes["decoder_heads"] == sizes["heads"]:
            sizes["decoder_heads"] = 0
        positions = self._whole("max_position_embeddings", default=1024)
        return Form(
            **sizes,
            activation=ACTIVATIONS.get(activation, "relu"),
            scaled=bool(self.config.get("scale_embedding", family.scaled)),
            embedding_norm=family.embedding_norm,
            final_norm=family.pre_norm,
            output_bias=True,
            positions=(positions, positions),
        )

    def _token(self, key: str) -> int:
        """A token that the configuration names, -1 where it names none."""
        found = self.generation.get(key)
        found = self.config.get(key) if found is None else found
        if isinstance(found, list):
            if len(found) != 1:
                self.faults.append(f"found {key} {found}, wanted one token")
                return -1
            found = found[0]
        if found is None:
            return -1
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            self.faults.append(f"found {key} {found!r}, wanted a token")
            return -1
        return found

    def _start(self, vocabulary: _Vocabulary) -> int:
        """The token that translations start after: of mBART the language that is asked for."""
        start = self._token("decoder_start_token_id")
        start = self._token("bos_token_id") if start < 0 else start
        if vocabulary.starts and self.languages[TARGET]:
            start = vocabulary.languages.get(self.languages[TARGET], start)
        if start < 0:
            self.faults.append("found no decoder_start_token_id")
        return start

    def _most_tokens(self) -> int:
        found: Any = self.tokenizer.get("model_max_length")
        return int(found) if isinstance(found, int | float) and 1 <= found < 1 << 20 else 1 << 20

    def _rules(self, size: int, unknown: int, end: int) -> Rules:
        """What generation_config.json says of the search, where it has a form here. size: tokens of a target."""
        ours = Renumbering(size, *(each if each < size else -1 for each in (unknown, end))).ours
        given = {key: value for key, value in self.generation.items() if value is not None}
        for key, value in given.items():
            if key in UNSUPPORTED:
                if value not in UNSUPPORTED[key]:
                    self.faults.append(f"{key} {value!r} is not supported; remove it from {GENERATION}")
            elif key not in SUPPORTED and value is not False:
                self.faults.append(f"{GENERATION} has {key}, which is not known here; remove it")

        def number(key: str, default: float, kinds: type | tuple[type, ...] = int) -> Any:
            found: Any = given.get(key, default)
            sound = isinstance(found, kinds) and not isinstance(found, bool)
            if not sound or not -1e6 < found < 1e6:
                self.faults.append(f"{key} is {found!r}, wanted a number")
                return default
            return found

        def tokens(key: str, found: Any) -> list[int]:
            if not all(isinstance(each, int) and 0 <= each < len(ours) for each in found):
                self.faults.append(f"{key} names tokens that the vocabulary has not")
                return []
            return [int(ours[each]) for each in found]

        banned = []
        words = given.get("bad_words_ids") or []
        if not all(isinstance(each, list) and len(each) == 1 for each in words):
            self.faults.append("bad_words_ids of several tokens are not supported")
            words = []
        banned += [each for each in tokens("bad_words_ids", [each[0] for each in words]) if each != END]
        banned += tokens("suppress_tokens", given.get("suppress_tokens") or [])
        prefix = tokens("forced_bos_token_id", [given[key] for key in ("forced_bos_token_id",) if key in given])
        forced = given.get("forced_eos_token_id")
        if forced is not None and tokens("forced_eos_token_id", forced if isinstance(forced, list) else [forced]) != [
            END
        ]:
            self.faults.append(f"forced_eos_token_id {forced} is not the end, which is not supported")
        stopping = given.get("early_stopping", False)
        if stopping not in (True, False, "never"):
            self.faults.append(f"early_stopping is {stopping!r}, wanted true, false or never")
        most = number("max_new_tokens", 0) or max(number("max_length", 1) - 1, 0)
        least = number("min_new_tokens", -1) + 1 or number("min_length", 0)
        repeated = number("no_repeat_ngram_size", 0)
        if repeated == 1:
            self.faults.append("no_repeat_ngram_size 1 is not supported")
        if most and most <= len(prefix):
            self.faults.append(f"translations of at most {most} tokens have no room for one")
        return Rules(
            "transformers",
            beam=number("num_beams", Rules().beam),
            length_penalty=float(number("length_penalty", 1.0, (int, float))),
            early_stopping=stopping,
            prefix=tuple(prefix),
            banned=tuple(dict.fromkeys(banned)),
            least=least,
            most=most,
            forced_end=forced is not None,
            no_repeat_ngram=repeated,
        )

    # ------------------------------------------------------------------------------------------------------- weights

    def _weights(self) -> dict[str, torch.Tensor]:
        """All tensors, by name."""
        for name in WEIGHTS:
            if (self.path / name).is_file():
                return self._tensors(name)
            if (self.path / f"{name}{INDEX}").is_file():
                places = self._json(f"{name}{INDEX}").get("weight_map")
                if not isinstance(places, dict) or not all(
                    isinstance(each, str) and Path(each).name == each for each in places.values()
                ):
                    self.faults.append(f"{name}{INDEX} names no files")
                    return {}
                found: dict[str, torch.Tensor] = {}
                for part in sorted(set(places.values())):
                    found |= self._tensors(part)
                return found
        self.faults.append(f"found no weights, wanted {' or '.join(WEIGHTS)}")
        return {}

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        import torch

        path = self.path / name
        try:
            if path.suffix == ".safetensors":
                import safetensors.torch

                return safetensors.torch.load_file(path)
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
        except ModuleNotFoundError as error:
            self.faults.append(
                f"{name} is read by {error.name}, which is not installed; run: pip install 'int8-zoo[import]'"
            )
        except pickle.UnpicklingError:
            self.faults.append(f"{name} is damaged or holds code, which is not executed")
        except Exception as error:  # the classes of both libraries' errors differ from version to version
            self.faults.append(f"{name} is damaged ({one_line(error)})")
        else:
            if isinstance(found, dict) and all(isinstance(each, torch.Tensor) for each in found.values()):
                return found
            self.faults.append(f"{name} holds something else than tensors")
        return {}

    def _array(
        self, tensors: Mapping[str, torch.Tensor], names: Sequence[str], shape: tuple[int, ...]
    ) -> NDArray[np.float32]:
        """The first of these tensors that there is, float32. shape: -1 for any size."""
        for name in names:
            if name in tensors:
                found: NDArray[np.float32] = tensors[name].detach().float().numpy()
                fits = len(shape) == found.ndim and all(a in (-1, b) for a, b in zip(shape, found.shape, strict=True))
                if not fits:
                    wanted = " x ".join("?" if size < 0 else str(size) for size in shape)
                    self.faults.append(f"{name} is {' x '.join(map(str, found.shape))}, wanted {wanted}")
                    break
                if not np.isfinite(found).all():
                    self.faults.append(f"{name} holds NaN or infinity")
                return found
        else:
            self.faults.append(f"{names[0]} is missing")
        return np.zeros([1] * len(shape), np.float32)

    def _tables(
        self, tensors: Mapping[str, torch.Tensor], form: Form
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]] | None:
        """Embeddings of the source and the target, and the weights of the output, [tokens, width] each."""
        before, shape = len(self.faults), (-1, form.width)
        shared, output = "model.shared.weight", "lm_head.weight"
        source, target = (f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
        tied = self.config.get("tie_word_embeddings", True)
        if tied and self.config.get("share_encoder_decoder_embeddings", True):
            table = self._array(tensors, (shared, source, target, output), shape)
            found = table, table, table
        else:
            decoder = self._array(tensors, (target, output) if tied else (target, shared), shape)
            encoder = self._array(tensors, (source, shared), shape)
            found = encoder, decoder, decoder if tied else self._array(tensors, (output,), decoder.shape)
        return found if len(self.faults) == before else None

    def _fits(self, vocabulary: _Vocabulary, tables: Sequence[NDArray[np.float32]], end: int) -> None:
        """Whether the vocabulary is the weights' own."""
        for table, pieces in zip(tables, (vocabulary.source, vocabulary.target), strict=False):
            if not pieces:
                continue  # which has been said
            spare = len(table) - len(pieces)
            if not 0 <= spare <= vocabulary.spare:
                self.faults.append(f"the vocabulary has {len(pieces)} tokens, the weights {len(table)}")
            elif not 0 <= end < len(pieces) or pieces[end] != vocabulary.end:
                self.faults.append(f"eos_token_id is {end}, which is not {vocabulary.end} in the vocabulary")

    def _state(
        self,
        tensors: Mapping[str, torch.Tensor],
        form: Form,
        family: Family,
        tables: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
        renumbered: tuple[Renumbering, Renumbering],
        start: int,
    ) -> tuple[Form, dict[str, NDArray[np.float32]]]:
        """The state dict of the zoo's network, and its form."""
        encoder, decoder, output = tables
        source, target = renumbered
        if not start < len(decoder):
            self.faults.append(f"decoder_start_token_id is {start}, the vocabulary has {len(decoder)} tokens")
            return form, {}
        shared = encoder is decoder or np.array_equal(encoder, decoder)
        tied = output is decoder or np.array_equal(output, decoder)
        positions = tuple(self._positions(tensors, family, side, form) for side in ("encoder", "decoder"))
        lengths = tuple(len(each) for each in positions)
        form = replace(form, shared_source=shared, tied_output=tied, positions=lengths)
        bias = np.zeros(len(decoder), np.float32)
        if "final_logits_bias" in tensors:
            bias = self._array(tensors, ("final_logits_bias",), (1, len(decoder)))[0]
        found = {
            "embedding.weight": target.table(decoder, start),
            "source_positions": positions[0],
            "positions": positions[1],
            "output_bias": target.bias(bias),
        }
        if not shared:
            found["source_embedding.weight"] = source.table(encoder)
        if not tied:
            found["output_weight"] = target.table(output)

        def copy(ours: str, theirs: str, *shape: int) -> None:
            found[f"{ours}.weight"] = self._array(tensors, (f"{theirs}.weight",), shape)
            found[f"{ours}.bias"] = self._array(tensors, (f"{theirs}.bias",), shape[:1])

        width = form.width
        for side, other, layers, hidden in (
            ("encoder", "source", form.encoder, form.hidden),
            ("decoder", "target", form.decoder, form.decoder_hidden or form.hidden),
        ):
            blocks = {"attention": "self_attn"} | ({"cross": "encoder_attn"} if side == "decoder" else {})
            for i in range(layers):
                ours, theirs = f"{side}.{i}", f"model.{side}.layers.{i}"
                for name, block in blocks.items():
                    for part, projection in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "out")):
                        copy(f"{ours}.{name}.{part}", f"{theirs}.{block}.{projection}_proj", width, width)
                    copy(f"{ours}.around_{name}.norm", f"{theirs}.{block}_layer_norm", width)
                copy(f"{ours}.feed.inner", f"{theirs}.fc1", hidden, width)
                copy(f"{ours}.feed.outer", f"{theirs}.fc2", width, hidden)
                copy(f"{ours}.around_feed.norm", f"{theirs}.final_layer_norm", width)
            if form.embedding_norm:
                copy(f"{other}_norm", f"model.{side}.layernorm_embedding", width)
            if form.final_norm:
                copy(f"{side}_norm", f"model.{side}.layer_norm", width)
        layer = re.compile(r"model\.(encoder|decoder)\.layers\.(\d+)\.")
        found_layers = {name: layer.match(name) for name in tensors}
        if more := [name for name, at in found_layers.items() if at and int(at[2]) >= getattr(form, at[1])]:
            self.faults.append(f"found {more[0]}, which is of more layers than {CONFIG} says")
        return form, found

    def _positions(
        self, tensors: Mapping[str, torch.Tensor], family: Family, side: str, form: Form
    ) -> NDArray[np.float32]:
        """Position encodings [tokens, width] of the encoder or the decoder."""
        length, width = form.positions[0], form.width
        if family.positions == "learned":
            return self._array(tensors, (f"model.{side}.embed_positions.weight",), (-1, width))[OFFSET:]
        if family.positions == "sinusoids":
            return sinusoids(length + OFFSET, width)[OFFSET:]
        angles = np.arange(length)[:, None] / np.power(10_000, 2 * np.arange(width // 2) / width)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)

    # ---------------------------------------------------------------------------------------------------- vocabulary

    def _vocabulary(self) -> _Vocabulary:
        """The vocabulary of the folder; an empty one, with a fault, where there is none."""
        there = {each.name for each in self.path.iterdir() if each.is_file()}
        if there & {"source.spm", "target.spm"}:
            return self._of_marian()
        if there >= {"vocab.json", PIECES} and FAST not in there:
            return self._of_m2m()
        if FAST in there:
            return self._of_tokenizers()
        if there >= {"vocab.json", "merges.txt"}:
            return self._of_byte_pairs()
        if PIECES in there:
            return self._of_fairseq()
        self.faults.append(f"found no vocabulary, wanted source.spm, target.spm and vocab.json, or {FAST}, or {PIECES}")
        return self._made("sentencepiece", [], {})

    def _special(self, name: str, default: str) -> str:
        found = self.tokenizer.get(name, default)
        return str(found.get("content", default)) if isinstance(found, dict) else str(found or default)

    def _numbered(self, name: str) -> list[str | None]:
        """A {piece: token} file as a list of pieces."""
        return self._in_order(self._json(name), name)

    def _in_order(self, found: Mapping[str, Any], name: str) -> list[str | None]:
        if not found or not all(isinstance(each, int) and 0 <= each < 1 << 24 for each in found.values()):
            self.faults.append(f"{name} numbers no pieces")
            return []
        pieces: list[str | None] = [None] * (max(found.values()) + 1)
        for piece, token in found.items():
            pieces[token] = piece
        return pieces

    def _made(self, kind: str, source: list[str | None], files: Mapping[str, bytes], **more: Any) -> _Vocabulary:
        special = {
            name: self._special(f"{name}_token", default)
            for name, default in {"unk": "<unk>", "eos": "</s>", "bos": "<s>", "pad": "<pad>", "mask": "<mask>"}.items()
        }
        added = self.tokenizer.get("added_tokens_decoder")
        hidden = {*special.values()}
        if isinstance(added, dict):
            hidden |= {each["content"] for each in added.values() if isinstance(each, dict) and each.get("special")}
        languages = {
            next(filter(None, found.groups())): token
            for token, piece in enumerate(source)
            if piece and (found := LANGUAGE.fullmatch(piece))
        }
        unknown = source.index(special["unk"]) if special["unk"] in source else -1
        return _Vocabulary(kind, source, files, unknown, special["eos"], hidden, languages, **more)

    def _of_marian(self) -> _Vocabulary:
        files = {name: self._bytes(name) for name in ("source.spm", "target.spm")}
        source = self._numbered("vocab.json")
        target = self._numbered("target_vocab.json") if self.tokenizer.get("separate_vocabs") else source
        found = self._made("sentencepiece", source, files, target=target, spare=0)
        # a model for several languages reads its own in the text
        found.before = (TARGET,) if found.languages else ()
        return found

    def _of_m2m(self) -> _Vocabulary:
        pieces = self._numbered("vocab.json")
        codes = CODES.get(self.tokenizer.get("language_codes", "m2m100"), M2M100).split()
        pieces += [f"__{code}__" for code in codes]
        found = self._made("sentencepiece", pieces, {PIECES: self._bytes(PIECES)})
        return self._of_languages(found, "M2M100Tokenizer")

    def _of_fairseq(self) -> _Vocabulary:
        """Pieces of sentencepiece in the order of fairseq: four of its own first, then languages, at last the mask."""
        import sentencepiece

        content = self._bytes(PIECES)
        try:
            model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            self.faults.append(f"{PIECES} is no vocabulary of sentencepiece")
            return self._made("sentencepiece", [], {})
        pieces: list[str | None] = ["<s>", "<pad>", "</s>", "<unk>"]
        pieces += [model.id_to_piece(i) for i in range(3, len(model))]
        extra = self._json("special_tokens_map.json") if (self.path / "special_tokens_map.json").is_file() else {}
        codes = extra.get("additional_special_tokens") or self.tokenizer.get("additional_special_tokens") or []
        codes = [each.get("content") if isinstance(each, dict) else each for each in codes]
        if not codes:
            self.faults.append(f"found no languages in special_tokens_map.json or {TOKENIZER}, and no {FAST}")
        found = self._made("sentencepiece", [*pieces, *map(str, codes), "<mask>"], {PIECES: content})
        return self._of_languages(found, self._tokenizer_class("MBart50Tokenizer"))

    def _of_tokenizers(self) -> _Vocabulary:
        fast = self._json(FAST)
        model = fast.get("model", {})
        numbered = model.get("vocab", {}) if isinstance(model, dict) else {}
        if isinstance(numbered, list):  # of a unigram model: (piece, score)
            numbered = {each[0]: token for token, each in enumerate(numbered)}
        added = [each for each in fast.get("added_tokens", []) if isinstance(each, dict)]
        pieces = self._in_order({**numbered, **{each["content"]: each["id"] for each in added}}, FAST)
        kind, files = "tokenizers", {FAST: self._bytes(FAST)}
        if (self.path / PIECES).is_file():  # the same pieces, by the lighter library
            kind, files = "sentencepiece", {PIECES: self._bytes(PIECES)}
        found = self._made(kind, pieces, files)
        found.hidden |= {each["content"] for each in added if each.get("special")}
        return self._of_languages(found, self._tokenizer_class("BartTokenizer"))

    def _of_byte_pairs(self) -> _Vocabulary:
        """vocab.json and merges.txt as one tokenizer.json."""
        try:
            import tokenizers
        except ModuleNotFoundError:
            self.faults.append(
                "merges.txt is read by tokenizers, which is not installed; run: pip install 'int8-zoo[import]'"
            )
            return self._made("tokenizers", [], {})
        try:
            merged = tokenizers.ByteLevelBPETokenizer.from_file(
                str(self.path / "vocab.json"), str(self.path / "merges.txt"), trim_offsets=True
            )
        except Exception as error:  # what the library raises has no class of its own
            self.faults.append(f"merges.txt is damaged ({one_line(error)})")
            return self._made("tokenizers", [], {})
        files = {FAST: merged.to_str().encode()}
        return self._of_languages(self._made("tokenizers", self._numbered("vocab.json"), files), "BartTokenizer")

    def _tokenizer_class(self, default: str) -> str:
        found = str(self.tokenizer.get("tokenizer_class") or default).removesuffix("Fast")
        if found in FIRST_LANGUAGE or found in ("BartTokenizer", "RobertaTokenizer"):
            return found
        return {
            "M2M100ForConditionalGeneration": "NllbTokenizer",
            "MBartForConditionalGeneration": "MBart50Tokenizer",
        }.get(self.config["architectures"][0], "BartTokenizer")

    def _of_languages(self, found: _Vocabulary, kind: str) -> _Vocabulary:
        """What stands around a source with this class of tokenizer."""
        if kind not in FIRST_LANGUAGE:
            found.before = ("bos",)
            found.bos = self._special("bos_token", "<s>")
            found.languages = {}
            return found
        chosen = self.tokenizer.get("src_lang") or FIRST_LANGUAGE[kind]
        found.first = {SOURCE: str(chosen), TARGET: str(self.tokenizer.get("tgt_lang") or "")}
        found.starts = kind == "MBartTokenizer"
        found.prefixed = not found.starts
        if found.starts or self.tokenizer.get("legacy_behaviour"):
            found.after = ("eos", SOURCE)
        else:
            found.before = (SOURCE,)
        return found


@dataclass
class _Vocabulary:
    """A vocabulary in the original's tokens.

    source, target: pieces by token. hidden: pieces that are no text. languages: {name: token}. first: the languages
    that the folder itself chooses. starts: translations start after the token of the target language, instead of
    beginning with it (`prefixed`).
    """

    kind: str
    source: list[str | None]
    files: Mapping[str, bytes]
    unknown: int
    end: str
    hidden: set[str]
    languages: dict[str, int]
    target: list[str | None] = field(default_factory=list)
    spare: int = SPARE
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ("eos",)
    bos: str = ""
    first: Mapping[str, str] = field(default_factory=dict)
    starts: bool = False
    prefixed: bool = False

    def __post_init__(self) -> None:
        self.target = self.target or self.source

    def framed(
        self, source: Renumbering, target: Renumbering, rules: Rules, languages: Mapping[str, str]
    ) -> tuple[Framing, tuple[list[str | None], ...]]:
        """The framing and the pieces in the zoo's tokens. Raises RequestError for a language that the model has not."""
        ours = source.ours
        places: dict[str, int | str] = {"eos": END, SOURCE: SOURCE, TARGET: TARGET}
        if self.bos in self.source:
            places["bos"] = int(ours[self.source.index(self.bos)])
        known = {name: int(ours[token]) for name, token in self.languages.items()}
        chosen = {side: languages[side] or self.first.get(side, "") for side in (SOURCE, TARGET)}
        for side, name in chosen.items():
            if languages[side] and name not in known:
                wanted = f"wanted one of: {', '.join(sorted(known))}" if known else "this model has none to choose from"
                raise RequestError(f"found --{side}-language {name}; {wanted}")
        prefixed = self.prefixed
        if prefixed and not chosen[TARGET] and rules.prefix:  # which is a language, or what all translations begin with
            chosen[TARGET] = next((name for name, token in known.items() if (token,) == rules.prefix), "")
            prefixed = bool(chosen[TARGET])
        pieces = source.pieces(self.source)
        other = target.pieces(self.target)
        hidden = [token for token, piece in enumerate(other) if piece is None or piece in self.hidden]
        hidden += [known[name] for name in known if self.target is self.source]
        framing = Framing(
            self.kind,
            tuple(self.files),
            tuple(places[each] for each in self.before if each in places),
            tuple(places[each] for each in self.after),
            known or None,
            chosen[SOURCE] if chosen[SOURCE] in known else "",
            chosen[TARGET] if chosen[TARGET] in known else "",
            prefixed,
            tuple(sorted(set(hidden))),
        )
        return framing, (pieces,) if self.target is self.source else (pieces, other)
