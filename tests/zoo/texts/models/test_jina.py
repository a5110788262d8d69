"""Jina v2 and v3, and MosaicBERT: networks of custom code, whose formulas are written here in torch, and adapters of tasks."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="the original of v3 is its model")

from helpers import text_models, text_networks  # noqa: E402
from helpers.text_networks import CONFIGS, TEXTS  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402

V2 = {
    **text_networks.SIZES,
    "model_type": "bert",
    "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "attention_probs_dropout_prob": 0.0,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "model_max_length": 8192,
    "num_hidden_layers": 2,
    "position_embedding_type": "alibi",
    "type_vocab_size": 2,
}
POOLED = (("Pooling", {"pooling_mode_mean_tokens": True}), ("Normalize", {}))
TASKS = ["retrieval.query", "retrieval.passage", "separation"]


class JinaBert(torch.nn.Module):
    """Post-norm layers with ALiBi (Press et al. 2022) of both directions and a gated feed-forward."""

    def __init__(self, heads):
        super().__init__()
        self.heads, linear, norm = heads, torch.nn.Linear, torch.nn.LayerNorm
        tables = {"word_embeddings": torch.nn.Embedding(64, 32), "token_type_embeddings": torch.nn.Embedding(2, 32)}
        self.embeddings = torch.nn.ModuleDict({**tables, "LayerNorm": norm(32, 1e-12)})
        self.encoder = torch.nn.ModuleDict({"layer": torch.nn.ModuleList()})
        for _ in range(2):
            attention = torch.nn.ModuleDict(
                {
                    "self": torch.nn.ModuleDict({name: linear(32, 32) for name in ("query", "key", "value")}),
                    "output": torch.nn.ModuleDict({"dense": linear(32, 32), "LayerNorm": norm(32, 1e-12)}),
                }
            )
            feed = {"gated_layers": linear(32, 96, bias=False), "wo": linear(48, 32), "layernorm": norm(32, 1e-12)}
            layer = torch.nn.ModuleDict({"attention": attention, "mlp": torch.nn.ModuleDict(feed)})
            self.encoder["layer"].append(layer)

    def slopes(self):
        """Slopes of the paper's released code: of the lower power of two, then every second one of the double."""

        def powers(n):
            return [2 ** (-8 * i / n) for i in range(1, n + 1)]

        closest = 2 ** int(np.log2(self.heads))
        return torch.tensor(powers(closest) + powers(2 * closest)[0::2][: self.heads - closest])

    def forward(self, ids, activation):
        x = self.embeddings["word_embeddings"](ids) + self.embeddings["token_type_embeddings"].weight[0]
        x = self.embeddings["LayerNorm"](x)
        places = torch.arange(len(ids))
        bias = -self.slopes()[:, None, None] * (places[:, None] - places).abs()
        for layer in self.encoder["layer"]:
            split = {
                name: part(x).reshape(len(ids), self.heads, -1).transpose(0, 1)
                for name, part in layer["attention"]["self"].items()
            }
            scores = split["query"] @ split["key"].transpose(1, 2) / (32 // self.heads) ** 0.5 + bias
            context = (scores.softmax(-1) @ split["value"]).transpose(0, 1).reshape(len(ids), 32)
            output, feed = layer["attention"]["output"], layer["mlp"]
            x = output["LayerNorm"](x + output["dense"](context))
            gate, up = feed["gated_layers"](x).chunk(2, -1)
            x = feed["layernorm"](x + feed["wo"](activation(gate) * up))
        return x


def joined(state):
    """The weights as MosaicBERT names them: queries, keys and values in one layer."""
    parts = {
        name: [state.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        for name in list(state)
        if ".query." in name
    }
    return {**state, **{name.replace("query", "Wqkv"): torch.cat(own) for name, own in parts.items()}}


@pytest.mark.parametrize(("heads", "kind"), [(4, "geglu"), (8, "reglu"), (4, "mosaic")])
def test_embeddings_of_v2_and_of_mosaic_bert_follow_their_formula(tmp_path, heads, kind):
    torch.manual_seed(0)
    network = JinaBert(heads).eval()
    text_networks.randomize(network)
    (tmp_path / "theirs").mkdir()
    state = joined(network.state_dict()) if kind == "mosaic" else network.state_dict()
    save_file(state, tmp_path / "theirs/model.safetensors")
    values = {**V2, "num_attention_heads": heads, "feed_forward_type": kind}
    if kind == "mosaic":
        own = {"alibi_starting_size": 512, "position_embedding_type": "absolute", "feed_forward_type": None}
        values |= {**own, "auto_map": {"AutoModel": "bert_layers.BertModel"}}
    (tmp_path / "theirs/config.json").write_text(json.dumps(values))
    text_networks.finish(tmp_path / "theirs", POOLED)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    activation = torch.nn.ReLU() if kind == "reglu" else torch.nn.GELU()
    with torch.no_grad():
        rows = [network(torch.tensor(text_models.tokenizer().encode(x).ids), activation).mean(0) for x in TEXTS]
    assert np.abs(vectors - text_networks.unit(torch.stack(rows).numpy())).max() < 1e-5


class JinaCode(JinaBert):
    """jina-embeddings-v2-base-code: norms of whole queries and keys, and a second sum and norm after attention."""

    def __init__(self):
        super().__init__(4)
        for layer in self.encoder["layer"]:
            norms = {f"layer_norm_{name}": torch.nn.LayerNorm(32, 1e-12) for name in "qk"}
            layer["attention"]["self"].update(norms)
            layer.update({f"layer_norm_{i}": torch.nn.LayerNorm(32, 1e-12) for i in (1, 2)})
            layer["mlp"] = torch.nn.ModuleDict(
                {"up_gated_layer": torch.nn.Linear(32, 96, bias=False), "down_layer": torch.nn.Linear(48, 32)}
            )

    def forward(self, ids):
        x = self.embeddings["word_embeddings"](ids) + self.embeddings["token_type_embeddings"].weight[0]
        x = self.embeddings["LayerNorm"](x)
        places = torch.arange(len(ids))
        bias = -self.slopes()[:, None, None] * (places[:, None] - places).abs()
        for layer in self.encoder["layer"]:
            own, output, feed = layer["attention"]["self"], layer["attention"]["output"], layer["mlp"]
            rows = own["layer_norm_q"](own["query"](x)), own["layer_norm_k"](own["key"](x)), own["value"](x)
            query, key, value = (part.reshape(len(ids), 4, 8).transpose(0, 1) for part in rows)
            scores = query @ key.transpose(1, 2) / 8**0.5 + bias
            context = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(ids), 32)
            attended = output["LayerNorm"](x + output["dense"](context))
            x = layer["layer_norm_1"](x + attended)
            up, gate = feed["up_gated_layer"](x).chunk(2, -1)
            x = layer["layer_norm_2"](x + feed["down_layer"](up * torch.nn.functional.gelu(gate)))
        return x


def test_embeddings_of_code_follow_its_formula(tmp_path):
    torch.manual_seed(0)
    network = JinaCode().eval()
    text_networks.randomize(network)
    (tmp_path / "theirs").mkdir()
    save_file(network.state_dict(), tmp_path / "theirs/model.safetensors")
    code = {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}
    (tmp_path / "theirs/config.json").write_text(json.dumps({**V2, "auto_map": code}))
    text_networks.finish(tmp_path / "theirs", POOLED)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    with torch.no_grad():
        rows = [network(torch.tensor(text_models.tokenizer().encode(x).ids)).mean(0) for x in TEXTS]
    assert np.abs(vectors - text_networks.unit(torch.stack(rows).numpy())).max() < 1e-5


def test_rerankers_of_v2_have_the_head_of_bert(tmp_path):
    torch.manual_seed(0)
    parts = {"bert": JinaBert(4), "pooler": torch.nn.Linear(32, 32), "classifier": torch.nn.Linear(32, 1)}
    network = torch.nn.ModuleDict(parts)
    text_networks.randomize(network)
    (tmp_path / "theirs").mkdir()
    tensors = {name.replace("pooler", "bert.pooler.dense"): value for name, value in network.state_dict().items()}
    types = "bert.embeddings.token_type_embeddings.weight"
    tensors[types] = tensors[types][:1].clone()  # the class above has one type
    values = {**V2, "architectures": ["JinaBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    values["type_vocab_size"] = 1
    save_file(tensors, tmp_path / "theirs/model.safetensors")
    (tmp_path / "theirs/config.json").write_text(json.dumps(values))
    text_networks.finish(tmp_path / "theirs", ())
    (tmp_path / "theirs/modules.json").unlink()
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    assert opened.folder.entry.name == "cross-encoder"
    scores = opened.compute_texts([(TEXTS[0], text) for text in TEXTS])
    expected = []
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor(text_models.tokenizer().encode(TEXTS[0], text).ids)
            row = parts["bert"](ids, torch.nn.GELU())[0]
            expected.append(parts["classifier"](parts["pooler"](row).tanh()).numpy())
    assert np.abs(scores - np.stack(expected)).max() < 1e-5


@pytest.mark.parametrize("heads", [12, 5])
def test_slopes_of_other_counts_of_heads(heads):
    from zoo.texts.export.positions import alibi_bias
    from zoo.texts.models.config import ModelConfig

    config = ModelConfig("jina_bert", layers=1, width=60, heads=heads, hidden=8, vocabulary=9, positions=3, alibi=True)
    expected = -JinaBert(heads).slopes().numpy() * np.array([2, 1, 0, 1, 2], np.float32)[:, None]
    assert np.abs(alibi_bias(config) - expected).max() < 1e-7


def test_other_code_of_v2_is_refused(tmp_path):
    torch.manual_seed(0)
    save_file(JinaBert(4).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**V2, "feed_forward_type": "original"}))
    text_networks.finish(tmp_path, POOLED)
    with pytest.raises(RequestError, match="its feed_forward_type is 'original'; expected 'geglu' or 'reglu'"):
        zoo.import_model(tmp_path, tmp_path / "ours")


def adapted(folder):
    """A folder of v3 with random adapters as its custom code has them; returns the network and the adapters."""
    network = text_networks.write(folder, CONFIGS["jina_embeddings_v3"])
    values = {
        **CONFIGS["jina_embeddings_v3"],
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
        "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
        "lora_adaptations": TASKS,
        "lora_alpha": 1,
        "lora_rank": 4,
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0,
    }
    del values["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(values))
    tensors, adapters = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(".weight") or tensor.ndim == 1:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        base = f"{name.removesuffix('.weight')}.parametrizations.weight"
        shapes = ((rows, 4), (4, columns)) if "embeddings" in name else ((4, columns), (rows, 4))
        a, b = (torch.randn(len(TASKS), *shape) * 0.3 for shape in shapes)
        tensors |= {f"{base}.original": tensor, f"{base}.0.lora_A": a, f"{base}.0.lora_B": b}
        adapters[name] = a @ b if "embeddings" in name else b @ a
    save_file(tensors, folder / "model.safetensors")
    return network, adapters


@pytest.mark.parametrize("task", ["", *TASKS[:2]])
def test_adapters_of_v3_are_merged_into_the_weights(tmp_path, task):
    network, adapters = adapted(tmp_path / "theirs")
    text_models.prompted(tmp_path / "theirs", prompts={"retrieval.query": "the "}, default_prompt_name=None)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", task=task)
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    if task:
        names = {name: name.replace("roberta.", "").replace("emb_ln", "embeddings.LayerNorm") for name in adapters}
        parameters = dict(network.named_parameters())
        with torch.no_grad():
            for name, delta in adapters.items():
                delta = delta[TASKS.index(task)] / 4
                name = names[name].replace("encoder.layers", "layers").replace("mixer.out_proj", "self_attn.o_proj")
                if "Wqkv" in name:
                    for key, change in zip("qkv", delta.chunk(3), strict=True):
                        parameters[name.replace("mixer.Wqkv", f"self_attn.{key}_proj")] += change
                elif name in parameters:
                    parameters[name] += delta
    prompt = "the " if task == "retrieval.query" else ""
    expected = [text_networks.hidden(network, prompt + text).mean(axis=0) for text in TEXTS]
    assert np.abs(vectors - text_networks.unit(np.stack(expected))).max() < 1e-5
    features = zoo.info(tmp_path / "ours")["preprocessing"]
    assert features["prompt"] == (task if prompt else "")


def test_tasks_that_a_model_lacks_are_refused(tmp_path):
    adapted(tmp_path / "theirs")
    with pytest.raises(RequestError, match="its tasks are retrieval.query, .*; found --task other"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours", task="other")
    text_networks.write(tmp_path / "plain", CONFIGS["jina_embeddings_v3"])
    with pytest.raises(RequestError, match="it has no adapters of tasks"):
        zoo.import_model(tmp_path / "plain", tmp_path / "ours", task="separation")
