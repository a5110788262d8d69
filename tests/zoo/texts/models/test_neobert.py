"""NeoBERT: a network of custom code, whose formulas are written here in torch."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="the helpers write its models")

from helpers import text_models, text_networks  # noqa: E402
from helpers.text_networks import TEXTS  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import zoo  # noqa: E402

WIDTH, HEADS, HIDDEN = 32, 4, 40
VALUES = {
    "model_type": "neobert",
    "architectures": ["NeoBERT"],
    "auto_map": {"AutoModel": "model.NeoBERT"},
    "hidden_size": WIDTH,
    "intermediate_size": 56,  # of which two thirds, up to a multiple of 8, are `HIDDEN`
    "max_length": 4096,
    "norm_eps": 1e-5,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "vocab_size": 64,
}


class NeoBert(torch.nn.Module):
    """Norms before attention and feed-forward, neighbouring columns as complex numbers that positions rotate."""

    def __init__(self):
        super().__init__()
        linear, norm = torch.nn.Linear, torch.nn.RMSNorm
        self.encoder, self.layer_norm = torch.nn.Embedding(64, WIDTH), norm(WIDTH, 1e-5)
        self.transformer_encoder = torch.nn.ModuleList()
        for _ in range(VALUES["num_hidden_layers"]):
            feed = {"w12": linear(WIDTH, 2 * HIDDEN, bias=False), "w3": linear(HIDDEN, WIDTH, bias=False)}
            parts = {"qkv": linear(WIDTH, 3 * WIDTH, bias=False), "wo": linear(WIDTH, WIDTH, bias=False)}
            parts |= {"ffn": torch.nn.ModuleDict(feed)}
            parts |= {"attention_norm": norm(WIDTH, 1e-5), "ffn_norm": norm(WIDTH, 1e-5)}
            self.transformer_encoder.append(torch.nn.ModuleDict(parts))

    def forward(self, ids):
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(len(ids)), 10_000.0 ** -(torch.arange(0, size, 2) / size))
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]

        def turned(x):
            return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)

        x = self.encoder(ids)
        for layer in self.transformer_encoder:
            query, key, value = layer["qkv"](layer["attention_norm"](x)).view(len(ids), HEADS, -1).chunk(3, -1)
            query, key, value = (part.transpose(0, 1) for part in (turned(query), turned(key), value))
            weights = (query @ key.transpose(1, 2) / size**0.5).softmax(-1)
            x = x + layer["wo"]((weights @ value).transpose(0, 1).reshape(len(ids), WIDTH))
            gate, up = layer["ffn"]["w12"](layer["ffn_norm"](x)).chunk(2, -1)
            x = x + layer["ffn"]["w3"](torch.nn.functional.silu(gate) * up)
        return self.layer_norm(x)


def test_embeddings_follow_the_formula(tmp_path):
    torch.manual_seed(0)
    network = NeoBert().eval()
    text_networks.randomize(network)
    (tmp_path / "theirs").mkdir()
    save_file(network.state_dict(), tmp_path / "theirs/model.safetensors")
    (tmp_path / "theirs/config.json").write_text(json.dumps(VALUES))
    text_networks.finish(tmp_path / "theirs", (("Pooling", {"pooling_mode_mean_tokens": True}),))
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    with torch.no_grad():
        rows = [network(torch.tensor(text_models.tokenizer().encode(text).ids)).mean(0).numpy() for text in TEXTS]
    assert np.abs(vectors - np.stack(rows)).max() < 1e-5
