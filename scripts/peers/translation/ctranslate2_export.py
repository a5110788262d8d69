"""Exports a translation model to CTranslate2's format: the same weights and pieces.

MODEL is a name of the zoo or a model folder. DIR is then opened by `ctranslate2.Translator(DIR,
compute_type="float32")`, which takes pieces of sentencepiece without start and end. --check translates the lines of
FILE by this project's beam search in torch and by CTranslate2, both in fp32, and reports how many are the same. Needs
the `train` and `peers` extras.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import zoo
from pipelines.core.errors import RequestError
from pipelines.data.text_files import read_lines
from scripts.peers import harness
from zoo.translation.data.parallel_text import END, POSITIONS, START, UNKNOWN, Tokens, Vocabulary
from zoo.translation.search.beam_search import Hypothesis, limit

if TYPE_CHECKING:
    from zoo.translation.models.transformer import Attention, Layer, Transformer

QUANTIZATIONS = ("float32", "int8")


# -------------------------------------------------------------------------------------------------------------- export


def specification(model: Transformer, vocabulary: Vocabulary) -> Any:
    """The model as a `ctranslate2.specs.TransformerSpec`, validated. Raises RequestError that names everything that
    does not fit.
    """
    from ctranslate2.specs import TransformerSpec  # type: ignore[import-untyped]
    from torch import nn

    names = vocabulary.pieces
    twice = sorted({name for name, after in itertools.pairwise(sorted(names)) if name == after})
    epsilons = sorted({module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)})
    broken = [name for name, each in model.named_parameters() if not bool(each.isfinite().all())]
    rows = model.embedding.num_embeddings
    faults = [
        (rows != len(names), f"{len(names)} pieces for {rows} embeddings"),
        (twice, f"pieces that come twice: {', '.join(map(repr, twice))}"),
        (len(epsilons) > 1, f"layer normalizations of several epsilons: {', '.join(map(str, epsilons))}"),
        (broken, f"weights that are no numbers: {', '.join(broken)}"),
    ]
    if found := [fault for wrong, fault in faults if wrong]:
        raise RequestError(f"CTranslate2 cannot run this model: {'; '.join(found)}")
    spec = TransformerSpec.from_config(
        (model.form.encoder, model.form.decoder), model.form.heads, pre_norm=model.pre_norm
    )
    for side, layers, last in (
        (spec.encoder, model.encoder, model.encoder_norm),
        (spec.decoder, model.decoder, model.decoder_norm),
    ):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = _array(model.embedding.weight)
        side.position_encodings.encodings = _array(model.positions)
        if isinstance(last, nn.LayerNorm):
            _copy(side.layer_norm, last)
        for given, layer in zip(side.layer, layers, strict=True):
            _layer(given, layer)  # type: ignore[arg-type]
    spec.decoder.projection.weight = _array(model.embedding.weight)
    spec.config.layer_norm_epsilon = epsilons[0]
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = (
        names[each] for each in (UNKNOWN, START, END)
    )
    spec.config.decoder_start_token, spec.config.add_source_eos = names[START], True
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.validate()
    return spec


def _array(tensor: Any) -> Any:
    return tensor.detach().cpu().float().numpy().copy()


def _copy(spec: Any, module: Any) -> None:
    """A linear layer or a layer normalization."""
    weight, bias = ("gamma", "beta") if hasattr(spec, "gamma") else ("weight", "bias")
    setattr(spec, weight, _array(module.weight))
    setattr(spec, bias, _array(module.bias))


def _layer(spec: Any, layer: Layer) -> None:
    _attention(spec.self_attention, layer.attention, layer.around_attention.norm, fused=3)
    if hasattr(layer, "cross"):
        _attention(spec.attention, layer.cross, layer.around_cross.norm, fused=2)
    _copy(spec.ffn.layer_norm, layer.around_feed.norm)
    _copy(spec.ffn.linear_0, layer.feed.inner)
    _copy(spec.ffn.linear_1, layer.feed.outer)


def _attention(spec: Any, attention: Attention, norm: Any, fused: int) -> None:
    """fused: how many of query, key and value are one linear layer, counted from the last."""
    from ctranslate2.converters import utils  # type: ignore[import-untyped]
    from ctranslate2.specs.common_spec import LinearSpec  # type: ignore[import-untyped]

    parts = [LinearSpec() for _ in range(3)]
    for part, module in zip(parts, (attention.query, attention.key, attention.value), strict=True):
        _copy(part, module)
    if fused < len(parts):
        _copy(spec.linear[0], attention.query)
    utils.fuse_linear(spec.linear[-2], parts[-fused:])
    _copy(spec.linear[-1], attention.output)
    _copy(spec.layer_norm, norm)


def export(model: Transformer, vocabulary: Vocabulary, target: str | Path, quantization: str = "float32") -> Path:
    """Write the folder `target`, whole or not at all. quantization: of the weights, one of `QUANTIZATIONS`.

    Raises RequestError for an unknown quantization, a `target` that is in use by something else, and what
    `specification` refuses.
    """
    target = Path(target)
    if quantization not in QUANTIZATIONS:
        raise RequestError(f"found the quantization {quantization}; choose of {', '.join(QUANTIZATIONS)}")
    if target.exists() and not (target / "model.bin").is_file() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"found {target} in use by something else than a CTranslate2 model; choose another folder")
    spec = specification(model, vocabulary)
    spec.optimize(None if quantization == "float32" else quantization)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        spec.save(str(made))
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return target


# --------------------------------------------------------------------------------------------------------------- check


def translations(
    translator: Any, names: Sequence[str], sentences: Sequence[Tokens], *, beam: int, best: int, length_penalty: float
) -> list[list[Hypothesis]]:
    """What CTranslate2 makes of tokenized sentences (`END` last), by the limits of this project's search; the best
    first.
    """
    token = {name: index for index, name in enumerate(names)}
    found: list[list[Hypothesis]] = [[] for _ in sentences]
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    for length, group in itertools.groupby(order, key=lambda i: len(sentences[i])):  # a call has one limit
        chosen = list(group)
        given = [[names[each] for each in sentences[i][:-1]] for i in chosen]
        options = {"beam_size": beam, "num_hypotheses": best, "length_penalty": length_penalty, "return_scores": True}
        results = translator.translate_batch(
            given,
            max_batch_size=64,
            max_input_length=0,
            max_decoding_length=limit(length, POSITIONS),
            min_decoding_length=0,
            **options,
        )
        for i, result in zip(chosen, results, strict=True):
            said = zip(result.hypotheses, result.scores, strict=True)
            found[i] = [Hypothesis([token[each] for each in tokens], score) for tokens, score in said]
    return found


def compare(ours: Sequence[Sequence[Hypothesis]], theirs: Sequence[Sequence[Hypothesis]]) -> dict[str, Any]:
    """{"sentences", "same": share whose best translations have the same tokens, "same_n_best": share whose lists have
    the same, in order,
    "score_difference": the largest of equal translations, "different": the first of them, {"sentence", "ours",
    "theirs"}}.
    """
    pairs = list(zip(ours, theirs, strict=True))
    same = [a[0].tokens == b[0].tokens for a, b in pairs]
    lists = [[each.tokens for each in a] == [each.tokens for each in b] for a, b in pairs]
    scores = [
        abs(one.score - other.score)
        for a, b in pairs
        for one, other in zip(a, b, strict=False)
        if one.tokens == other.tokens
    ]
    different = [{"sentence": i, "ours": a, "theirs": b} for i, (a, b) in enumerate(pairs) if not same[i]]
    return {
        "sentences": len(pairs),
        "same": float(np.mean(same)),
        "same_n_best": float(np.mean(lists)),
        "score_difference": max(scores, default=float("nan")),
        "different": different[:20],
    }


def check(
    model: Transformer,
    vocabulary: Vocabulary,
    folder: Path,
    sentences: Sequence[Tokens],
    *,
    beam: int = 4,
    length_penalty: float = 1.0,
) -> dict[str, Any]:
    """`compare` of the n-best lists (n = beam) that this project's search in torch and CTranslate2 find, in fp32.
    folder: of `export`.
    """
    import ctranslate2  # type: ignore[import-untyped]

    translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    options: dict[str, Any] = {"beam": beam, "best": beam, "length_penalty": length_penalty}
    ours = list(_in_torch(model, sentences, **options))
    return compare(ours, translations(translator, vocabulary.pieces, sentences, **options))


def _in_torch(model: Transformer, sentences: Sequence[Tokens], **options: Any) -> Iterator[list[Hypothesis]]:
    from zoo.translation.models.transformer import translate

    for at in range(0, len(sentences), 32):
        yield from translate(model, sentences[at : at + 32], **options)


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("target", metavar="DIR")
    parser.add_argument("--quantization", default="float32", help="of the weights: float32 or int8 (default float32)")
    parser.add_argument(
        "--check", metavar="FILE", help="translate its lines in both, fp32, and compare the translations"
    )
    parser.count("--beam", 4, "beam size")
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.count("--sentences", 1000, "lines of FILE")


def measure(args: Any) -> dict[str, Any] | None:
    """Exports; returns `compare` where that is asked for."""
    from zoo.translation.models.checkpoints import load_model

    model, vocabulary = load_model(zoo.load(args.model).path)
    folder = export(model, vocabulary, args.target, args.quantization)
    if not args.check:
        return None
    texts = [each for each in itertools.islice(read_lines(args.check), args.sentences) if each]
    search = {"beam": args.beam, "length_penalty": args.length_penalty}
    return check(model, vocabulary, folder, vocabulary.encode(texts), **search)
