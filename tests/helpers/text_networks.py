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
    "nomic_bert": {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "activation_function": "swiglu",
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "bos_token_id": None,
        "causal": False,
        "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 2048,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "n_embd": 32,
        "n_head": 4,
        "n_inner": 250,
        "n_layer": 2,
        "n_positions": 8192,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "type_vocab_size": 2,
        "use_rms_norm": False,
        "vocab_size": 64,
    },
    "gte": {
        **SIZES,
        "model_type": "new",
        "architectures": ["NewModel"],
        "auto_map": {"AutoModel": "modeling.NewModel"},
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "layer_norm_type": "layer_norm",
        "max_position_embeddings": 8192,
        "num_hidden_layers": 2,
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_scaling": {"factor": 2.0, "type": "ntk"},
        "rope_theta": 160000,
        "type_vocab_size": 2,
        "unpad_inputs": False,
    },
    "qwen3": {
        **SIZES,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "eurobert": {
        **SIZES,
        "model_type": "eurobert",
        "architectures": ["EuroBertForMaskedLM"],
        "attention_bias": False,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 250000,
    },
    "stella": {
        **SIZES,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"},
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "gemma3": {
        **SIZES,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3TextModel"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [*(["sliding_attention"] * 5), "full_attention", "sliding_attention"],
        "max_position_embeddings": 2048,
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 257,
        "use_bidirectional_attention": True,
    },
    "albert": {
        **SIZES,
        "model_type": "albert",
        "architectures": ["AlbertModel"],
        "embedding_size": 16,
        "hidden_act": "gelu_new",
        "inner_group_num": 1,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 2048,
        "num_hidden_groups": 2,
        "num_hidden_layers": 4,
        "type_vocab_size": 2,
    },
    "xlm-roberta-xl": {
        **SIZES,
        "model_type": "xlm-roberta-xl",
        "architectures": ["XLMRobertaXLModel"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2050,
        "num_hidden_layers": 3,
        "pad_token_id": 1,
        "type_vocab_size": 1,
    },
    "deberta-v3": {
        **SIZES,
        "model_type": "deberta-v2",
        "architectures": ["DebertaV2Model"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-7,
        "max_position_embeddings": 2048,
        "max_relative_positions": 512,
        "norm_rel_ebd": "layer_norm",
        "num_hidden_layers": 3,
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": 32,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "position_buckets": 256,
        "relative_attention": True,
        "share_att_key": True,
        "type_vocab_size": 0,
    },
    "deberta": {
        **SIZES,
        "model_type": "deberta",
        "architectures": ["DebertaModel"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-7,
        "max_position_embeddings": 2048,
        "max_relative_positions": -1,
        "num_hidden_layers": 3,
        "padding_idx": 0,
        "pooler_hidden_act": "gelu",
        "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
        "relative_attention": True,
        "type_vocab_size": 0,
    },
    "llama": {
        **SIZES,
        "model_type": "llama",
        "architectures": ["LlamaModel"],
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
    },
    "mistral": {
        **SIZES,
        "model_type": "mistral",
        "architectures": ["MistralModel"],
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 40,
    },
    "ultrabert": {
        **SIZES,
        "model_type": "ultrabert",
        "architectures": ["UltrabertForMaskedLM"],
        "attention_bias": False,
        "attention_windows": [20, 20, None, 20],
        "classifier_pooling": "mean",
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "prediction_head_size": 48,
        "rms_norm_eps": 1e-5,
        "rope_theta": [10000.0, 10000.0, 160000.0, 10000.0],
    },
    "roformer": {
        **SIZES,
        "model_type": "roformer",
        "architectures": ["RoFormerModel"],
        "embedding_size": 16,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 3,
        "rotary_value": False,
        "type_vocab_size": 2,
    },
    "jina_embeddings_v3": {
        **SIZES,
        "model_type": "jina_embeddings_v3",
        "architectures": ["JinaEmbeddingsV3Model"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8194,
        "num_hidden_layers": 3,
        "pad_token_id": 1,
        "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
        "type_vocab_size": 1,
    },
    "esm": {
        **SIZES,
        "model_type": "esm",
        "architectures": ["EsmForMaskedLM"],
        "emb_layer_norm_before": False,
        "hidden_act": "gelu",
        "is_folding_model": False,
        "layer_norm_eps": 1e-5,
        "mask_token_id": 4,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 3,
        "position_embedding_type": "rotary",
        "token_dropout": True,
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5EncoderModel"],
        "d_ff": 48,
        "d_kv": 16,
        "d_model": 32,
        "dense_act_fn": "relu",
        "feed_forward_proj": "relu",
        "is_encoder_decoder": True,
        "is_gated_act": False,
        "layer_norm_epsilon": 1e-6,
        "n_positions": 2048,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "num_layers": 3,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "vocab_size": 64,
    },
}
CONFIGS["mt5"] = {
    **CONFIGS["t5"],
    "model_type": "mt5",
    "architectures": ["MT5EncoderModel"],
    "dense_act_fn": "gelu_new",
    "feed_forward_proj": "gated-gelu",
    "is_gated_act": True,
}
CONFIGS["deberta-v2-xl"] = {
    **CONFIGS["deberta-v3"],
    "conv_act": "gelu",
    "conv_kernel_size": 3,
}
HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM")
NATIVE = {  # what transformers itself calls networks of custom code, by their model_type
    "nomic_bert": {**SIZES, "model_type": "nomic_bert", "num_hidden_layers": 2, "intermediate_size": 256},
    "new": {"model_type": "gte", "rope_scaling": None, "rope_theta": None, "auto_map": None},
    "qwen2": {"is_causal": False, "auto_map": None},
    "llama_bidirec": {"model_type": "llama", "is_causal": False, "auto_map": None},
}
ABSOLUTE = ("albert", "xlm-roberta-xl")  # a text has other positions after padding
LONG = " ".join(["the", "zebra", "sat,", "and", "a", "cat?", "no!"] * 60)  # longer than windows of real models
TEXTS = [*text_models.TEXTS, LONG, "!", "a b " * 100]


def write(folder, values, modules=(("Pooling", {"pooling_mode_mean_tokens": True}), ("Normalize", {})), seed=0):
    """A folder of a random network as sentence-transformers writes it; returns the network.

    values: content of config.json. modules: (type, config.json) of what is after the network; None: a network with
    labels, which transformers writes.
    """
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    values = copy.deepcopy(values)
    native = NATIVE.get(values["model_type"], {}) if values.get("auto_map") else {}
    labels = {key: values[key] for key in ("id2label", "label2id") if key in values}
    base = labels if "n_embd" in values else copy.deepcopy(values)
    options = {key: value for key, value in {**base, **native}.items() if value is not None}
    config = transformers.AutoConfig.for_model(**options)
    if values["model_type"] in ("t5", "mt5"):
        network = transformers.AutoModelForTextEncoding.from_config(config).float().eval()
    else:
        ends = (end for end in HEADS if modules is None and values["architectures"][0].endswith(end))
        loader = getattr(transformers, f"AutoModel{next(ends, '')}")
        network = loader.from_config(config, attn_implementation="eager").float().eval()
    randomize(network)
    if (values.get("rope_scaling") or {}).get("type") == "ntk":
        network.base_model.rotary_emb.inv_freq = ntk_frequencies(values)
    network.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    finish(folder, modules)
    if modules is None:
        (folder / "modules.json").unlink()
    return network


def ntk_frequencies(values):
    """Rotary frequencies of GTE 1.5: a base times the factor f, then divided by f^(2 / size)."""
    size, factor = values["hidden_size"] // values["num_attention_heads"], values["rope_scaling"]["factor"]
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return 1.0 / (values["rope_theta"] * factor) ** exponents / factor ** (2 / size)


def randomize(network):
    """Weights large enough that all parts show."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:  # a table of RoFormer
                continue
            spread = 0.1 if parameter.ndim == 1 else 1.2 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn_like(parameter) * spread + (parameter.ndim == 1 and "bias" not in name))


def finish(folder, modules):
    """Writes tokenizer and modules, with random Dense layers."""
    from safetensors.torch import save_file

    tokenizer = text_models.tokenizer()
    tokenizer.add_special_tokens(text_models.SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "mask_token": "[MASK]"})
    )
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, (kind, about) in enumerate(modules or (), 1):
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
