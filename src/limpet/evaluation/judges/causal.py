"""The built-in judge: a causal transformer with Duo's layers and no noise level, and the folder it is stored in."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.errors import LimpetError
from limpet.evaluation.judges.base import Judge
from limpet.models.model_files import read_config, whole_number
from limpet.models.networks import (
    MAX_BLOCKS,
    MAX_LENGTH,
    MAX_WIDTH,
    Linear,
    Norm,
    Rotary,
    TransformerBlock,
    attend,
    set_precision,
)
from limpet.models.tensor_files import digest_of, fill, open_tensors, unpacked
from limpet.models.tokenizers import HuggingFaceTokenizer, read_tokenizer


@dataclass(frozen=True)
class CausalShape:
    """Every size of a causal network; `length` is the longest context it was trained on."""

    vocab_size: int
    length: int
    width: int
    blocks: int
    heads: int
    hidden: int


LIMITS = {"blocks": MAX_BLOCKS, "vocab_size": MAX_LENGTH, "length": MAX_LENGTH}
FIELDS = {one.name: whole_number(LIMITS.get(one.name, MAX_WIDTH)) for one in fields(CausalShape)}


class CausalBlock(TransformerBlock):
    """Attention to the past, then the MLP, each after a norm; dropout in training only."""

    def __init__(self, shape: CausalShape, dropout: float) -> None:
        super().__init__(shape.width, shape.heads, shape.hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        attended = attend(self.attn_qkv(self.norm1(x)), self.heads, rotary, causal=True)
        x = x + self.dropout(self.attn_out(attended))
        return cast(Tensor, x + self.dropout(self.mlp(self.norm2(x))))


class CausalNetwork(nn.Module):
    """Tokens -> features that depend on the past alone; features -> logits of the next token.

    The head is the transposed embedding: one matrix for both."""

    def __init__(self, shape: CausalShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.empty(shape.vocab_size, shape.width))
        self.rotary_emb = Rotary(shape.width // shape.heads)
        self.blocks = nn.ModuleList(CausalBlock(shape, dropout) for _ in range(shape.blocks))
        self.norm_final = Norm(shape.width)
        nn.init.normal_(self.embedding, std=0.02)
        for name, parameter in self.named_parameters():  # small, so that the residual does not grow with depth
            if name.endswith(("attn_out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.blocks) ** 0.5)

    def backbone(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens -> (B, L, width) features, the head's input."""
        x = F.embedding(tokens, self.embedding)
        rotary = self.rotary_emb(tokens.shape[1])
        for block in self.blocks:
            x = block(x, rotary)
        return cast(Tensor, self.norm_final(x))

    def head(self, features: Tensor) -> Tensor:
        return F.linear(features.to(self.embedding.dtype), self.embedding)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) tokens -> (B, L, V) logits; those at position i are of token i + 1."""
        return self.head(self.backbone(tokens))


class CausalJudge(Judge):
    """A causal network as a judge."""

    def __init__(self, name: str, network: CausalNetwork, tokenizer: HuggingFaceTokenizer | None) -> None:
        self.name, self.network, self.tokenizer = name, network, tokenizer
        self.digest = digest_of(dict(network.named_parameters()), {"context": network.shape.length})
        self.context, self.vocab_size = network.shape.length, network.shape.vocab_size
        dtypes = [module.weight.dtype for module in network.modules() if isinstance(module, Linear)]
        self.precision = str((dtypes or [torch.float32])[0]).removeprefix("torch.")
        self.eos = tokenizer.special.get("eos") if tokenizer else None

    @property
    def device(self) -> torch.device:
        return self.network.embedding.device

    def backbone(self, tokens: Tensor) -> Tensor:
        return self.network.backbone(tokens)

    def head(self, features: Tensor) -> Tensor:
        return self.network.head(features)


def load(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> CausalJudge:
    """Read a judge's folder. In bfloat16 the linear maps of the blocks are rounded; embedding and head are not."""
    sizes = {key: value for key, value in read_config(folder, FIELDS, "a judge").items() if key != "model_type"}
    try:
        with torch.device("meta"):
            network = CausalNetwork(CausalShape(**sizes))
    except (TypeError, RuntimeError, ZeroDivisionError) as error:
        raise LimpetError(f"{folder / 'config.json'} gives no sizes of a judge ({error}): copy it again") from error
    path = folder / "model.safetensors"
    set_precision(network, dtype)
    fill(network, unpacked(open_tensors(path)), path, "the sizes in its config.json", device)
    return CausalJudge(name, network, read_tokenizer(folder, network.shape.vocab_size))
