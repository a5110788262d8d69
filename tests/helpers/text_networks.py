"""Small random networks of newer architectures, by the config.json that public models of them have."""

import copy
import json

import numpy as np
import torch
import transformers

from helpers import text_models

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64, "pad_token_id": 0}
CONFIGS = {
    "modernbert": {
        **SIZES,
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "num_hidden_layers": 7,
        "attention_bias": False,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "hidden_activation": "gelu",
        "layer_norm_eps": 1e-5,
        "local_attention": 128,
        "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "norm_bias": False,
        "norm_eps": 1e-5,
        "position_embedding_type": "absolute",
    },
}
LONG = " ".join(["the", "zebra", "sat,", "and", "a", "cat?", "no!"] * 60)  # longer than windows of real models
TEXTS = [*text_models.TEXTS, LONG, "!", "a b " * 100]


def write(folder, values, modules=(("Pooling", {"pooling_mode_mean_tokens": True}), ("Normalize", {})), seed=0):
    """A folder of a random network as sentence-transformers writes it; returns the network.

    values: content of config.json. modules: (type, config.json) of what is after the network.
    """
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    values = copy.deepcopy(values)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(values))
    network = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    randomize(network)
    network.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    finish(folder, modules)
    return network


def randomize(network):
    """Weights large enough that all parts show."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            spread = 0.1 if parameter.ndim == 1 else 1.2 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn_like(parameter) * spread + (parameter.ndim == 1 and "bias" not in name))


def finish(folder, modules):
    """Writes tokenizer and modules, with random Dense layers."""
    from safetensors.torch import save_file

    tokenizer = text_models.tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"})
    )
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, (kind, about) in enumerate(modules, 1):
        (folder / f"{i}_{kind}").mkdir()
        (folder / f"{i}_{kind}" / "config.json").write_text(json.dumps(about))
        listed.append({"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"})
        if kind == "Dense":
            layer = torch.nn.Linear(about["in_features"], about["out_features"], about.get("bias", True))
            save_file(
                {f"linear.{name}": value for name, value in layer.state_dict().items()},
                folder / f"{i}_{kind}" / "model.safetensors",
            )
    (folder / "modules.json").write_text(json.dumps(listed))


def hidden(network, text, **given):
    """The last layer of a network for one text without padding: float32 [tokens, width]."""
    ids = text_models.tokenizer().encode(text).ids
    with torch.no_grad():
        out = network(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), **given)
    return out.last_hidden_state[0].numpy()


def unit(rows):
    """L2-normalized rows."""
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)
