"""Fine-tuning of imported models: the loss is that of transformers, and the result is a model like any other."""

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.trainings import assert_same_weights, broken_off, weights

import zoo
from pipelines.core.errors import RequestError
from zoo import api
from zoo.cli.app import cli

torch = pytest.importorskip("torch", reason="training needs the train extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import huggingface_folders as folders  # noqa: E402

from zoo.training.runs import Processes  # noqa: E402
from zoo.translation.data.parallel_text import corpus  # noqa: E402
from zoo.translation.data.tokens import START  # noqa: E402
from zoo.translation.importers.imported import Renumbering  # noqa: E402
from zoo.translation.models.checkpoints import open_network  # noqa: E402
from zoo.translation.models.transformer import Transformer  # noqa: E402
from zoo.translation.train_config import ImportedConfig, TrainingConfig  # noqa: E402
from zoo.translation.training import adapters  # noqa: E402
from zoo.translation.training.start import StartModel, mixed  # noqa: E402
from zoo.translation.training.trainer import Trainer  # noqa: E402

torch.set_num_threads(1)
LANGUAGES = {
    "m2m": "de",
    "nllb": "deu_Latn",
    "mbart50": "de_DE",
    "mbart": "ro_RO",
    "marian languages": "de",
    "plbart": "en_XX",
    "madlad": "de",
}
SLOW = (*folders.NEAR, "marian", "m2m", "bart untied")
QUICK = {
    "batch_size": "512",
    "precision": "fp32",
    "average": "1",
    "warmup": "5",
    "learning_rate": "3e-3",
    "epochs": "2",
}


def pairs(count, seed, reverse):
    """Made-up sentences with their words, or their words in reverse order."""
    texts = folders.sentences(count, seed)
    return [(text, " ".join(reversed(text[:-1].lower().split())) if reverse else text) for text in texts]


def write(path, count, seed, reverse=True):
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs(count, seed, reverse)))
    return str(path)


def imported(kind, folder):
    if kind == "fsmt":
        pytest.importorskip("sacremoses", reason="FSMT's words are those of Moses")
    model, tokenizer = folders.make(kind, folder / "original")
    zoo.import_model(folder / "original", folder / "imported", target_language=LANGUAGES.get(kind, ""))
    return model, tokenizer, folder / "imported"


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    """(imported folder, new pairs, old pairs, fine-tuned folder, its metrics)."""
    folder = tmp_path_factory.mktemp("marian")
    _, _, start = imported("marian", folder)
    new, old = write(folder / "new.tsv", 120, 3), write(folder / "old.tsv", 80, 4, reverse=False)
    result = zoo.finetune(start, new, folder / "tuned", settings={**QUICK, "keep_data": old})
    return start, new, old, folder / "tuned", result


# the legacy tokenizer of NLLB has the language behind a target, where no translation begins with it
LOSSES = [kind for kind in folders.KINDS if kind != "nllb legacy"]


@pytest.mark.parametrize("kind", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in LOSSES])
def test_the_loss_is_that_of_transformers(kind, tmp_path):
    model, tokenizer, folder = imported(kind, tmp_path)
    config = ImportedConfig(dropout=0.0, precision="fp32")
    start = StartModel.read(folder, config)
    trainer = Trainer(
        open_network(start.about, start.vocabulary, Transformer, config.dropout), config, Processes(), rules=start.rules
    )
    texts = pairs(6, 5, reverse=True)
    data, _ = corpus(texts, start.vocabulary)
    with torch.inference_mode():
        _, plain, count = trainer.loss(trainer.model, data, np.arange(len(texts)), False, 0.0)
        target = LANGUAGES.get(kind)
        if kind not in ("marian languages", "madlad"):
            tokenizer.tgt_lang = target
        begin = {"marian languages": ">>de<< ", "madlad": "<2de> "}.get(kind, "")
        total = 0.0
        for source, text in texts:
            made = tokenizer(begin + source, return_tensors="pt")
            labels = tokenizer(text_target=text, return_tensors="pt").input_ids
            if kind == "fsmt":  # whose tokenizer splits no targets
                numbers = Renumbering(len(tokenizer.decoder), tokenizer.unk_token_id, 2).ours.tolist()
                labels = torch.tensor([[*map(numbers.index, start.vocabulary.encode_target([text])[0])]])
            if kind == "blenderbot small":  # whose tokenizer leaves the end to the caller
                labels = torch.cat([labels, torch.full((1, 1), tokenizer.eos_token_id)], 1)
            if kind in ("mbart", "plbart"):  # the language, which starts the decoder, comes last in the labels
                language, labels = labels[:, -1:], labels[:, :-1]
                shifted = torch.cat([language, labels[:, :-1]], 1)
            else:
                first = torch.full((1, 1), model.config.decoder_start_token_id)
                shifted = torch.cat([first, labels[:, :-1]], 1)
            logits = model(**made, decoder_input_ids=shifted, use_cache=False).logits  # with it FSMT masks nothing
            total += torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
            count -= labels.shape[1]
    assert count == 0  # as many labels
    assert float(plain) == pytest.approx(total, rel=1e-4)


def test_fine_tuning_measures_new_and_old_data_and_builds_int8(marian):
    start, _, _, tuned, result = marian
    assert {"bleu", "bleu_before", "kept_bleu", "kept_bleu_before"} <= result.keys()
    history = (tuned / "history.json").read_text()
    assert history.count('"epoch"') == 2
    before, after = zoo.load(start).card.details, zoo.load(tuned).card.details
    assert after["preprocessing"] == before["preprocessing"]
    assert after["imported"] == before["imported"]
    assert zoo.load(tuned).ensure("int8.onnx").is_file()


def test_training_lowers_the_loss_and_keeps_what_transformers_shares(marian):
    start, _, _, tuned, _ = marian
    old, now = weights(start), weights(tuned)
    assert torch.equal(old["output_bias"], now["output_bias"])
    table = now["embedding.weight"]
    same = (old["embedding.weight"] == old["embedding.weight"][START]).all(1)
    assert same.sum() == 2  # the start is padding's row, in the original's numbers
    assert (table[same] == table[START]).all()
    assert not torch.equal(old["embedding.weight"][START], table[START])
    config = ImportedConfig(precision="fp32")
    losses = []
    for folder in (start, tuned):
        read = StartModel.read(folder, config)
        trainer = Trainer(
            open_network(read.about, read.vocabulary, Transformer, config.dropout).eval(), config, Processes()
        )
        data, _ = corpus(pairs(20, 9, reverse=True), read.vocabulary)
        with torch.inference_mode():
            losses.append(float(trainer.loss(trainer.model, data, np.arange(20), False, 0.1)[0]))
    assert losses[1] < 0.8 * losses[0]


def test_a_fine_tuned_model_is_fine_tuned_again(marian, tmp_path):
    _, new, _, tuned, _ = marian
    zoo.load(tuned).ensure("int8.onnx")
    before = {path.name for path in tuned.iterdir()}
    result = zoo.finetune(tuned, new, tmp_path / "again", settings={**QUICK, "epochs": "1"})
    assert result["loss"] < marian[4]["loss"]
    assert {path.name for path in tuned.iterdir()} == before  # no float graph stays
    assert zoo.load(tmp_path / "again").preprocessing == zoo.load(tuned).preprocessing


def exported(folder, tmp_path):
    """Asserts that transformers translates with the exported folder as the folder's pipeline does."""
    api.export(folder, "huggingface", tmp_path / "exported")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    pipeline, texts = zoo.pipeline(folder, "fp32"), folders.sentences(6, 2)
    for beam in (1, 4):
        with torch.inference_mode():
            tokens = model.generate(**tokenizer(texts, return_tensors="pt", padding=True), num_beams=beam)
        decoded = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        pipeline.beam = beam
        assert [result["translation"] for result in pipeline(texts)] == [text.strip() for text in decoded]


def test_a_fine_tuned_model_is_exported_to_transformers(marian, tmp_path):
    exported(marian[3], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nllb", "mbart50", "bart", "t5", "umt5", "marian separate", "pegasus"])
def test_fine_tuned_models_of_other_kinds_are_exported(marian, kind, tmp_path):
    _, _, folder = imported(kind, tmp_path)
    zoo.finetune(folder, marian[1], tmp_path / "tuned", settings={**QUICK, "epochs": "1"})
    exported(tmp_path / "tuned", tmp_path)


def test_a_resumed_run_gives_the_same_bytes(marian, tmp_path):
    start, new, old, tuned, result = marian
    options = {"settings": {**QUICK, "keep_data": old}}
    broken_off(Trainer, 6, lambda: zoo.finetune(start, new, tmp_path / "parts", **options))
    assert zoo.finetune(start, new, tmp_path / "parts", resume=True, **options) == result
    assert_same_weights(tmp_path / "parts", tuned)


def test_adapters_are_merged_and_change_linear_layers_alone(marian, tmp_path):
    start, new, _, _, _ = marian
    zoo.finetune(start, new, tmp_path / "tuned", settings={**QUICK, "epochs": "1", "adapters": "3", "frozen": "true"})
    old, now = weights(start), weights(tmp_path / "tuned")
    assert old.keys() == now.keys()
    changed = {name for name in old if not torch.equal(old[name], now[name])}
    linear = {name for name in old if name.startswith("decoder.") and ".weight" in name and "norm" not in name}
    assert changed == linear
    name = "decoder.1.feed.inner.weight"
    assert torch.linalg.matrix_rank(now[name] - old[name], rtol=1e-3) == 3


def test_merged_adapters_compute_the_same(marian):
    config = ImportedConfig(dropout=0.0)
    read = StartModel.read(marian[0], config)
    model = open_network(read.about, read.vocabulary, Transformer, config.dropout).eval()
    adapters.add(model, 2)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, adapters.AdaptedLinear):
                layer.up.normal_(std=0.1)
    source, target = torch.tensor([[7, 8, 9, 3]]), torch.tensor([[2, 5, 6]])
    expected, state = model(source, target), adapters.weights(model)
    adapters.merge(model)
    assert state.keys() == model.state_dict().keys()
    torch.testing.assert_close(model(source, target), expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_the_command_freezes_the_encoder(marian, tmp_path):
    start, new, _, _, _ = marian
    settings = [f"--set={name}={value}" for name, value in {**QUICK, "epochs": "1"}.items()]
    command = ["finetune", str(start), "--data", new, "-o", str(tmp_path / "tuned"), "--freeze", "encoder", *settings]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    old, now = weights(start), weights(tmp_path / "tuned")
    changed = {name.split(".")[0] for name in old if not torch.equal(old[name], now[name])}
    assert changed == {"decoder"}


def test_pairs_to_keep_are_mixed_in_by_their_share():
    words = [(f"a{i}", f"b{i}") for i in range(60)]
    vocabulary = type("Numbers", (), {"encode": lambda _, texts: [np.array([int(x[1:])], np.int32) for x in texts]})()
    vocabulary.encode_target = vocabulary.encode
    new, old = corpus(words[:30], vocabulary)[0], corpus(words[30:], vocabulary)[0]
    assert len(mixed(new, old, 0.25, 0)) == 40
    assert len(mixed(new, old, 0.9, 0)) == 60
    assert mixed(new, old, 0.0, 0).digest == new.digest
    assert len({int(mixed(new, old, 0.25, 0).pair(i)[0][0]) for i in range(40)}) == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_language": "xx"}, "no target languages"),
        ({"qat": "true"}, "found qat, which imported models do not support"),
        ({"teacher": "multi30k-en-de"}, "found teacher, which imported models do not support"),
        ({"keep_data": "missing.tsv"}, "found no missing.tsv"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(marian, tmp_path, settings, message):
    with pytest.raises(RequestError, match=message):
        zoo.finetune(marian[0], marian[1], tmp_path / "out", settings=settings)
    assert not (tmp_path / "out").exists()


def test_settings_of_fine_tuning_need_a_start_model(tmp_path):
    for name, value in {"adapters": 4, "keep_data": "a", "frozen": True}.items():
        with pytest.raises(RequestError, match=f"found {name} with"):
            replace(TrainingConfig(), **{name: value}).require_start(False)
