"""Writes short Fourier transforms as the products that they compute, as in LaMa's Fourier convolutions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, io, query
from pipelines.rewrites.driver import Rewrite

AXIS_INPUT = 20  # opset from which the axis is an input, and half a spectrum has an inverse
LONGEST = 128  # values of a transform; products of longer ones take as long as onnxruntime's transform


class DftToEinsum(Rewrite):
    """DFT(x)[.., n, d] = sum_kc x[.., k, c] F[k, c, n, d] over the axis k and the real and imaginary parts c.

    `EinsumToMatMul` makes it a MatMul. Forward and inverse, also of half a spectrum (onesided), cut or filled to a
    length. Scalars that x or the result is multiplied by or divided by, as for norm="ortho", are folded into F. Does
    not fire on axes of unknown or more than `LONGEST` values.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Replaces every such DFT of the main graph.

        Args:
            model: Model to change.

        Returns:
            Number of replaced operators.
        """
        taken, opset = query.used_names(model.graph), model.opset_imports.get("", io.OPSET)
        transforms = [node for node in list(model.graph) if query.is_op(node, "DFT")]
        return sum(self._replace(model.graph, node, opset, taken) for node in transforms)

    def _replace(self, graph: ir.Graph, dft: ir.Node, opset: int, taken: set[str]) -> bool:
        matrix, (x, *_) = _matrix(dft, opset), dft.inputs
        if matrix is None or x is None or x.shape is None:
            self.refuse(dft, f"its sizes are unknown, or it is longer than {LONGEST}")
            return False
        before, after = x.producer(), query.sole_user(dft.outputs[0])
        if before is not None and query.sole_user(x) is dft and (factor := _factor(before, before.inputs[0])):
            matrix, x = matrix * factor, before.inputs[0]
        nodes = [dft]
        if after is not None and (factor := _factor(after, dft.outputs[0])):
            matrix, nodes = matrix * factor, [dft, after]
        assert x is not None and x.shape is not None
        name, last = nodes[-1].outputs[0].name, len(x.shape) - 1
        axis = (_axis(dft, opset) or 0) % (last + 1)
        order = [*(i for i in range(last) if i != axis), axis, last]
        moved = edit.node("Transpose", [x], f"{name}.rows", dtype=x.dtype, taken=taken, perm=order)
        moved.outputs[0].shape = ir.Shape([x.shape[i] for i in order])
        letters = [chr(ord("a") + i) for i in range(last + 1)]
        rows = "".join(letters[i] for i in order)
        result = "".join([*letters[:axis], "y", *letters[axis + 1 : last], "z"])
        equation = f"{rows},{rows[-2:]}yz->{result}"
        inputs = [moved.outputs[0], edit.initializer(graph, f"{name}.matrix", matrix.astype(np.float32), taken)]
        graph.insert_before(dft, moved)
        edit.substitute(nodes, ir.node("Einsum", inputs, {"equation": equation}, name=dft.name))
        return True


def _factor(node: ir.Node, x: ir.Value | None) -> float | None:
    """The scalar that a node multiplies x by; None for another node."""
    if not query.is_op(node, "Mul", "Div") or x is None or x not in node.inputs or x.shape is None:
        return None
    divisor = query.is_op(node, "Div")
    others = [value for value in (node.inputs[1:] if divisor else node.inputs) if value is not x]
    scalar = query.scalar(others[0]) if len(others) == 1 and (query.rank(others[0]) or 0) <= len(x.shape) else None
    return 1 / scalar if divisor and scalar else scalar


def _axis(dft: ir.Node, opset: int) -> int | None:
    """The axis; None if it is computed."""
    if opset < AXIS_INPUT:
        return dft.attributes.get_int("axis", 1)
    if len(dft.inputs) < 3 or dft.inputs[2] is None:
        return -2
    axis = query.scalar(dft.inputs[2])
    return None if axis is None else int(axis)


def _matrix(dft: ir.Node, opset: int) -> NDArray[np.float64] | None:
    """F [values, 1 or 2, results, 1 or 2] by transforms of unit vectors; None if it is unknown or too large."""
    sizes, axis = query.dimensions(dft.inputs[0]) or [], _axis(dft, opset)
    inverse, onesided = (bool(dft.attributes.get_int(key, 0)) for key in ("inverse", "onesided"))
    half = onesided and inverse
    if axis is None or not 0 <= axis % max(len(sizes), 1) < len(sizes) - 1 or (half and opset < AXIS_INPUT):
        return None
    values, parts = sizes[axis], sizes[-1]
    if values is None or values > LONGEST or parts not in (1, 2) or (onesided and parts != 1 + inverse):
        return None
    own = 2 * (values - 1) if half else values
    length = query.scalar(dft.inputs[1]) if len(dft.inputs) > 1 and dft.inputs[1] is not None else own
    if length is None or not 0 < length <= LONGEST or (half and values != length // 2 + 1):
        return None
    units = np.eye(values * parts).reshape(-1, values, parts)
    spectrum = units[..., 0] + 1j * units[..., -1] * (parts - 1)
    transform = np.fft.irfft if half else np.fft.ifft if inverse else np.fft.fft
    y = transform(spectrum, int(length))[:, : int(length) // 2 + 1 if onesided and not inverse else None]
    results = np.stack([y.real, y.imag], -1) if y.dtype.kind == "c" else y[..., None]
    return np.asarray(results.reshape(values, parts, -1, results.shape[-1]), np.float64)
