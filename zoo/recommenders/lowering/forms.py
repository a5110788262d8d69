"""Forms of a native program: the same model with other first layers; each machine selects the fastest by timing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.graph import reference_session
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import Mixed
from zoo.recommenders.lowering.activity import samples_of
from zoo.recommenders.lowering.quantized_tables import LookupTable, largest_change, tables_report

if TYPE_CHECKING:
    import onnx_ir as ir

    from zoo.recommenders.lowering.graph_reader import GraphReader
    from zoo.recommenders.lowering.plan import Decision

CHANGE = 3e-3  # largest change of an output by a form, where the recipe has no bound
SAMPLES = 256  # random ones, or rows of a log, on which outputs of forms are compared


class OverBoundError(RequestError):
    """No form of a model is within the error bound."""


@dataclass(frozen=True)
class Form:
    """How the linear layers that read embeddings are computed.

    Attributes:
        name: Name, for `--form`.
        fold: Which fields are folded into tables: "all", "near" (the smallest tables, as many as fit L2 together) or
            "none".
        wide: Rows of folded tables are int16 instead of uint8, if they fit L3.
        coarse: What is not folded is read as bytes instead of int16 codes, but for numbers.
        fine: In a coarse form gated vectors, and those of cross networks, whose rounding adds most noise stay codes.
    """

    name: str
    fold: str = "none"
    wide: bool = False
    coarse: bool = False
    fine: bool = False


FAR = 4  # groups of four samples between the prefetch of folded rows and their use, in the form "folded-far"
FORMS = (  # of forms that are as fast the first one runs: it has the finest integers
    Form("folded-int16", "all", wide=True),
    Form("folded", "all"),
    Form("part-folded", "near"),
    Form("int16"),
    Form("int8", coarse=True),
    Form("part-int8", coarse=True, fine=True),
)


@dataclass(eq=False)
class MadeForm:
    """A form of one model.

    Attributes:
        name: Name of the form.
        program: The program.
        decisions: What is folded, by hidden value.
        change: Largest change of an output.
    """

    name: str
    program: ClickProgram
    decisions: Mapping[str, Decision]
    change: float = 0.0

    def far(self) -> MadeForm:
        """Returns the same form with rows of folded tables that are fetched earlier."""
        steps = [replace(step, ahead=FAR) if isinstance(step, Mixed) else step for step in self.program.steps]
        return MadeForm(f"{self.name}-far", replace(self.program, steps=tuple(steps)), self.decisions, self.change)

    @property
    def megabytes(self) -> float:
        """Size of its tables in 10^6 bytes."""
        tables = [getattr(step, "table", None) for step in self.program.steps]
        return round(float(sum(table.nbytes for table in tables if table is not None)) / 1e6, 3)

    def to_json(self) -> dict[str, Any]:
        """Returns the form as plain JSON values."""
        folded = {name: decision.to_json() for name, decision in self.decisions.items() if decision.fold}
        return {
            "form": self.name,
            "megabytes": self.megabytes,
            "change": float(f"{self.change:.2e}"),
            "folded": folded,
        }


def within_bound(forms: Collection[MadeForm], bound: float) -> tuple[list[MadeForm], dict[str, str]]:
    """Selects the forms whose outputs change by the bound at most.

    Args:
        forms: The forms.
        bound: Largest allowed change of an output; 0: `CHANGE`.

    Returns:
        (forms, reason by name of each form that is left out).

    Raises:
        OverBoundError: All forms are beyond the bound.
    """
    bound = bound or CHANGE
    kept = [form for form in forms if form.change <= bound]
    if not kept:
        least = min(form.change for form in forms)
        raise OverBoundError(f"its forms change an output by {least:.2g} and more, the bound is {bound:g}")
    beyond = [form for form in forms if form.change > bound]
    return kept, {form.name: f"an output changes by {form.change:.2g}, the bound is {bound:g}" for form in beyond}


def changes_on(rows: Batch, model: ir.Model, reader: GraphReader) -> Callable[[ClickProgram], float]:
    """Computes the results of a float model on rows.

    Args:
        rows: Inputs of the model, of which the first `SAMPLES` rows are used.
        model: Float model.
        reader: Reader of the model.

    Returns:
        A function to the largest change of a result by a program.
    """
    few = {name: array[:SAMPLES] for name, array in rows.items()}
    opened = reference_session.session(model, "lowering needs")
    expected = reference_session.run(opened, {str(value.name): few[str(value.name)] for value in model.graph.inputs})

    def change(program: ClickProgram) -> float:
        return largest_change(expected, reference.run(program, *samples_of(program, reader, few, SAMPLES)))

    return change


def lowering_report(
    forms: Sequence[MadeForm], tables: Sequence[LookupTable], refused: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the report of a lowered model, see `zoo.recommenders.lowering.lower.lower`.

    Args:
        forms: The forms of the model.
        tables: Tables that are looked up row by row in the form without folded tables.
        refused: Why forms are left out.
    """
    sizes = ", ".join(f"{form.name} ({form.megabytes:,.1f} MB of tables)" for form in forms)
    reasons = [f"{len(forms)} forms: {sizes}" if len(forms) > 1 else f"one form: {sizes}", *tables_report(tables)]
    report = {"fold": True, "reason": "; ".join(reasons), "forms": [form.to_json() for form in forms]}
    report |= {"refused": dict(refused)}
    return report | ({"tables": [table.to_json() for table in tables]} if tables else {})
