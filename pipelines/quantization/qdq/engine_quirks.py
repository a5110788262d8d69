"""Workarounds for faults and gaps of engines: everything that the quantizer does for a single engine.

Every function rewrites a graph to an equivalent one, or returns a property of a graph. `QUIRKS` lists all workarounds,
also those in the modules of an engine, with the engine, the version where the fault was last seen, the test that fails
without the workaround, and the condition to remove it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.calibration.table import TensorRange
from pipelines.quantization.qdq.scales import dequantized_qparams

Strided = tuple[str, tuple[int, ...]]  # name of a tensor, strides


@dataclass(frozen=True)
class Quirk:
    """A fault or gap of an engine, and its workaround.

    Attributes:
        engine: Name of the engine.
        version: Version where the fault was last seen.
        fault: What the engine does wrongly, slowly or not at all.
        workaround: Dotted name of the function or method.
        test: Test that fails without the workaround.
        remove_when: Condition to remove the workaround.
    """

    engine: str
    version: str
    fault: str
    workaround: str
    test: str
    remove_when: str


def _here(function: str) -> str:
    return f"{__name__}.{function}"


QUIRKS = (
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="moves the strides of a 1x1 Conv between the uint8 tensor and its scale, computes it in float32",
        workaround=_here("subsample_before_pointwise_conv"),
        test="test_strided_pointwise_convolutions_run_in_int8",
        remove_when="executed() calls a strided 1x1 Conv u8 without it",
    ),
    Quirk(
        engine="onnxruntime",
        version="1.31",
        fault="fuses MatMul and Add into a Gemm before it looks for QDQ, and computes that Gemm in float32",
        workaround=_here("gemm_of_matmul_before_add"),
        test="test_a_matmul_before_an_add_runs_in_int8",
        remove_when="executed() calls a MatMul before an Add of a bias u8 without it",
    ),
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="transposes float32 where it finds a Transpose of uint8, and computes the MatMul behind it in float32",
        workaround=_here("dequantize_around_transpose"),
        test="test_a_product_behind_a_transpose_runs_in_int8",
        remove_when="executed() calls a MatMul behind a Transpose of uint8 u8 without it",
    ),
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="applies the per-channel scales of an int8 MatMul along another axis where a reduction drops its axes",
        workaround=_here("keep_reduced_axes"),
        test="test_products_without_bias_that_are_reduced",
        remove_when="a MatMul that is reduced with keepdims=0 keeps its SQNR without it",
    ),
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="adds the first channel's bias to all channels of an int8 Conv where a size of a dynamic shape is "
        "used as a value: it reads it off the tensor before the bias",
        workaround=_here("hide_sizes"),
        test="test_sizes_of_dynamic_shapes_cost_no_bias",
        remove_when="test_openvino_still_gives_all_channels_the_bias_of_the_first fails",
    ),
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="where any operator is int8 keeps float32 weights that are cast from int8 as int8 until it runs, and "
        "refuses some recurrent layers of such weights",
        workaround="pipelines.quantization.qdq.weight_only.quantize_weights",
        test="test_a_network_of_int8_layers_and_recurrent_ones",
        remove_when="OpenVINO compiles an Transpose of uint8 before an LSTM of weights that are one Cast and a Mul",
    ),
    Quirk(
        engine="onnxruntime",
        version="1.31",
        fault="has int8 kernels with a float32 output for Gemm and MatMul alone, not for Conv, Add, Mul, Concat, "
        "pools; nor for those before a Relu or Clip",
        workaround=_here("needs_output_qdq"),
        test="test_a_convolution_that_is_read_as_float_runs_in_int8",
        remove_when="executed() calls a Conv u8 whose output is read as float32",
    ),
    Quirk(
        engine="onnxruntime",
        version="1.31",
        fault="cannot run a Pad with axes that its layout optimizer moves behind an int8 Conv",
        workaround=_here("pad_all_axes"),
        test="test_a_pad_of_some_axes_runs",
        remove_when="onnxruntime runs a QDQ Conv before a Pad of two axes without it",
    ),
    Quirk(
        engine="onnxruntime",
        version="1.31",
        fault="aborts the process that opens a Squeeze, Transpose or Slice of a DequantizeLinear that a subgraph reads",
        workaround="pipelines.quantization.qdq.quantize_early.dequantize_before_subgraph",
        test="test_integers_are_moved_before_a_subgraph",
        remove_when="onnxruntime opens a DequantizeLinear, a Squeeze and an If that reads it",
    ),
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="knows no type of the results of ConcatFromSequence and Scan, and refuses a QuantizeLinear of them",
        workaround=_here("cast_untyped_results"),
        test="test_a_tensor_from_a_sequence_is_quantized",
        remove_when="OpenVINO compiles ConcatFromSequence and Scan before a QuantizeLinear without it",
    ),
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="computes HardSwish, SiLU and other functions behind a Q/DQ pair apart from the layer before it",
        workaround="pipelines.engines.openvino.functions.read_exact_results",
        test="test_it_is_part_of_the_layer",
        remove_when="executed() shows one Convert without it",
    ),
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="exports a compiled model that came from its cache as something that it cannot import",
        workaround="pipelines.engines.openvino.session.OpenVinoSession.exported",
        test="test_a_plan_made_again_can_be_opened",
        remove_when="export_model() of a model from CACHE_DIR can be imported",
    ),
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="compiles MatMuls behind each other into one subgraph for batches of up to 8 (with one thread): adds the "
        "first column's bias to all columns, or crashes (DCN v2); 9 samples and more are right",
        workaround="pipelines.engines.openvino.forms.correct_form",
        test="test_wrong_at_small_static_batch_sizes",
        remove_when="test_openvino_still_gives_all_columns_the_bias_of_the_first fails",
    ),
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="computes attention without a mask over dynamic shapes in a subgraph whose buffer has the size of the "
        "first batch: one key first, and results of 16 keys and more are wrong by orders of magnitude",
        workaround="pipelines.engines.openvino.forms.correct_form",
        test="test_attention_over_one_key_and_then_over_many",
        remove_when="test_openvino_still_keeps_buffers_of_one_key fails",
    ),
    Quirk(
        engine="openvino",
        version="2026.4",
        fault="writes an LSTM over [time, batch] of static time into its cache, and computes it wrongly from there for "
        "more than one series",
        workaround="pipelines.engines.openvino.forms.correct_form",
        test="test_a_recurrent_layer_from_the_cache",
        remove_when="test_openvino_still_caches_recurrent_layers_of_static_length_wrongly fails",
    ),
    Quirk(
        engine="onnxruntime",
        version="1.31",
        fault="on CPUs without VNNI sums u8 x s8 products in pairs of 16 bits, which saturate, unless told not to",
        workaround="pipelines.engines.onnxruntime.OnnxRuntimeSession._open",
        test="test_engines_agree_on_int8",
        remove_when="session.x64quantprecision is the default",
    ),
    Quirk(
        engine="onnxruntime",
        version="1.31",
        fault="with session.x64quantprecision cannot load int8 weights that several operators share",
        workaround="pipelines.engines.onnxruntime.OnnxRuntimeSession._be_exact",
        test="test_shared_weights_without_vnni",
        remove_when="a session with session.x64quantprecision loads them",
    ),
)


def subsample_before_pointwise_conv(
    conv: ir.Node, pools: dict[Strided, ir.Value], ranges: dict[str, TensorRange], taken: set[str]
) -> bool:
    """Replaces the strides of a 1x1 Conv by a 1x1 MaxPool with these strides before it.

    On uint8 the MaxPool copies the values that the Conv needs.

    Args:
        conv: Operator.
        pools: MaxPools so far, by tensor and strides; new ones are added.
        ranges: Calibrated ranges; the new tensor's is added.
        taken: Names in use; new ones are added.

    Returns:
        Whether `conv` was such a Conv.
    """
    if conv.op_type != "Conv":
        return False
    x, weight = conv.inputs[:2]
    strides = tuple(conv.attributes.get_ints("strides", []))
    if x is None or weight is None or weight.shape is None or dequantized_qparams(x) is not None:
        return False
    auto_pad = conv.attributes.get_string("auto_pad", "NOTSET")
    padded = any(conv.attributes.get_ints("pads", [])) or auto_pad not in ("NOTSET", "VALID")
    if len(strides) != 2 or max(strides) == 1 or padded or weight.shape[2:] != (1, 1):
        return False
    key = (str(x.name), strides)
    if key not in pools:
        pool = edit.node(
            "MaxPool",
            [x],
            f"{x.name}.strided",
            dtype=ir.DataType.FLOAT,
            taken=taken,
            kernel_shape=[1, 1],
            strides=list(strides),
        )
        if x.shape is not None:
            sizes = zip(x.shape[2:], strides, strict=True)
            image = [-(-size // stride) if isinstance(size, int) else None for size, stride in sizes]
            pool.outputs[0].shape = ir.Shape([*x.shape[:2], *image])
        _graph(conv).insert_before(conv, pool)
        pools[key] = pool.outputs[0]
        ranges[str(pool.outputs[0].name)] = ranges[str(x.name)]
    conv.replace_input_with(0, pools[key])
    conv.attributes["strides"] = ir.AttrInt64s("strides", [1, 1])
    return True


def gemm_of_matmul_before_add(matmul: ir.Node) -> bool:
    """Turns a MatMul of a matrix and a constant matrix into a Gemm if only an Add reads it.

    Args:
        matmul: Operator.

    Returns:
        Whether it was such a MatMul.
    """
    if matmul.op_type != "MatMul":
        return False
    weight, reader = query.constant(matmul.inputs[1]), query.sole_user(matmul.outputs[0])
    if weight is None or weight.ndim != 2 or query.rank(matmul.inputs[0]) != 2:
        return False
    if reader is None or reader.op_type != "Add":
        return False
    matmul.op_type = "Gemm"
    return True


def dequantize_around_transpose(transpose: ir.Node, taken: set[str]) -> bool:
    """Rewrites DequantizeLinear(Transpose(q)) with the Transpose between Q/DQ pairs.

    Both engines make one Transpose of uint8 of either form.

    Args:
        transpose: Operator.
        taken: Names in use; new ones are added.

    Returns:
        Whether it was such a Transpose.
    """
    if transpose.op_type != "Transpose":
        return False
    x, y = transpose.inputs[0], transpose.outputs[0]
    dequantize = next((node for node in y.consumers() if node.op_type == "DequantizeLinear"), None)
    if x is None or dequantize is None or y.dtype != ir.DataType.UINT8:
        return False
    qparams = dequantize.inputs[1:]
    before = edit.node("DequantizeLinear", [x, *qparams], f"{x.name}.dequantized", dtype=ir.DataType.FLOAT, taken=taken)
    after = edit.node("QuantizeLinear", [y, *qparams], f"{y.name}.quantized", dtype=ir.DataType.UINT8, taken=taken)
    before.outputs[0].shape, after.outputs[0].shape, y.type = x.shape, y.shape, ir.TensorType(ir.DataType.FLOAT)
    y.replace_all_uses_with(after.outputs[0], replace_graph_outputs=True)
    after.replace_input_with(0, y)
    transpose.replace_input_with(0, before.outputs[0])
    _graph(transpose).insert_before(transpose, before)
    _graph(transpose).insert_after(transpose, after)
    return True


def keep_reduced_axes(reduction: ir.Node, taken: set[str]) -> ir.Node | None:
    """Lets a reduction of an int8 MatMul keep its axes, and adds a Squeeze that drops them.

    Args:
        reduction: Operator.
        taken: Names in use; new ones are added.

    Returns:
        The Squeeze, or None if the operator is no such reduction.
    """
    if not reduction.op_type.startswith("Reduce"):
        return None
    x, y = reduction.inputs[0], reduction.outputs[0]
    product = query.producer(x)
    if product is None or product.op_type != "MatMul" or _op_type(product.inputs[1]) != "DequantizeLinear":
        return None
    axes = (
        query.constant(reduction.inputs[1])
        if len(reduction.inputs) > 1
        else np.array(reduction.attributes.get_ints("axes", []), np.int64)
    )
    if axes is None or not axes.size or reduction.attributes.get_int("keepdims", 1) != 0:
        return None
    graph = _graph(reduction)
    dropped = edit.initializer(graph, f"{y.name}.axes", axes.astype(np.int64), taken)
    squeeze = edit.node("Squeeze", [y, dropped], f"{y.name}.squeezed", dtype=ir.DataType.FLOAT, taken=taken)
    reduction.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)
    squeeze.outputs[0].shape, y.shape = y.shape, None
    y.replace_all_uses_with(squeeze.outputs[0], replace_graph_outputs=True)
    squeeze.replace_input_with(0, y)
    y.name, squeeze.outputs[0].name = squeeze.outputs[0].name, y.name
    graph.insert_after(reduction, squeeze)
    return squeeze


def hide_sizes(graph: ir.Graph, taken: set[str]) -> set[str]:
    """Inserts a Max with 0 behind the sizes that a graph of dynamic shapes computes with.

    OpenVINO takes a size from the first tensor that has it and whose shape is read. Its ONNX frontend reads the shape
    of every Conv with a bias before the bias is added. If that reader stays, and the Conv is int8 with a quantized
    result, all channels get the bias of the first. Behind the Max, OpenVINO does not recognize a value as a size. The
    frontend then finds the sizes that it reads for recurrent layers at the graph's inputs: each input gets a Reshape to
    its own shape, which is read first. Sizes of tensors of rank 1 do not change.

    Args:
        graph: QDQ graph; it is changed.
        taken: Names in use; new ones are added.

    Returns:
        Names of the added nodes.
    """
    dynamic = [value for value in graph.inputs if query.static_shape(value) is None]
    if not dynamic or not any(map(_biased_int8, graph)):
        return set()
    added: list[ir.Node] = []
    zero: ir.Value | None = None
    for shape in [node for node in graph if node.op_type == "Shape" and not _hidden(node)]:
        zero = zero or edit.initializer(graph, "hidden.zero", np.zeros(1, np.int64), taken)
        added += _hide(shape, zero, taken)
    if any(node.op_type in _FRONTEND_READS_SIZES for node in graph):
        for value in [candidate for candidate in dynamic if not any(map(_to_own_shape, candidate.consumers()))]:
            added += _reshape_to_own_shape(graph, value, taken)
    return {str(node.name) for node in added}


_FRONTEND_READS_SIZES = ("LSTM", "GRU", "RNN", "EyeLike")


def _biased_int8(node: ir.Node) -> bool:
    """Whether a node is a convolution of int8 weights with a bias."""
    biased = node.op_type in ("Conv", "ConvTranspose") and len(node.inputs) > 2 and node.inputs[2] is not None
    return biased and _op_type(node.inputs[1]) == "DequantizeLinear"


def _hidden(shape: ir.Node) -> bool:
    """Whether only Reshapes to a shape and Max read the output of a Shape."""
    y = shape.outputs[0]
    return y.is_graph_output() or all(node.op_type == "Max" or _to_own_shape(node) for node in y.consumers())


def _to_own_shape(node: ir.Node) -> bool:
    """Whether a node is a Reshape of a tensor to the shape that it has."""
    if node.op_type != "Reshape" or node.inputs[1] is None:
        return False
    shape = node.inputs[1].producer()
    return shape is not None and shape.op_type == "Shape" and shape.inputs[0] is node.inputs[0]


def _hide(shape: ir.Node, zero: ir.Value, taken: set[str]) -> list[ir.Node]:
    """A Max with 0 behind a Shape, then a Slice where it was to give some sizes only: the nodes added."""
    graph, y = _graph(shape), shape.outputs[0]
    hidden = edit.node("Max", [y, zero], f"{y.name}.hidden", dtype=ir.DataType.INT64, taken=taken)
    added = [hidden]
    bounds = [shape.attributes.get_int("start", 0), shape.attributes.get_int("end", np.iinfo(np.int64).max)]
    if bounds != [0, np.iinfo(np.int64).max]:
        for key in ("start", "end"):
            shape.attributes.pop(key, None)
        places = [edit.initializer(graph, f"{y.name}.bound", np.array([bound], np.int64), taken) for bound in bounds]
        name = f"{y.name}.part"
        added.append(edit.node("Slice", [hidden.outputs[0], *places], name, dtype=ir.DataType.INT64, taken=taken))
    else:
        hidden.outputs[0].shape = y.shape
    y.replace_all_uses_with(added[-1].outputs[0])
    hidden.replace_input_with(0, y)
    if len(added) > 1:
        added[-1].outputs[0].shape, y.shape = y.shape, None
    graph.insert_after(shape, added)
    return added


def _reshape_to_own_shape(graph: ir.Graph, value: ir.Value, taken: set[str]) -> list[ir.Node]:
    """A Reshape of a graph's input to its own shape, which all others read then: the nodes added."""
    shape = edit.node("Shape", [value], f"{value.name}.shape", dtype=ir.DataType.INT64, taken=taken)
    same = edit.node("Reshape", [value, shape.outputs[0]], f"{value.name}.same", dtype=value.dtype, taken=taken)
    same.outputs[0].shape = value.shape
    value.replace_all_uses_with(same.outputs[0])
    shape.replace_input_with(0, value)
    same.replace_input_with(0, value)
    first = next(iter(graph))
    graph.insert_before(first, [shape, same])
    return [shape, same]


def pad_all_axes(pad: ir.Node, taken: set[str]) -> set[str]:
    """Rewrites a Pad of some axes (input `axes`) as a Pad of all axes, with 0 for the others.

    Args:
        pad: Operator.
        taken: Names in use; new ones are added.

    Returns:
        Names of the added nodes.
    """
    axes = query.constant(pad.inputs[3]) if pad.op_type == "Pad" and len(pad.inputs) > 3 else None
    rank = query.rank(pad.inputs[0]) or query.rank(pad.outputs[0])
    if axes is None or not rank or pad.inputs[1] is None:
        return set()
    graph, count = _graph(pad), axes.size
    places = np.full(2 * rank, 2 * count)  # of every begin and end in the widths, behind which a 0 is appended
    for position, axis in enumerate(axes.ravel()):
        places[axis % rank], places[rank + axis % rank] = position, count + position
    widths, added, stem = query.constant(pad.inputs[1]), list[ir.Node](), f"{pad.outputs[0].name}.pads"
    if widths is not None:
        whole = edit.initializer(graph, stem, np.append(widths.ravel(), 0)[places].astype(np.int64), taken)
    else:
        zero = edit.initializer(graph, f"{stem}.zero", np.zeros(1, np.int64), taken)
        index = edit.initializer(graph, f"{stem}.places", places, taken)
        int64 = ir.DataType.INT64
        added.append(edit.node("Concat", [pad.inputs[1], zero], f"{stem}.some", dtype=int64, taken=taken, axis=0))
        added.append(edit.node("Gather", [added[0].outputs[0], index], stem, dtype=int64, taken=taken))
        graph.insert_before(pad, added)
        whole = added[-1].outputs[0]
    pad.replace_input_with(1, whole)
    pad.resize_inputs(3 if pad.inputs[2] is not None else 2)
    return {str(node.name) for node in added}


def cast_untyped_results(node: ir.Node, taken: set[str]) -> set[str]:
    """Inserts Casts to float32, which change nothing, behind ConcatFromSequence, and between Scan and a QuantizeLinear.

    Args:
        node: Operator.
        taken: Names in use; new ones are added.

    Returns:
        Names of the added nodes.
    """
    kind, added = ir.DataType.FLOAT, set()
    for y in node.outputs if node.op_type in ("ConcatFromSequence", "Scan") else ():
        everywhere = node.op_type == "ConcatFromSequence"  # OpenVINO knows no type of what is computed from it, either
        readers = [(reader, index) for reader, index in y.uses() if everywhere or reader.op_type == "QuantizeLinear"]
        if not query.is_float(y) or not readers:
            continue
        cast = edit.node("Cast", [y], f"{y.name}.typed", dtype=kind, taken=taken, to=int(kind))
        cast.outputs[0].shape = y.shape
        for reader, position in readers:
            reader.replace_input_with(position, cast.outputs[0])
        _graph(node).insert_after(node, cast)
        added.add(str(cast.name))
    return added


def needs_output_qdq(node: ir.Node) -> bool:
    """Returns whether an int8 operator needs a Q/DQ pair on its output even if all readers are float32.

    Args:
        node: Int8 operator.
    """
    reader = query.sole_user(node.outputs[0])
    return node.op_type not in ("Gemm", "MatMul") or (reader is not None and reader.op_type in ("Relu", "Clip"))


def _op_type(x: ir.Value | None) -> str:
    """Operator type of the producer, "" for a graph input or a constant."""
    producer = query.producer(x)
    return "" if producer is None else producer.op_type


def _graph(node: ir.Node) -> ir.Graph:
    """The main graph that `node` stands in."""
    assert isinstance(node.graph, ir.Graph)
    return node.graph
