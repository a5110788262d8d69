"""Protocol of pipelines that rank many items for one user."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class RanksItems(Protocol):
    """A pipeline that reads and computes the part of a user once for all items; see `LogPipeline.rank`."""

    def catalogue(self, items: Any, distinct: bool = True) -> Sized:
        """Reads and encodes items once.

        Args:
            items: Source of the items.
            distinct: Keep the first row of every id alone.

        Returns:
            The catalogue, an argument of `rank_columns`.
        """

    def rank_columns(
        self, user: Any, items: Any, top: int | None = None, *, ids: Iterable[Any] | None = None, exclude: Any = ()
    ) -> dict[str, Any]:
        """Ranks items for a user.

        Args:
            user: The user's raw values.
            items: Source of the items, or a catalogue.
            top: Number of items to return; None for all.
            ids: Ids of the items of a catalogue to rank; None for all.
            exclude: Ids of items that are not returned.

        Returns:
            {"row": positions, "item": ids if there are any, "probability"}, the best first.
        """
