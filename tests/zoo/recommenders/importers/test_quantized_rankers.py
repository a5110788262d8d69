"""Rankers without a family here, quantized with a schema: what moves, and how fast they are at one row and at many."""

import itertools
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import zoo
from zoo.cli.app import cli

ROWS = {"user": 60, "item": 40, "country": 8}
SIZE = 8
NUMBERS = ("age", "price")


class Fields(nn.Module):
    """Embeddings [n, fields, SIZE] of all ids, and the numbers."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(rows, SIZE) for name, rows in ROWS.items()})

    def forward(self, *columns):
        ids, numbers = columns[: len(ROWS)], torch.stack(columns[len(ROWS) :], 1)
        fields = torch.stack([table(column) for table, column in zip(self.tables.values(), ids, strict=True)], 1)
        return fields, torch.cat([fields.flatten(1), numbers], 1)


def mlp(*sizes):
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)))


class CompressedInteractions(nn.Module):
    """xDeepFM (Lian et al. 2018) as FuxiCTR writes it: products of all fields, convolved."""

    def __init__(self):
        super().__init__()
        count = len(ROWS)
        self.fields, self.head = Fields(), nn.Linear(16 + 16, 1)
        self.convs = nn.ModuleList([nn.Conv1d(count * count, 8, 1), nn.Conv1d(8 * count, 8, 1)])
        self.mlp = mlp(count * SIZE + len(NUMBERS), 32, 16)

    def forward(self, *columns):
        fields, joined = self.fields(*columns)
        layer, pooled = fields, []
        for conv in self.convs:
            layer = conv(torch.einsum("bhd,bmd->bhmd", layer, fields).flatten(1, 2))
            pooled.append(layer.sum(2))
        return self.head(torch.cat([*pooled, self.mlp(joined)], 1)).sigmoid()


class Experts(nn.Module):
    """MMoE (Ma et al. 2018) as torch-rechub writes it: two tasks over gated experts."""

    def __init__(self):
        super().__init__()
        width = len(ROWS) * SIZE + len(NUMBERS)
        self.fields, self.experts = Fields(), nn.ModuleList(mlp(width, 32, 16) for _ in range(3))
        self.gates = nn.ModuleList(nn.Sequential(nn.Linear(width, 3), nn.Softmax(1)) for _ in range(2))
        self.towers = nn.ModuleList(nn.Sequential(mlp(16, 8), nn.Linear(8, 1)) for _ in range(2))

    def forward(self, *columns):
        _, joined = self.fields(*columns)
        experts = torch.stack([expert(joined) for expert in self.experts], 1)
        pairs = zip(self.gates, self.towers, strict=True)
        return tuple(tower((gate(joined)[:, :, None] * experts).sum(1)).sigmoid() for gate, tower in pairs)


class Squashed(nn.Module):
    """Two labels by a network with operators that no family has."""

    def __init__(self):
        super().__init__()
        self.fields, self.head = Fields(), nn.Linear(len(ROWS) * SIZE + len(NUMBERS), 2)

    def forward(self, *columns):
        both = self.head(torch.erf(self.fields(*columns)[1])).sigmoid()
        return both[:, :1], both[:, 1:]


class EntireSpace(nn.Module):
    """ESMM (Ma et al. 2018) as torch-rechub writes it: a conversion after a click, a click, and both."""

    def __init__(self):
        super().__init__()
        width = len(ROWS) * SIZE + len(NUMBERS)
        self.fields = Fields()
        self.towers = nn.ModuleList(nn.Sequential(mlp(width, 16), nn.Linear(16, 1)) for _ in range(2))

    def forward(self, *columns):
        after_click, click = (tower(self.fields(*columns)[1]).sigmoid() for tower in self.towers)
        return after_click, click, after_click * click


class Joined(nn.Module):
    """The results of a network as one, [n, labels]."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, *columns):
        return torch.cat(self.network(*columns), 1)


@pytest.fixture
def log(rng, tmp_path):
    """Writes a log and its schema."""
    columns = {name: rng.zipf(1.4, 1500) % rows for name, rows in ROWS.items()}
    columns |= {"age": np.abs(rng.normal(size=1500)).round(4), "price": np.exp(rng.normal(size=1500)).round(4)}
    columns |= {"label": rng.integers(0, 2, 1500)}
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    schema = [
        *({"name": name, "kind": "category", "encoding": {"type": "id", "rows": ROWS[name]}} for name in ROWS),
        *({"name": name, "kind": "number", "encoding": {"type": "value"}} for name in NUMBERS),
        {"name": "label", "kind": "label"},
    ]
    (tmp_path / "schema.json").write_text(json.dumps({"columns": schema}))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("network", "outputs"), [(CompressedInteractions, ["p"]), (Experts, ["click", "purchase"])])
def test_what_moves_and_how_fast_it_is_at_one_row_and_at_many(log, network, outputs):
    torch.manual_seed(0)
    names = [*ROWS, *NUMBERS]
    example = tuple(torch.zeros(2, dtype=torch.int64 if name in ROWS else torch.float32) for name in names)
    axes = {name: {0: "batch"} for name in names + outputs}
    options = {"input_names": names, "output_names": outputs, "dynamic_axes": axes, "opset_version": 17}
    torch.onnx.export(network().eval(), example, str(log / "ranker.onnx"), dynamo=False, **options)
    command = ["quantize", log / "ranker.onnx", "--schema", log / "schema.json", "--data", log / "log.csv"]
    command += ["--output-node", outputs[0], "-o", log / "ranker", "--json"]
    done = CliRunner().invoke(cli, [*map(str, command)])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["family"] == "ranker" and 0 < report["probability"]["largest"] < 0.005
    summary = report["summary"]
    assert summary["many"] == 512 and summary["engine"] in summary["speed"].keys() & summary["speed_of_many"].keys()
    assert "x in " in summary["line"] and "(1 sample)" in summary["line"] and "(512 samples)" in summary["line"]
    speeds = [summary[key][summary["engine"]] for key in ("speed", "speed_of_many")]
    if not summary["as_opened"]:  # it runs natively
        assert ("SLOWER THAN FLOAT" in done.stderr) is (max(speeds) < 0.95)


@pytest.mark.parametrize(
    ("network", "joined", "family"),
    [
        *((Experts, joined, "mmoe") for joined in (False, True)),
        *((Squashed, joined, "ranker") for joined in (False, True)),
        (EntireSpace, True, "esmm"),
    ],
)
def test_a_ranker_of_two_labels_is_served_from_raw_rows(log, network, joined, family):
    torch.manual_seed(0)
    names, outputs = [*ROWS, *NUMBERS], ["both"] if joined else ["purchase", "label"]
    example = tuple(torch.zeros(2, dtype=torch.int64 if name in ROWS else torch.float32) for name in names)
    axes = {name: {0: "batch"} for name in names + outputs}
    options = {"input_names": names, "output_names": outputs, "dynamic_axes": axes, "opset_version": 17}
    made = network()
    torch.onnx.export((Joined(made) if joined else made).eval(), example, log / "ranker.onnx", dynamo=False, **options)
    schema = json.loads((log / "schema.json").read_text())
    schema["columns"].append({"name": "purchase", "kind": "label"})
    (log / "schema.json").write_text(json.dumps(schema))
    rows = [{**dict.fromkeys(ROWS, str(i)), "age": "0.5", "price": f"1.2{i}"} for i in range(1, 5)]
    arrays = [torch.tensor([float(row[name]) for row in rows]) for name in names]
    arrays = [x.long() if name in ROWS else x for name, x in zip(names, arrays, strict=True)]
    with torch.no_grad():
        first, second = (result.ravel().numpy() for result in made.eval()(*arrays)[-2:])
    expected = {"label": first if joined else second, "purchase": second if joined else first}
    folder = log / "ranker"
    zoo.freeze("ranker", from_onnx=log / "ranker.onnx", schema=log / "schema.json", data=log / "log.csv", output=folder)
    structure = json.loads((folder / "card.json").read_text())["structure"]
    assert structure["family"] == family, structure
    for precision, tolerance in (("fp32", 2e-6), ("int8", 0.005)):
        results = zoo.pipeline(folder, precision, "onnxruntime")(rows)
        assert list(results[0]) == ["probability_label", "label", "probability_purchase", "purchase"]
        for label, probabilities in expected.items():
            scores = [result[f"probability_{label}"] for result in results]
            np.testing.assert_allclose(scores, probabilities, atol=tolerance)
