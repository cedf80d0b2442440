"""What gidd-unif and Sumi share: transformers that are told no time, in the layout of transformers' large models.

Such a network reads the level of noise off the tokens. Linear maps, embedding and attention run in the precision asked
for; norms and the residual stream stay float32."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.diffusion.backends import has_triton
from limpet.diffusion.process import Schedule
from limpet.errors import LimpetError
from limpet.models import Denoiser, Needed, ToldClean, model_files
from limpet.models.duo import (
    MOST_BLOCKS,
    MOST_LENGTH,
    MOST_WIDTH,
    AlignedHead,
    Linear,
    Rotary,
    dtype_of,
    in_place,
    rows_of,
)
from limpet.models.tensor_files import Unread, digest_of, fill
from limpet.models.tokenizers import Tokenizer

N = TypeVar("N", bound="Network")
Rotation = tuple[Tensor, Tensor]  # (L, head width / 2) each: cosines and sines


@dataclass(frozen=True)
class Sizes:
    """What the tensors tell of every network here, but for its length and heads; a family adds its own numbers."""

    vocab_size: int
    length: int
    width: int
    blocks: int
    heads: int
    hidden: int


class RMSNorm(nn.Module):
    """x over its root mean square, in float32, times a gain; `centred` gains are stored as what they are above one."""

    def __init__(self, width: int, eps: float, centred: bool = False) -> None:
        super().__init__()
        self.eps, self.centred = eps, centred
        self.weight = nn.Parameter(torch.zeros(width) if centred else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        gain = 1 + self.weight if self.centred else self.weight
        return F.rms_norm(x.float(), self.weight.shape, gain, self.eps)


class Network(nn.Module):
    """Embedding, layers, a last norm; the head apart. A layer is called with x, the rotation, clean positions or None,
    and the rows that go on from its attention or None for all."""

    def __init__(self, shape: Sizes, layer: Callable[[], nn.Module], norm: nn.Module, base: float) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(layer() for _ in range(shape.blocks))
        self.norm = norm
        self.rotary_emb = Rotary(shape.width // shape.heads, base)
        self.lm_head = Linear(shape.width, shape.vocab_size, bias=False)

    def body(self, tokens: Tensor, needed: Needed = lambda: None, clean: Tensor | None = None) -> Tensor:
        """(B, L) tokens -> (B, L, width) features at the needed positions; the others may hold anything."""
        x, rotation = self.embed_tokens(tokens).float(), self.rotary_emb(tokens.shape[1])
        *layers, last = self.layers
        at, through = rows_of(needed(), tokens), compiled() if has_triton(tokens.device) else everywhere
        for layer in layers:
            x = through(layer, x, rotation, clean)
        return in_place(self.norm(last(x, rotation, clean, at)), at, tokens)

    def head(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.lm_head(features))


def everywhere(layer: nn.Module, x: Tensor, rotation: Rotation, clean: Tensor | None) -> Tensor:
    """One layer, all positions."""
    return cast(Tensor, layer(x, rotation, clean, None))


@cache
def compiled() -> Callable[..., Tensor]:
    """The same as one program for all layers of a network, which are alike: it is compiled once a shape of batches."""
    return torch.compile(everywhere, dynamic=False)


def set_precision(network: nn.Module, dtype: torch.dtype) -> None:
    for module in network.modules():
        if isinstance(module, (Linear, nn.Embedding)):
            module.to(dtype)


class Timeless(Denoiser):
    """A network that is told no time, as a denoiser: t is there for the sampler's transition alone.

    The head's output is multiplied by `scale`; `mask` is a token that it gives no chance."""

    tokenizer: Tokenizer | None

    def __init__(
        self,
        network: Network,
        *,
        schedule: Schedule,
        scale: float = 1.0,
        mask: int | None = None,
        told_clean: ToldClean = "nothing",
        name: str = "timeless",
        tokenizer: Tokenizer | None = None,
        precision: str = "float32",
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.network, self.schedule, self.told_clean = network, schedule, told_clean
        self.scale, self.mask = scale, mask
        self.name, self.tokenizer, self.precision = name, tokenizer, precision
        self.vocab_size, self.length = network.shape.vocab_size, network.shape.length
        counts, shape = [parameter.numel() for parameter in network.parameters()], asdict(network.shape)
        self.info = {**(info or {}), "parameters": sum(counts), "tensors": len(counts), "shape": shape}
        facts = {"shape": shape, "schedule": schedule.name, "scale": scale, "mask": mask, "told": told_clean}
        self.digest = digest_of(dict(network.named_parameters()), facts)
        self._aligned: dict[torch.device, AlignedHead] = {}

    @property
    def device(self) -> torch.device:
        return self.network.embed_tokens.weight.device

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.body_told(tokens, t, lambda: None, None)

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        return self.body_told(tokens, t, needed, None)

    def body_told(self, tokens: Tensor, t: float | Tensor, needed: Needed, clean: Tensor | None) -> Tensor:
        with torch.no_grad():
            return self.network.body(tokens, needed, clean)

    def head(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self._head(features.device)(features)
            if self.scale != 1:
                logits = logits * self.scale
            if self.mask is not None:
                logits[..., self.mask] = -math.inf
            return logits

    def _head(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        if device.type != "cuda":
            return self.network.head
        if device not in self._aligned:
            self._aligned[device] = AlignedHead(self.network.lm_head)
        return self._aligned[device]


# From a folder to a network

Taken = tuple[str, Callable[[Any], bool]]
NUMBER: Taken = (
    "a number above 0",
    lambda value: type(value) in (int, float) and 0 < value <= sys.float_info.max,
)
COUNT: Taken = (
    f"a whole number from 1 to {MOST_LENGTH}",
    lambda value: type(value) is int and 0 < value <= MOST_LENGTH,
)
FALSE: Taken = ("false", lambda value: value is False)


def open_folder(
    folder: Path | None, takes: model_files.Takes, what: str, needs: tuple[str, ...]
) -> tuple[Path, dict[str, Any], dict[str, Unread]]:
    """A folder's weights, its config, which says what the tensors cannot, and its tensors, not yet read."""
    if folder is None:
        raise LimpetError(f"{what} is read from files: give its folder")
    path = model_files.weights_in(folder)
    config = model_files.read_config(path.parent, takes, what)
    silent = [field for field in needs if field not in config]
    if silent:
        raise LimpetError(f"{path.parent / 'config.json'} does not say {', '.join(silent)}, which {what} needs")
    state, _ = model_files.open_weights(path, "raw", lambda stored: [])
    return path, config, state


def sizes_of(state: Mapping[str, Unread], up: str, heads: int, path: Path, what: str) -> tuple[int, int, int, int]:
    """Vocabulary, width, hidden width and blocks, read off the tensors; `up` names a layer's map into its MLP."""
    anchors = ("embed_tokens.weight", f"layers.0.{up}")
    sizes = [state[name].shape if name in state else () for name in anchors]
    if any(len(size) != 2 or min(size) < 1 for size in sizes):
        raise LimpetError(f"{path} does not hold {what}: it lacks the matrices {', '.join(anchors)}")
    (vocab_size, width), (hidden, _) = sizes
    blocks = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    if blocks > MOST_BLOCKS:
        raise LimpetError(f"{path} does not hold {what}: it names {blocks} blocks, and {MOST_BLOCKS} is the most")
    if max(width, hidden) > MOST_WIDTH:
        raise LimpetError(f"{path} does not hold {what}: it is {max(width, hidden)} wide")
    if width % heads or width // heads % 2:
        raise LimpetError(f"{path} has width {width}, which {heads} heads do not share evenly: check its config.json")
    return vocab_size, width, hidden, blocks


def filled(
    lay_out: Callable[[], N], state: Mapping[str, Unread], path: Path, what: str, device: torch.device, precision: str
) -> N:
    """A network with every tensor from the files, in a precision and on a device."""
    with torch.device("meta"):
        network = lay_out()
    set_precision(network, dtype_of(precision))
    fill(network, state, path, f"{what} of {len(network.layers)} blocks", device)
    return network
