"""The whole search as one ONNX graph: encoder, a Loop of steps with beams, and the hypotheses at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines import graph
from zoo.transformer_mt.cache import LOGITS, PARENTS, POSITION, SOURCE, TOKENS, Incremental
from zoo.transformer_mt.data import END, PAD, POSITIONS, START
from zoo.transformer_mt.decode import NEVER

BEAM, BEST, PENALTY, GROWTH = "beam", "best", "length_penalty", "growth"
SCORES = "scores"
FORM = "1"  # changes with the graph that is made here
BOOL, FLOAT, INT64 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT64


def search(model: Incremental, end: int = END) -> ir.Model:
    """Beam search (the rules of `zoo.transformer_mt.decode.beam_search`) as one graph, of standard operators alone.

    source int64 [n, s], padded with `PAD`; beam and best int64 [1]; length_penalty float32 [1]; growth int64 [2], (a, b): a translation of
    a source of c tokens has at most a c + b tokens, its end included, and `POSITIONS` -> tokens int64 [n, best, t], padded, without `end`,
    and scores float32 [n, best], the best first. end=-1 is no token: all translations run to their limit, to time a step.
    A step keeps the likeliest words of each row before their sum is normalized; what was chosen is followed back once, when all is done.
    """
    main = _Graph(model.encoder.graph)
    source = main.graph.inputs[0]
    beam, best = main.input(BEAM, INT64, [1]), main.input(BEST, INT64, [1])
    penalty, growth = main.input(PENALTY, FLOAT, [1]), main.input(GROWTH, INT64, [2])
    given = {str(each.name): each for each in main.graph.outputs}
    main.graph.outputs.clear()

    count = main("Shape", source, dtype=INT64, start=0, end=1)
    rows = main("Mul", count, beam, dtype=INT64)
    length = main("ReduceSum", main("Cast", main("Cast", source, dtype=BOOL), dtype=INT64), [1], dtype=INT64, keepdims=0)
    a, b = (main("Gather", growth, [i], dtype=INT64) for i in (0, 1))
    limits = main("Min", main("Add", main("Mul", length, a, dtype=INT64), b, dtype=INT64), POSITIONS, dtype=INT64)
    first = main("Equal", main("Range", 0, main("Squeeze", beam, dtype=INT64), 1, dtype=INT64), 0, dtype=BOOL)
    scores = main("Expand", main("Where", first, 0.0, NEVER, dtype=FLOAT), main("Concat", count, beam, dtype=INT64, axis=0), dtype=FLOAT)
    states = {
        TOKENS: main("Expand", START, rows, dtype=INT64),
        PARENTS: main("Range", 0, main("Squeeze", rows, dtype=INT64), 1, dtype=INT64),
        "total": scores,
        "live": main("Expand", True, count, dtype=BOOL),
        "found": main("Expand", 0, count, dtype=INT64),
        "topped": main("Expand", False, count, dtype=BOOL),
    }
    for cache in model.caches:
        shape = main("Concat", *(rows if each is None else [each] for each in cache.shape), dtype=INT64, axis=0)
        states[cache.before] = main("Expand", ir.tensor(np.zeros((), cache.dtype.numpy())), shape, dtype=cache.dtype)
    most = main("ReduceMax", limits, dtype=INT64, keepdims=0)
    outer = {
        "limits": limits,
        "beam": beam,
        "width": main("Mul", beam, 2, dtype=INT64),
        "matrix": main("Concat", count, [-1], dtype=INT64, axis=0),
        "firsts": main("Mul", main("Unsqueeze", main("Range", 0, main("Squeeze", count, dtype=INT64), 1, dtype=INT64), [1], dtype=INT64), beam, dtype=INT64),
        "enough": main("Where", main("Equal", penalty, 0.0, dtype=BOOL), best, beam, dtype=INT64),
        "penalized": main("Not", main("Equal", penalty, 0.0, dtype=BOOL), dtype=BOOL),
    }  # fmt: skip
    body = _body(model, given, outer, states, end)
    loop = ir.node("Loop", [most, main.constant(True), *states.values()], {"body": body}, num_outputs=len(body.outputs) - 1, name="search")
    for value, inner in zip(loop.outputs, body.outputs[1:], strict=True):
        value.name, value.type = graph.unique(f"search/{inner.name}", main.taken), inner.type
    main.graph.append(loop)
    _hypotheses(main, loop.outputs[len(states) :], beam, best, penalty, outer["firsts"], end)
    _share(main.graph, body)
    return ir.Model(main.graph, ir_version=model.encoder.ir_version)


def _body(
    model: Incremental, given: Mapping[str, ir.Value], outer: Mapping[str, ir.Value], states: Mapping[str, ir.Value], end: int
) -> ir.Graph:
    """One step: (iteration, condition, `states`) -> (condition, `states`, and of each step: scores of what ends, [n, beam], their words and
    rows likewise, and the words and rows before, [n * beam], of what goes on)."""
    step = model.step.graph
    inputs = {str(each.name): each for each in step.inputs}
    for name in model.given:
        inputs[name].replace_all_uses_with(given[name])
    step.inputs.clear()
    body = _Graph(step, "step/", {str(each.name) for each in given.values()})
    (iteration, condition) = (body.input(name, dtype, []) for name, dtype in (("iteration", INT64), ("going", BOOL)))
    inputs[POSITION].replace_all_uses_with(iteration)
    state = {}
    for name, value in states.items():
        if name in inputs:
            state[name] = inputs[name]
            step.inputs.append(state[name])
        else:
            state[name] = body.input(f"step/{name}", value.dtype or INT64, None)
        state[name].shape = None
    found = {str(each.name): each for each in step.outputs}
    step.outputs.clear()
    logits = found[LOGITS]
    logits.name = f"step/{LOGITS}"

    values, words = body.top(logits, outer["width"])
    norm = _norm(body, logits, values, words)
    totals = body("Add", body("Reshape", state["total"], [-1, 1]), body("Sub", values, norm))
    total, order = body.top(body("Reshape", totals, outer["matrix"]), outer["width"])
    words = body("GatherElements", body("Reshape", words, outer["matrix"], dtype=INT64), order, dtype=INT64, axis=1)
    origin = body("Add", body("Div", order, outer["width"], dtype=INT64), outer["firsts"], dtype=INT64)

    ended = body("Equal", words, end, dtype=BOOL)
    number = body("Add", iteration, 1, dtype=INT64)
    last = body("LessOrEqual", outer["limits"], number, dtype=BOOL)
    likely = {"ended": (ended, BOOL), "total": (total, FLOAT), "words": (words, INT64), "origin": (origin, INT64)}
    front = {name: body("Slice", each, [0], outer["beam"], [1], dtype=dtype) for name, (each, dtype) in likely.items()}
    closes = body(
        "And", body("Or", front["ended"], body("Unsqueeze", last, [1], dtype=BOOL), dtype=BOOL),
        body("Unsqueeze", state["live"], [1], dtype=BOOL), dtype=BOOL,
    )  # fmt: skip
    closed = body("ReduceSum", body("Cast", closes, dtype=INT64), [1], dtype=INT64, keepdims=0)
    count = body("Add", state["found"], closed, dtype=INT64)
    topped = body("Or", state["topped"], body("Gather", ended, 0, dtype=BOOL, axis=1), dtype=BOOL)
    enough = body(
        "And", body("GreaterOrEqual", count, outer["enough"], dtype=BOOL), body("Or", topped, outer["penalized"], dtype=BOOL), dtype=BOOL
    )
    live = body("And", state["live"], body("Not", body("Or", last, enough, dtype=BOOL), dtype=BOOL), dtype=BOOL)

    late = body("Mul", body("Cast", ended, dtype=INT64), 2**20, dtype=INT64)  # what has ended comes after all that goes on
    place = body("Add", late, body("Range", 0, body("Squeeze", outer["width"], dtype=INT64), 1, dtype=INT64), dtype=INT64)
    _, kept = body.top(place, outer["beam"], largest=0)
    going = {name: body("GatherElements", likely[name][0], kept, dtype=likely[name][1], axis=1) for name in ("total", "words", "origin")}
    after = {
        TOKENS: body("Reshape", going["words"], [-1], dtype=INT64),
        PARENTS: body("Reshape", going["origin"], [-1], dtype=INT64),
        "total": going["total"],
        "live": live,
        "found": count,
        "topped": topped,
        **{cache.before: found[cache.after] for cache in model.caches},
    }
    any_live = body("Cast", body("ReduceMax", body("Cast", live, dtype=ir.DataType.INT32), dtype=ir.DataType.INT32, keepdims=0), dtype=BOOL)
    steps = [body("Where", closes, front["total"], NEVER), front["words"], front["origin"]]
    steps += [body("Identity", after[name], dtype=INT64) for name in (TOKENS, PARENTS)]
    step.outputs.extend([any_live, *(after[name] for name in states), *steps])
    return step


def _norm(body: _Graph, logits: ir.Value, values: ir.Value, words: ir.Value) -> ir.Value:
    """log(sum(exp(logits))) of each row, [rows, 1]: the likeliest word's logit less the logarithm of its probability."""
    chances = body("Softmax", logits, axis=-1)
    largest, place = (body("Slice", each, [0], [1], [1], dtype=kind) for each, kind in ((values, FLOAT), (words, INT64)))
    return body("Sub", largest, body("Log", body("GatherElements", chances, place, axis=1)))


def _hypotheses(
    main: _Graph, steps: Sequence[ir.Value], beam: ir.Value, best: ir.Value, penalty: ir.Value, firsts: ir.Value, end: int
) -> None:
    """The outputs: of all that ended the best, followed back from word to word."""
    total, words, origin, tokens, parents = steps
    count = main("Shape", total, dtype=INT64, start=0, end=1)
    numbers = main("Range", 1, main("Add", main("Squeeze", count, dtype=INT64), 1, dtype=INT64), 1, dtype=INT64)
    has_end = main("Equal", words, end, dtype=BOOL)
    lengths = main("Sub", main("Unsqueeze", numbers, [1, 2], dtype=INT64), main("Cast", has_end, dtype=INT64), dtype=INT64)
    divisor = main("Pow", main("Cast", main("Max", lengths, 1, dtype=INT64), dtype=FLOAT), penalty)
    flat = [main("Flatten", main("Transpose", each, dtype=kind, perm=[1, 0, 2]), dtype=kind) for each, kind in
            ((main("Div", total, divisor), FLOAT), (main("Where", has_end, PAD, words, dtype=INT64), INT64), (origin, INT64))]  # fmt: skip
    scores, where = main.top(flat[0], best)
    word, row = (main("GatherElements", each, where, dtype=INT64, axis=1) for each in flat[1:])
    when = main("Div", where, beam, dtype=INT64)

    body = _Graph(ir.Graph([], [], nodes=[], name="back"), "back/", main.taken)
    iteration, condition = body.input("back/number", INT64, []), body.input("back/go", BOOL, [])
    at = body.input("back/row", INT64, None)
    t = body("Sub", main("Sub", main("Squeeze", count, dtype=INT64), 1, dtype=INT64), iteration, dtype=INT64)
    here, before = body("Equal", when, t, dtype=BOOL), body("Less", t, when, dtype=BOOL)
    word_then, row_then = (body("Gather", body("Gather", each, t, dtype=INT64), at, dtype=INT64) for each in (tokens, parents))
    said = body("Where", here, word, body("Where", before, word_then, PAD, dtype=INT64), dtype=INT64)
    back = body("Where", here, row, body("Where", before, row_then, at, dtype=INT64), dtype=INT64)
    body.graph.outputs.extend([body("Identity", condition, dtype=BOOL), back, said])
    loop = ir.node("Loop", [main("Squeeze", count, dtype=INT64), main.constant(True), row], {"body": body.graph}, num_outputs=2, name="back")
    for value, name in zip(loop.outputs, ("row", "words"), strict=True):
        value.name, value.type = graph.unique(f"back/{name}.all", main.taken), ir.TensorType(INT64)
    main.graph.append(loop)
    forward = main("Slice", loop.outputs[1], [-1], [np.iinfo(np.int64).min], [0], [-1], dtype=INT64)
    result = main("Transpose", forward, dtype=INT64, perm=[1, 2, 0])
    result.name, scores.name = TOKENS, SCORES
    result.shape, scores.shape = ir.Shape(["batch", "best", "length"]), ir.Shape(["batch", "best"])
    main.graph.outputs.extend([result, scores])


def _share(main: ir.Graph, body: ir.Graph) -> None:
    """Let weights that stand in both graphs, such as the embeddings, be those of the outer one."""
    outer = {id(each.const_value): each for each in main.initializers.values()}
    for name, value in list(body.initializers.items()):
        if (found := outer.get(id(value.const_value))) is not None:
            value.replace_all_uses_with(found)
            del body.initializers[name]


class _Graph:
    """Appends operators to one graph; numbers become constants."""

    def __init__(self, main: ir.Graph, prefix: str = "", taken: set[str] | None = None) -> None:
        self.graph, self.prefix = main, prefix
        self.taken = graph.names(main) | (taken or set())
        self.known: dict[tuple[Any, ...], ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int] | None) -> ir.Value:
        """Another input; shape None: any."""
        value = ir.Value(name=graph.unique(name, self.taken), type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def constant(self, given: Any) -> ir.Value:
        """An initializer, made at its first use: int64, or float32 or bool for such numbers."""
        array = given.numpy() if isinstance(given, ir.Tensor) else np.asarray(given)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self.known:
            self.known[key] = graph.initializer(self.graph, f"{self.prefix}search.constant", array, self.taken)
        return self.known[key]

    def __call__(self, op: str, *inputs: Any, dtype: ir.DataType = FLOAT, **attributes: Any) -> ir.Value:
        if op == "Cast":
            attributes["to"] = int(dtype)
        values = [each if isinstance(each, ir.Value) else self.constant(each) for each in inputs]
        node = graph.node(op, list(values), f"{self.prefix}search.{op.lower()}", dtype=dtype, taken=self.taken, **attributes)
        self.graph.append(node)
        return node.outputs[0]

    def top(self, x: ir.Value, count: ir.Value, largest: int = 1) -> tuple[ir.Value, ir.Value]:
        """The largest values along the last axis and where they stand, the first of equal ones first."""
        name = graph.unique(f"{self.prefix}search.top", self.taken)
        node = ir.node("TopK", [x, count], {"axis": -1, "largest": largest, "sorted": 1}, num_outputs=2, name=name)
        for value, kind, dtype in zip(node.outputs, ("values", "places"), (x.dtype, INT64), strict=True):
            value.name, value.type = f"{name}.{kind}", None if dtype is None else ir.TensorType(dtype)
        self.graph.append(node)
        return node.outputs[0], node.outputs[1]
