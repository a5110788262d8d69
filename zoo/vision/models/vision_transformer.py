"""Vision transformers (Dosovitskiy et al. 2021, Touvron et al. 2021) in torch; torch.fx can trace the modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo.training.lazy_module import LazyModule
from zoo.vision.family import PublishedImageFamily
from zoo.vision.models.configs import config_of

if TYPE_CHECKING:
    import torch
    from torch import nn

PATCH, SIDE = 16, 224  # pixels
EPSILON = 1e-6  # of LayerNorm
EXPANSION = 4  # ratio of the hidden columns of a feed-forward network to the width


@dataclass(frozen=True)
class VisionTransformerConfig:
    """Architecture of a vision transformer.

    Attributes:
        width: Columns of a token.
        heads: Attention heads.
        depth: Blocks.
    """

    width: int
    heads: int
    depth: int = 12


CONFIGS = {"vit-small": VisionTransformerConfig(384, 6), "deit-tiny": VisionTransformerConfig(192, 3)}


def build(arch: str, classes: int, width: float = 1.0) -> VisionTransformer:
    """Builds an untrained network, from normalized float32 [n, 3, 224, 224] to logits float32 [n, classes].

    State-dict names and outputs are those of timm's vit_small_patch16_224 and deit_tiny_patch16_224.

    Args:
        arch: "vit-small" or "deit-tiny".
        classes: Number of classes.
        width: Must be 1.

    Raises:
        RequestError: See `config_of`.
    """
    return VisionTransformer(config_of(arch, width, CONFIGS, "vision transformer"), classes)


class PatchEmbedding(LazyModule):
    """Projection of the patches of an image to tokens.

    Args:
        width: Columns of a token.
    """

    def __init__(self, width: int) -> None:
        from torch import nn

        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH, PATCH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [n, 3, height, width] to [n, patches, columns]."""
        return self.proj(x).flatten(2).permute(0, 2, 1)  # type: ignore[no-any-return]


class Attention(LazyModule):
    """Multi-head self-attention.

    Args:
        config: Architecture.
        tokens: Number of tokens.
    """

    def __init__(self, config: VisionTransformerConfig, tokens: int) -> None:
        from torch import nn

        super().__init__()
        self.shape = (-1, tokens, 3, config.heads, config.width // config.heads)
        self.tokens = (-1, tokens, config.width)
        self.scale = (config.width // config.heads) ** -0.5
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps tokens [n, tokens, columns] to the same shape."""
        qkv = self.qkv(x).reshape(*self.shape).permute(2, 0, 3, 1, 4)
        attention = (qkv[0] * self.scale).matmul(qkv[1].permute(0, 1, 3, 2)).softmax(-1)
        return self.proj(attention.matmul(qkv[2]).permute(0, 2, 1, 3).reshape(*self.tokens))  # type: ignore[no-any-return]


class FeedForward(LazyModule):
    """Two linear layers with GELU between them.

    Args:
        width: Columns of a token.
    """

    def __init__(self, width: int) -> None:
        from torch import nn

        super().__init__()
        self.fc1 = nn.Linear(width, EXPANSION * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(EXPANSION * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [..., columns] to the same shape."""
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class Block(LazyModule):
    """Transformer block with the norms before its two branches.

    Args:
        config: Architecture.
        tokens: Number of tokens.
    """

    def __init__(self, config: VisionTransformerConfig, tokens: int) -> None:
        from torch import nn

        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, EPSILON)
        self.attn = Attention(config, tokens)
        self.norm2 = nn.LayerNorm(config.width, EPSILON)
        self.mlp = FeedForward(config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps tokens [n, tokens, columns] to the same shape."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class VisionTransformer(LazyModule):
    """Patches and a class token with positions, transformer blocks, a norm, and a linear head on the class token.

    Args:
        config: Architecture.
        classes: Number of classes.
    """

    def __init__(self, config: VisionTransformerConfig, classes: int) -> None:
        import torch
        from torch import nn

        super().__init__()
        tokens = 1 + (SIDE // PATCH) ** 2
        self.patch_embed = PatchEmbedding(config.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, config.width))
        self.blocks: nn.Module = nn.Sequential(*(Block(config, tokens) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(config.width, EPSILON)
        self.head = nn.Linear(config.width, classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps normalized images, float32 [n, 3, 224, 224], to logits, float32 [n, classes]."""
        import torch

        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


VIT = PublishedImageFamily(name="vit", title="Vision transformer: image classification", build=build)
