"""Beam search as one ONNX model: encoder, a Loop of decoding steps, and the hypotheses at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from pipelines.graph.builder import GraphBuilder
from zoo.translation.data.tokens import END, LOGITS, PAD, START
from zoo.translation.search.beam_search import MIN_SCORE
from zoo.translation.search.kv_cache import IncrementalModel
from zoo.translation.search.step_graph import PARENTS, POSITION, TOKENS

BEAM, BEST, PENALTY, GROWTH = "beam", "best", "length_penalty", "growth"
SCORES = "scores"
SHARED = 4096  # minimum bytes of a weight that two graphs share
ACTIVE_SHARE = (3, 4)  # share of active sentences at which finished ones leave the batch
# The key under which the graph of `search` is cached. Bump it when that graph changes;
# tests/zoo/translation/search/test_loop_graph.py fails where that is forgotten.
GRAPH_VERSION = 9
BOOL, FLOAT, INT64 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT64
# outputs of every step, [sentences, beam] each: scores of the hypotheses that end there, or `MIN_SCORE`, with their
# last token and parent beam; token and parent beam of every beam that continues
STEPS = {"closed": FLOAT, "last_words": INT64, "last_beams": INT64, "words": INT64, "beams": INT64}
# candidates of a step, [sentences, width] each: whether they end, scores of the hypotheses, tokens and parent beams
CANDIDATES = {"ended": BOOL, "total": FLOAT, "words": INT64, "origin": INT64}


def search(model: IncrementalModel, end: int = END, banned: Sequence[int] = ()) -> ir.Model:
    """Builds beam search as one graph of standard operators, with the rules of `beam_search`.

    Inputs of the graph: source int64 [n, s], padded; beam and best int64 [1]; length_penalty float32 [1]; growth int64
    [2], (a, b): a translation of a source of c tokens has at most a c + b tokens, its end included. Outputs: tokens
    int64 [n, best, t], padded, without the end, and scores float32 [n, best], the best first. A step takes the top
    logits of each row before log-softmax. Hypotheses are followed back from token to token once, at the end.

    Args:
        model: Encoder and step; used up.
        end: The end token; -1 is no token: all translations have their maximum length, for timing.
        banned: Tokens that are never chosen; they keep their share of the probability.

    Returns:
        The graph.
    """
    main = GraphBuilder(model.encoder.graph)
    source = main.graph.inputs[0]
    beam, best = main.input(BEAM, INT64, [1]), main.input(BEST, INT64, [1])
    penalty, growth = main.input(PENALTY, FLOAT, [1]), main.input(GROWTH, INT64, [2])
    encoder_outputs = {str(value.name): value for value in main.graph.outputs}
    main.graph.outputs.clear()

    count = main("Shape", source, dtype=INT64, start=0, end=1)
    rows = main("Mul", count, beam, dtype=INT64)
    length = main(
        "ReduceSum", main("Cast", main("Cast", source, dtype=BOOL), dtype=INT64), [1], dtype=INT64, keepdims=0
    )
    a, b = (main("Gather", growth, [i], dtype=INT64) for i in (0, 1))
    first = main("Equal", main.arange(beam), 0, dtype=BOOL)
    states = {
        "sentence": main.arange(count),
        "length": main("Squeeze", main("Mul", beam, 0, dtype=INT64), dtype=INT64),
        "limits": main(
            "Min", main("Add", main("Mul", length, a, dtype=INT64), b, dtype=INT64), model.positions, dtype=INT64
        ),
        TOKENS: main("Expand", START, rows, dtype=INT64),
        PARENTS: main.arange(rows),
        "total": main("Expand", main("Where", first, 0.0, MIN_SCORE), main("Concat", count, beam, dtype=INT64, axis=0)),
        "found": main("Expand", 0, count, dtype=INT64),
        "topped": main("Expand", False, count, dtype=BOOL),
        **encoder_outputs,
    }
    for cache in model.caches:
        shape = main("Concat", *(rows if size is None else [size] for size in cache.shape), dtype=INT64, axis=0)
        states[cache.before] = main("Expand", ir.tensor(np.zeros((), cache.dtype.numpy())), shape, dtype=cache.dtype)
    none = main("Concat", [0], count, beam, dtype=INT64, axis=0)
    states |= {
        name: main("Expand", ir.tensor(np.zeros((), dtype.numpy())), none, dtype=dtype) for name, dtype in STEPS.items()
    }
    outer = {
        "beam": beam,
        # candidates of a step: 2 * beam without the banned ones
        "width": main("Add", main("Mul", beam, 2, dtype=INT64), len(banned), dtype=INT64),
        "sentences": count,
        "enough": main("Where", main("Equal", penalty, 0.0, dtype=BOOL), best, beam, dtype=INT64),
        "penalized": main("Not", main("Equal", penalty, 0.0, dtype=BOOL), dtype=BOOL),
    }
    turns = _turns(model, outer, states, main.taken, end, banned)
    results = main.loop("turns", turns, [None, main.constant(True), *states.values()])
    finals = dict(zip(states, results, strict=True))
    _hypotheses(main, [finals[name] for name in STEPS], beam, best, penalty, end)
    for inner in (node.attributes["body"].as_graph() for node in turns if node.op_type == "Loop"):
        _share(main.graph, inner)
    return ir.Model(main.graph, ir_version=model.encoder.ir_version)


def _turns(
    model: IncrementalModel,
    outer: Mapping[str, ir.Value],
    states: Mapping[str, ir.Value],
    taken: set[str],
    end: int,
    banned: Sequence[int],
) -> ir.Graph:
    """Builds the body of the outer Loop: steps until a quarter of the sentences is finished and leaves the batch.

    (number, condition, `states`) -> (condition, `states`). Keys and values of the source are copied here, not in a
    step; the caches of the target follow in the next step, by its `parents`.
    """
    turn = GraphBuilder(ir.Graph([], [], nodes=[], name="turn"), "turn/", taken)
    turn.input("turn/number", INT64, [])
    turn.input("turn/going", BOOL, [])
    state = {name: turn.input(f"turn/{name}", value.dtype or INT64, None) for name, value in states.items()}
    count, beam = turn("Shape", state["limits"], dtype=INT64, start=0, end=1), outer["beam"]
    fixed = {
        **outer,
        "limits": state["limits"],
        "length": state["length"],
        "matrix": turn("Concat", count, [-1], dtype=INT64, axis=0),
        "firsts": turn("Mul", turn("Unsqueeze", turn.arange(count), [1], dtype=INT64), beam, dtype=INT64),
        "few": turn(
            "Squeeze",
            turn("Div", turn("Mul", count, ACTIVE_SHARE[0], dtype=INT64), ACTIVE_SHARE[1], dtype=INT64),
            dtype=INT64,
        ),
    }
    going = {
        name: state[name]
        for name in (TOKENS, PARENTS, "total", "found", "topped", *(cache.before for cache in model.caches))
    }
    going["live"] = turn("Expand", True, count, dtype=BOOL)
    body = _step(model, {name: state[name] for name in model.encoder_outputs}, fixed, going, turn.taken, end, banned)
    results = turn.loop("steps", body, [None, turn.constant(True), *going.values()])
    after, steps = dict(zip(going, results, strict=False)), dict(zip(STEPS, results[len(going) :], strict=True))

    kept = turn("Squeeze", turn("NonZero", after["live"], dtype=INT64), [0], dtype=INT64)
    rows = turn(
        "Add", turn("Mul", turn("Unsqueeze", kept, [1], dtype=INT64), beam, dtype=INT64), turn.arange(beam), dtype=INT64
    )
    rows = turn("Reshape", rows, [-1], dtype=INT64)
    done = turn("Shape", steps["closed"], dtype=INT64, start=0, end=1)
    after |= {name: turn("Gather", after[name], rows, dtype=INT64) for name in (TOKENS, PARENTS)}
    after |= {
        name: turn("Gather", after[name], kept, dtype=states[name].dtype or FLOAT)
        for name in ("total", "found", "topped")
    }
    kinds = ("sentence", "limits", *model.encoder_outputs)
    after |= {name: turn("Gather", state[name], kept, dtype=states[name].dtype or FLOAT) for name in kinds}
    after["length"] = turn("Add", state["length"], turn("Squeeze", done, dtype=INT64), dtype=INT64)
    after |= _recorded(turn, steps, state, count, done, outer)
    left = turn("Squeeze", turn("Shape", kept, dtype=INT64), dtype=INT64)
    turn.graph.outputs.extend([turn("Greater", left, 0, dtype=BOOL), *(after[name] for name in states)])
    return turn.graph


def _recorded(
    turn: GraphBuilder,
    steps: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
    count: ir.Value,
    done: ir.Value,
    outer: Mapping[str, ir.Value],
) -> dict[str, ir.Value]:
    """Appends the `STEPS` of a turn of `done` steps and `count` sentences to those of all sentences before."""
    # index of each sentence among those of this turn; `count`, a row of nothing, for those that have left the batch
    places = turn(
        "ScatterElements",
        turn("Expand", count, outer["sentences"], dtype=INT64),
        state["sentence"],
        turn.arange(count),
        dtype=INT64,
    )
    gone = turn("Concat", done, [1], outer["beam"], dtype=INT64, axis=0)
    recorded = {}
    for name, dtype in STEPS.items():
        nothing = turn("Expand", MIN_SCORE if dtype == FLOAT else 0, gone, dtype=dtype)
        whole = turn("Gather", turn("Concat", steps[name], nothing, dtype=dtype, axis=1), places, dtype=dtype, axis=1)
        recorded[name] = turn("Concat", state[name], whole, dtype=dtype, axis=0)
    return recorded


def _step(
    model: IncrementalModel,
    encoder_outputs: Mapping[str, ir.Value],
    outer: Mapping[str, ir.Value],
    states: Mapping[str, ir.Value],
    taken: set[str],
    end: int,
    banned: Sequence[int],
) -> ir.Graph:
    """(iteration, condition, `states`) -> (condition, `states`, `STEPS`): a token for every row."""
    step = model.step.graph
    inputs = {str(value.name): value for value in step.inputs}
    for name in model.encoder_outputs:
        inputs[name].replace_all_uses_with(encoder_outputs[name])
    step.inputs.clear()
    body = GraphBuilder(step, "step/", taken)
    iteration, _ = body.input("step/number", INT64, []), body.input("step/going", BOOL, [])
    position = body("Add", iteration, outer["length"], dtype=INT64)
    inputs[POSITION].replace_all_uses_with(position)
    state = {}
    for name, value in states.items():
        if name in inputs:
            inputs[name].shape = None
            step.inputs.append(inputs[name])
        state[name] = inputs[name] if name in inputs else body.input(f"step/{name}", value.dtype or INT64, None)
    results = {str(value.name): value for value in step.outputs}
    step.outputs.clear()
    logits = results[LOGITS]
    logits.name = f"step/{LOGITS}"

    likely = _candidates(body, logits, state["total"], outer, end, banned)
    top, closes, finished = _close(body, likely, position, outer, state)
    going = _continue(body, likely, outer)
    after = {
        TOKENS: body("Reshape", going["words"], [-1], dtype=INT64),
        PARENTS: body("Reshape", body("Add", going["origin"], outer["firsts"], dtype=INT64), [-1], dtype=INT64),
        "total": going["total"],
        **finished,
        **{cache.before: results[cache.after] for cache in model.caches},
    }
    alive = body("ReduceSum", body("Cast", finished["live"], dtype=INT64), dtype=INT64, keepdims=0)
    more = body("Greater", alive, outer["few"], dtype=BOOL)
    closed = body("Where", closes, top["total"], MIN_SCORE)
    of_step = [closed, top["words"], top["origin"], going["words"], going["origin"]]
    step.outputs.extend([more, *(after[name] for name in states), *of_step])
    step.sort()  # the position stands after its readers
    return step


def _candidates(
    body: GraphBuilder,
    logits: ir.Value,
    total: ir.Value,
    outer: Mapping[str, ir.Value],
    end: int,
    banned: Sequence[int],
) -> dict[str, ir.Value]:
    """The `CANDIDATES` of a step: the continuations of each sentence with the highest scores."""
    values, words = body.top(logits, outer["width"])
    norm = _norm(body, logits, values, words)
    for token in banned:
        values = body("Where", body("Equal", words, token, dtype=BOOL), MIN_SCORE, values)
    totals = body("Add", body("Reshape", total, [-1, 1]), body("Sub", values, norm))
    total, order = body.top(body("Reshape", totals, outer["matrix"]), outer["width"])
    words = body("GatherElements", body("Reshape", words, outer["matrix"], dtype=INT64), order, dtype=INT64, axis=1)
    origin = body("Div", order, outer["width"], dtype=INT64)
    ended = body("Equal", words, end, dtype=BOOL)
    return {"ended": ended, "total": total, "words": words, "origin": origin}


def _close(
    body: GraphBuilder,
    likely: Mapping[str, ir.Value],
    position: ir.Value,
    outer: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
) -> tuple[dict[str, ir.Value], ir.Value, dict[str, ir.Value]]:
    """Closes hypotheses that end among the first `beam` candidates, or that have their maximum length.

    Returns:
        These candidates; which of them close, [sentences, beam]; and the states "live", "found" and "topped".
    """
    last = body("LessOrEqual", outer["limits"], body("Add", position, 1, dtype=INT64), dtype=BOOL)
    top = {
        name: body("Slice", likely[name], [0], outer["beam"], [1], dtype=dtype) for name, dtype in CANDIDATES.items()
    }
    ends = body("Or", top["ended"], body("Unsqueeze", last, [1], dtype=BOOL), dtype=BOOL)
    closes = body("And", ends, body("Unsqueeze", state["live"], [1], dtype=BOOL), dtype=BOOL)
    closed = body("ReduceSum", body("Cast", closes, dtype=INT64), [1], dtype=INT64, keepdims=0)
    count = body("Add", state["found"], closed, dtype=INT64)
    topped = body("Or", state["topped"], body("Gather", likely["ended"], 0, dtype=BOOL, axis=1), dtype=BOOL)
    many = body("GreaterOrEqual", count, outer["enough"], dtype=BOOL)
    enough = body("And", many, body("Or", topped, outer["penalized"], dtype=BOOL), dtype=BOOL)
    live = body("And", state["live"], body("Not", body("Or", last, enough, dtype=BOOL), dtype=BOOL), dtype=BOOL)
    return top, closes, {"live": live, "found": count, "topped": topped}


def _continue(body: GraphBuilder, likely: Mapping[str, ir.Value], outer: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
    """The first `beam` candidates that have not ended: "total", "words" and "origin", [sentences, beam] each."""
    late = body("Mul", body("Cast", likely["ended"], dtype=INT64), 2**20, dtype=INT64)  # ended candidates come last
    _, kept = body.top(body("Add", late, body.arange(outer["width"]), dtype=INT64), outer["beam"], largest=0)
    return {
        name: body("GatherElements", likely[name], kept, dtype=CANDIDATES[name], axis=1)
        for name in ("total", "words", "origin")
    }


def _norm(body: GraphBuilder, logits: ir.Value, values: ir.Value, words: ir.Value) -> ir.Value:
    """log-sum-exp of the logits of each row, [rows, 1]: the top logit less the logarithm of its probability."""
    probabilities = body("Softmax", logits, axis=-1)
    largest, place = (
        body("Slice", value, [0], [1], [1], dtype=kind) for value, kind in ((values, FLOAT), (words, INT64))
    )
    return body("Sub", largest, body("Log", body("GatherElements", probabilities, place, axis=1)))


def _hypotheses(
    main: GraphBuilder, steps: Sequence[ir.Value], beam: ir.Value, best: ir.Value, penalty: ir.Value, end: int
) -> None:
    """Add the outputs: the best hypotheses of each sentence, followed back from token to token."""
    total, words, origin, before, parents = steps
    count = main("Squeeze", main("Shape", total, dtype=INT64, start=0, end=1), dtype=INT64)
    numbers = main("Range", 1, main("Add", count, 1, dtype=INT64), 1, dtype=INT64)
    has_end = main("Equal", words, end, dtype=BOOL)
    divisor = main("Pow", main("Cast", main("Unsqueeze", numbers, [1, 2], dtype=INT64), dtype=FLOAT), penalty)
    ended = (
        (main("Div", total, divisor), FLOAT),
        (main("Where", has_end, PAD, words, dtype=INT64), INT64),
        (origin, INT64),
    )
    flat = [
        main("Flatten", main("Transpose", value, dtype=dtype, perm=[1, 0, 2]), dtype=dtype) for value, dtype in ended
    ]
    scores, where = main.top(flat[0], best)
    word, row = (main("GatherElements", value, where, dtype=INT64, axis=1) for value in flat[1:])
    when, newest = main("Div", where, beam, dtype=INT64), main("Sub", count, 1, dtype=INT64)

    body = GraphBuilder(ir.Graph([], [], nodes=[], name="back"), "back/", main.taken)
    number, going = body.input("back/number", INT64, []), body.input("back/going", BOOL, [])
    position = body.input("back/row", INT64, None)
    t = body("Sub", newest, number, dtype=INT64)
    here, on_way = body("Equal", when, t, dtype=BOOL), body("Less", t, when, dtype=BOOL)
    then = [
        body("GatherElements", body("Gather", value, t, dtype=INT64), position, dtype=INT64, axis=1)
        for value in (before, parents)
    ]
    token = body("Where", here, word, body("Where", on_way, then[0], PAD, dtype=INT64), dtype=INT64)
    back = body("Where", here, row, body("Where", on_way, then[1], position, dtype=INT64), dtype=INT64)
    body.graph.outputs.extend([body("Identity", going, dtype=BOOL), back, token])
    _, backward = main.loop("back", body.graph, [count, main.constant(True), row])
    forward = main("Slice", backward, [-1], [np.iinfo(np.int64).min], [0], [-1], dtype=INT64)
    result = main("Transpose", forward, dtype=INT64, perm=[1, 2, 0])
    result.name, scores.name = TOKENS, SCORES
    result.shape, scores.shape = ir.Shape(["batch", "best", "length"]), ir.Shape(["batch", "best"])
    main.graph.outputs.extend([result, scores])


def _share(main: ir.Graph, body: ir.Graph) -> None:
    """Have the body read its large weights from the outer graph where that has equal ones, such as embeddings."""
    outer: dict[Any, list[ir.Value]] = {}
    for value in main.initializers.values():
        if (array := query.constant(value)) is not None and array.nbytes >= SHARED:
            outer.setdefault((array.dtype, array.shape), []).append(value)
    for name, value in list(body.initializers.items()):
        if (array := query.constant(value)) is None:
            continue
        for other in outer.get((array.dtype, array.shape), []):
            constant = query.constant(other)
            if constant is not None and np.array_equal(constant, array):
                value.replace_all_uses_with(other)
                del body.initializers[name]
                break
