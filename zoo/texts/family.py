"""Families of text encoders: sentence encoders, cross-encoders, and the tasks of `zoo.texts.heads`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.models import family
from pipelines.models.family import RunOption
from pipelines.models.protocols import ModulesExportable, ShipsSamples
from pipelines.quantization.recipe import QuantRecipe
from zoo.texts.train_config import TrainConfig

if TYPE_CHECKING:
    from pipelines.core.batches import Batch
    from pipelines.models.folder import ModelFolder
    from pipelines.models.pipeline import Pipeline
    from pipelines.quantization.calibration.table import CalibrationTable
    from pipelines.rewrites.driver import Rewrite
    from zoo.serving.handlers.base import Handler
    from zoo.texts.models.head import Head


@dataclass(frozen=True, kw_only=True)
class TextFamily(
    family.Family,
    family.Trainable,
    family.Freezable,
    family.Importable,
    family.Servable,
    family.Reported,
    ModulesExportable,
    ShipsSamples,
):
    """Text encoders of Hugging Face.

    Attributes:
        module: Module of `zoo.texts.heads` with the head of the networks; "": they embed texts.
        config: Default settings of fine-tuning.
    """

    checkpoint: str = "model.safetensors"
    transient: tuple[str, ...] = ("fp32.onnx", "rewritten.onnx")  # the weights are in the checkpoint
    files: tuple[str, ...] = ("tokenizer.json", "config.json", "sample.jsonl.gz")
    module: str = ""
    config: TrainConfig = field(default_factory=TrainConfig)

    @property
    def head(self) -> Head | None:
        """Head of the networks; None: they embed texts."""
        if not self.module:
            return None
        head: Head = importlib.import_module(f"zoo.texts.heads.{self.module}").HEAD
        return head

    def pipeline(self) -> type[Pipeline]:
        """See `Family`."""
        from zoo.texts.inference import SentencePipeline

        return self.head.pipeline() if self.head else SentencePipeline

    def passes(self, preprocessing: Mapping[str, Any]) -> Sequence[Rewrite]:
        """See `Family`."""
        from zoo.texts.export.rewrites import passes

        return passes(preprocessing)

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Family`: of sentence encoders Spearman's correlation, or NDCG@10 and MRR@10."""
        from zoo.texts import metrics

        return (self.head or metrics).evaluate(pipelines, data, on_error)

    def train_config(self) -> TrainConfig:
        """See `Trainable`."""
        return self.config

    def train(self, data: Any, output: Path, **options: Any) -> dict[str, Any]:
        """See `Trainable` and `zoo.texts.training.train.train`."""
        with self.needs("train"):
            from zoo.texts.training.train import train
        return train(data, output, head=self.head, **options)

    def freeze(self, folder: Path) -> dict[str, Any]:
        """See `Freezable` and `zoo.texts.export.freeze.freeze`."""
        with self.needs("freeze"):
            from zoo.texts.export.freeze import freeze
        return freeze(folder, self.head)

    def importer(self) -> family.Importer:
        """See `Importable` and `zoo.texts.importers.huggingface`."""
        from zoo.texts.importers.huggingface import importer

        return importer(self.head)

    def export_modules(self, folder: ModelFolder, output: Path, precision: str, threads: int) -> dict[str, Any]:
        """See `ModulesExportable` and `zoo.texts.export.modules`."""
        from zoo.texts.export.modules import export_modules

        return export_modules(folder, output, precision, threads)

    def samples(self, folder: ModelFolder) -> Batch:
        """See `ShipsSamples` and `zoo.texts.default_calibration`."""
        from zoo.texts.default_calibration import DefaultTexts

        return DefaultTexts(folder).calibration()

    def judged(
        self, folder: ModelFolder, path: Path, recipe: QuantRecipe, table: CalibrationTable
    ) -> tuple[CalibrationTable, dict[str, Any]]:
        """See `ShipsSamples` and `zoo.texts.default_calibration.judged`."""
        from zoo.texts.default_calibration import judged

        return judged(folder, path, recipe, table)

    def handler(self) -> type[Handler]:
        """See `Servable`."""
        from zoo.serving.handlers.text_tasks import TaskHandler
        from zoo.serving.handlers.texts import TextHandler
        from zoo.texts.heads.task_pipeline import TaskPipeline

        return TaskHandler if issubclass(self.pipeline(), TaskPipeline) else TextHandler

    def report_sections(self) -> family.ReportSections:
        """See `Reported`."""
        from zoo.texts import report_sections

        return report_sections


# attention products, and layers that compute one row per text, are too small to gain from int8
ATTENTION, HEAD = r".*\.(products|found)", r"(dense|dense_norm|classifier)(\..*)?|scores"
POOLED = r"dense\.\d+(\..*)?"  # after the pooling

MAX_LENGTH = RunOption(
    "max_length", int, None, "Maximum number of tokens; longer texts are truncated and counted. [default: the model's]"
)

PROMPT = RunOption(
    "prompt",
    str,
    None,
    "Name of a prompt of the model, such as query, or a prefix of every text, with a blank or a colon.",
)

SENTENCE_ENCODER = TextFamily(  # Reimers and Gurevych 2019, "Sentence-BERT"
    name="sentence-encoder",
    title="Sentence encoder: texts to vectors",
    task="embedding",
    recipe=QuantRecipe(keep_float=(f"{ATTENTION}|{POOLED}",), smooth=True),
    run_options=(
        RunOption(
            "column", str, None, "Column with the texts in CSV, TSV, JSON lines or Parquet. [default: text, ...]"
        ),
        RunOption("output_dtype", str, "float32", "Dtype of the vectors: float32, float16, int8 or binary."),
        PROMPT,
        MAX_LENGTH,
        RunOption(
            "chunk",
            int,
            None,
            "Divide texts into chunks of this many tokens. [default: longer texts are truncated]",
            summary="{texts:,} texts in {chunks:,} chunks, {skipped:,} left out, {texts_per_second:,.0f} texts/s, "
            "{precision} in {engine}",
        ),
        RunOption("stride", int, 0, "Tokens that a chunk shares with the one before."),
        RunOption(
            "chunk_pooling", str, "none", "none: a row of output for every chunk; mean: the mean of a text's chunks."
        ),
    ),
    summary=(
        "{texts:,} texts, {skipped:,} left out, {cut:,} cut, {texts_per_second:,.0f} texts/s, {precision} in {engine}"
    ),
)

CROSS_ENCODER = TextFamily(  # Nogueira and Cho 2019, "Passage Re-ranking with BERT"
    name="cross-encoder",
    title="Cross-encoder: pairs of texts to scores",
    task="ranking",
    module="ranking",
    config=TrainConfig(max_length=0),
    recipe=QuantRecipe(keep_float=(ATTENTION, HEAD), smooth=True),
    run_options=(
        RunOption(
            "column", str, None, "Two columns of CSV, TSV, JSON lines or Parquet: query,text. [default: the first two]"
        ),
        RunOption("raw", bool, False, "Write logits instead of scores."),
        MAX_LENGTH,
    ),
    summary=(
        "{texts:,} pairs, {skipped:,} left out, {cut:,} cut, {texts_per_second:,.0f} pairs/s, {precision} in {engine}"
    ),
)

COLUMN = RunOption(
    "column", str, None, "Column with the texts in CSV, TSV, JSON lines or Parquet. [default: text, ...]"
)
SUMMARY = "{texts:,} texts, {skipped:,} left out, {cut:,} cut, {texts_per_second:,.0f} texts/s, {precision} in {engine}"
TOKEN_CLASSIFIER = r"classifier(\..*)?|logits"  # few columns a token

TEXT_CLASSIFICATION = TextFamily(
    name="text-classification",
    title="Text classification: labels of texts or pairs",
    task="text classification",
    module="sequence_classification",
    recipe=QuantRecipe(keep_float=(ATTENTION, HEAD), smooth=True),
    run_options=(
        COLUMN,
        RunOption("top_k", int, 1, "Number of labels a text, best first; 0 for all."),
        RunOption("function_to_apply", str, None, "softmax, sigmoid or none. [default: the model's]"),
        MAX_LENGTH,
    ),
    summary=SUMMARY,
)

TOKEN_CLASSIFICATION = TextFamily(
    name="token-classification",
    title="Token classification: entities of texts",
    task="token classification",
    module="token_classification",
    recipe=QuantRecipe(keep_float=(ATTENTION, TOKEN_CLASSIFIER), smooth=True),
    run_options=(
        COLUMN,
        RunOption(
            "aggregation_strategy", str, "simple", "Merging of tokens to entities: none, simple, first, average or max."
        ),
        RunOption(
            "stride",
            int,
            None,
            "Divide longer texts into windows that share this many tokens. [default: longer texts are truncated]",
        ),
        MAX_LENGTH,
    ),
    summary=SUMMARY,
)

QUESTION_ANSWERING = TextFamily(  # Rajpurkar et al. 2016, "SQuAD"
    name="question-answering",
    title="Extractive question answering: spans of contexts",
    task="question answering",
    module="question_answering",
    recipe=QuantRecipe(keep_float=(ATTENTION, TOKEN_CLASSIFIER), smooth=True),
    run_options=(
        RunOption("column", str, None, "Two columns of the questions and contexts. [default: question,context]"),
        RunOption("top_k", int, 1, "Number of answers, best first."),
        RunOption("doc_stride", int, None, "Tokens that windows of a long context share. [default: 128]"),
        RunOption("max_answer_len", int, 15, "Maximum number of tokens of an answer."),
        RunOption("handle_impossible_answer", bool, False, "Allow an empty answer."),
    ),
    summary=SUMMARY,
)

FILL_MASK = TextFamily(
    name="fill-mask",
    title="Masked language model: tokens in the place of a mask",
    task="fill-mask",
    module="fill_mask",
    recipe=QuantRecipe(keep_float=(ATTENTION,), smooth=True),
    run_options=(
        COLUMN,
        RunOption("top_k", int, 5, "Number of tokens of a mask, best first."),
        MAX_LENGTH,
    ),
    summary=SUMMARY,
)

ZERO_SHOT = TextFamily(  # Yin et al. 2019, "Benchmarking Zero-shot Text Classification"
    name="zero-shot-classification",
    title="Zero-shot classification: labels that are named with each run, by a model of natural language inference",
    task="zero-shot classification",
    module="zero_shot",
    recipe=QuantRecipe(keep_float=(ATTENTION, HEAD), smooth=True),
    run_options=(
        COLUMN,
        RunOption("candidate_labels", str, "", "Labels to choose from, separated by commas."),
        RunOption("hypothesis_template", str, "This example is {}.", "Hypothesis about a label, with {} in its place."),
        RunOption("multi_label", bool, False, "Score every label on its own: several may apply."),
    ),
    summary=SUMMARY,
)

SPARSE_ENCODER = TextFamily(  # Formal et al. 2021, "SPLADE v2"
    name="sparse-encoder",
    title="Sparse encoder: texts to weights of the vocabulary (SPLADE, BGE-M3)",
    task="sparse embedding",
    module="sparse_encoder",
    recipe=QuantRecipe(keep_float=(rf"{ATTENTION}|sparse(\..*)?",), smooth=True),
    run_options=(
        COLUMN,
        RunOption("max_active_dims", int, None, "Number of tokens of a vector. [default: all above 0]"),
        PROMPT,
        MAX_LENGTH,
    ),
    summary=SUMMARY,
)

MULTI_VECTOR_ENCODER = TextFamily(  # Khattab and Zaharia 2020, "ColBERT"
    name="multi-vector-encoder",
    title="Multi-vector encoder: texts to vectors of tokens, which MaxSim ranks (ColBERT)",
    task="late interaction",
    module="late_interaction.head",
    recipe=QuantRecipe(keep_float=(f"{ATTENTION}|{POOLED}",), smooth=True),
    run_options=(
        COLUMN,
        RunOption("query", str, None, "Query to score the texts for."),
        RunOption("index", str, None, "Index of documents, FILE.npz: search it for every text."),
        RunOption("top_k", int, 10, "Documents of a query in the index, best first."),
        MAX_LENGTH,
    ),
    summary=SUMMARY,
)
