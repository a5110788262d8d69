"""Quantization-aware training by the rules of `quantize`: the trained model computes what the int8 model computes.

Straight-through estimator (Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference"): the forward pass rounds, q = clip(round(x / s) + z, 0, 255), x' = s (q - z); the
backward pass uses dx'/dx = 1 inside the range and 0 outside. The quantizer itself selects the int8 tensors and weights,
so training and quantization agree.

    student = prepare(model, example)              # the trained float model; a copy of it is prepared
    for x, y in batches: ...                       # train as usual, at a low learning rate
    freeze_ranges(student)                         # for the last part of the training
    path, table = export(student, example, "fp32.onnx")
    int8, report = quantize(graph.load(path), recipe, table)

Not simulated: the rounding of biases (by half of s_x s_w), products of two activations, and dynamic quantization.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, one_line
from pipelines.graph import io as graph
from pipelines.graph import query
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.table import CalibrationTable, TensorRange
from pipelines.quantization.qdq.scales import LEAST_SCALE, activation_qparams
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
OPSET, DOMAIN = 18, "qat"
Example = Tensor | Sequence[Tensor]
Lowered = tuple[ir.Model, dict[str, int]]  # float graph, and `Range.index` by tensor name


class _Round(torch.autograd.Function):
    """Fake quantization: rounds to multiples of the scale; the gradient passes inside the range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: int, least: int, most: int) -> Tensor:
        q = torch.round(x / scale) + zero
        ctx.save_for_backward((q >= least) & (q <= most))
        return (q.clamp(least, most) - zero) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None, None, None, None


class _Mark(torch.autograd.Function):
    """The identity; an operator of an exported graph that marks the tensor of `Range.index`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: int) -> Tensor:
        return x.clone()

    @staticmethod
    def symbolic(g: Any, x: Any, index: int) -> Any:
        return g.op(f"{DOMAIN}::Mark", x, index_i=index).setType(x.type())


_round: Callable[[Tensor, Tensor, int, int, int], Tensor] = _Round.apply
_mark: Callable[[Tensor, int], Tensor] = _Mark.apply


class Range(nn.Module):
    """Observes one float tensor of any shape, and fake-quantizes it if the int8 model quantizes it (`active`).

    Args:
        index: Number of the range in its module.
        momentum: Momentum of the moving averages.
        symmetric: See `QuantRecipe.symmetric`.

    Attributes:
        ends: (low, high), moving averages of the extremes of each batch while training and not `frozen`: r += momentum
            (batch - r), starting from the first batch.
        count: Number of observed values.
        tensor: Name of the tensor in the float graph, "" if it occurs there not once.
    """

    ends: Tensor
    count: Tensor

    def __init__(self, index: int, momentum: float, symmetric: bool) -> None:
        super().__init__()
        self.index, self.momentum, self.symmetric = index, momentum, symmetric
        self.active = self.frozen = self.marking = False
        self.tensor = ""
        self.register_buffer("ends", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Observes `x` and returns it fake-quantized if `active`, in its shape and dtype."""
        if self.marking:
            return _mark(x, self.index)
        if self.training and not self.frozen:
            batch = torch.stack(torch.aminmax(x.detach()))
            self.ends += (self.momentum if self.count else 1.0) * (batch - self.ends)
            self.count += x.numel()
        if not self.active or not self.count:
            return x
        scale, zero = activation_qparams(self.range(), self.symmetric)
        return _round(x, x.new_tensor(float(scale)), int(zero), 0, 255)

    def range(self) -> TensorRange:
        """Returns the trained range."""
        low, high = self.ends.tolist()
        return TensorRange(low, high, low, high, int(self.count), "qat")


class Layer(nn.Module):
    """A convolution or linear layer with folded BatchNorm; weights are fake-quantized if `active`.

    W' = W g / sqrt(v + e), b' = (b - m) g / sqrt(v + e) + B, with running mean m and variance v, in training and
    inference. While training and not `frozen`, m and v follow the batches as in any BatchNorm; g and B are trained.

    Args:
        inner: Convolution or linear module.
        norm: BatchNorm module, or None.
        norm_path: Path of the BatchNorm in the original module.
        bits: Bits of a weight.

    Attributes:
        input_scale: If set, float32 [inputs, 1, ...]: factor per input that the graph to be quantized has in W'; the
            product is rounded.
    """

    input_scale: Tensor | None

    def __init__(self, inner: Any, norm: Any, norm_path: str, bits: int) -> None:
        super().__init__()
        self.inner, self.norm, self.norm_path, self.bits = inner, norm, norm_path, bits
        self.active = self.frozen = False
        self.register_buffer("input_scale", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the layer's output.

        Args:
            x: float32 [n, channels, ...] for a convolution, [..., features] for a linear layer.

        Returns:
            float32 [n, out channels, ...] or [..., out features].
        """
        if self.norm is not None and self.training and not self.frozen:
            with torch.no_grad():
                self.norm(self.inner(x))  # moves the running statistics
        weight, bias = self.folded()
        if self.active:
            scale = self.input_scale
            weight = rounded(weight, self.bits) if scale is None else rounded(weight * scale, self.bits) / scale
        compute: Callable[..., Tensor] = (
            nn.functional.linear if isinstance(self.inner, nn.Linear) else self.inner._conv_forward
        )
        return compute(x, weight, bias)

    def folded(self) -> tuple[Tensor, Tensor | None]:
        """Returns float weight and bias with folded BatchNorm."""
        weight, bias, norm = self.inner.weight, self.inner.bias, self.norm
        if norm is None:
            return weight, bias
        gain = torch.rsqrt(norm.running_var + norm.eps) * (1.0 if norm.weight is None else norm.weight)
        shift = (0.0 if bias is None else bias) - norm.running_mean
        bias = shift * gain + (0.0 if norm.bias is None else norm.bias)
        return weight * gain.reshape(-1, *[1] * (weight.dim() - 1)), bias


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Fake-quantizes a weight symmetrically per channel of axis 0, as `scales.weight_qparams`.

    Args:
        weight: float32 [channels, ...].
        bits: Bits of a weight.

    Returns:
        float32 of the same shape and device.
    """
    top = 2 ** (bits - 1) - 1
    reach = weight.detach().flatten(1).abs().amax(1)
    scale = reach / top
    scale = torch.where(scale >= LEAST_SCALE, scale, torch.ones_like(scale)).reshape(-1, *[1] * (weight.dim() - 1))
    return _round(weight, scale, 0, -top, top)


def prepare(
    module: nn.Module,
    example: Example,
    recipe: QuantRecipe | None = None,
    *,
    momentum: float = 0.05,
    lower: Callable[[fx.GraphModule], Lowered] | None = None,
    trace: Callable[[nn.Module], fx.GraphModule] = fx.symbolic_trace,
    ranges: Mapping[str, TensorRange] | None = None,
) -> fx.GraphModule:
    """Copies a module so that it computes as its int8 model will; the copy is trainable.

    Args:
        module: Trained float module; it is not changed.
        example: Inputs of the module, float32, first axis samples.
        recipe: Recipe that the exported model will be quantized by; its observer is not used.
        momentum: Momentum of the ranges.
        lower: Maps the copy to the float graph to be quantized and `Range.index` by tensor name; for a model that is
            not written by `export`.
        trace: Maps a module to its graph, if torch.fx does not trace it; modules other than torch's own may be single
            steps.
        ranges: Ranges of a calibration table of the float graph to start from, instead of the first batch's.

    Returns:
        The copy, in the training mode of `module`.

    Raises:
        RequestError: torch.fx cannot trace the module, or no tensor can be quantized.
    """
    recipe = recipe or QuantRecipe()
    try:
        traced = trace(copy.deepcopy(module))
    except Exception as error:  # whatever the module's own code does with proxies
        raise RequestError(
            f"torch.fx cannot trace {type(module).__name__} ({one_line(error)}); prepare a part of it"
        ) from error
    traced.graph.eliminate_dead_code()
    for submodule in traced.modules():
        if getattr(submodule, "inplace", False):
            setattr(submodule, "inplace", False)  # noqa: B010 a range stands before it
    with torch.no_grad():
        ShapeProp(traced.eval()).propagate(*_inputs(example))
    _wrap(traced, momentum, recipe)
    _activate(traced, lower(traced) if lower is not None else _frozen(traced, example), recipe, ranges or {})
    start_ranges(traced, ranges or {})
    return traced.train(module.training)


def start_ranges(module: nn.Module, tensors: Mapping[str, TensorRange]) -> None:
    """Starts from the ranges of a calibration table.

    Args:
        module: Prepared module; it is changed.
        tensors: Range by tensor name.
    """
    for submodule in module.modules():
        if isinstance(submodule, Range) and (bounds := tensors.get(submodule.tensor)) is not None and bounds.count:
            submodule.ends.copy_(torch.tensor([bounds.low, bounds.high]))
            submodule.count.fill_(bounds.count)


def freeze_ranges(module: nn.Module) -> None:
    """Freezes ranges and BatchNorm statistics for the last part of the training; weights still train.

    Args:
        module: Prepared module; it is changed.
    """
    for submodule in module.modules():
        if isinstance(submodule, Range | Layer):
            submodule.frozen = True


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the trained float weights as a state dict of the original module.

    Args:
        module: Prepared module.

    Returns:
        Tensor by name.
    """
    layers = {path: layer for path, layer in module.named_modules() if isinstance(layer, Layer)}
    moved = {f"{path}.inner": path for path in layers} | {
        f"{path}.norm": layer.norm_path for path, layer in layers.items()
    }
    ranges = {path for path, submodule in module.named_modules() if isinstance(submodule, Range)}
    state = {}
    for name, tensor in module.state_dict().items():
        path, dot, key = name.rpartition(".")
        if path not in ranges:
            state[f"{moved.get(path, path)}{dot}{key}"] = tensor
    return state


def export(module: nn.Module, example: Example, path: str | Path) -> tuple[Path, CalibrationTable]:
    """Writes the float graph and returns the calibration table of the trained ranges.

    BatchNorm is folded, the batch is dynamic, and inputs have the names of forward's arguments.
    `quantize(graph.load(path), recipe, table)` with the recipe of `prepare` has exactly the trained scales. The
    observer of the table is "minmax", the method of its tensors "qat".

    Args:
        module: Prepared and trained module.
        example: Inputs of the module.
        path: ONNX file to write.

    Returns:
        The path and the calibration table.

    Raises:
        RequestError: The module was not prepared, or has seen no batch in training mode.
    """
    trained = table(module, example)
    file = graph.save(_frozen(module, example)[0], path)
    return file, replace(trained, graph=graph.digest(graph.load(file)))


def table(module: nn.Module, example: Example) -> CalibrationTable:
    """Returns the calibration table of the trained ranges without a graph digest; see `export`.

    Args:
        module: Prepared and trained module.
        example: Inputs of the module.

    Returns:
        The calibration table.

    Raises:
        RequestError: The module was not prepared, or has seen no batch in training mode.
    """
    ranges = [submodule for submodule in module.modules() if isinstance(submodule, Range)]
    if not ranges or not all(int(span.count) for span in ranges):
        raise RequestError("the module has no trained ranges; call prepare, then feed it batches in training mode")
    first = next((tensor for tensor in _inputs(example) if tensor.is_floating_point() and tensor.numel()), None)
    samples = int(ranges[0].count) * len(first) // first.numel() if first is not None else 0
    return CalibrationTable("", "minmax", samples, "", {span.tensor: span.range() for span in ranges if span.tensor})


def completed(trained: CalibrationTable, model: ir.Model, samples: Iterable[Batch]) -> CalibrationTable:
    """Adds calibrated ranges for the tensors without a trained range.

    Args:
        trained: Table of the trained ranges.
        model: Float model.
        samples: Calibration batches, array [samples, ...] for every graph input.

    Returns:
        The calibration table of `model`.
    """
    seen = calibrate(model, samples, trained.observer)
    tensors = {name: replace(tensor, histogram=None) for name, tensor in seen.tensors.items()}
    return replace(trained, samples=seen.samples, tensors=tensors | trained.tensors)


def distillation_loss(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Computes T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over samples (Hinton et al. 2015).

    Args:
        student_logits: float32 [n, classes].
        teacher_logits: float32 [n, classes]; no gradient flows into it.
        temperature: T.

    Returns:
        Scalar loss.
    """
    student, teacher = (
        torch.log_softmax(logits / temperature, dim=-1) for logits in (student_logits, teacher_logits.detach())
    )
    return nn.functional.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def _inputs(example: Example) -> tuple[Tensor, ...]:
    """Returns the example's inputs as a tuple."""
    return (example,) if isinstance(example, Tensor) else tuple(example)


def _wrap(traced: fx.GraphModule, momentum: float, recipe: QuantRecipe) -> None:
    """Replaces layers, with the BatchNorm that alone reads them, by `Layer`s; adds a `Range` behind float tensors."""
    modules = dict(traced.named_modules())
    calls = Counter(node.target for node in traced.graph.nodes)
    for node in list(traced.graph.nodes):
        layer = modules.get(str(node.target))
        seen = isinstance(layer, LAYERS) and isinstance(traced.get_submodule(str(node.target)), Layer)
        if isinstance(layer, LAYERS) and not seen:
            after = next(iter(node.users))
            alone = len(node.users) == calls[node.target] == calls[after.target] == 1
            norm = modules.get(str(after.target)) if alone else None
            if folds := isinstance(norm, NORMS) and norm.track_running_stats:
                after.replace_all_uses_with(node)
                traced.graph.erase_node(after)
            bits = 7 if recipe.reduced_range else 8
            fused = Layer(layer, norm if folds else None, str(after.target) if folds else "", bits)
            traced.set_submodule(str(node.target), fused)
    traced.delete_all_unused_submodules()
    floats = [
        node
        for node in traced.graph.nodes
        if getattr(meta := node.meta.get("tensor_meta"), "dtype", None) == torch.float32 and meta.shape.numel()
    ]
    for index, node in enumerate(node for node in floats if node.op not in ("output", "get_attr")):
        traced.add_submodule(f"range_{index}", Range(index, momentum, recipe.symmetric))
        with traced.graph.inserting_after(node):
            ranged = traced.graph.call_module(f"range_{index}", (node,))
        node.replace_all_uses_with(ranged, delete_user_cb=lambda user, ranged=ranged: user is not ranged)
    traced.recompile()


def _activate(traced: fx.GraphModule, lowered: Lowered, recipe: QuantRecipe, start: Mapping[str, TensorRange]) -> None:
    """Activates the `Range`s and `Layer`s of the tensors and weights that the int8 model quantizes.

    The float graph is quantized with a distinct scale per tensor, which identifies the tensor in the int8 graph.
    """
    model, named = lowered
    below = {name for name, tensor in start.items() if tensor.low < 0}
    widths = {name: (i + 1) * 2.0**-20 for name, i in named.items()}
    lows = {name: -width / 2 if name in below else 0.0 for name, width in widths.items()}
    tensors = {
        name: TensorRange(lows[name], lows[name] + width, lows[name], lows[name] + width, 1)
        for name, width in widths.items()
    }
    scales = {float(activation_qparams(tensors[name])[0]): i for name, i in named.items()}
    int8, report = quantize(model, recipe, CalibrationTable(graph.digest(model), "minmax", 1, "", tensors))
    ranges = [submodule for submodule in traced.modules() if isinstance(submodule, Range)]
    for name, i in named.items():
        ranges[i].tensor = name
    floats: dict[int, set[str | None]] = {}  # range -> who reads its tensor unrounded
    for node in int8.graph:
        x = node.inputs[0] if node.op_type in ("QuantizeLinear", "DequantizeLinear") else None
        if x is not None and (scale := query.scalar(node.inputs[1])) in scales:
            ranges[scales[scale]].active = True  # by DequantizeLinear alone, where tables of its bytes are looked up
        if x is not None and scale in scales and node.op_type == "QuantizeLinear":
            readers = floats.setdefault(scales[scale], set())
            readers |= {reader.name for reader in x.consumers()} | ({None} if x.is_graph_output() else set())
    int8_operators = {operator.name for operator in report.operators if operator.precision == "int8"}
    producers = {named[str(value.name)]: node for node in model.graph for value in node.outputs if value.name in named}
    modules = dict(traced.named_modules())

    def parts(node: fx.Node) -> set[str | None]:
        """Names of the operators that `node` became; None for the end of the graph."""
        behind = modules.get(str(next(iter(node.users)).target)) if node.users else None
        if isinstance(behind, Range) and behind.index in producers:
            return _parts(producers[behind.index], named)
        return {None}

    for node in traced.graph.nodes:
        here = modules.get(str(node.target))
        if isinstance(here, Layer):
            here.active = not int8_operators.isdisjoint(parts(node))
        if isinstance(here, Range) and here.active:
            for user in [user for user in node.users if not floats.get(here.index, set()).isdisjoint(parts(user))]:
                user.replace_input_with(node, node.args[0])
    traced.recompile()
    if not any(span.active for span in ranges):
        raise RequestError(
            "nothing in the module can be int8; it needs Conv or Linear layers that the recipe does not keep float"
        )


def _parts(node: ir.Node, named: dict[str, int]) -> set[str | None]:
    """Returns the operators that compute the result of `node` from tensors in `named`."""
    inner = [x for x in node.inputs if x is not None and x.name not in named]
    return {node.name}.union(*(_parts(producer, named) for x in inner if (producer := x.producer()) is not None))


def _frozen(module: nn.Module, example: Example) -> Lowered:
    """Returns the float graph that torch exports, and {tensor: index of its `Range`}."""
    plain: Any = copy.deepcopy(module).eval()
    for name, submodule in list(plain.named_modules()):
        if isinstance(submodule, Layer):
            parameters = (None if tensor is None else nn.Parameter(tensor.detach()) for tensor in submodule.folded())
            submodule.inner.weight, submodule.inner.bias = parameters
            plain.set_submodule(name, submodule.inner)
        elif isinstance(submodule, Range):
            submodule.marking = True
    inputs = _inputs(example)
    names = [str(node.target) for node in plain.graph.nodes if node.op == "placeholder"][: len(inputs)]
    (results,) = next(node.args for node in plain.graph.nodes if node.op == "output")
    outputs = ["output"] if isinstance(results, fx.Node) else [f"output_{i}" for i in range(len(results))]
    stream: Any = io.BytesIO()
    called: Any = {
        "input_names": names,
        "output_names": outputs,
        "dynamic_axes": {name: {0: "batch"} for name in (*names, *outputs)},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo=False is deprecated, but needs no further package
        torch.onnx.export(plain, inputs, stream, dynamo=False, opset_version=OPSET, custom_opsets={DOMAIN: 1}, **called)
    model = ir.from_proto(onnx.load_from_string(stream.getvalue()))
    model.opset_imports.pop(DOMAIN, None)
    marks: list[tuple[ir.Value, int]] = []
    for node in list(model.graph):
        if node.domain == DOMAIN and (x := node.inputs[0]) is not None:
            marks.append((x, node.attributes.get_int("index", 0)))
            node.outputs[0].replace_all_uses_with(x, replace_graph_outputs=True)
            if x.is_graph_output() and not x.is_graph_input():
                x.name, x.type, x.shape = node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape
            model.graph.remove(node, safe=True)
    return model, {str(value.name): index for value, index in reversed(marks)}  # of two ranges of one tensor, the first
