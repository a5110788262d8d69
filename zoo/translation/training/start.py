"""Models that fine-tuning starts from, this project's and imported ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core.files import copy_file, read_json, sha256
from pipelines.models.hub import CARD
from zoo.translation.data.parallel_text import VOCABULARY, Corpus, Vocabulary, from_tokens
from zoo.translation.data.vocabularies import PIECES, ImportedVocabulary, open_vocabulary
from zoo.translation.importers.original import ORIGINAL
from zoo.translation.models.checkpoints import copy_shortlist, inherited_features, read_features
from zoo.translation.search.config import DEFAULT_SEARCH, SearchConfig
from zoo.translation.train_config import TrainingConfig


@dataclass(frozen=True)
class StartModel:
    """A model folder that fine-tuning starts from.

    Attributes:
        folder: The folder.
        about: Its features, see `read_features`.
        vocabulary: Its vocabulary, with the languages and the prompt of the training.
    """

    folder: Path
    about: Mapping[str, Any]
    vocabulary: Vocabulary | ImportedVocabulary

    @staticmethod
    def read(folder: Path, config: TrainingConfig) -> StartModel:
        """Reads a model folder.

        Args:
            folder: The folder.
            config: The training recipe, which may choose languages and a prompt of an imported model.

        Returns:
            The model.

        Raises:
            RequestError: The folder holds no translation model, or a chosen language is unknown.
        """
        about = read_features(folder)
        vocabulary = open_vocabulary(folder, about)
        chosen = vocabulary.choose(config.source_language, config.target_language, config.prompt or None)
        start = StartModel(folder, about, chosen)
        if isinstance(chosen, ImportedVocabulary):  # else what the tokenizer begins a target with (BART)
            begin = tuple(token for token in chosen.framing.before if isinstance(token, int))
            chosen.label_prefix = start.rules.prefix or begin
        return start

    @property
    def imported(self) -> bool:
        """Whether the model was imported from another toolkit."""
        return isinstance(self.vocabulary, ImportedVocabulary)

    @property
    def origin(self) -> dict[str, Any]:
        """Where an imported model comes from, for the record of the training."""
        imported: dict[str, Any] = read_json(self.folder / CARD).get("imported", {})
        return imported

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights, in hex."""
        return sha256(self.about["source"])

    @property
    def rules(self) -> SearchConfig:
        """Search options, with the tokens that every translation begins with."""
        if not isinstance(self.vocabulary, ImportedVocabulary):
            return DEFAULT_SEARCH
        rules = SearchConfig.from_json(self.about.get("search", {}))
        return replace(rules, prefix=self.vocabulary.prefix or rules.prefix)

    def settled(self, config: TrainingConfig) -> TrainingConfig:
        """Returns the recipe with the properties of the model.

        Args:
            config: The training recipe.
        """
        if self.imported:
            return replace(config, max_length=min(config.max_length, self.about["max_length"]))
        return replace(config, **{name: self.about[name] for name in config.KEPT if name in self.about})

    @property
    def features(self) -> dict[str, Any]:
        """Features of the fine-tuned model that come from this one, without those of its network."""
        kept = inherited_features(self.folder)
        if not isinstance(self.vocabulary, ImportedVocabulary):
            return kept
        framing = self.vocabulary.framing
        chosen = "-".join(filter(None, (framing.source_language, framing.target_language)))
        own = {name: self.about[name] for name in ("max_length", "search") if name in self.about}
        languages = chosen or self.about["languages"]
        return {**own, **kept, "languages": languages, "vocabulary": framing.to_json()}

    def copy_files(self, output: Path) -> None:
        """Copies the vocabulary and the shortlist to the folder of the fine-tuned model.

        Args:
            output: The folder.
        """
        own = isinstance(self.vocabulary, ImportedVocabulary)
        for name in (*self.vocabulary.framing.files, PIECES) if own else (VOCABULARY,):  # type: ignore[union-attr]
            copy_file(self.folder / name, output / name)
        if (self.folder / ORIGINAL).is_file():
            copy_file(self.folder / ORIGINAL, output / ORIGINAL)
        copy_shortlist(self.features, self.folder, output)


def mixed(data: Corpus, other: Corpus, share: float, seed: int) -> Corpus:
    """Adds pairs of another corpus, drawn without repetition.

    Args:
        data: The corpus.
        other: The other corpus.
        share: Share of the other corpus in the result, where it has enough pairs.
        seed: Seed of the draw.

    Returns:
        The corpus, the added pairs last.
    """
    count = min(round(len(data) * share / (1 - share)), len(other))
    drawn = np.sort(np.random.default_rng(seed).choice(len(other), count, replace=False))
    pairs = [data.pair(i) for i in range(len(data))] + [other.pair(int(i)) for i in drawn]
    return from_tokens(*map(list, zip(*pairs, strict=True)))
