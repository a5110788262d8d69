"""Encoders of texts from an imported folder to files of vectors and scores, on tiny random models."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from helpers import text_models
from helpers.text_models import TEXTS
from helpers.tiers import one_in

import zoo
from pipelines.core.errors import RequestError
from pipelines.engines.agreement import WrongResultsError
from pipelines.kernels import extension
from pipelines.models import line_pipeline
from zoo.texts import metrics
from zoo.texts.data import text_files, vector_files

PAIRS = list(zip(TEXTS, [*TEXTS[1:], "the end."], strict=True))


def folder_of(tmp_path, **options):
    """(a folder as transformers writes it, its model)."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder, text_models.write(folder, **options)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A sentence encoder, built up to int8."""
    path = tmp_path_factory.mktemp("encoder")
    folder, _ = folder_of(path)
    zoo.import_model(folder, path / "ours")
    texts = path / "texts.txt"
    texts.write_text("\n".join(TEXTS * 30))
    zoo.calibrate(path / "ours", str(texts), samples=16)
    zoo.build(path / "ours")
    return path / "ours"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A cross-encoder, built up to int8."""
    path = tmp_path_factory.mktemp("reranker")
    folder, _ = folder_of(path, labels=1)
    zoo.import_model(folder, path / "ours")
    pairs = path / "pairs.tsv"
    pairs.write_text("\n".join("\t".join(pair) for pair in PAIRS * 30))
    zoo.calibrate(path / "ours", str(pairs), samples=16)
    return path / "ours"


@pytest.mark.parametrize("kind", one_in(2, text_models.CONFIGS))
@pytest.mark.parametrize(("labels", "pooling", "normalize"), [(0, "mean", True), (0, "max", False), (2, "cls", False)])
def test_an_imported_model_computes_what_transformers_does(tmp_path, kind, labels, pooling, normalize):
    folder, model = folder_of(tmp_path, kind=kind, labels=labels, pooling=pooling, normalize=normalize)
    report = zoo.import_model(folder, tmp_path / "ours", format="cross-encoder" if labels else None)
    assert report["family"] == ("cross-encoder" if labels else "sentence-encoder")
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    texts = PAIRS if labels else TEXTS
    outputs = opened.compute_texts(texts if labels else [(text,) for text in texts])
    wanted = text_models.expected(model, texts, pooling, normalize)
    assert np.abs(outputs - wanted).max() < 1e-5 * max(np.abs(wanted).max(), 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_are_read_exactly(tmp_path, dtype):
    from zoo.texts.models import weights
    from zoo.texts.models.tensor_file import TensorFile

    folder, model = folder_of(tmp_path)
    model.to(dtype).save_pretrained(folder)
    tensors = TensorFile(folder / weights.FILE)
    for name, tensor in model.state_dict().items():
        assert np.array_equal(tensors[name], tensor.float().numpy()), name


def test_bfloat16_is_read_where_nothing_else_has_registered_it(tmp_path):
    folder, model = folder_of(tmp_path)
    model.to(torch.bfloat16).save_pretrained(folder)
    code = "import sys; from pathlib import Path; from zoo.texts.models.tensor_file import TensorFile\n"
    code += "for each in TensorFile(Path(sys.argv[1])).values(): assert each.dtype == 'float32'"
    subprocess.run([sys.executable, "-c", code, str(folder / "model.safetensors")], check=True)


@pytest.mark.usefixtures("openvino")
def test_int8_is_near_fp32_in_every_engine(encoder):
    fp32 = zoo.pipeline(encoder, "fp32").compute_texts([(text,) for text in TEXTS])
    for engine in ("native", "onnxruntime", "openvino"):
        opened = zoo.pipeline(encoder, "int8", engine)
        assert opened.engine == engine
        assert (fp32 * opened.compute_texts([(text,) for text in TEXTS])).sum(axis=1).min() > 0.9, (
            engine
        )  # of random weights
    assert "native" not in zoo.info(encoder)  # it named the limits of image networks


@pytest.mark.skipif(not extension.isas(), reason="needs the native kernels")
@pytest.mark.parametrize("wrong", [("int8.onnx",), ("int8.onnx", "rewritten.onnx")])
def test_native_code_far_from_int8_in_onnxruntime_is_compared_with_the_float_model(encoder, monkeypatch, wrong):
    compared = []

    def validate(model, *batches):
        compared.append(model.reference.name)
        if compared[-1] in wrong:
            raise WrongResultsError("they differ; use onnxruntime")

    monkeypatch.setattr(line_pipeline, "validate", validate)
    opened = zoo.pipeline(encoder, "int8")
    opened.compute_texts([("a text",)])
    assert compared == ["int8.onnx", "rewritten.onnx"]
    assert opened.engine == ("onnxruntime" if "rewritten.onnx" in wrong else "native")


@pytest.mark.parametrize(("kind", "labels"), one_in(3, itertools.product(text_models.CONFIGS, (1, 2))))
def test_a_calibrated_reranker_of_any_kind_runs_natively(tmp_path, kind, labels):
    folder, _ = folder_of(tmp_path, kind=kind, labels=labels)
    zoo.import_model(folder, tmp_path / "ours", format="cross-encoder")
    (tmp_path / "pairs.tsv").write_text("\n".join("\t".join(pair) for pair in PAIRS * 10))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "pairs.tsv"), samples=16)
    opened = zoo.pipeline(tmp_path / "ours", "int8")
    assert opened.engine == "native"
    exact = zoo.pipeline(tmp_path / "ours", "fp32").compute_texts(PAIRS)
    assert np.abs(opened.compute_texts(PAIRS) - exact).max() < 0.15


@pytest.mark.skipif(not extension.isas(), reason="needs the native kernels")
def test_native_code_loads_nothing_that_reads_graphs(encoder):
    code = "import sys, zoo; zoo.pipeline(sys.argv[1], engine='native')('a text'); print(*sys.modules)"
    for _ in range(2):  # the first time the graph is read
        done = subprocess.run([sys.executable, "-c", code, encoder], capture_output=True, text=True, check=True)
    assert {"onnx", "onnx_ir", "onnxruntime", "openvino", "sympy", "requests", "torch"} & set(
        done.stdout.split()
    ) == set()


def test_names_of_no_files_are_no_texts(encoder, reranker, tmp_path):
    from click.testing import CliRunner

    from zoo.cli.app import cli

    texts, missing = tmp_path / "texts.txt", tmp_path / "missing.txt"
    texts.write_text("the cat\n")
    for model in (encoder, reranker):
        for names in ([str(missing)], [str(missing), str(missing)]):
            result = CliRunner().invoke(cli, ["run", str(model), *names, "-o", str(tmp_path / "v.jsonl")])
            assert isinstance(result.exception, RequestError), names
            assert str(result.exception).startswith(f"found no file {missing}")
    with pytest.raises(RequestError, match=f"found no file {missing}"):
        zoo.run(encoder, [str(texts), str(missing)], tmp_path / "v.jsonl")
    assert not (tmp_path / "v.jsonl").exists()


def test_half_a_surrogate_pair_is_a_fault_of_its_row(encoder, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "the cat"}\n{"text": "bad \\ud83d"}\n')
    report = zoo.run(encoder, tmp_path / "t.jsonl", tmp_path / "v.npy")
    assert (report["texts"], report["skipped"]) == (1, 1)
    with pytest.raises(RequestError, match="text 1 holds half a surrogate pair"):
        zoo.pipeline(encoder)(["\ud800 x"])


def test_what_is_not_looked_at_counts_as_cut(encoder, tmp_path):
    (tmp_path / "t.txt").write_text("the cat" + " " * 1_000_000 + "sat\nthe cat" + " " * 1_000_000 + "\nthe cat sat\n")
    assert zoo.run(encoder, tmp_path / "t.txt", tmp_path / "v.npy")["cut"] == 1


def test_the_pipeline_takes_texts_and_padded_arrays(encoder):
    opened = zoo.pipeline(encoder)
    results = opened(TEXTS)
    assert [result["embedding"].shape for result in results] == [(32,)] * len(TEXTS)
    assert np.array_equal(opened(TEXTS[2])[0]["embedding"], results[2]["embedding"])
    batch = opened.preprocess(TEXTS)
    with pytest.raises(RequestError, match="attention_mask is not 1"):
        opened.predict({**batch, "attention_mask": batch["attention_mask"][:, ::-1].copy()})
    with pytest.raises(RequestError, match="found 64 in input_ids"):
        opened.predict({**batch, "input_ids": np.full_like(batch["input_ids"], 64)})
    with pytest.raises(RequestError, match="text 2 is empty"):
        opened(["a", " "])


def test_run_keeps_rows_counts_what_is_none_and_cuts_what_is_long(encoder, tmp_path):
    lines = [b"the cat", b"", b"\xff\xfe", b"a" * 1_000_000, b"\x00\x07", b"the \x07 zoo", b"cat " * 300, b"zoo"]
    (tmp_path / "texts.txt").write_bytes(b"\r\n".join(lines))
    report = zoo.run(encoder, str(tmp_path / "texts.txt"), tmp_path / "v.npy")
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.shape == (len(lines), 32) and vectors.dtype == np.float32
    assert [i for i, row in enumerate(vectors) if not row.any()] == [1, 2]
    assert (report["texts"], report["skipped"], report["cut"]) == (
        6,
        2,
        2,
    )  # the million letters are not looked at to their end
    with pytest.raises(RequestError, match="line 2 is empty"):
        zoo.run(encoder, str(tmp_path / "texts.txt"), tmp_path / "w.npy", on_error="raise")
    assert not (tmp_path / "w.npy").exists()


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet"])
def test_columns_are_read_by_name(encoder, tmp_path, form):
    path = tmp_path / f"texts.{form}"
    rows = [{"id": i, "body": text} for i, text in enumerate(TEXTS)]
    if form == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        mark = "\t" if form == "tsv" else ","
        cells = [["id", "body"], *([str(row["id"]), row["body"]] for row in rows)]
        quoted = [[f'"{cell}"' if "," in cell and form == "csv" else cell for cell in row] for row in cells]
        path.write_text("\n".join(mark.join(row) for row in quoted))
    zoo.run(encoder, str(path), tmp_path / "v.npy", column="body")
    wanted = zoo.pipeline(encoder).compute_texts([(text,) for text in TEXTS])
    assert np.array_equal(np.load(tmp_path / "v.npy"), wanted)
    with pytest.raises(RequestError, match="has the columns id, body; name 1 of them with --column"):
        zoo.run(encoder, str(path), tmp_path / "v.npy", column="text")


def test_vectors_in_every_format_and_dtype_are_the_same(encoder, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    exact = zoo.pipeline(encoder).compute_texts([(text,) for text in TEXTS])
    for dtype in vector_files.DTYPES:
        arrays = []
        for form in vector_files.FORMATS:
            path = tmp_path / f"v{form}"
            zoo.run(encoder, str(tmp_path / "texts.txt"), path, output_dtype=dtype)
            if form == ".npy":
                arrays.append(np.load(path))
            elif form == ".parquet":
                table = parquet.read_table(path)
                assert table["row"].to_pylist() == list(range(1, len(TEXTS) + 1))
                arrays.append(np.array(table["embedding"].to_pylist()))
            else:
                arrays.append(np.array([json.loads(line)["embedding"] for line in path.read_text().splitlines()]))
        assert all(np.array_equal(array.astype(arrays[0].dtype), arrays[0]) for array in arrays[1:]), dtype
        assert np.array_equal(arrays[0], vector_files.convert(exact, dtype))
    assert np.array_equal(np.unpackbits(vector_files.convert(exact, "binary"), axis=1)[:, :32], exact > 0)
    with pytest.raises(RequestError, match="unknown dtype"):
        zoo.run(encoder, str(tmp_path / "texts.txt"), tmp_path / "v.npy", output_dtype="int4")
    with pytest.raises(RequestError, match="cannot tell the format"):
        zoo.run(encoder, str(tmp_path / "texts.txt"), tmp_path / "v.txt")


def test_a_prompt_stands_before_each_text(encoder, tmp_path):
    (tmp_path / "texts.txt").write_text("cat\n")
    zoo.run(encoder, str(tmp_path / "texts.txt"), tmp_path / "v.npy", prompt="the ")
    assert np.array_equal(np.load(tmp_path / "v.npy"), zoo.pipeline(encoder).compute_texts([("the cat",)]))


def test_a_default_prompt_stands_before_each_text_wherever_it_comes_in(tmp_path):
    folder, model = folder_of(tmp_path)
    text_models.prompted(folder)
    zoo.import_model(folder, tmp_path / "ours")
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    (tmp_path / "texts.txt").write_text("cat\n")
    vectors = {"the cat": [opened(["cat"])[0]["embedding"], opened.compute_texts([("cat",)])[0]]}
    for prompt, text in (
        (None, "the cat"),
        ("passage", "a cat"),
        ("document", "cat"),
        ("", "cat"),
        ("yes ", "yes cat"),
    ):
        opened.run(tmp_path / "texts.txt", tmp_path / "v.npy", prompt=prompt)
        vectors.setdefault(text, []).append(np.load(tmp_path / "v.npy")[0])
    for text, arrays in vectors.items():
        assert np.abs(np.stack(arrays) - text_models.expected(model, [text])).max() < 1e-5, text
    wanted = text_models.tokenizer().encode("the cat").ids
    assert opened.calibration([("cat",)], 1)["input_ids"].tolist() == [wanted]


def test_raw_scores_are_of_the_run_that_asks_for_them_alone(reranker, tmp_path):
    opened = zoo.pipeline(reranker)
    wanted = opened(PAIRS)
    opened.run(PAIRS, tmp_path / "s.jsonl", raw=True)
    assert opened(PAIRS) == wanted


@pytest.mark.parametrize(
    ("where", "name"),
    [("sbert_ce_default_activation_function", "torch.nn.modules.activation.Tanh"), ("", "torch.nn.LogSigmoid")],
)
def test_a_reranker_with_another_activation_is_refused_by_its_name(tmp_path, where, name):
    folder, _ = folder_of(tmp_path, labels=1)
    if where:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, where: name}))
    else:
        text_models.prompted(folder, activation_fn=name)
    with pytest.raises(RequestError, match=f"its scores go through {name}; supported: Identity, Sigmoid"):
        zoo.import_model(folder, tmp_path / "ours")


def test_a_reranker_scores_pairs(reranker, tmp_path):
    lines = ["\t".join(pair) for pair in PAIRS] + ["alone", ""]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    report = zoo.run(reranker, str(tmp_path / "pairs.tsv"), tmp_path / "s.jsonl")
    assert (report["texts"], report["skipped"]) == (len(PAIRS), 2)
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(1, len(lines) + 1))
    wanted = [result["score"] for result in zoo.pipeline(reranker)(PAIRS)]
    assert [row["score"] for row in rows[: len(PAIRS)]] == pytest.approx(wanted, abs=1e-6)
    assert all(0 < score < 1 for score in wanted)


def test_evaluation_compares_precisions(encoder, reranker, tmp_path):
    (tmp_path / "sts.csv").write_text("".join(f'"{a}","{b}",{i}\n' for i, (a, b) in enumerate(PAIRS)))
    report = zoo.evaluate(encoder, str(tmp_path / "sts.csv"))
    assert report["samples"] == len(PAIRS) and report["difference"]["cosine"] > 0.9
    lowest, share = (report["difference"][key] for key in ("least_cosine", "cosine_below_99"))
    assert lowest <= report["difference"]["cosine"] and share <= 1 and (share > 0) == (lowest < 0.99)
    assert set(report["metrics"]["fp32"]) == {"spearman"} and set(report["kept"]) == set(vector_files.DTYPES[1:])
    ranked = "".join(f"{q}\t{d}\t{int(q == d)}\n" for q in TEXTS[:3] for d in TEXTS)
    (tmp_path / "ranked.tsv").write_text(ranked)
    for model in (encoder, reranker):
        report = zoo.evaluate(model, str(tmp_path / "ranked.tsv"))
        assert set(report["metrics"]["int8"]) == {"ndcg10", "mrr10"}
    assert zoo.evaluate(encoder, str(tmp_path / "ranked.tsv"))["metrics"]["fp32"]["mrr10"] == 1
    (tmp_path / "none.tsv").write_text("a\tb\tgood\n")
    with pytest.raises(RequestError, match="'good', expected a number"):
        zoo.evaluate(encoder, str(tmp_path / "none.tsv"))


def test_metrics_of_rankings_are_those_of_their_definitions():
    scores, gains = np.array([0.1, 0.9, 0.5]), np.array([3.0, 0.0, 1.0])
    ideal = 3 + 1 / np.log2(3)
    assert metrics.ndcg(scores, gains) == pytest.approx((1 / np.log2(3) + 3 / np.log2(4)) / ideal)
    assert metrics.reciprocal_rank(scores, gains) == 0.5
    assert np.isnan(metrics.ndcg(scores, np.zeros(3)))
    assert metrics.spearman(np.array([1.0, 2, 2, 4]), np.array([1.0, 3, 3, 9])) == pytest.approx(1)


def test_pairs_whose_texts_are_queries_with_quotes_are_kept(tmp_path):
    (tmp_path / "pairs.tsv").write_text('5" disk\tthe "cat\t1\n')
    (row,) = text_files.read_rows(str(tmp_path / "pairs.tsv"), 2, extra=1)
    assert row.texts == ('5" disk', 'the "cat', "1") and not row.error


@pytest.mark.parametrize("scored", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fine_tuning_goes_on_after_an_interruption_to_the_same_weights(tmp_path, scored, monkeypatch):
    from zoo.texts.training import train as training

    folder, _ = folder_of(tmp_path, labels=int(scored))
    zoo.import_model(folder, tmp_path / "ours")
    rows = [(*pair, str(i % 2)) if scored else pair for i, pair in enumerate(PAIRS * 4)]
    (tmp_path / "pairs.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    settings = {"batch_size": "4", "epochs": "2", "checkpoint_steps": "3", "learning_rate": "0.001"}
    zoo.finetune(tmp_path / "ours", str(tmp_path / "pairs.tsv"), tmp_path / "whole", settings=settings)
    fit = training._Trainer._loss

    def failing(self, *arguments):
        if self.step == 7:
            raise KeyboardInterrupt
        return fit(self, *arguments)

    monkeypatch.setattr(training._Trainer, "_loss", failing)
    with pytest.raises(KeyboardInterrupt):
        zoo.finetune(tmp_path / "ours", str(tmp_path / "pairs.tsv"), tmp_path / "cut", settings=settings)
    monkeypatch.undo()
    zoo.finetune(tmp_path / "ours", str(tmp_path / "pairs.tsv"), tmp_path / "cut", settings=settings, resume=True)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut", "ours")]
    assert weights[0] == weights[1] != weights[2]
    zoo.build(tmp_path / "cut")
    texts = PAIRS if scored else [("the cat",)]
    vectors = zoo.pipeline(tmp_path / "cut", "fp32", "onnxruntime").compute_texts(texts)
    zoo.import_model(tmp_path / "cut", tmp_path / "again")  # a folder as others write theirs
    assert np.array_equal(zoo.pipeline(tmp_path / "again", "fp32", "onnxruntime").compute_texts(texts), vectors)


def test_pairs_come_from_columns_by_name(tmp_path):
    folder, _ = folder_of(tmp_path)
    zoo.import_model(folder, tmp_path / "ours")
    rows = [{"id": i, "question": a, "answer": b, "how": i % 3} for i, (a, b) in enumerate(PAIRS * 2)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (tmp_path / "qa.csv").write_text("question,answer\n" + "".join(f'"{a}","{b}"\n' for a, b in PAIRS))
    from zoo.texts.training import train as training

    assert training.read_pairs(str(tmp_path / "qa.csv"), 0, "raise") == (PAIRS, None)
    pairs, labels = training.read_pairs(str(tmp_path / "t.parquet"), 0, "raise", ("question", "answer", "how"))
    assert pairs == PAIRS * 2 and labels.tolist() == [row["how"] for row in rows]
    from click.testing import CliRunner

    from zoo.cli.app import cli

    data = ["--data", str(tmp_path / "t.parquet"), "--column"]
    for verb, names in (("calibrate", "answer"), ("evaluate", "question,answer,how")):
        result = CliRunner().invoke(cli, [verb, str(tmp_path / "ours"), *data, names])
        assert result.exit_code == 0, result.output
    assert "recall of the ten nearest texts by float32" in result.output
    columns = ("question", "answer", "how")
    assert zoo.evaluate(tmp_path / "ours", str(tmp_path / "t.parquet"), columns=columns)["samples"] == len(rows)
    with pytest.raises(RequestError, match="--column requires a text encoder"):
        zoo.evaluate("mobilenet-v1-cifar10", str(tmp_path / "qa.csv"), columns=columns)


@pytest.mark.parametrize("label", [0, 3])
def test_an_evaluation_that_says_nothing_is_refused(encoder, tmp_path, label):
    (tmp_path / "t.tsv").write_text("".join(f"{a}\t{b}\t{label}\n" for a, b in PAIRS))
    with pytest.raises(RequestError, match="expected pairs of different similarity"):
        zoo.evaluate(encoder, str(tmp_path / "t.tsv"))
    (tmp_path / "r.tsv").write_text("".join(f"{q}\t{d}\t0\n" for q in TEXTS[:3] for d in TEXTS))
    with pytest.raises(RequestError, match="expected relevant texts among them"):
        zoo.evaluate(encoder, str(tmp_path / "r.tsv"))


def damaged(folder, what):
    """Spoil a folder as transformers writes it; what the import says of it."""
    config = json.loads((folder / "config.json").read_text())
    match what:
        case "no pooling":
            (folder / "1_Pooling" / "config.json").unlink()
            return r"no 1_Pooling/config.json.*--pooling"
        case "another pooling":
            about = {"pooling_mode_median_tokens": True, "pooling_mode_mean_tokens": True}
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(about))
            return "its pooling is mean and pooling_mode_median_tokens"
        case "prompts that are left out":
            about = {"pooling_mode": "mean", "include_prompt": False}
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(about))
            text_models.prompted(folder)
            return "its pooling leaves prompts out .include_prompt in 1_Pooling/config.json"
        case "a layer more":
            config["num_hidden_layers"] = 3
            why = "no encoder.layer.2"
        case "another tokenizer":
            made = text_models.tokenizer()
            made.add_tokens(["a new one"])
            made.save(str(folder / "tokenizer.json"))
            return "is of another model: it has 65 tokens"
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
            return "no tokenizer.json"
        case "a broken tokenizer":
            (folder / "tokenizer.json").write_text("{")
            return "cannot read .*tokenizer.json"
        case "broken weights":
            (folder / "model.safetensors").write_bytes(b"123")
            return "cannot read the weights"
        case "no weights":
            (folder / "model.safetensors").unlink()
            return "no model.safetensors"
        case "rotary positions":
            config["position_embedding_type"] = "relative_key"
            why = "its positions are relative_key"
        case _:
            modules = json.loads((folder / "modules.json").read_text())
            modules.append({"idx": 3, "name": "3", "path": "3_CNN", "type": "sentence_transformers.models.CNN"})
            (folder / "modules.json").write_text(json.dumps(modules))
            return "its module CNN is not supported"
    (folder / "config.json").write_text(json.dumps(config))
    return why


@pytest.mark.parametrize(
    "what",
    [
        "no pooling",
        "another pooling",
        "prompts that are left out",
        "a layer more",
        "another tokenizer",
        "no tokenizer",
        "a broken tokenizer",
        "broken weights",
        "no weights",
        "rotary positions",
        "another module",
    ],
)
def test_a_folder_that_is_no_encoder_is_refused_in_one_line(tmp_path, what):
    folder, _ = folder_of(tmp_path)
    why = damaged(folder, what)
    with pytest.raises(RequestError, match=why) as caught:
        zoo.import_model(folder, tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ours" / "card.json").exists()


def test_pickled_weights_need_torch(tmp_path, monkeypatch):
    folder, model = folder_of(tmp_path)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(
            RequestError, match="needs torch, which is not installed; run: pip install 'int8-zoo.import.'"
        ):
            zoo.import_model(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    zoo.import_model(folder, tmp_path / "ours")
    assert (tmp_path / "ours/model.safetensors").is_file()


def test_a_folder_without_pooling_is_told_it(tmp_path):
    folder, model = folder_of(tmp_path)
    (folder / "1_Pooling" / "config.json").unlink()
    zoo.import_model(folder, tmp_path / "ours", pooling="cls")
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    assert np.abs(vectors - text_models.expected(model, TEXTS, "cls")).max() < 1e-5


def test_a_folder_that_says_nothing_of_length_is_told_it(tmp_path):
    folder, model = folder_of(tmp_path, normalize=False)
    zoo.import_model(folder, tmp_path / "ours", normalize=True)
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    assert np.abs(vectors - text_models.expected(model, TEXTS, "mean", True)).max() < 1e-5


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {"model_type": "other", "architectures": ["OtherModel"]},
            "model type other, which is not supported; supported: bert",
        ),
        ({"model_type": "bart", "architectures": ["BartForSequenceClassification"]}, "there is no model.safetensors"),
    ],
)
def test_a_network_with_unsupported_parts_is_refused_by_them(tmp_path, config, why):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=why):
        zoo.import_model(tmp_path, tmp_path / "out")
