"""Tiny random models as transformers and sentence-transformers write them, and what transformers computes with them."""

import json
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

import zoo

WORDS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{char}" for char in "abcdefghijklmnopqrstuvwxyz"), *".,!?", "the", "cat"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "the cat",
    "a",
    "the cat sat, and sat.",
    "zebra! the zoo? yes, the zoo.",
    "b c d e f g h i j k l m n o p q r s",
]
SIZES = {"vocab_size": 64, "max_position_embeddings": 80}
USUAL = {
    **SIZES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
CONFIGS = {
    "bert": lambda **more: transformers.BertConfig(**{**USUAL, **more}),
    "roberta": lambda **more: transformers.RobertaConfig(**{**USUAL, "type_vocab_size": 1, **more}),
    "xlm-roberta": lambda **more: transformers.XLMRobertaConfig(**{**USUAL, "type_vocab_size": 1, **more}),
    "distilbert": lambda **more: transformers.DistilBertConfig(
        **{**SIZES, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "pad_token_id": 0, **more}
    ),
    "mpnet": lambda **more: transformers.MPNetConfig(**{**USUAL, **more}),
}
MORE_CONFIGS = {  # of which not all have native kernels
    "electra": lambda **more: transformers.ElectraConfig(**{**USUAL, "embedding_size": 32, **more}),
    "electra small": lambda **more: transformers.ElectraConfig(**{**USUAL, "embedding_size": 16, **more}),
    "ernie": lambda **more: transformers.ErnieConfig(**{**USUAL, **more}),
    "ernie tasks": lambda **more: transformers.ErnieConfig(**{**USUAL, "use_task_id": True, **more}),
    "data2vec": lambda **more: transformers.Data2VecTextConfig(**{**USUAL, "type_vocab_size": 1, **more}),
}

NEWER_CONFIGS = {
    "modernbert": lambda **more: transformers.ModernBertConfig(
        **{
            **USUAL,
            "num_hidden_layers": 3,
            "local_attention": 16,
            "classifier_pooling": "mean",
            "classifier_activation": "silu",
            **dict(zip(("unk_token_id", "cls_token_id", "sep_token_id", "mask_token_id"), range(1, 5), strict=True)),
            "bos_token_id": 2,
            "eos_token_id": 3,
            **more,
        }
    ),
    "qwen3": lambda **more: transformers.Qwen3Config(**{**USUAL, "num_key_value_heads": 1, "head_dim": 16, **more}),
}


def tokenizer():
    """A WordPiece tokenizer of letters, which frames texts as BERT's does."""
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    vocabulary |= {f"[unused{i}]": i for i in range(len(vocabulary), SIZES["vocab_size"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return made


def write(folder, kind="bert", labels=0, pooling="mean", normalize=True, seed=0, **more):
    """A folder of a random model; returns the model. Weights are large enough that its parts show."""
    torch.manual_seed(seed)
    config = {**CONFIGS, **MORE_CONFIGS}[kind](**more)
    if labels:
        config.num_labels = labels
    chosen = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
    model = chosen.from_config(config, attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    if not labels:
        modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        listed = [
            {
                "idx": i,
                "name": str(i),
                "path": "" if not i else f"{i}_{module}",
                "type": f"sentence_transformers.models.{module}",
            }
            for i, module in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        names = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
        about = {f"pooling_mode_{name}": name == names[pooling] for name in names.values()}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **about}))
    return model


def prompted(folder, **more):
    """Give a folder prompts, one of them its default."""
    said = {"prompts": {"query": "the ", "passage": "a ", "document": ""}, "default_prompt_name": "query", **more}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))


def expected(model, texts, pooling="mean", normalize=True):
    """What transformers computes: float32 [n, width or labels]."""
    made = tokenizer()
    made.no_truncation()
    encodings = made.encode_batch(texts)
    rows = []
    for encoding in encodings:
        inputs = {
            "input_ids": torch.tensor([encoding.ids]),
            "attention_mask": torch.ones(1, len(encoding.ids), dtype=torch.int64),
        }
        if getattr(model.config, "type_vocab_size", 1) > 1:
            inputs["token_type_ids"] = torch.tensor([encoding.type_ids])
        if model.config.model_type in (
            "roberta",
            "xlm-roberta",
            "mpnet",
            "data2vec-text",
        ):  # a token 0 is no padding here
            first = 2 if model.config.model_type == "mpnet" else model.config.pad_token_id + 1
            inputs["position_ids"] = torch.arange(first, first + len(encoding.ids))[None]
        with torch.no_grad():
            out = model(**inputs)
        if hasattr(out, "logits"):
            rows.append(out.logits[0].numpy())
            continue
        hidden = out.last_hidden_state[0].numpy()
        row = {"mean": hidden.mean(axis=0), "cls": hidden[0], "max": hidden.max(axis=0)}[pooling]
        rows.append(row / np.linalg.norm(row) if normalize else row)
    return np.stack(rows)


def write_task(folder, task, kind="bert", seed=0, **more):
    """A folder of a random model with the head of a class of transformers, such as AutoModelForTokenClassification;
    returns the model and a tokenizer of transformers."""
    torch.manual_seed(seed)
    config = {**CONFIGS, **MORE_CONFIGS, **NEWER_CONFIGS}[kind](**more)
    model = getattr(transformers, task).from_config(config, attn_implementation="eager").eval()
    randomize(model)
    return model, save(folder, model)


def randomize(model):
    """Gives a model weights that are large enough that its parts show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn_like(parameter) * spread + ("orm.weight" in name))


def save(folder, model, limit=76):
    """Writes a folder of a model with the tokenizer of letters; returns the tokenizer of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    made = tokenizer()
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    inputs = ["input_ids", "attention_mask"]
    if getattr(model.config, "type_vocab_size", 1) > 1 and model.config.model_type != "mpnet":
        inputs.append("token_type_ids")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=limit, model_input_names=inputs, **names
    )
    fast.save_pretrained(folder)
    return fast


PAIRS = [[text, TEXTS[0]] for text in TEXTS]


def built(path: Path, labels: int) -> Path:
    """A model of random weights, built up to int8."""
    (path / "theirs").mkdir(parents=True)
    write(path / "theirs", labels=labels)
    zoo.import_model(path / "theirs", path / "ours")
    data = path / "data.tsv"
    data.write_text("\n".join("\t".join(pair) if labels == 1 else pair[0] for pair in PAIRS * 30))
    zoo.calibrate(path / "ours", str(data), samples=16)
    zoo.build(path / "ours")
    card = path / "ours" / "card.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "name": f"texts-{labels}"}))
    return path / "ours"
