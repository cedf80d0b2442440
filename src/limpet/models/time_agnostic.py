"""What gidd-unif and Sumi share: transformers that are not given the time, laid out as transformers' large models.

Such a network infers the level of noise from the tokens. Linear maps, embedding and attention run in the chosen
precision. Norms and the residual stream stay float32."""

from __future__ import annotations

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
from limpet.models import Cache, CleanTokens, ModelInput, Rows, all_rows, model_files
from limpet.models.networks import (
    AlignedHead,
    Linear,
    NetworkDenoiser,
    Parts,
    Positions,
    Rotary,
    Rotation,
    check_heads,
    dtype_of,
    in_place,
    positions_of,
    set_precision,
    sizes_in,
)
from limpet.models.tensor_files import Unread, fill
from limpet.models.tokenizers import HuggingFaceTokenizer

N = TypeVar("N", bound="TimeAgnosticNetwork")
IN_DIGEST = {"ignored": "nothing", "fixed": "given", "committed": "visible"}  # so that digests stay what they were


@dataclass(frozen=True)
class TimeAgnosticShape:
    """The sizes that every network here has. A family adds its own numbers."""

    vocab_size: int
    length: int
    width: int
    blocks: int
    heads: int
    hidden: int


class RMSNorm(nn.Module):
    """x over its root mean square, in float32, times a gain. `centred` gains are stored as their difference from 1."""

    def __init__(self, width: int, eps: float, centred: bool = False) -> None:
        super().__init__()
        self.eps, self.centred = eps, centred
        self.weight = nn.Parameter(torch.zeros(width) if centred else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        gain = 1 + self.weight if self.centred else self.weight
        return F.rms_norm(x.float(), self.weight.shape, gain, self.eps)


class TimeAgnosticLayer(nn.Module):
    """Attention and MLP, each with a norm before it; a family names these.

    Its attention is called with normed features, the rotation, clean positions or None, and where it appends keys and
    values. `self_attn.cached` is called with the normed features of some positions, which it is given, and a layer of
    a cache, which it returns renewed."""

    self_attn: nn.Module
    mlp: nn.Module
    weight: float = 1.0  # of each of the two branches

    @property
    def norms(self) -> tuple[nn.Module, nn.Module]:
        """The norms before attention and MLP."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        clean: Tensor | None,
        positions: Positions | None,
        keep: list[Tensor] | None = None,
    ) -> Tensor:
        """(B, L, width) -> the same, or (R, width) at some positions, which alone go on from its attention."""
        mixed = self.self_attn(self.norms[0](x), rotation, clean, keep)
        if positions is not None:  # nothing after attention mixes positions, so only these go on
            x, mixed = x[positions], mixed[positions]
        return self.after(x, mixed)

    def cached(
        self, x: Tensor, rotation: Rotation, clean: Tensor | None, positions: Positions, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer at some positions, (R, width), beside the kept keys and values of the others; both, renewed."""
        mixed, kept = cast(Any, self.self_attn).cached(self.norms[0](x), rotation, clean, positions, kept)
        return self.after(x, mixed), kept

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer after its attention."""
        x = x + self.weight * cast(Any, self.self_attn).o_proj(mixed)
        return cast(Tensor, x + self.weight * self.mlp(self.norms[1](x)))


class TimeAgnosticNetwork(nn.Module):
    """Embedding, layers, a last norm, and a head."""

    def __init__(
        self, shape: TimeAgnosticShape, layer: Callable[[], TimeAgnosticLayer], norm: nn.Module, base: float
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(layer() for _ in range(shape.blocks))
        self.norm = norm
        self.rotary_emb = Rotary(shape.width // shape.heads, base)
        self.lm_head = Linear(shape.width, shape.vocab_size, bias=False)

    def backbone(
        self, tokens: Tensor, rows: Rows = all_rows, clean: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """(B, L) tokens -> (B, L, width) features at the flat positions that `rows` returns. The others may hold
        anything."""
        rotation = self.rotary_emb(tokens.shape[1])
        if cache is not None and cache.compute is not None:
            return self.cached(tokens, rotation, clean, cache, cache.compute)
        x, positions = self.embed_tokens(tokens).float(), positions_of(rows(), tokens)
        keep = None if cache is None else cache.after
        run = compiled_layer() if has_triton(tokens.device) and keep is None else run_layer
        *layers, last = self.layers
        for layer in layers:
            x = run(layer, x, rotation, clean, keep)
        return in_place(self.norm(last(x, rotation, clean, positions, keep)), positions, tokens)

    def cached(self, tokens: Tensor, rotation: Rotation, clean: Tensor | None, cache: Cache, compute: Tensor) -> Tensor:
        """The backbone at the flat positions `compute`, (R,) of them."""
        positions = compute // tokens.shape[1], compute % tokens.shape[1]
        x = self.embed_tokens(tokens[positions]).float()
        for layer, kept in zip(cast("list[TimeAgnosticLayer]", list(self.layers)), cache.before, strict=True):
            x, kept = layer.cached(x, rotation, clean, positions, kept)
            cache.after.append(kept)
        return in_place(self.norm(x), positions, tokens)

    def head(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.lm_head(features))


def run_layer(
    layer: nn.Module, x: Tensor, rotation: Rotation, clean: Tensor | None, keep: list[Tensor] | None = None
) -> Tensor:
    """One layer at all positions."""
    return cast(Tensor, layer(x, rotation, clean, None, keep))


@cache
def compiled_layer() -> Callable[..., Tensor]:
    """`run_layer` as one program for all layers of a network, compiled once for each shape of a batch."""
    return torch.compile(run_layer, dynamic=False)


class TimeAgnostic(NetworkDenoiser):
    """A network that is not given the time, as a denoiser. Only the sampler's transition uses t."""

    network: TimeAgnosticNetwork

    def __init__(
        self,
        network: TimeAgnosticNetwork,
        *,
        schedule: Schedule,
        scale: float = 1.0,
        mask: int | None = None,
        clean_tokens: CleanTokens = "ignored",
        name: str = "time-agnostic",
        tokenizer: HuggingFaceTokenizer | None = None,
        precision: str = "float32",
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.schedule, self.scale, self.mask, self.clean_tokens = schedule, scale, mask, clean_tokens
        facts = {"shape": asdict(network.shape), "schedule": schedule.name, "scale": scale, "mask": mask}
        facts["told"] = IN_DIGEST[clean_tokens]
        super().__init__(network, name=name, tokenizer=tokenizer, precision=precision, info=info, facts=facts)
        shape = network.shape
        narrow = shape.width // shape.heads * getattr(shape, "groups", shape.heads)
        self.cache_bytes = 2 * shape.blocks * narrow * dtype_of(precision).itemsize

    def backbone(self, inputs: ModelInput) -> Tensor:
        with torch.no_grad():
            return self.network.backbone(inputs.tokens, inputs.rows, inputs.clean, inputs.cache)

    def make_parts(self, device: torch.device) -> Parts:
        network = self.network
        return network.backbone, AlignedHead(network.lm_head) if device.type == "cuda" else network.head


# From a folder to a network


def open_folder(
    folder: Path | None, fields: model_files.Fields, what: str, needed: tuple[str, ...]
) -> tuple[Path, dict[str, Any], dict[str, Unread]]:
    """The path of a folder's weights, its config, and its tensors, not yet read."""
    path = model_files.weights_in(folder, what)
    config = model_files.read_config(path.parent, fields, what)
    missing = [field for field in needed if field not in config]
    if missing:
        raise LimpetError(f"{path.parent / 'config.json'} does not say {', '.join(missing)}, which {what} needs")
    state, _ = model_files.open_weights(path, "raw", lambda stored: [])
    return path, config, state


def read_sizes(state: Mapping[str, Unread], heads: int, path: Path, what: str) -> tuple[int, int, int, int]:
    """Vocabulary, width, hidden width and blocks, read off the shapes of the tensors."""
    anchors = ("embed_tokens.weight", "layers.0.mlp.up_proj.weight")
    blocks, ((vocab_size, width), (hidden, _)) = sizes_in(state, anchors, "layers.", path, what)
    check_heads(width, heads, path)
    return vocab_size, width, hidden, blocks


def filled_network(
    lay_out: Callable[[], N], state: Mapping[str, Unread], path: Path, what: str, device: torch.device, precision: str
) -> N:
    """A network with every tensor from the files, in a precision and on a device."""
    with torch.device("meta"):
        network = lay_out()
    set_precision(network, dtype_of(precision), (Linear, nn.Embedding))
    fill(network, state, path, f"{what} of {len(network.layers)} blocks", device)
    return network
