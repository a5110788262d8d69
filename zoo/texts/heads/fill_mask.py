"""Masked language models: tokens in the place of a mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.texts.data import text_files
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.heads import labelled
from zoo.texts.heads.masked_language import MaskedLanguageHead
from zoo.texts.heads.sequence_classification import SOFTMAX, activated
from zoo.texts.heads.task_pipeline import TaskPipeline, as_names
from zoo.texts.models import weights
from zoo.texts.models.architectures import architecture_of
from zoo.texts.models.architectures.base import ConfigFile
from zoo.texts.models.head import special_token
from zoo.texts.text_pipeline import SORT_WINDOW, Floats

if TYPE_CHECKING:
    import onnx_ir as ir

ROWS = "rows"
TOP = 5


class FillMask(MaskedLanguageHead):
    """Rows of tokens, from which the pipeline computes the vocabulary where there is a mask."""

    FORMAT: ClassVar[str] = "fill-mask"
    TITLE: ClassVar[str] = "masked language model"
    OUTPUT: ClassVar[str] = ROWS
    PER_TOKEN: ClassVar[bool] = True

    def recognizes(self, path: Path, config: Mapping[str, Any]) -> bool:
        """See `Head`; sentence encoders have modules or a pooling, and are the network of such a model."""
        is_encoder = any((path / name).exists() for name in ("modules.json", "1_Pooling"))
        return not is_encoder and super().recognizes(path, config)

    def outputs(self, config: Mapping[str, Any]) -> int:
        """See `Head`."""
        network = architecture_of(config).read(ConfigFile(config))
        return network.embedding or network.width

    def features(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`: "mask", the token in place of which others are predicted, and "padding"."""
        if not (mask := special_token(network, "mask_token")):
            raise RequestError("its tokenizer has no mask_token in tokenizer_config.json; copy it from the model")
        return {"mask": mask, "padding": special_token(network, "pad_token")}

    def export(self, writer: Any, hidden: ir.Value, ids: ir.Value, mask: ir.Value) -> ir.Value:
        """See `Head`."""
        return self.transform(writer, hidden, ROWS)

    def pipeline(self) -> type[FillMaskPipeline]:
        """See `Head`."""
        return FillMaskPipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Head`: accuracy of the first token and of the first five."""
        return evaluate(pipelines, data, on_error)


class FillMaskPipeline(TaskPipeline):
    """Predicts tokens in the place of a mask; see `zoo.pipeline`.

    Attributes:
        top_k: Number of tokens of a mask.
        targets: Tokens to choose from; (): all.
    """

    OUTPUT: ClassVar[str] = ROWS
    PER_TOKEN: ClassVar[bool] = True
    COLUMNS: ClassVar[Mapping[str, Any]] = {
        "score": np.float32,
        "token": np.int64,
        "token_str": str,
        "sequence": str,
    }
    top_k: int = TOP
    targets: Sequence[int] = ()
    _decoder: tuple[Floats, Floats] | None = None

    def __call__(  # type: ignore[override]
        self,
        raw: Any,
        *,
        top_k: int = TOP,
        targets: str | Sequence[str] | None = None,
        max_length: int | None = None,
        on_error: str = "raise",
    ) -> list[Any]:
        """Predicts the tokens of masks.

        Args:
            raw: Texts with the mask token, such as [MASK], or one text. Only a `Path` names a file.
            top_k: Number of tokens of a mask.
            targets: Tokens to choose from; None: all.
            max_length: Maximum number of tokens of a text; None for that of the model.
            on_error: "raise" at the first invalid text, or "skip" to return its error.

        Returns:
            List of {"score", "token", "token_str", "sequence"} of each text, the best token first; of a text with
            several masks a list for each mask, of a text whose masks are truncated an empty list.

        Raises:
            RequestError: A text has no mask, or an option is out of range.
        """
        configured = self.with_options(top_k=top_k, targets=targets, max_length=max_length)
        return super(FillMaskPipeline, configured).__call__(raw, on_error=on_error)

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        top_k: int = TOP,
        max_length: int | None = None,
    ) -> dict[str, Any]:
        """Predicts the tokens of masks in constant memory and input order.

        Writes the columns row (from 1), score, token, token_str and sequence, a line for each token of each mask.

        Args:
            inputs: Text files with one text per line, tables, or "-" for stdin.
            output: .csv, .csv.gz, .jsonl or .parquet file; "-" for CSV on stdout.
            on_error: "raise" to stop at the first invalid row, "skip" to write an empty line for it.
            column: Column of the texts in tables.
            top_k: Number of tokens of a mask.
            max_length: Maximum number of tokens of a text; None for that of the model.

        Returns:
            Summary, as `SentencePipeline.run`.

        Raises:
            RequestError: The input is unusable.
        """
        configured = self.with_options(top_k=top_k, max_length=max_length)
        return configured._run(inputs, output, on_error, self.parse_columns(column), None, max_length)

    def with_options(
        self, *, top_k: int = TOP, targets: str | Sequence[str] | None = None, max_length: int | None = None
    ) -> Self:
        """See `TaskPipeline`.

        Args:
            top_k: See `__call__`.
            targets: See `__call__`.
            max_length: See `__call__`.
        """
        if type(top_k) is not int or not 0 < top_k <= self.config.vocabulary:
            raise RequestError(f"found top_k {top_k!r:.40}; expected a whole number from 1")
        names = [] if targets is None else [targets] if isinstance(targets, str) else as_names("targets", targets)
        numbers = [self.tokenizer.number(name) if isinstance(name, str) else None for name in names]
        if None in numbers:
            raise RequestError(f"found the target {names[numbers.index(None)]!r:.40}; expected tokens of the model")
        self.decoder()  # read once, not by every copy
        return self.configured(max_length=max_length, top_k=top_k, targets=tuple(dict.fromkeys(numbers)))

    @property
    def mask(self) -> int:
        """Id of the mask token."""
        number = self.tokenizer.number(self.folder.preprocessing["mask"])
        if number is None:
            raise RequestError(f"the tokenizer of {self.folder.card.name} has no mask token; import the model again")
        return number

    def decoder(self) -> tuple[Floats, Floats]:
        """Returns the layer from rows to the vocabulary: float32 [vocabulary, width] and [vocabulary]."""
        if self._decoder is None:
            file = self.folder.card.details.get("weights", {}).get("file", weights.FILE)
            tensors = weights.load_weights(self.config, self.folder.verify(file), head=HEAD)
            self._decoder = tensors["decoder.weight"], tensors["decoder.bias"]
        return self._decoder

    def input_rows(self, data: Any, columns: Sequence[str] = (), *, names: bool = True) -> Iterator[text_files.Row]:
        """See `TextPipeline.input_rows`: a text without a mask is invalid."""
        mask = str(self.folder.preprocessing["mask"])
        error = f"has no {mask}; expected it in the place of a token"
        for row in self.rows(data, columns, names=names):
            yield row if row.error or mask in row.texts[0] else row._replace(error=error)

    def example(self, count: int, data: Any = None) -> list[Any]:
        """See `TextPipeline.example`: texts have a mask."""
        mask = str(self.folder.preprocessing["mask"])
        return [text if mask in text else f"{text} {mask}" for text in super().example(count, data)]

    def probabilities(self, outputs: Floats, tokens: Tokens) -> tuple[Floats, NDArray[np.int64]]:
        """Computes the probabilities of the vocabulary at the masks.

        Args:
            outputs: What `compute` returns.
            tokens: What `tokenize` returns.

        Returns:
            float32 [masks, vocabulary], and the numbers of the masks among all tokens.
        """
        places = np.flatnonzero(tokens.ids == self.mask)
        weight, bias = self.decoder()
        return activated(outputs[places] @ weight.T + bias, SOFTMAX), places

    def decode(self, outputs: Floats, tokens: Tokens) -> list[Any]:
        """See `TaskPipeline.decode`."""
        scores, places = self.probabilities(outputs, tokens)
        ends = np.cumsum(tokens.lengths)
        results: list[Any] = []
        for i, end in enumerate(ends):
            start = end - tokens.lengths[i]
            own = np.flatnonzero((places >= start) & (places < end))
            ids = tokens.ids[start:end]
            masks = [self._tokens(ids, int(places[k] - start), scores[k], len(own) == 1) for k in own]
            results.append(masks[0] if len(masks) == 1 else masks)
        return results

    def _tokens(self, ids: NDArray[np.int32], place: int, scores: Floats, single: bool) -> list[dict[str, Any]]:
        """Returns the best tokens in the place of a mask."""
        choice = np.array(self.targets, np.int64) if self.targets else np.arange(len(scores))
        best = choice[np.argsort(-scores[choice], kind="stable")[: self.top_k]]
        padding = self.tokenizer.number(self.folder.preprocessing["padding"])
        sequences = []
        for number in best:
            changed = ids.tolist()
            changed[place] = int(number)
            sequences.append([token for token in changed if token != padding])
        words = self.tokenizer.decode([[int(number)] for number in best], skip_special_tokens=False)
        texts = self.tokenizer.decode(sequences, skip_special_tokens=single)
        return [
            {"score": float(scores[number]), "token": int(number), "token_str": word, "sequence": text}
            for number, word, text in zip(best, words, texts, strict=True)
        ]

    def lines(self, result: Any) -> list[dict[str, Any]]:
        """See `TaskPipeline.lines`: masks one after the other."""
        masks = result if result and isinstance(result[0], list) else [result]
        return [line for mask in masks for line in mask]


def evaluate(pipelines: Mapping[str, FillMaskPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Compares the tokens of several precisions with fp32 at the masks of the same texts.

    Args:
        pipelines: Pipelines by precision, fp32 first.
        data: Files with a text with one mask, and the token in its place.
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

    Returns:
        {"samples", "skipped", "metrics", "difference", "interval", "others"} (see `against_fp32`): accuracy of the best
        token, and of the best five (top5); "difference" has "agreement", the share of texts with the token of fp32.

    Raises:
        RequestError: The data are unusable.
    """
    first = next(iter(pipelines.values()))
    report, errors = labelled.reporter(first, on_error)
    texts: list[tuple[str, ...]] = []
    expected: list[int] = []
    mask = str(first.folder.preprocessing["mask"])
    for row in text_files.read_rows(data, 1, first.columns, extra=1):
        number = first.tokenizer.number(row.texts[-1].strip()) if not row.error else None
        error = row.error or ("" if number is not None else f"has {row.texts[-1]!r:.40}, expected a token of the model")
        error = error or ("" if row.texts[0].count(mask) == 1 else f"has not one {mask}")
        report(row.location, error)
        if not error and number is not None:
            texts.append(row.texts[:1])
            expected.append(number)
    if not texts:
        raise RequestError(f"found no texts in {text_files.describe(data)}; expected: text with {mask} TAB token")
    ranked: dict[str, NDArray[np.int64]] = {}
    for name, pipeline in pipelines.items():
        parts = []
        for i in range(0, len(texts), SORT_WINDOW):
            tokens = pipeline.tokenize(texts[i : i + SORT_WINDOW])
            scores, places = pipeline.probabilities(pipeline.compute(tokens), tokens)
            best = np.full((len(tokens.lengths), TOP), -1)  # of a truncated mask
            owners = np.searchsorted(np.cumsum(tokens.lengths), places, side="right")
            best[owners] = np.argsort(-scores, axis=1, kind="stable")[:, :TOP]
            parts.append(best)
        ranked[name] = np.concatenate(parts)

    def measured(name: str) -> dict[str, labelled.Counts]:
        right = ranked[name] == np.array(expected)[:, None]
        one = np.ones(len(right))
        return {
            "accuracy": labelled.Counts(np.stack([right[:, 0], one], axis=1), labelled.share),
            "top5": labelled.Counts(np.stack([right.any(axis=1), one], axis=1), labelled.share),
        }

    compared = labelled.compare(
        {name: measured(name) for name in ranked},
        lambda name: {"agreement": float((ranked[name][:, 0] == ranked["fp32"][:, 0]).mean())},
    )
    return {"samples": len(texts), "skipped": errors.total(), **compared}


HEAD = FillMask()
