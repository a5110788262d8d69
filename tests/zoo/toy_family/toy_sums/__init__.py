"""A family outside the tree, as small as one can be: the sum of the absolute values of eight numbers."""

from dataclasses import asdict, dataclass

import numpy as np

from pipelines.models.family import Family, Freezable, Reported, RunOption, Trainable


@dataclass(frozen=True)
class SumConfig:
    """Settings of a training."""

    hidden: int = 64
    seed: int = 0


class SumFamily(Family, Trainable, Freezable, Reported):
    """Least squares on a layer of random hyperplanes: seconds of numpy."""

    def train_config(self):
        return SumConfig()

    def train(self, data, output, *, config, resume=False, start_from=None, on_error="raise"):
        from pipelines.core.files import write_json
        from toy_sums.pipeline import read

        numbers, labels = read(data)
        first = np.random.default_rng(config.seed).normal(size=(8, config.hidden)).astype(np.float32)
        hidden = np.maximum(numbers @ first, 0)
        second = np.linalg.lstsq(hidden, labels, rcond=None)[0].astype(np.float32)
        metrics = {"r2": r2(labels, hidden @ second)}
        output.mkdir(parents=True, exist_ok=True)
        np.savez(output / "model.npz", first=first, second=second[:, None])
        np.savez(output / "calibration.npz", numbers=numbers[:256])
        record = {"features": {"columns": 8}, "rows": len(labels), "metrics": metrics, "config": asdict(config)}
        write_json(output / "train.json", record)
        return metrics

    def freeze(self, folder):
        import onnx

        text = "(float[batch,8] numbers) => (float[batch,1] sum) { h = MatMul(numbers, first) p = Relu(h) sum = MatMul(p, second) }"
        model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17]> sums {text}')
        for node, name in zip(model.graph.node, ("hidden", "relu", "sum"), strict=True):
            node.name = name
        with np.load(folder / "model.npz") as weights:
            model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
        onnx.save(model, folder / "fp32.onnx")
        return {"nodes": len(model.graph.node)}

    def passes(self, preprocessing):
        from pipelines.rewrites.shared import SHARED

        return [rewrite() for rewrite in SHARED]

    def pipeline(self):
        from toy_sums.pipeline import SumPipeline

        return SumPipeline

    def evaluate(self, pipelines, data, on_error):
        from pipelines.analysis.metrics import against_fp32
        from toy_sums.pipeline import read

        numbers, labels = read(data)
        outputs = {name: pipeline.predict({"numbers": numbers})["sum"][:, 0] for name, pipeline in pipelines.items()}
        compared = against_fp32(
            outputs,
            lambda sums: {"r2": r2(labels, sums)},
            lambda fp32, other: {"difference": {"r2": r2(labels, other) - r2(labels, fp32)}},
        )
        return {"samples": len(labels), **compared}

    def report_sections(self):
        return self

    def sections(self, name):
        import zoo

        return f"`{name}`: {zoo.hub().card(name).description}"


def r2(labels, sums):
    """The share of the labels' variance that the sums explain."""
    return float(1 - np.square(labels - sums).sum() / np.square(labels - labels.mean()).sum())


FAMILY = SumFamily(
    name="toy-sums",
    title="Toy sums: the sum of the absolute values of eight numbers",
    task="sums",
    checkpoint="model.npz",
    run_options=(RunOption("digits", int, 2, "places after the point."),),
    summary="{sums:,} sums, the largest {largest:.1f}, {precision} in {engine}",
)
