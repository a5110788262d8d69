"""Base class of the models that can be pruned."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pipelines.models.folder import ModelFolder


class PrunableModel(abc.ABC):
    """A trained model with its data, see `pipelines.compression.search.Prunable`.

    Args:
        folder: Model folder.
        data: Data of the task.
        config: Training settings; they determine the held-out data.
        importance: Importance criterion, "taylor" or "activation".
        on_error: "raise", or "skip" to leave out faulty samples.
        like: Another model opened with the same data, which is not read again.

    Attributes:
        metric: Name of the quality metric.
        drop: Accepted loss of the metric by default.
        batch_size: Samples of a batch in measurements of speed.

    Raises:
        RequestError: The model or the data cannot be used.
    """

    metric: ClassVar[str]
    drop: ClassVar[float]
    batch_size: ClassVar[int]

    def __init__(
        self,
        folder: ModelFolder,
        data: Any,
        *,
        config: Any,
        importance: str = "taylor",
        on_error: str = "raise",
        like: Any = None,
    ) -> None:
        self.folder, self.importance = folder, importance
        self.open(data, config, on_error, like)

    @abc.abstractmethod
    def open(self, data: Any, config: Any, on_error: str, like: Any) -> None:
        """Opens the network and reads the data.

        Args:
            data: As in the constructor.
            config: As in the constructor.
            on_error: As in the constructor.
            like: As in the constructor.

        Raises:
            RequestError: The model or the data cannot be used.
        """
