"""Click programs as native objects."""

from __future__ import annotations

from typing import Any

from pipelines.kernels.arrays import contiguous
from pipelines.kernels.extension import required
from pipelines.kernels.recommenders import program as steps


def click_program(program: steps.ClickProgram, isa: str = "") -> Any:
    """`ClickProgram` as a native object: `(ids int32 or int64 [n, C], numbers float32 [n, M] or None, scales float32
    [n, B] or None) -> float32 [n, width]`, or a tuple of such where the program has several outputs.

    All arrays C-contiguous and aligned; any n, also 0. Tables are used where they lie. Raises, when called, IndexError
    for an id that is no row, before a table is read with it, and TypeError or ValueError for other arrays.
    """
    slots = [(kind, width) for kind, width in program.slots]
    made = required().ClickProgram(contiguous(program.rows), program.numbers, program.means, slots, isa)
    for step in program.steps:
        match step:
            case steps.Numbers():
                made.numbers(step.out, step.position, contiguous(step.columns), contiguous(step.scale))
            case steps.Gather():
                where = (step.column, step.count, step.pool, step.factor, step.mean)
                table = contiguous(step.table)
                made.gather(step.out, step.position, table, 0, step.rows, step.stride, step.width, *where)
            case steps.Mixed():
                arrays = [contiguous(each) for each in (step.weight, step.scale, step.bias)]
                table = None if step.table is None else contiguous(step.table)
                chosen = [contiguous(each) for each in (step.columns, step.offsets, step.rows)]
                made.mixed(step.x, step.first, *arrays, list(step.outs), table, *chosen, step.shift)
            case steps.Dense():
                layer = step.layer
                arrays = [contiguous(each) for each in (layer.weight, layer.bias, layer.scale)]
                made.dense(step.x, step.out, *arrays, layer.zero_point or 0, layer.low)
            case steps.Quantize():
                made.quantize(step.x, step.out, step.position, step.factor, step.relu)
            case steps.Factorization():
                made.factorization(step.x, step.out, contiguous(step.positions), step.width, step.scale)
            case steps.Cross():
                weight = None if step.weight is None else contiguous(step.weight)
                made.cross(step.x, step.u, step.g, step.first, step.factor, step.out, step.total, weight)
            case steps.Dots():
                made.dots(
                    step.x, step.out, step.position, contiguous(step.positions), step.width, contiguous(step.factor)
                )
            case steps.Normalize():
                made.normalize(step.x, step.out, step.epsilon, step.least, step.relu)
            case steps.Leaky():
                made.leaky(step.x, step.out, contiguous(step.slope))
            case steps.Tanh():
                made.tanh(step.x, step.out)
            case steps.Mixture():
                made.mixture(step.x, step.gates, step.out)
            case steps.Product():
                made.product(step.x, step.y, step.out)
            case steps.LookupSum():
                chosen = [contiguous(each) for each in (step.table, step.columns, step.offsets, step.rows)]
                made.lookup_sum(step.out, *chosen)
            case steps.Total():
                made.total(step.out, list(step.terms), step.bias, step.sigmoid)
            case steps.Weighted():
                made.weighted(step.x, step.first, contiguous(step.weight), step.out)
    made.outputs(list(program.outputs))
    return made
