"""The sequences of an imported ranker's graph: found first, then written when the walk reaches their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from zoo.recommenders.importers.sequences.attention_form import activated, attend
from zoo.recommenders.importers.sequences.attention_units import attention_units, dice_activations
from zoo.recommenders.importers.sequences.transformer_form import transform
from zoo.recommenders.importers.sequences.transformer_units import transformer_units
from zoo.recommenders.importers.values import Array, Layout, Writer


class Sequences:
    """Target attention, transformer layers and Dice in a graph.

    Args:
        model: Graph; it is not changed.

    Attributes:
        inner: Operators within sequences, which the walk does not visit.
    """

    def __init__(self, model: ir.Model) -> None:
        self._attention = {unit.pooled: unit for unit in attention_units(model)}
        self._transformers = {unit.result: unit for unit in transformer_units(model)}
        self.inner = {node for unit in self._attention.values() for node in unit.nodes}
        self.inner |= {node for block in self._transformers.values() for node in block.nodes}
        dice = dice_activations(model)
        self._dice = {value: made for value, made in dice.items() if value.producer() not in self.inner}

    def layout(
        self,
        writer: Writer,
        value: ir.Value,
        layouts: Mapping[ir.Value, Layout | Array | None],
        shape: Callable[[ir.Value], tuple[int, ...]],
    ) -> Layout | None:
        """Writes the sequence or activation that computes a value.

        Args:
            writer: Writer of the new graph.
            value: Value of the imported graph.
            layouts: Layouts of the values before it.
            shape: Returns the sizes of an imported value without the batch axis.

        Returns:
            Layout of the value; None if no sequence computes it.

        Raises:
            RequestError: The sequence has other operands than rows of a table.
        """
        if (unit := self._attention.get(value)) is not None:
            return attend(writer, unit, layouts.get(unit.keys), layouts.get(unit.target), shape(value))
        if (block := self._transformers.get(value)) is not None:
            heads = int(np.prod(shape(block.shares))) // len(block.position) ** 2
            return transform(writer, block, layouts.get(block.keys), layouts.get(block.target), heads)
        if (dice := self._dice.get(value)) is not None:
            return activated(writer, layouts.get(dice[0]), dice[1])
        return None
