"""What the tests of quantization-aware training share: the int8 model beside the network that was trained."""

import numpy as np
import onnx_ir as ir
import pytest

from helpers.rewriting import run
from pipelines.graph import query
from pipelines.quantization.qdq.scales import activation_qparams

torch = pytest.importorskip("torch", reason="needs the train extra")

from pipelines.quantization.training.qat import Range  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For what is trained once for all tests, too: another number of threads gives other sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bytes_of(student, *inputs):
    """({tensor: uint8 array that the student computes}, its first result)."""
    arrays = {}

    def keep(each, _, result):
        if each.active:
            scale, zero = activation_qparams(each.range())
            arrays[each.tensor] = (np.rint(result.numpy() / scale) + zero).astype(np.uint8)

    hooks = [module.register_forward_hook(keep) for module in student.modules() if isinstance(module, Range)]
    with torch.no_grad():
        results = student(*inputs)
    for hook in hooks:
        hook.remove()
    return arrays, (results[0] if isinstance(results, tuple) else results).numpy()


def layer_by_layer(int8, given, **feeds):
    """({tensor: (bytes that the int8 model makes, those of `given`)}, its outputs) where every operator reads bytes of
    `given`. feeds: the model's inputs.
    """
    cut, made = int8.clone(), {}
    read = {
        node.inputs[0]: node
        for node in cut.graph
        if node.op_type == "DequantizeLinear" and node.inputs[0].producer() is not None
    }
    for value, node in read.items():
        if value.name.endswith(".image.padded"):
            continue
        name, shape = (
            node.inputs[1].name.removesuffix(".scale").removesuffix(".strided"),
            query.dimensions(value)[1:],
        )
        if name not in given:  # a layer rounded by what a Relu behind it gives
            name = node.outputs[0].consumers()[0].outputs[0].name
        array = given[name]
        if not all(isinstance(size, int) for size in shape):
            shape = array.shape[1:]
        if array[0].size == 4 * np.prod(shape):  # a stride taken before the layer
            array = array[..., ::2, ::2]
        feeds[f"{value.name}.given"] = array.reshape(-1, *shape)  # a Flatten may stand between
        made[value.name] = name, array.reshape(-1, *shape)
        fed = ir.Value(name=f"{value.name}.given", type=ir.TensorType(ir.DataType.UINT8), shape=value.shape)
        value.replace_all_uses_with(fed)
        cut.graph.inputs.append(fed)
        cut.graph.outputs.append(value)
    outputs = run(cut, optimized=True, **feeds)
    return {name: (outputs[value], wanted) for value, (name, wanted) in made.items()}, outputs


def assert_same_bytes(found, given):
    """Every layer gives the student's bytes, but for a step here and there. found: see `layer_by_layer`."""
    assert found.keys() == given.keys()
    for name, (mine, wanted) in found.items():
        difference = np.abs(mine.astype(int) - wanted)
        assert difference.max() <= 1, name
        assert np.mean(difference > 0) < 0.05, name
