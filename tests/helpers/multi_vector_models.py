"""Tiny multi-vector encoders as Stanford's ColBERT, PyLate and sentence-transformers write them, and their definition."""

import json
import string

import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers

from helpers import text_models, text_networks

OUTPUTS = 16


def stanford(folder, kind="bert", **metadata):
    """A folder of Stanford's ColBERT; returns (network, its projection, tokenizer)."""
    model, fast = text_models.write_task(folder, "AutoModel", kind)
    weight = torch.randn(OUTPUTS, 32) * 0.2
    file = folder / "model.safetensors"
    tensors = {f"{kind}.{name}": tensor for name, tensor in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file({**tensors, "linear.weight": weight}, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    defaults = {"query_token_id": "[unused63]", "doc_token_id": "cat", "query_maxlen": 12, "doc_maxlen": 20}
    (folder / "artifact.metadata").write_text(json.dumps({**defaults, "dim": OUTPUTS, **metadata}))
    return model, lambda x: x @ weight.T, fast


def bge(folder):
    """A folder as that of BGE-M3, with the layer of tokens in a file of its own."""
    model, fast = text_models.write_task(folder, "AutoModel", "bert")
    layer = torch.nn.Linear(32, OUTPUTS)
    torch.save(layer.state_dict(), folder / "colbert_linear.pt")
    torch.save(torch.nn.Linear(32, 1).state_dict(), folder / "sparse_linear.pt")
    return model, layer, fast


def jina(folder):
    """A folder as that of jina-colbert-v2, by the code of its network and the default base of rotary positions."""
    values = text_networks.CONFIGS["jina_embeddings_v3"]
    positions = {"rope_theta": 10_000.0, "rope_type": "default"}
    network = text_networks.write(folder, {**values, "rope_parameters": positions})
    (folder / "modules.json").unlink()
    code = "jinaai/xlm-roberta-flash-implementation--configuration_xlm_roberta.XLMRobertaFlashConfig"
    values = {**values, "model_type": "xlm-roberta", "architectures": ["HF_ColBERT"], "auto_map": {"AutoConfig": code}}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if key != "rope_parameters"})
    )
    weight = torch.randn(OUTPUTS, 32) * 0.2
    file = folder / "model.safetensors"
    safetensors.torch.save_file({**safetensors.torch.load_file(file), "linear.weight": weight}, file)
    content = json.loads(text_models.tokenizer().to_str())
    for token, marker in (("##z", "[QueryMarker]"), ("[unused63]", "[DocumentMarker]")):
        content["model"]["vocab"][marker] = content["model"]["vocab"].pop(token)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(content)),
        **{"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"},
    )
    fast.add_special_tokens({"additional_special_tokens": ["[QueryMarker]", "[DocumentMarker]"]})
    fast.save_pretrained(folder)
    metadata = {"query_token_id": "[QueryMarker]", "doc_token_id": "[DocumentMarker]", "dim": OUTPUTS}
    metadata |= {"query_maxlen": 12, "doc_maxlen": 30, "attend_to_mask_tokens": True, "mask_punctuation": True}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return network, lambda x: x @ weight.T, fast


def modules(folder, kind="bert", layers=((OUTPUTS, False),), more=(), names="pylate.models.Dense.Dense"):
    """The network, layers Dense, each (outputs, whether it has a residual), and modules.json; as `stanford`."""
    model, fast = text_models.write_task(folder, "AutoModel", kind)
    listed = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    steps, inputs = [], 32
    for i, (outputs, residual) in enumerate(layers, 1):
        place = folder / f"{i}_Dense"
        place.mkdir()
        tensors = {"linear.weight": torch.randn(outputs, inputs) * 0.2}
        total = tensors["linear.weight"]
        if residual:
            other = torch.randn(outputs, inputs) * 0.2 if outputs != inputs else torch.eye(inputs)
            total = total + other
            tensors |= {"residual.weight": other} if outputs != inputs else {}
        safetensors.torch.save_file(tensors, place / "model.safetensors")
        config = {"in_features": inputs, "out_features": outputs, "bias": False, "use_residual": residual}
        config |= {"activation_function": "torch.nn.modules.linear.Identity", "module_input_name": "token_embeddings"}
        (place / "config.json").write_text(json.dumps(config))
        listed.append({"type": names, "path": place.name})
        steps.append(total)
        inputs = outputs
    for i, (name, config) in enumerate(more, len(listed)):
        place = folder / f"{i}_{name.rpartition('.')[2]}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        listed.append({"type": f"sentence_transformers.{name}", "path": place.name})
    (folder / "modules.json").write_text(json.dumps([{"idx": i, "name": str(i), **x} for i, x in enumerate(listed)]))

    def project(x):
        for weight in steps:
            x = x @ weight.T
        return x

    return model, project, fast


def pylate(folder, kind="bert", layers=((OUTPUTS, False),), **settings):
    """A folder of PyLate; as `stanford`."""
    made = modules(folder, kind, layers)
    defaults = {"query_prefix": "[unused63]", "document_prefix": "cat", "query_length": 12, "document_length": 20}
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"model_type": "ColBERT", **defaults, **settings})
    )
    return made


def sentence_transformers(folder, kind="bert", expansion=None, **mask):
    """A folder of `MultiVectorEncoder`; as `stanford`."""
    more = [
        ("multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", mask),
        ("base.modules.normalize.Normalize", {"module_input_name": "token_embeddings"}),
    ]
    made = modules(folder, kind, more=more, names="sentence_transformers.base.modules.dense.Dense")
    transformer = {"document_length": 20, "query_length": 16, "query_expansion": expansion}
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))
    settings = {"model_type": "MultiVectorEncoder", "prompts": {"query": "q: ", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return made


def expected(made, text, *, marker=None, most, expand=0, attend=False, skipped=()):
    """The definition: vectors of one text by transformers' network."""
    model, project, fast = made
    ids = fast(text, truncation=True, max_length=most - (marker is not None))["input_ids"]
    if marker is not None:
        ids.insert(1, fast.convert_tokens_to_ids(marker))
    count = len(ids)
    ids += [fast.mask_token_id] * (expand - count)
    mask = [1] * count + [int(attend)] * (len(ids) - count)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([mask])}
    if model.config.model_type == "xlm-roberta":
        inputs["position_ids"] = torch.arange(1, 1 + len(ids))[None]
    with torch.no_grad():
        rows = torch.nn.functional.normalize(project(model(**inputs).last_hidden_state[0]), dim=-1).numpy()
    left_out = {fast.convert_tokens_to_ids(word) for word in skipped}
    return rows[[i not in left_out for i in ids]]


PUNCTUATION = list(string.punctuation)


def max_sim(query, document):
    """The score in float64."""
    return (query.astype(np.float64) @ document.astype(np.float64).T).max(axis=1).sum()
