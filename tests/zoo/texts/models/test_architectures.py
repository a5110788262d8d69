"""Networks of every architecture compute what transformers does, at any length and with padding on either side."""

import functools
import json
from dataclasses import fields

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models, text_networks  # noqa: E402
from helpers.text_networks import CONFIGS, LONG, TEXTS  # noqa: E402
from helpers.tiers import one_in  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from pipelines.kernels import extension  # noqa: E402
from zoo.texts.export.freeze import freeze  # noqa: E402
from zoo.texts.export.positions import distance_bias, rotary_angles  # noqa: E402
from zoo.texts.models.config import Attention, Dense, ModelConfig, Norm, Rotary  # noqa: E402


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """imported(kind): the network of transformers and the folder of the imported model, made once."""

    @functools.cache
    def get(kind):
        folder = tmp_path_factory.mktemp("model")
        network = text_networks.write(folder / "theirs", CONFIGS[kind])
        zoo.import_model(folder / "theirs", folder / "ours")
        return network, folder / "ours"

    return get


@pytest.mark.parametrize("kind", one_in(2, CONFIGS))
def test_embeddings_are_those_of_transformers(imported, kind):
    network, ours = imported(kind)
    vectors = zoo.pipeline(ours, "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    expected = [text_networks.hidden(network, text).mean(axis=0) for text in TEXTS]
    assert np.abs(vectors - text_networks.unit(np.stack(expected))).max() < 1e-5


@pytest.mark.parametrize("kind", one_in(4, CONFIGS))
def test_padding_on_either_side_changes_nothing(imported, kind):
    _, ours = imported(kind)
    freeze(ours)
    session = onnxruntime.InferenceSession(ours / "fp32.onnx")
    for text in (TEXTS[2], LONG):
        ids = np.array([text_models.tokenizer().encode(text).ids])
        alone = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
        for pad in ((0, 9), (9, 0)) if kind not in text_networks.ABSOLUTE else ((0, 9),):
            feeds = {
                "input_ids": np.pad(ids, ((0, 0), pad)),
                "attention_mask": np.pad(np.ones_like(ids), ((0, 0), pad)),
            }
            assert np.abs(session.run(None, feeds)[0] - alone).max() < 1e-5


@pytest.mark.parametrize("kind", one_in(7, CONFIGS))
def test_int8_is_near_fp32(imported, tmp_path, kind):
    _, ours = imported(kind)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 10))
    zoo.calibrate(ours, str(tmp_path / "texts.txt"), samples=16)
    exact, int8 = (
        zoo.pipeline(ours, precision, "onnxruntime").compute_texts([(text,) for text in TEXTS])
        for precision in ("fp32", "int8")
    )
    assert (exact * int8).sum(axis=1).mean() > 0.95  # of random weights
    if extension.isas():
        assert zoo.pipeline(ours, engine="native").engine == "native"


def test_the_description_of_a_card_reads_back():
    config = ModelConfig(
        "modernbert",
        layers=4,
        width=32,
        heads=4,
        hidden=48,
        vocabulary=64,
        positions=100,
        rotary=Rotary(1000.0, 8, local_theta=10.0, scaling="ntk", factor=2.0),
        attention=Attention(key_heads=2, local=(1, 3), window=4),
        norm=Norm("rms", "pre"),
        unbiased=("query", "up"),
        dense=(Dense(16, "tanh"), Dense(8)),
        pooling="cls+mean",
    )
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.output_size == 8
    old = {"kind": "bert", "layers": 2, "width": 32, "heads": 2, "hidden": 64, "vocabulary": 64, "positions": 80}
    assert ModelConfig.from_json(old).to_json().keys() == {field.name for field in fields(ModelConfig)} - {
        field.name for field in fields(ModelConfig) if field.kw_only
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": Attention(key_heads=3)}, "cannot share 3 heads of keys"),
        ({"attention": Attention(local=(9,))}, "has local ones"),
        ({"norm": Norm("batch")}, "has the norm batch"),
        ({"rotary": Rotary(10.0, 9)}, "rotates 9 columns"),
        ({"rotary": Rotary(10.0, 8, scaling="yarn")}, "scaled by 'yarn'"),
        ({"distinct_layers": 5}, "cannot repeat 5 of them"),
        ({"dense": (Dense(8, "selu"),)}, "the activation selu"),
        ({"pooling": "mean+median"}, "the pooling mean.median"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, reason):
    with pytest.raises(RequestError, match=reason):
        ModelConfig("bert", layers=4, width=32, heads=4, hidden=48, vocabulary=64, positions=100, **changes)


def test_tables_of_positions_are_linear_in_the_length():
    config = ModelConfig(
        "modernbert",
        layers=3,
        width=32,
        heads=4,
        hidden=48,
        vocabulary=64,
        positions=8192,
        rotary=Rotary(1000.0, 8),
        attention=Attention(local=(1,), window=64),
    )
    assert rotary_angles(config, True).shape == (8192, 8)
    bias = distance_bias(config, {}, True)
    assert bias.shape == (2 * 8192 - 1, 1) and (bias[8191 - 64 : 8192 + 64] == 0).all()
    assert (bias[: 8191 - 64] < 0).all() and (bias[8192 + 64 :] < 0).all()
    assert distance_bias(config, {}, False) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_activation": "selu"}, "its activation is selu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "are scaled by longrope"),
        ({"partial_rotary_factor": 0.5}, "its partial_rotary_factor is 0.5; expected 1"),
        (
            {"architectures": ["ModernBertForSequenceClassification"], "classifier_activation": "selu"},
            "its activation is selu",
        ),
    ],
)
def test_unsupported_settings_are_refused(tmp_path, changes, reason):
    text_networks.write(tmp_path / "theirs", CONFIGS["modernbert"])
    content = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(RequestError, match=reason):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")


SLIDING = ["full_attention", *(["sliding_attention"] * 6)]
ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
ROPE_LOCAL = {"rope_type": "default", "rope_theta": 70.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
LLAMA = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 60}


@pytest.mark.parametrize(
    ("kind", "changes"),
    one_in(
        2,
        [
            ("modernbert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
            ("modernbert", {"layer_types": SLIDING, "local_attention": 20}),
            ("modernbert", {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE_LOCAL}}),
            (
                "qwen3",
                {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "attention_bias": True},
            ),
            ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "hidden_act": "gelu"}),
            ("qwen3", {"is_causal": False}),
            ("qwen3", {"rope_scaling": YARN}),
            ("qwen3", {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 8, "attention_factor": 1.2}}),
            ("qwen3", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
            ("eurobert", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA}}),
            ("modernbert", {"rope_parameters": {"full_attention": {**ROPE, **YARN}, "sliding_attention": ROPE_LOCAL}}),
            ("stella", {"auto_map": None}),
            ("llama", {"model_type": "llama_bidirec", "auto_map": {"AutoModel": "m.LlamaBidirectionalModel"}}),
            ("mistral", {"sliding_window": None, "head_dim": 16}),
            ("gte", {"type_vocab_size": 0}),
            ("gemma3", {"use_bidirectional_attention": False, "sliding_window": 40, "layer_types": None}),
            ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
            ("albert", {"num_hidden_groups": 1, "embedding_size": 32}),
            ("albert", {"num_hidden_groups": 3}),
            ("deberta-v3", {"share_att_key": False, "norm_rel_ebd": "none", "pos_att_type": "c2p|p2c"}),
            ("deberta-v3", {"pos_att_type": ["p2c"], "position_biased_input": True, "type_vocab_size": 2}),
            ("deberta-v3", {"pos_att_type": ["c2p"], "position_buckets": -1, "max_relative_positions": 64}),
            ("deberta-v3", {"relative_attention": False, "position_biased_input": True}),
            ("t5", {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}),
            ("t5", {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 40}),
        ],
    ),
)
def test_other_settings_of_an_architecture(tmp_path, kind, changes):
    network = text_networks.write(tmp_path / "theirs", {**CONFIGS[kind], **changes})
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    expected = [text_networks.hidden(network, text).mean(axis=0) for text in TEXTS]
    assert np.abs(vectors - text_networks.unit(np.stack(expected))).max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("nomic_bert", {"moe_every_n_layers": 2}, "it is a mixture of experts .moe_every_n_layers is 2"),
        ("nomic_bert", {"rotary_emb_interleaved": True}, "its rotary_emb_interleaved is True"),
        ("gte", {"position_embedding_type": "absolute"}, "its position_embedding_type is 'absolute'; expected 'rope'"),
        ("qwen3", {"auto_map": {"AutoModel": "other.Model"}}, "its custom code other.Model is not known"),
        (
            "qwen3",
            {"rope_scaling": {"type": "llama3", "factor": 4.0}},
            "expected numbers: factor, slow, fast and original",
        ),
        ("t5", {"architectures": ["T5ForSequenceClassification"]}, "whose head reads the output of a decoder"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "its attn_logit_softcapping is 50.0; expected None"),
        ("albert", {"inner_group_num": 2}, "its inner_group_num is 2; expected 1"),
        (
            "deberta-v3",
            {"conv_kernel_size": 3, "conv_act": "tanh"},
            "its conv_act is 'tanh'; expected that of its layers",
        ),
        ("deberta-v3", {"conv_kernel_size": 4, "conv_act": "gelu"}, "a convolution over 4 tokens; expected an odd"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "its activation is tanh"),
    ],
)
def test_settings_that_are_not_supported_are_named(tmp_path, kind, changes, reason):
    text_networks.write(tmp_path / "theirs", CONFIGS[kind])
    content = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(RequestError, match=reason):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")


def test_dynamic_positions_of_nomic_bert_end_where_scaling_begins(tmp_path):
    values = {**CONFIGS["nomic_bert"], "rotary_scaling_factor": 2, "max_trained_positions": 512}
    text_networks.write(tmp_path / "theirs", values)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    assert zoo.info(tmp_path / "ours")["preprocessing"]["max_length"] == 512


def test_a_length_of_the_folder_limits_the_tables(tmp_path):
    text_networks.write(tmp_path / "theirs", CONFIGS["qwen3"])
    (tmp_path / "theirs/sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    assert zoo.info(tmp_path / "ours")["preprocessing"]["form"]["positions"] == 100


SMALL = {**text_networks.SIZES, "num_hidden_layers": 7, "num_key_value_heads": 2, "architectures": None}
LONGER = {"max_position_embeddings": 2048, "max_relative_positions": 512, "n_positions": 2048}
PUBLIC = {  # what is smaller than in the public configuration; the rest is as it is there
    "answerdotai__ModernBERT-base": {"layer_types": None, "architectures": ["ModernBertModel"]},
    "ModernBERT-token-classification": {"architectures": ["ModernBertModel"]},
    "Alibaba-NLP__gte-large-en-v1.5": {"architectures": ["NewModel"]},
    "Qwen__Qwen3-Embedding-0.6B": {"head_dim": 16, "architectures": ["Qwen3Model"]},
    "NovaSearch__stella_en_1.5B_v5": {"architectures": ["Qwen2ForCausalLM"]},
    "microsoft__deberta-v3-base": {"architectures": ["DebertaV2Model"], **LONGER, "pooler_hidden_size": 32},
    "protectai__deberta-v3-base-prompt-injection-v2": {
        "architectures": ["DebertaV2Model"],
        **LONGER,
        "pooler_hidden_size": 32,
    },
    "hkunlp__instructor-xl": {"d_ff": 48, "d_kv": 16, "d_model": 32, "num_heads": 4, "num_layers": 7, **LONGER},
    "google__embeddinggemma-300m": {"head_dim": 16, "num_key_value_heads": 1, "architectures": ["Gemma3TextModel"]},
}


@pytest.mark.data
@pytest.mark.parametrize("name", PUBLIC)
def test_public_configurations_at_smaller_sizes(tmp_path, shared, name):
    folder = shared / "hub-configs" / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    values = json.loads((folder / "config.json").read_text()) | SMALL | PUBLIC[name]
    if kinds := values.get("layer_types"):
        values["layer_types"] = kinds[:7]
    network = text_networks.write(tmp_path / "theirs", values)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    expected = [text_networks.hidden(network, text).mean(axis=0) for text in TEXTS]
    assert np.abs(vectors - text_networks.unit(np.stack(expected))).max() < 1e-5


def test_merged_weights_of_layers_that_repeat_are_stored_once(tmp_path):
    text_networks.write(tmp_path / "theirs", CONFIGS["albert"])
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    freeze(tmp_path / "ours")
    zoo.rewrite(tmp_path / "ours")
    model = onnx.load(tmp_path / "ours/rewritten.onnx")
    merged = [x.name for x in model.graph.initializer if x.name.endswith(".merged.weight")]
    assert len(merged) == CONFIGS["albert"]["num_hidden_groups"]


@pytest.mark.parametrize("kind", [pytest.param("albert", marks=pytest.mark.slow), "roformer"])
def test_native_kernels_compute_long_texts(tmp_path, kind):
    pytest.importorskip("pipelines.kernels._native", reason="needs the native kernels")
    text_networks.write(tmp_path / "theirs", CONFIGS[kind])
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "texts.txt"), samples=8)
    vectors = zoo.pipeline(tmp_path / "ours", "int8", "native").compute_texts([(LONG,)])
    exact = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(LONG,)])
    assert (vectors * exact).sum() > 0.99
