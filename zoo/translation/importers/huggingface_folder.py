"""JSON files of a transformers folder, and the search rules in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import one_line
from zoo.translation.data.tokens import END
from zoo.translation.importers.imported import Renumbering
from zoo.translation.importers.model_reader import ModelReader
from zoo.translation.search.config import MAX_BEAM, SearchConfig

Made = TypeVar("Made")
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
LAYERS, SIZES = 1000, 1 << 20  # upper bounds of a network
# Options of generation_config.json that are not supported: {name: values with which they have no effect}
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1, 1.0),
    "diversity_penalty": (0, 0.0),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "guidance_scale": (1, 1.0),
    **dict.fromkeys(
        (
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
    **dict.fromkeys(("token_healing", "use_mtp"), (False,)),
}
# Other options: supported, or without effect on a deterministic search
HARMLESS = (
    "max_length max_new_tokens min_length min_new_tokens early_stopping num_beams length_penalty no_repeat_ngram_size "
    "do_sample renormalize_logits remove_invalid_values repetition_penalty encoder_no_repeat_ngram_size "
    "begin_suppress_tokens "
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
TOP_K = 50  # default of transformers
# Options of sampling that are not supported: {name: values with which they have no effect}
WARPERS: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0, 0.0),
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "top_h": (None,),
}


class Folder(ModelReader):
    """Files of a transformers folder, and their errors.

    Args:
        path: The folder.
        languages: Chosen language by side, `SOURCE` and `TARGET`.
    """

    def __init__(self, path: Path, languages: Mapping[str, str]) -> None:
        super().__init__(path)
        self.languages = languages
        self.config = self.read_json(CONFIG, dict)
        own = self.read_json(GENERATION, dict) if (path / GENERATION).is_file() else {}
        self.generation = own or {
            key: value for key, value in self.config.items() if key in SUPPORTED | UNSUPPORTED.keys()
        }
        self.tokenizer = self.read_json(TOKENIZER, dict) if (path / TOKENIZER).is_file() else {}

    def _try_read(self, what: str, make: Callable[[], Made], otherwise: Made) -> Made:
        """Returns the result of `make`; on unexpected values adds an error and returns `otherwise`."""
        try:
            return make()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.faults.append(f"{what} is not as transformers writes it ({one_line(error)})")
            return otherwise

    def whole(self, key: str, default: int | None = None) -> int:
        """Reads a size of config.json.

        Args:
            key: Its key.
            default: The size without this key.

        Returns:
            The size; 1, with a fault, if there is none.
        """
        value = self.config.get(key, default)
        most = LAYERS if key.endswith("layers") else SIZES
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        self.faults.append(f"{CONFIG} has {key} {value!r}, expected a whole number from 1 to {most:,}")
        return 1

    def _token(self, key: str) -> int:
        """Returns a token of the configuration; -1 for none."""
        token = self.generation.get(key)
        token = self.config.get(key) if token is None else token
        if isinstance(token, list):
            if len(token) != 1:
                self.faults.append(f"found {key} {token}, expected one token")
                return -1
            token = token[0]
        if token is None:
            return -1
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            self.faults.append(f"found {key} {token!r}, expected a token")
            return -1
        return token

    def _most_tokens(self) -> int:
        length: Any = self.tokenizer.get("model_max_length")
        return int(length) if isinstance(length, int | float) and 1 <= length < 1 << 20 else 1 << 20

    def _rules(self, size: int, unknown: int, end: int, start: int) -> SearchConfig:
        """Returns the search options of generation_config.json. size: tokens of the target vocabulary."""
        ours = Renumbering(size, *(token if token < size else -1 for token in (unknown, end))).ours
        options = {key: value for key, value in self.generation.items() if value is not None}
        return _GenerationOptions(options, ours, self.faults).rules(start)


class _GenerationOptions:
    """Reads generation_config.json as a `SearchConfig`.

    Args:
        options: Options that are set.
        ours: The zoo's token of every original one, int64 [tokens].
        faults: List that invalid and unsupported options are added to.
    """

    def __init__(self, options: Mapping[str, Any], ours: NDArray[np.int64], faults: list[str]) -> None:
        self.options, self.ours, self.faults = options, ours, faults

    def rules(self, start: int) -> SearchConfig:
        """Returns the search options.

        Args:
            start: Original token that translations start with.
        """
        self._require_supported()
        banned, bad_words = self._banned()
        first = self.options.get("forced_bos_token_id")
        prefix = self._tokens("forced_bos_token_id", [] if first is None else [first])
        forced_end = self._forces_end()
        stopping = self.options.get("early_stopping", False)
        if stopping not in (True, False, "never"):
            self.faults.append(f"early_stopping is {stopping!r}, expected true, false or never")
        least, most = self._lengths(len(prefix))
        repeated, copied = self._number("no_repeat_ngram_size", 0), self._number("encoder_no_repeat_ngram_size", 0)
        if repeated == 1:
            self.faults.append("no_repeat_ngram_size 1 is not supported")
        penalty = float(self._number("repetition_penalty", 1.0, (int, float)))
        if penalty <= 0:
            self.faults.append(f"repetition_penalty is {penalty}, expected a number above 0")
        beam = self._number("num_beams", 1)  # greedy, as generate() without it
        if not 1 <= beam <= MAX_BEAM:
            self.faults.append(f"num_beams is {beam}, expected 1 to {MAX_BEAM}")
        return SearchConfig(
            "transformers",
            beam=beam,
            length_penalty=float(self._number("length_penalty", 1.0, (int, float))),
            early_stopping=stopping,
            prefix=tuple(prefix),
            banned=banned,
            least=least,
            most=most,
            forced_end=forced_end,
            no_repeat_ngram=repeated,
            encoder_no_repeat_ngram=copied,
            repetition_penalty=penalty,
            counted=(int(self.ours[start]),) if 0 <= start < len(self.ours) else (),
            bad_words=bad_words,
            first_banned=tuple(self._tokens("begin_suppress_tokens", self.options.get("begin_suppress_tokens") or [])),
            **self._sampling(),
            renormalize=bool(self.options.get("renormalize_logits", False)),
        )

    def _number(self, key: str, default: float, kinds: type | tuple[type, ...] = int) -> Any:
        value: Any = self.options.get(key, default)
        sound = isinstance(value, kinds) and not isinstance(value, bool)
        if not sound or not -1e6 < value < 1e6:
            self.faults.append(f"{key} is {value!r}, expected a number")
            return default
        return value

    def _tokens(self, key: str, tokens: Sequence[Any]) -> list[int]:
        """The zoo's tokens of original tokens that an option lists."""
        if not all(isinstance(token, int) and 0 <= token < len(self.ours) for token in tokens):
            self.faults.append(f"{key} names tokens that are not in the vocabulary")
            return []
        return [int(self.ours[token]) for token in tokens]

    def _require_supported(self) -> None:
        for key, value in self.options.items():
            if key in UNSUPPORTED:
                if value not in UNSUPPORTED[key]:
                    self.faults.append(f"{key} {value!r} is not supported; remove it from {GENERATION}")
            elif key not in SUPPORTED and value is not False:
                self.faults.append(f"{GENERATION} has {key}, which is unknown; remove it")

    def _banned(self) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Tokens that are never chosen, and sequences of several tokens that are never completed."""
        words = self.options.get("bad_words_ids") or []
        if not all(isinstance(word, list) and word for word in words):
            self.faults.append(f"bad_words_ids are {words!r:.60}, expected lists of tokens")
            words = []
        bad_words = [tuple(self._tokens("bad_words_ids", word)) for word in words]
        banned = [word[0] for word in bad_words if len(word) == 1 and word[0] != END]
        banned += self._tokens("suppress_tokens", self.options.get("suppress_tokens") or [])
        return tuple(dict.fromkeys(banned)), tuple(word for word in bad_words if len(word) > 1)

    def _forces_end(self) -> bool:
        """Whether the last token of a translation of maximum length is the end."""
        forced = self.options.get("forced_eos_token_id")
        if forced is None:
            return False
        if self._tokens("forced_eos_token_id", forced if isinstance(forced, list) else [forced]) != [END]:
            self.faults.append(f"forced_eos_token_id {forced} is not the end, which is not supported")
        return True

    def _lengths(self, prefix: int) -> tuple[int, int]:
        """Least and most tokens of a translation behind its start; 0 for no limit. prefix: forced tokens."""
        length, new = self._number("max_length", 2), self._number("max_new_tokens", 1)  # the start counts as a token
        if length < 2 or new < 1:
            self.faults.append(f"max_length is {length} and max_new_tokens {new}, expected at least 2 and 1")
        most = new if "max_new_tokens" in self.options else (length - 1 if "max_length" in self.options else 0)
        if most and most <= prefix:
            self.faults.append(f"translations of at most {most} tokens have no room for one")
        return self._number("min_new_tokens", -1) + 1 or self._number("min_length", 0), most

    def _sampling(self) -> dict[str, Any]:
        """The options of sampling; none of them for a deterministic search."""
        options = self.options
        if not options.get("do_sample"):
            return {}
        temperature, top_p = (float(self._number(key, 1.0, (int, float))) for key in ("temperature", "top_p"))
        wrong = {name: options.get(name) not in values for name, values in WARPERS.items()}
        wrong |= {"num_beams": options.get("num_beams", 1) != 1, "temperature": temperature <= 0}
        wrong["top_p"] = not 0 < top_p <= 1
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            self.faults.append(f"do_sample with {name} {options[name]} is not supported; remove one from {GENERATION}")
        return {"sample": True, "temperature": temperature, "top_k": self._number("top_k", TOP_K), "top_p": top_p}
