"""Quantization-aware training: the trained torch model and the int8 ONNX model that its ranges make compute the
same.
"""

from dataclasses import replace

import numpy as np
import pytest
from helpers.rewriting import run

from pipelines.core.errors import RequestError
from pipelines.graph import io, query
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.qdq.scales import activation_qparams, weight_qparams
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

torch = pytest.importorskip("torch", reason="needs the train extra")
from torch import nn  # noqa: E402

from pipelines.quantization.training import qat  # noqa: E402

RECIPE = QuantRecipe(observer="minmax")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


class Small(nn.Module):
    """Conv-BN-ReLU, depthwise Conv-BN-ReLU6, a residual addition, a pool, Linear."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.narrow = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.last = nn.Linear(8, 5)

    def forward(self, image):
        x = self.first(image)
        x = torch.relu(x + self.narrow(self.deep(x)))
        return self.last(self.pool(x).flatten(1))


def images(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32))


def fit(module, steps=20, rate=1e-2, frozen=5):
    """Train on random data in place; ranges stand still for the last steps."""
    optimizer = torch.optim.SGD(module.parameters(), rate)
    labels = torch.arange(16) % 5
    module.train()
    for step in range(steps):
        if step == steps - frozen:
            qat.freeze_ranges(module)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(images(16, step)), labels).backward()
        optimizer.step()
    return module.eval()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(fake-quantized torch model, path of the float graph, table)."""
    torch.manual_seed(0)
    network = Small()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):  # not what a fresh one has
            nn.init.uniform_(layer.weight, 0.5, 2)
            nn.init.normal_(layer.bias)
    module = fit(qat.prepare(network, images(2), RECIPE))
    return module, *qat.export(module, images(2), tmp_path_factory.mktemp("qat") / "fp32.onnx")


def quantized_tensors(model):
    """{float tensor: QuantizeLinear node}; the tensor's name is that of its scale."""
    return {
        node.inputs[1].name.removesuffix(".scale"): node for node in model.graph if node.op_type == "QuantizeLinear"
    }


def fake_quantized(module, named, inputs):
    """{tensor: what its active range gave}."""
    observed, names = {}, {index: name for name, index in named.items()}

    def keep(each, _, result):
        if each.active:
            observed[names[each.index]] = result.detach().numpy()

    hooks = [layer.register_forward_hook(keep) for layer in module.modules() if isinstance(layer, qat.Range)]
    with torch.no_grad():
        logits = module(inputs)
    for hook in hooks:
        hook.remove()
    return observed, logits.numpy()


def test_torch_and_int8_onnx_agree_within_one_step(trained):
    module, path, table = trained
    int8, report = quantize(io.load(path), RECIPE, table)
    assert {op.type for op in report.operators if op.precision == "float"} <= {"Flatten"}
    wanted, logits = fake_quantized(module, qat._frozen(module, images(2))[1], images(32, seed=99))
    steps = quantized_tensors(int8)
    assert set(steps) == set(wanted) and len(steps) >= 6
    scales = {name: node.inputs[1].const_value.numpy() for name, node in steps.items()}
    zeros = {name: int(node.inputs[2].const_value.numpy()) for name, node in steps.items()}
    names = {name: node.outputs[0].name for name, node in steps.items()}
    int8.graph.outputs.extend(node.outputs[0] for node in steps.values())
    for optimized in (False, True):
        outputs = run(int8, optimized=optimized, image=images(32, seed=99).numpy())
        for name, fake in wanted.items():
            integers = np.rint(fake / scales[name]).astype(int) + zeros[name]
            assert np.ptp(integers) > 60, name
            difference = np.abs(
                outputs[names[name]].astype(int).reshape(fake.shape) - integers
            )  # a Flatten may stand between
            assert difference.max() <= 1, name
            assert np.mean(difference > 0) < 0.05, name
        # a step of the last layer's input in every feature, at the very most
        bound = max(scales.values()) * np.abs(module.last.inner.weight.detach().numpy()).sum(axis=1).max()
        assert np.abs(outputs["output"] - logits).max() <= bound / 4
    assert (
        np.abs(logits - run(io.load(path), image=images(32, seed=99).numpy())["output"]).max() > 1e-3
    )  # it does round


def test_ranges_and_scales_are_those_trained(trained, tmp_path):
    module, path, table = trained
    ranges = {layer.index: layer for layer in module.modules() if isinstance(layer, qat.Range)}
    named = qat._frozen(module, images(2))[1]
    assert table.tensors.keys() == named.keys()
    for name, index in named.items():
        assert [table.tensors[name].low, table.tensors[name].high] == ranges[index].ends.tolist()
    int8, _ = quantize(io.load(path), RECIPE, table)
    for name, node in quantized_tensors(int8).items():
        scale, zero = activation_qparams(ranges[named[name]].range())
        assert (node.inputs[1].const_value.numpy(), node.inputs[2].const_value.numpy()) == (scale, zero)
    assert CalibrationTable.load(table.save(tmp_path / "table.json")) == table
    assert table.samples == 15 * 16


@pytest.mark.parametrize("bits", [7, 8])
def test_weights_are_rounded_as_the_quantizer_does(bits):
    weight = torch.randn(6, 4, 3, 3)
    weight[2] = 0
    weight[3] *= 1e-30
    scale, quantized = weight_qparams(weight.numpy(), 0, bits)
    assert np.array_equal(qat.rounded(weight, bits).numpy(), scale.reshape(-1, 1, 1, 1) * quantized)


def test_the_exported_graph_is_the_float_model_with_batch_norm_folded():
    network = Small().eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.running_mean, layer.weight.data, layer.bias.data):
                tensor.normal_()
            layer.running_var.uniform_(0.5, 2)
    module = qat.prepare(network, images(2), RECIPE)
    assert not any(part.training for part in module.modules())
    with torch.no_grad():
        wanted = network(images(4)).numpy()
    model, _ = qat._frozen(module, images(2))
    layers = {"Conv": 3, "Relu": 2, "Clip": 1, "Add": 1, "GlobalAveragePool": 1, "Flatten": 1, "Gemm": 1}
    assert {name: count for name, count in query.op_counts(model).items() if name != "Constant"} == layers
    assert np.allclose(run(model, image=images(4).numpy())["output"], wanted, atol=1e-5)


def test_batch_norm_statistics_follow_the_batches_until_frozen():
    plain = Small().train()
    module = qat.prepare(plain, images(2), RECIPE)
    with torch.no_grad():
        plain.first(images(16))
        module(images(16))
    norm = module.get_submodule("first.0").norm
    assert torch.allclose(
        norm.running_mean, plain.first[1].running_mean, atol=0.02
    )  # the image is rounded, the weights are not
    qat.freeze_ranges(module)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.no_grad():
        module(images(16, seed=1))
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


class Residual(nn.Module):
    """What the first layer reads rounded, the addition after the second reads as it is."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


@pytest.mark.parametrize("recipe", [RECIPE, replace(RECIPE, symmetric=True, reduced_range=True)])
def test_only_those_read_rounded_values_that_do_so_in_the_int8_model(recipe, tmp_path):
    x = torch.randn(4, 5, 8)
    module = qat.prepare(Residual().train(), x, recipe)
    module(x)
    path, table = qat.export(module.eval(), x, tmp_path / "fp32.onnx")
    int8, report = quantize(io.load(path), recipe, table)
    assert [op.type for op in report.operators if op.precision == "int8"] == ["MatMul", "MatMul"]
    with torch.no_grad():
        assert np.abs(run(int8, x=x.numpy())["output"] - module(x).numpy()).max() < 1e-5


def test_gradients_pass_inside_the_range_only():
    quantizer = qat.Range(0, 0.05, False)
    quantizer.active = True
    quantizer(torch.tensor([-1.0, 2.0]))
    x = torch.tensor([-2.0, -0.9, 0.3, 1.9, 5.0], requires_grad=True)
    quantizer.eval()(x).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


def test_what_the_recipe_keeps_float_is_not_rounded():
    module = qat.prepare(Small(), images(2), replace(RECIPE, keep_float=("/last/.*",)))
    assert not module.get_submodule("last").active and module.get_submodule("first.0").active


def test_same_seeds_same_bytes(tmp_path):
    files = []
    for name in "ab":
        torch.manual_seed(1)
        module = fit(qat.prepare(Small(), images(2), RECIPE), steps=4, frozen=1)
        path, table = qat.export(module, images(2), tmp_path / name)
        files.append((path.read_bytes(), table.save(tmp_path / f"{name}.json").read_bytes()))
    assert files[0] == files[1]


def test_what_cannot_be_done_is_said_in_one_line(tmp_path):
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(RequestError, match="torch.fx cannot trace Branches"):
        qat.prepare(Branches(), images(2))
    with pytest.raises(RequestError, match="nothing in the module can be int8"):
        qat.prepare(nn.ReLU(), images(2))
    with pytest.raises(RequestError, match="no trained ranges"):
        qat.export(qat.prepare(Small(), images(2)), images(2), tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


def test_distillation_is_nothing_between_equals_and_scales_with_the_temperature():
    logits, other = torch.randn(4, 5), torch.randn(4, 5)
    assert abs(float(qat.distillation_loss(logits, logits, 3.0))) < 1e-6
    p, q = torch.softmax(other / 2, 1), torch.softmax(logits / 2, 1)
    assert torch.isclose(qat.distillation_loss(logits, other, 2.0), 4 * (p * (p / q).log()).sum(1).mean(), rtol=1e-5)


class Hard(nn.Module):
    """Two convolutions with one channel between them that is 300 times as large as the others, and is shrunk again by
    the second.
    """

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()
        )
        self.last = nn.Linear(16, 4)

    def forward(self, image):
        return self.last(self.body(image).mean((2, 3)))

    def harden(self):
        with torch.no_grad():
            for parameter in (self.body[1].weight, self.body[1].bias):
                parameter[0] *= 300
            self.body[3].weight[:, 0] /= 300


def examples(count, seed):
    """Noise over one of four textures, which is the class."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, count)
    patterns = np.random.default_rng(7).standard_normal((4, 3, 3, 3))
    noise = random.standard_normal((count, 3, 8, 8))
    noise += 0.6 * np.tile(patterns[labels], (1, 1, 3, 3))[:, :, :8, :8]
    return torch.from_numpy(noise.astype(np.float32)), torch.from_numpy(labels)


def accuracy(logits, labels):
    return float((logits.argmax(1) == labels.numpy()).mean())


def test_training_gets_back_what_post_training_quantization_loses(tmp_path):
    network = Hard()
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 1e-2 if step < 110 else 1e-3
        x, y = examples(64, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    network.eval().harden()
    x, y = examples(1000, 1000)
    with torch.no_grad():
        fp32 = accuracy(network(x).numpy(), y)

    path, _ = qat.export(_seen(qat.prepare(network, x[:2], RECIPE), x[:1]), x[:2], tmp_path / "fp32.onnx")
    model = io.load(path)
    ptq = {}
    for observer in ("minmax", "auto"):
        int8, _ = quantize(model, RECIPE, calibrate(model, [{"image": examples(256, 500)[0].numpy()}], observer))
        ptq[observer] = accuracy(run(int8, image=x.numpy())["output"], y)

    student = qat.prepare(network, x[:2], RECIPE).train()
    optimizer = torch.optim.Adam(student.parameters(), 1e-2)
    for step in range(120):
        if step == 90:
            qat.freeze_ranges(student)
            optimizer.param_groups[0]["lr"] = 1e-3
        batch, _ = examples(64, 2000 + step)
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = network(batch)
        qat.distillation_loss(student(batch), wanted, 2.0).backward()
        optimizer.step()
    path, table = qat.export(student, x[:2], tmp_path / "qat.onnx")
    int8, _ = quantize(io.load(path), RECIPE, table)
    trained = accuracy(run(int8, image=x.numpy())["output"], y)
    lost = fp32 - max(ptq.values())
    assert fp32 > 0.9 and lost > 0.1
    assert trained > fp32 - lost / 2  # half of it, in a few seconds


def _seen(module, x):
    module.train()(x)
    return module.eval()
