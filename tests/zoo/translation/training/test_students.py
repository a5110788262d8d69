"""What a student takes over from a teacher or a model before it, and what it cannot."""

from dataclasses import replace

import pytest
from helpers.rounding import one_thread  # noqa: F401
from helpers.trainings import broken_off

import zoo
from pipelines.core.errors import RequestError

torch = pytest.importorskip("torch", reason="needs the train extra")
from zoo.translation.data.parallel_text import Vocabulary, learn_vocabulary  # noqa: E402
from zoo.translation.models import checkpoints  # noqa: E402
from zoo.translation.models.config import ModelConfig  # noqa: E402
from zoo.translation.models.transformer import ARCHITECTURES, TRANSFORMER_MT, Transformer  # noqa: E402
from zoo.translation.train_config import TrainingConfig  # noqa: E402
from zoo.translation.training import distillation  # noqa: E402
from zoo.translation.training.trainer import Trainer  # noqa: E402

ARCHITECTURES["one"] = ModelConfig(1, 1, 32, 64, 2)
QUICK = TrainingConfig(arch="one", vocabulary=60, epochs=1, batch_size=512, warmup=20, precision="fp32", teacher="some")


@pytest.fixture
def teacher(language, monkeypatch):
    """Opens as the model "some" a network whose form is given, with a vocabulary."""
    vocabulary = Vocabulary(learn_vocabulary(language.pairs(60), 60, 0))

    def opens(form: ModelConfig, pre_norm: bool = True) -> Vocabulary:
        network = Transformer(form, len(vocabulary), pre_norm=pre_norm, dropout=0.0)
        monkeypatch.setattr(checkpoints, "_load", lambda name: (network, vocabulary))
        return vocabulary

    return opens


def test_soft_needs_the_teacher_s_very_vocabulary(language, teacher):
    vocabulary = teacher(ARCHITECTURES["one"])
    pairs = [(a.upper(), b.upper()) for a, b in language.pairs(60)]
    other, student = Vocabulary(learn_vocabulary(pairs, 60, 0)), Transformer.of("one", len(vocabulary))
    assert len(other) == len(vocabulary)
    checkpoints.load_teacher(QUICK, student, vocabulary)
    with pytest.raises(RequestError, match="soft needs the same vocabulary: --set inherit=true"):
        checkpoints.load_teacher(QUICK, student, other)


@pytest.mark.parametrize(
    ("changed", "pre_norm", "fits"),
    [
        ({"decoder": 2, "decoder_hidden": 48, "autoregression": "ssru"}, True, True),
        ({"encoder": 2}, True, False),
        ({"heads": 4}, True, False),
        ({"hidden": 48}, True, False),
        ({}, False, False),
    ],
)
def test_an_encoder_is_frozen_only_where_it_is_the_teacher_s(teacher, changed, pre_norm, fits):
    student = Transformer.of("one", len(teacher(replace(ARCHITECTURES["one"], **changed), pre_norm)))
    checkpoints.inherit(student, replace(QUICK, inherit=True))
    frozen = replace(QUICK, inherit=True, frozen=True)
    if fits:
        checkpoints.inherit(student, frozen)
    else:
        with pytest.raises(RequestError, match="found frozen for one, whose encoder differs from that of some"):
            checkpoints.inherit(student, frozen)


def test_what_the_teacher_said_before_the_first_checkpoint_is_not_lost(translator, language, tmp_path, monkeypatch):
    pairs, out = language.write(tmp_path / "pairs.tsv", 300), tmp_path / "students" / "out"
    config = replace(QUICK, teacher=str(translator), teacher_beam=1)
    broken_off(Trainer, 0, lambda: TRANSFORMER_MT.train(pairs, out, config=config))
    kept = out / "checkpoint" / distillation.PAIRS
    before = kept.read_bytes()
    assert {path.name for path in kept.parent.iterdir()} == {distillation.PAIRS, distillation.DIGEST}
    with monkeypatch.context() as patch:
        patch.setattr(distillation, "progress", lambda *_: pytest.fail("the teacher was asked again"))
        broken_off(Trainer, 0, lambda: TRANSFORMER_MT.train(pairs, out, config=config))
    assert kept.read_bytes() == before
    TRANSFORMER_MT.train(pairs, out, config=replace(config, references=True))  # what was said is of other pairs
    assert kept.stat().st_size > len(before)


@pytest.mark.parametrize("prune", [None, "ratio=.3"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("arch", "tiny"), ("pre_norm", "false"), ("languages", "de-en"), ("max_length", "40"), ("vocabulary", "900")],
)
def test_a_model_cannot_be_set_to_another(translator, tmp_path, name, value, prune):
    (data := tmp_path / "pairs.tsv").write_text("one\tuno\n")
    with pytest.raises(RequestError, match=rf"setting {name} (?i:{value}), but fine-tuning keeps that of model \("):
        zoo.finetune(translator, data, tmp_path / "out", settings={name: value}, prune=prune)
    assert not (tmp_path / "out").exists()
