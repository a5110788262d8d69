"""Sparse encoders: weights of tokens of the vocabulary.

SPLADE (Formal et al. 2021, "SPLADE v2") weights all tokens by the head of a masked language model. The lexical weights
of BGE-M3 (Chen et al. 2024, sparse_linear.pt) are of the tokens of the text alone: the largest of relu(layer(row)) of
each, without special tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.texts import metrics
from zoo.texts.data import tokenizer as tokenizer_file
from zoo.texts.data.tokenizer import Tokenizer, Tokens
from zoo.texts.heads.masked_language import MaskedLanguageHead
from zoo.texts.heads.task_pipeline import SPARSE_ENCODER, TaskPipeline
from zoo.texts.importers import sentence_modules
from zoo.texts.models.architectures import architecture_of
from zoo.texts.models.architectures.base import ConfigFile
from zoo.texts.models.config import ModelConfig
from zoo.texts.models.head import HeadWeights, special_token
from zoo.texts.models.tensor_file import TensorFile, read_pickled_layer
from zoo.texts.models.weights import FILE
from zoo.texts.text_pipeline import Floats

if TYPE_CHECKING:
    import onnx_ir as ir

ACTIVATIONS = ("relu", "log1p_relu")  # of `SpladePooling`; the second one has another logarithm
QUERIES = "queries.weight"  # name of the weights of tokens in queries
WEIGHTS, POOLING = "weights", "SpladePooling"
MASKED = -1e9  # logits of padding
LEXICAL_LAYER, LEXICAL = "sparse_linear.pt", "lexical"  # of BGE-M3; feature with the tokens that have no weight
UNWEIGHTED = ("cls_token", "eos_token", "sep_token", "pad_token", "unk_token")


class SparseEncoder(MaskedLanguageHead):
    """log(1 + relu(logit)) of the vocabulary, the largest of all tokens."""

    FORMAT: ClassVar[str] = "sparse-encoder"
    TITLE: ClassVar[str] = "sparse encoder"
    OUTPUT: ClassVar[str] = WEIGHTS

    def recognizes(self, path: Path, config: Mapping[str, Any]) -> bool:
        """See `Head`: sentence-transformers has written the pooling of SPLADE."""
        return any(kind == POOLING for kind, _ in sentence_modules.read_modules(path))

    def accepts(self, path: Path, name: str) -> bool:
        """See `Head`: lexical weights need no head of a masked language model."""
        return _is_lexical(path) or super().accepts(path, name)

    def outputs(self, config: Mapping[str, Any]) -> int:
        """See `Head`."""
        return architecture_of(config).read(ConfigFile(config)).vocabulary

    def form(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`: of lexical weights one output a token."""
        return {"labels": 1} if _is_lexical(path) else super().form(path, network, config)

    def per_token(self, config: ModelConfig) -> bool:
        """See `Head`."""
        return config.labels == 1

    def features(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`; a folder without the pooling of SPLADE is read as with its defaults."""
        features: dict[str, Any] = {}
        if _is_lexical(path):
            tokens = (special_token(network, name) for name in UNWEIGHTED)
            return {LEXICAL: [token for token in dict.fromkeys(tokens) if token]}
        for kind, folder in sentence_modules.read_modules(path):
            file = path / folder / sentence_modules.CONFIG
            settings = read_json(file) if kind == POOLING and file.is_file() else {}
            for key, expected in (("pooling_strategy", ("max",)), ("activation_function", ACTIVATIONS)):
                if settings.get(key, expected[0]) not in expected:
                    raise RequestError(
                        f"its {key} is {settings[key]!r:.40} ({folder}); expected {' or '.join(expected)}"
                    )
            if settings.get("activation_function") == ACTIVATIONS[1]:
                features["activation"] = ACTIVATIONS[1]
            if kind == sentence_modules.STATIC:
                features["queries"] = QUERIES
        return features

    def tables(self, path: Path, network: Path, features: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
        """See `Head`: the layer of lexical weights; weights of queries without a network (`SparseStaticEmbedding`)."""
        if LEXICAL in features:
            return read_pickled_layer(path / LEXICAL_LAYER, "sparse")
        folder = sentence_modules.folder_of(sentence_modules.read_modules(path), sentence_modules.STATIC)
        if not folder:
            return {}
        size = int(read_json(network / sentence_modules.CONFIG)["vocab_size"])
        file = path / folder / FILE
        if file.is_file():
            weight = TensorFile(file).get("weight")
        else:
            weight = _inverse_document_frequencies(path, folder, network, size)
        if weight is None or weight.shape != (size,) or not np.isfinite(weight).all():
            shape = "no weight" if weight is None else f"{list(weight.shape)}"
            raise RequestError(f"its weights of queries ({folder}) are {shape}; expected {size} numbers")
        return {QUERIES: np.ascontiguousarray(weight)}

    def weights(self, store: HeadWeights, config: ModelConfig) -> None:
        """See `Head`: "sparse" of lexical weights.

        Args:
            store: Where they are taken from, and gathered.
            config: Configuration of the network.
        """
        if config.labels == 1:
            return store.linear("sparse", "sparse", 1, config.width)
        return super().weights(store, config)

    def export(self, writer: Any, hidden: ir.Value, ids: ir.Value, mask: ir.Value) -> ir.Value:
        """See `Head`."""
        result: ir.Value
        if writer.config.labels == 1:
            result = writer.add("Relu", [writer.linear(hidden, "sparse")], WEIGHTS)
            return result
        x = writer.linear(self.transform(writer, hidden), "decoder")
        missing = writer.add("Sub", [writer.constant("one.int64", np.array(1)), mask], "absent", dtype=_int64())
        low = writer.add("Cast", [missing], "absent.float", to=1)
        low = writer.add("Mul", [low, writer.constant("absent.logit", MASKED)], "absent.logits")
        low = writer.add("Unsqueeze", [low, writer.constant("last_axis", [2])], "absent.rows")
        x = writer.add("Add", [x, low], "present")
        x = writer.add("ReduceMax", [x, writer.constant("token_axis", [1])], "largest", keepdims=0)
        x = writer.add("Add", [writer.add("Relu", [x], "positive"), writer.constant("one", 1.0)], "above_one")
        result = writer.add("Log", [x], WEIGHTS)
        return result

    def pipeline(self) -> type[SparsePipeline]:
        """See `Head`."""
        return SparsePipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Head` and `zoo.texts.metrics.evaluate`: as for embeddings.

        Args:
            pipelines: See `Head`.
            data: See `Head`.
            on_error: See `Head`.

        Raises:
            RequestError: Queries have no network.
        """
        if next(iter(pipelines.values())).queries is not None:
            raise RequestError(
                "found a sparse encoder with a table for queries (inference-free), which zoo evaluate does not support"
            )
        return metrics.evaluate(pipelines, data, on_error)


def _is_lexical(path: Path) -> bool:
    """Returns whether a folder has the layer of BGE-M3, and no pooling of SPLADE."""
    kinds = [kind for kind, _ in sentence_modules.read_modules(path)]
    return (path / LEXICAL_LAYER).is_file() and POOLING not in kinds


def _inverse_document_frequencies(path: Path, folder: str, network: Path, size: int) -> NDArray[np.float32] | None:
    """Returns the weights of tokens in a JSON file, {token: weight}; None without one."""
    named = str(sentence_modules.read_object(path / folder / sentence_modules.CONFIG).get("path") or "")
    names = [path / folder / Path(named).name, path / Path(named).name, path / "idf.json"]
    file = next((name for name in names if name.suffix == ".json" and name.is_file()), None)
    if file is None:
        return None
    content, tokenizer = read_json(file), Tokenizer(network / tokenizer_file.FILE, size, 8)
    weights = np.zeros(size, np.float32)
    for token, weight in content.items():
        if (number := tokenizer.number(token)) is not None:
            weights[number] = weight
    return weights


def _int64() -> ir.DataType:
    import onnx_ir as ir

    return ir.DataType.INT64


class SparsePipeline(TaskPipeline):
    """Computes sparse vectors of texts; see `zoo.pipeline`.

    Attributes:
        most: Number of tokens of a vector that are kept; 0: all.
    """

    OUTPUT: ClassVar[str] = WEIGHTS
    EMBEDS: ClassVar[bool] = True
    BATCH_TOKENS: ClassVar[int] = 512
    API_KIND: ClassVar[str] = SPARSE_ENCODER
    COLUMNS: ClassVar[Mapping[str, Any]] = {"token": np.int64, "token_str": str, "weight": np.float32}
    most: int = 0

    @functools.cached_property
    def queries(self) -> Floats | None:
        """Weights of the vocabulary in queries that need no network, float32 [vocabulary]; None for others."""
        if not (name := self.folder.preprocessing.get("queries")):
            return None
        return TensorFile(self.folder.verify(FILE)).get(name)

    @property
    def per_token(self) -> bool:
        """See `TextPipeline`: of lexical weights."""
        return LEXICAL in self.folder.preprocessing

    def compute(self, tokens: Tokens) -> Floats:
        """See `TextPipeline.compute`: with another logarithm where the model has it.

        Args:
            tokens: Tokens of texts.
        """
        weights = super().compute(tokens)
        return np.log1p(weights) if self.folder.preprocessing.get("activation") == ACTIVATIONS[1] else weights

    def __call__(
        self,
        raw: Any,
        *,
        max_active_dims: int | None = None,
        prompt: str | None = None,
        max_length: int | None = None,
        on_error: str = "raise",
    ) -> list[Any]:
        """Computes sparse vectors of texts.

        Args:
            raw: Texts, or one text. Only a `Path` names a file.
            max_active_dims: Number of tokens of a vector, those of the largest weights; None: all above 0.
            prompt: Name of a prompt of the model, or a prefix with a blank or a colon; "" for none, None for the
                default.
            max_length: Maximum number of tokens of a text; None for that of the model.
            on_error: "raise" at the first invalid text, or "skip" to return its error.

        Returns:
            {"indices": token ids in ascending order, "values": weights} of each text.

        Raises:
            RequestError: There are no valid texts, or an option is out of range.
        """
        configured = self.with_options(max_active_dims=max_active_dims, prompt=prompt, max_length=max_length)
        return super(SparsePipeline, configured).__call__(raw, on_error=on_error)

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        max_active_dims: int | None = None,
        prompt: str | None = None,
        max_length: int | None = None,
    ) -> dict[str, Any]:
        """Computes sparse vectors of texts in constant memory and input order.

        Writes the columns row (from 1), token, token_str and weight, a line for each token with a weight above 0.

        Args:
            inputs: Text files with one text per line, tables, or "-" for stdin.
            output: .csv, .csv.gz, .jsonl or .parquet file; "-" for CSV on stdout.
            on_error: "raise" to stop at the first invalid row, "skip" to write an empty line for it.
            column: Column of the texts in tables.
            max_active_dims: See `__call__`.
            prompt: See `__call__`.
            max_length: Maximum number of tokens of a text; None for that of the model.

        Returns:
            Summary, as `SentencePipeline.run`.

        Raises:
            RequestError: The input is unusable.
        """
        configured = self.with_options(max_active_dims=max_active_dims, prompt=prompt, max_length=max_length)
        return configured._run(inputs, output, on_error, self.parse_columns(column), None, max_length)

    def with_options(
        self, *, max_active_dims: int | None = None, prompt: str | None = None, max_length: int | None = None
    ) -> Self:
        """See `TaskPipeline`.

        Args:
            max_active_dims: See `__call__`.
            prompt: See `__call__`.
            max_length: See `__call__`.
        """
        if max_active_dims is not None and (type(max_active_dims) is not int or max_active_dims < 1):
            raise RequestError(f"found max_active_dims {max_active_dims!r:.40}; expected a whole number from 1")
        prefix = self.prompts.resolve(prompt)
        return self.configured(max_length=max_length, most=max_active_dims or 0, prompt=prefix)

    def compute_texts(self, rows: Sequence[tuple[str, ...]], prompt: str | None = None) -> Floats:
        """See `TextPipeline.compute_texts`; of lexical weights, columns are the tokens of all texts in order.

        Args:
            rows: Texts, as tuples.
            prompt: See `TextPipeline.compute_texts`.
        """
        if not self.per_token:
            return super().compute_texts(rows, prompt)
        tokens = self.tokenize(rows, prompt)
        columns = np.unique(tokens.ids)
        dense = np.zeros((len(rows), len(columns)), np.float32)
        for row, vector in zip(dense, self.decode(self.compute(tokens), tokens), strict=True):
            row[np.searchsorted(columns, vector["indices"])] = vector["values"]
        return dense

    def encode_query(self, inputs: str | Sequence[str], **options: Any) -> Any:
        """Computes sparse vectors with the prompt of queries, as `SparseEncoder.encode_query`.

        Models whose queries need no network look up the weights of their tokens.

        Args:
            inputs: Queries, or one query.
            **options: See `__call__`.
        """
        options = {"prompt": self.prompts.role("query"), **options}
        if self.queries is None:
            return self(inputs, **options)
        configured = self.with_options(**options)
        tokens = configured.tokenize([(text,) for text in ([inputs] if isinstance(inputs, str) else inputs)])
        outputs = np.zeros((len(tokens.lengths), len(self.queries)), np.float32)
        for row, encoding in zip(outputs, tokens.context, strict=True):  # special tokens are none of the text
            ids = np.array(encoding.ids)[np.array(encoding.special_tokens_mask) == 0]
            row[ids] = self.queries[ids]
        return configured.decode(outputs, tokens)

    def encode_document(self, inputs: str | Sequence[str], **options: Any) -> Any:
        """Computes sparse vectors with the prompt of documents, as `SparseEncoder.encode_document`.

        Args:
            inputs: Documents, or one document.
            **options: See `__call__`.
        """
        return self(inputs, **{"prompt": self.prompts.role("document"), **options})

    def tokenize(
        self, rows: Sequence[tuple[str, ...]], prompt: str | None = None, max_length: int | None = None
    ) -> Tokens:
        """See `TextPipeline.tokenize`."""
        prefix = self.prompt if prompt is None else prompt
        return super().tokenize([(prefix + row[0],) for row in rows], None, max_length)

    def decode(self, outputs: Floats, tokens: Tokens) -> list[Any]:
        """See `TaskPipeline.decode`."""
        if self.per_token:
            ends = np.cumsum(tokens.lengths)[:-1]
            parts = zip(np.split(tokens.ids, ends), np.split(outputs[:, 0], ends), strict=True)
            return [self._largest(*self._lexical(*part)) for part in parts]
        vocabulary = np.arange(outputs.shape[1])
        return [self._largest(vocabulary, row) for row in outputs]

    def _lexical(self, ids: NDArray[np.int32], weights: Floats) -> tuple[NDArray[np.int64], Floats]:
        """Returns the tokens of a text without special ones, in order, and the largest weight of each."""
        left_out = [self.tokenizer.number(token) for token in self.folder.preprocessing[LEXICAL]]
        kept = ~np.isin(ids, [number for number in left_out if number is not None])
        indices, places = np.unique(ids[kept].astype(np.int64), return_inverse=True)
        largest = np.zeros(len(indices), np.float32)
        np.maximum.at(largest, places, weights[kept])
        return indices, largest

    def _largest(self, indices: NDArray[np.int64], weights: Floats) -> dict[str, NDArray[Any]]:
        """Returns the tokens with a weight above 0, or the `most` largest of them."""
        chosen = np.flatnonzero(weights > 0)
        if self.most and len(chosen) > self.most:
            chosen = np.sort(chosen[np.argsort(-weights[chosen], kind="stable")[: self.most]])
        return {"indices": indices[chosen], "values": weights[chosen]}

    def lines(self, result: Any) -> list[dict[str, Any]]:
        """See `TaskPipeline.lines`: a line a token."""
        return [
            {"token": int(number), "token_str": self.tokenizer.token(int(number)), "weight": float(weight)}
            for number, weight in zip(result["indices"], result["values"], strict=True)
        ]


HEAD = SparseEncoder()
