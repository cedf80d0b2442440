"""The built-in judge's network: a causal transformer of the Duo family, with no noise level to be told about."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.denoisers.duo import Linear, Norm, Rotary, attend


@dataclass(frozen=True)
class Shape:
    """Every size of a causal network; `length` is the longest context it was trained on."""

    vocab_size: int
    length: int
    width: int
    blocks: int
    heads: int
    hidden: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class Block(nn.Module):
    """Attention to the past, then the MLP, each behind a norm; dropout only while training."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = Norm(shape.width)
        self.attn_qkv = Linear(shape.width, 3 * shape.width, bias=False)
        self.attn_out = Linear(shape.width, shape.width, bias=False)
        self.norm2 = Norm(shape.width)
        self.mlp = nn.Sequential(
            Linear(shape.width, shape.hidden), nn.GELU(approximate="tanh"), Linear(shape.hidden, shape.width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        seen = attend(self.attn_qkv(self.norm1(x)), self.heads, rotary, causal=True)
        x = x + self.dropout(self.attn_out(seen))
        mixed: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return mixed


class Network(nn.Module):
    """Tokens -> features that have seen the past alone; features -> logits of the next token.

    The head is the embedding read backwards: one matrix, half the vocabulary's parameters."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.empty(shape.vocab_size, shape.width))
        self.rotary_emb = Rotary(shape.width // shape.heads)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.blocks))
        self.norm_final = Norm(shape.width)
        nn.init.normal_(self.embedding, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(
                ("attn_out.weight", "mlp.2.weight")
            ):  # small, so that the residual does not grow with depth
                nn.init.normal_(parameter, std=0.02 / (2 * shape.blocks) ** 0.5)

    def body(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens -> (B, L, width) features, the head's input."""
        x = F.embedding(tokens, self.embedding)
        rotary = self.rotary_emb(tokens.shape[1])
        for block in self.blocks:
            x = block(x, rotary)
        features: Tensor = self.norm_final(x)
        return features

    def head(self, features: Tensor) -> Tensor:
        return F.linear(features.to(self.embedding.dtype), self.embedding)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens -> (B, L, V) logits; those at position i are of token i + 1."""
        return self.head(self.body(tokens))
