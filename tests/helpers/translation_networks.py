"""Small Transformers for translation, with random weights or with weights that are the same everywhere."""

import torch

from zoo.translation.models.config import ModelConfig
from zoo.translation.models.transformer import Transformer

FORMS = {
    "small": ModelConfig(1, 2, 32, 48, 2),
    "odd heads": ModelConfig(1, 1, 40, 56, 4),
    "one head": ModelConfig(1, 1, 16, 20, 1),
    "deep": ModelConfig(1, 4, 64, 64, 2),
    "recurrent": ModelConfig(1, 2, 32, 48, 2, decoder_hidden=64, autoregression="ssru"),
    "gelu": ModelConfig(
        2, 2, 32, 48, 2, activation="gelu", scaled=False, embedding_norm=True, output_bias=True, positions=(600, 530)
    ),
    "norm first": ModelConfig(
        1, 1, 32, 48, 2, embedding_norm=True, target_norm_first=True, final_norm=False, positions=(64, 64)
    ),
    "apart": ModelConfig(1, 2, 32, 48, 2, decoder_heads=1, activation="swish", shared_source=False, tied_output=False),
}
WORDS = 60


def network(form="small", pre=True, sharp=3.0, seed=0):
    """Random weights, biases and norms included; `sharp` logits have no near ties."""
    torch.manual_seed(seed)
    model = Transformer(FORMS[form], WORDS, pre_norm=pre, dropout=0.0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(tensor, std=0.2)
            elif tensor.ndim == 1:
                torch.nn.init.uniform_(tensor, 0.7, 1.3)
        model.embedding.weight *= sharp
        if not model.config.tied_output:
            model.output_weight *= sharp
        for tensor in model.buffers():
            if not tensor.any():
                torch.nn.init.normal_(tensor)
    return model.eval()


def plain_network():
    """Weights by a formula, all of them multiples of 1 / 64: exact in float32, whatever the CPU or the libraries."""
    model = Transformer(FORMS["one head"], WORDS, pre_norm=True, dropout=0.0)
    with torch.no_grad():
        for turn, weight in enumerate(model.parameters()):
            weight.copy_((((torch.arange(weight.numel()) * 37 + 11 * turn) % 127 - 63) / 64).reshape(weight.shape))
    return model.eval()
