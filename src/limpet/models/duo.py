"""The Duo transformer in plain PyTorch: any size, backbone and head apart, parameter names as released.

UDLM and SDLLM-Duo are the same network over other vocabularies. config.json tells them apart."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.diffusion.backends import has_triton
from limpet.diffusion.process import LOG_LINEAR, SCHEDULES, Schedule
from limpet.errors import LimpetError
from limpet.models import Cache, ModelInput, Rows, all_rows, model_files
from limpet.models.float8 import Float8Gelu, Float8Linear
from limpet.models.model_files import FALSE, TOKEN, Fields, whole_number
from limpet.models.networks import (
    MAX_LENGTH,
    MAX_WIDTH,
    PRECISIONS,
    AlignedHead,
    Linear,
    NetworkDenoiser,
    Norm,
    Parts,
    Positions,
    Rotary,
    Rotation,
    TransformerBlock,
    attend,
    attend_at,
    attend_kept,
    check_heads,
    dtype_of,
    in_place,
    pad_rows,
    positions_of,
    set_precision,
    sizes_in,
)
from limpet.models.tensor_files import STORAGES, fill
from limpet.models.tokenizers import HuggingFaceTokenizer

WHAT = "a Duo model"
ROTARY = "rotary_emb.inv_freq"  # no parameter, but kept in the files: it tells the number of heads and can be checked
KINDS = ("duo", "udlm", "sdllm-duo")
FIELDS: Fields = {
    "model_type": (" or ".join(KINDS), lambda value: isinstance(value, str) and value.lower() in KINDS),
    "causal": FALSE,
    "n_heads": whole_number(MAX_WIDTH),
    "model_length": whole_number(MAX_LENGTH),
    "schedule": (" or ".join(SCHEDULES), lambda value: isinstance(value, str) and value in SCHEDULES),
    "predicts": ("leave-one-out or posterior", lambda value: value in ("leave-one-out", "posterior")),
    "mask_token_id": TOKEN,
}


@dataclass(frozen=True)
class DuoShape:
    """Every size of a Duo network; the defaults are the released checkpoints'."""

    vocab_size: int = 50258
    length: int = 1024
    width: int = 768
    blocks: int = 12
    heads: int = 12
    cond: int = 128
    hidden: int = 3072
    learned_positions: bool = False  # whether each position has an embedding of its own, besides rotary ones


RELEASED = ("vocab_size", "model_length", "hidden_dim", "n_blocks", "n_heads", "cond_dim", "mlp_dim")  # names of these


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def _rows(part: Tensor, positions: Positions) -> Tensor:
    """(R, width) a modulation (B, 1, width) at some positions; (1, width) if all samples have the same."""
    return part[:, 0] if len(part) == 1 else part[positions[0], 0]


class SigmaMap(nn.Module):
    """sigma () or (B,) -> conditioning vector: a sinusoid of 256 features, cosines first, and a two-layer net."""

    FREQUENCIES = 128

    def __init__(self, cond: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * self.FREQUENCIES, cond), nn.SiLU(), nn.Linear(cond, cond))

    def forward(self, sigma: Tensor) -> Tensor:
        k = torch.arange(self.FREQUENCIES, dtype=torch.float32, device=sigma.device)
        rows = pad_rows(sigma.float()) if sigma.dim() else sigma.float().expand(2)
        angle = rows[:, None] * torch.exp(-math.log(10000) * k / self.FREQUENCIES)
        cond = F.silu(self.mlp(torch.cat([angle.cos(), angle.sin()], -1)))
        return cond[: len(sigma)] if sigma.dim() else cond[0]


class Modulation(Linear):
    """The conditioning of one time for all samples (cond,), or of each (B, cond) -> (1 or B, 1, out).

    One time is computed as two equal rows: a product of one shape, whose bits do not depend on the batch."""

    def forward(self, cond: Tensor) -> Tensor:
        if cond.dim() > 1:
            return super().forward(cond)[:, None]
        return F.linear(cond.to(self.weight.dtype).expand(2, -1), self.weight, self.bias)[:1, None]


class DuoBlock(TransformerBlock):
    """Attention and MLP, each modulated by the noise level on the way in and gated on the way out."""

    def __init__(self, shape: DuoShape) -> None:
        super().__init__(shape.width, shape.heads, shape.hidden)
        self.adaLN_modulation = Modulation(shape.cond, 6 * shape.width)

    def forward(
        self,
        x: Tensor,
        cond: Tensor,
        rotation: Rotation,
        positions: Positions | None = None,
        keep: list[Tensor] | None = None,
    ) -> Tensor:
        """keep: where keys and values are appended for the next call."""
        shift, scale, *others = self.adaLN_modulation(cond).chunk(6, -1)
        normed = _modulate(self.norm1(x), shift, scale)
        mlp = self.mlp if keep is None else self.mlp_beside_cache
        if positions is None:
            return self.after(x, attend(self.attn_qkv(normed), self.heads, rotation, keep=keep), mlp, *others)
        # Nothing after attention mixes positions, so only these, (R, width), go on.
        mixed = attend_at(normed, self.attn_qkv, self.heads, rotation, positions, keep)
        return self.after(x[positions], mixed, mlp, *(_rows(part, positions) for part in others))

    def cached(
        self, x: Tensor, cond: Tensor, rotation: Rotation, positions: Positions, kept: Tensor, read: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The block at some positions, (R, width), beside the kept keys and values of the others; both, renewed.

        read: the rows of x that go on from attention (default: all)."""
        shift, scale, *others = self.adaLN_modulation(cond).chunk(6, -1)
        normed = _modulate(self.norm1(x), _rows(shift, positions), _rows(scale, positions))
        mixed, kept = attend_kept(self.attn_qkv(normed), kept, self.heads, rotation, positions, read)
        if read is not None:
            x, positions = x[read], (positions[0][read], positions[1][read])
        return self.after(x, mixed, self.mlp_beside_cache, *(_rows(part, positions) for part in others)), kept

    def after(self, x: Tensor, mixed: Tensor, mlp: Callable[[Tensor], Tensor], *modulation: Tensor) -> Tensor:
        """The block after its attention."""
        gate_attn, shift, scale, gate_mlp = modulation
        x = x + gate_attn * self.attn_out(mixed)
        return x + gate_mlp * mlp(_modulate(self.norm2(x), shift, scale))


class Embedding(nn.Module):
    def __init__(self, shape: DuoShape) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(shape.vocab_size, shape.width))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))
        self.positions = None
        if shape.learned_positions:
            self.positions = nn.Parameter(torch.empty(shape.length, shape.width))
            nn.init.kaiming_uniform_(self.positions, a=math.sqrt(5))

    def forward(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        """(B, L) tokens, or (R,) tokens at (R,) places."""
        embedded = F.embedding(tokens, self.embedding).float()
        if self.positions is None:
            return embedded
        return embedded + self.positions[slice(tokens.shape[1]) if places is None else places].float()


class OutputLayer(nn.Module):
    """The last norm, which is part of the backbone, and the linear map that is the head."""

    def __init__(self, shape: DuoShape) -> None:
        super().__init__()
        self.norm_final = Norm(shape.width)
        self.linear = Linear(shape.width, shape.vocab_size)
        self.adaLN_modulation = Modulation(shape.cond, 2 * shape.width)

    def forward(self, x: Tensor, cond: Tensor, positions: Positions | None = None) -> Tensor:
        shift, scale = self.adaLN_modulation(cond).chunk(2, -1)
        if positions is not None:
            shift, scale = _rows(shift, positions), _rows(scale, positions)
        return _modulate(self.norm_final(x), shift, scale)


class DuoNetwork(nn.Module):
    """Noisy tokens and sigma -> features; features -> logits.

    It starts as the identity with a uniform distribution: modulations and head at zero, the released initialisation."""

    def __init__(self, shape: DuoShape) -> None:
        super().__init__()
        self.shape = shape
        self.vocab_embed = Embedding(shape)
        self.sigma_map = SigmaMap(shape.cond)
        self.rotary_emb = Rotary(shape.width // shape.heads)
        self.blocks = nn.ModuleList(DuoBlock(shape) for _ in range(shape.blocks))
        self.output_layer = OutputLayer(shape)
        for name, parameter in self.named_parameters():
            if "adaLN_modulation" in name or name.startswith("output_layer.linear"):
                nn.init.zeros_(parameter)

    def backbone(self, tokens: Tensor, sigma: Tensor, rows: Rows = all_rows, cache: Cache | None = None) -> Tensor:
        """(B, L) tokens, () or (B,) sigma -> (B, L, width) features, the head's input, at the flat positions that
        `rows` returns. The others may hold anything."""
        if cache is not None and cache.compute is not None:
            return self.cached(tokens, sigma, rows(), cache, cache.compute)
        x, positions = self.vocab_embed(tokens), positions_of(rows(), tokens)
        cond, rotation = self.sigma_map(sigma), self.rotary_emb(tokens.shape[1])
        keep = None if cache is None else cache.after
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x, cond, rotation, keep=keep)
        x = last(x, cond, rotation, positions, keep)
        return in_place(self.output_layer(x, cond, positions), positions, tokens)

    def cached(self, tokens: Tensor, sigma: Tensor, rows: Tensor | None, cache: Cache, compute: Tensor) -> Tensor:
        """The backbone at the flat positions `compute`, of which `rows` are read (None: all); sigma as above."""
        positions = compute // tokens.shape[1], compute % tokens.shape[1]
        x, cond = self.vocab_embed(tokens[positions], positions[1]), self.sigma_map(sigma)
        rotation, read = self.rotary_emb(tokens.shape[1]), None
        for block, kept in zip(cast("list[DuoBlock]", list(self.blocks)), cache.before, strict=True):
            if len(cache.after) == len(self.blocks) - 1 and rows is not None:
                read = torch.searchsorted(compute.contiguous(), rows.contiguous())
            x, kept = block.cached(x, cond, rotation, positions, kept, read)
            cache.after.append(kept)
        positions = positions if read is None else (positions[0][read], positions[1][read])
        return in_place(self.output_layer(x, cond, positions), positions, tokens)

    def head(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.output_layer.linear(features))

    def forward(self, tokens: Tensor, sigma: Tensor) -> Tensor:
        return self.head(self.backbone(tokens, sigma))


def in_float8(network: DuoNetwork) -> DuoNetwork:
    """The network with float8 products in its blocks. All other weights are shared.

    Two linear maps stay as they are. Attention's output would need a pass of its own to be rounded, which takes as
    long as its small product saves. Rounding in the head would change the predicted distribution directly."""
    kept = [*network.parameters(), *network.buffers()]
    twin = copy.deepcopy(network, {id(tensor): tensor for tensor in kept})
    for block in cast(list[DuoBlock], list(twin.blocks)):
        block.attn_qkv = Float8Linear(cast(Linear, block.attn_qkv))
        first, last = (Float8Linear(cast(Linear, block.mlp[place])) for place in (0, 2))
        block.mlp = nn.Sequential(first, Float8Gelu(), last)
    return twin


class Duo(NetworkDenoiser):
    """A Duo network as a denoiser.

    In bfloat16 the linear maps and attention of the blocks and the output run in bfloat16, and so are the logits.
    Sigma, norms and the residual stream stay float32, and so does an embedding that is stored in float32. In float8
    the products that compute queries, keys and values and those of the MLPs run in float8, and all else as in
    bfloat16. The weights are kept in bfloat16 and rounded to float8 on the device."""

    network: DuoNetwork

    def __init__(
        self,
        network: DuoNetwork,
        *,
        name: str = "duo",
        tokenizer: HuggingFaceTokenizer | None = None,
        schedule: Schedule = LOG_LINEAR,
        predicts: Literal["leave-one-out", "posterior"] = "leave-one-out",
        precision: str = "float32",
        mask: int | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        dtype = dtype_of(precision, tuple(PRECISIONS))
        if network.output_layer.linear.weight.dtype != dtype:  # on a copy: the caller's weights are not rounded
            network = copy.deepcopy(network)
            set_precision(network, dtype)
        self.schedule, self.predicts, self.mask = schedule, predicts, mask
        facts = {"heads": network.shape.heads, "schedule": schedule.name, "predicts": predicts}
        facts |= {} if mask is None else {"mask": mask}
        facts |= {"products": precision} if precision == "float8" else {}  # the tensors' types tell the others
        super().__init__(network, name=name, tokenizer=tokenizer, precision=precision, info=info, facts=facts)
        self.cache_bytes = 2 * network.shape.blocks * network.shape.width * PRECISIONS[precision].itemsize

    def to(self, device: torch.device | str) -> Duo:
        """Move the network to a device. Returns the same model."""
        self.device = torch.device(device)
        return self

    def backbone(self, inputs: ModelInput) -> Tensor:
        tokens, sigma, cache = inputs.tokens, self.schedule.sigma(inputs.t), inputs.cache
        if sigma.dim():
            sigma = sigma.to(tokens.device, torch.float32)
        else:  # filled in on the device, so that no copy waits for it; some positions share one modulation
            size = [] if tokens.device.type == "cpu" else [len(tokens) if cache is None or cache.compute is None else 1]
            sigma = torch.full(size, float(sigma), dtype=torch.float32, device=tokens.device)
        with torch.no_grad():
            return self._parts_on(tokens.device)[0](tokens, sigma, inputs.rows, cache)

    def make_parts(self, device: torch.device) -> Parts:
        network = in_float8(self.network) if self.precision == "float8" else self.network
        backbone: Callable[..., Tensor] = network.backbone
        if has_triton(device) and not self.network.shape.learned_positions:
            from limpet.models.duo_triton import FusedBackbone

            backbone = FusedBackbone(network)
        return backbone, AlignedHead(network.output_layer.linear) if device.type == "cuda" else network.head

    def config(self) -> dict[str, object]:
        """What the tensors cannot tell, and the sizes again under the released names, as config.json holds them."""
        sizes = zip(RELEASED, astuple(self.network.shape), strict=False)
        about: dict[str, object] = {"causal": False, "schedule": self.schedule.name, "predicts": self.predicts}
        about |= {} if self.mask is None else {"mask_token_id": self.mask}
        about |= {} if self.checker is None else {"checker": self.checker}
        about |= {} if self.prompt_layout is None else {"layout": self.prompt_layout.name}
        return {"model_type": "duo", **dict(sizes), **about}

    def save(self, folder: str | os.PathLike[str], storage: Literal["float32", "bfloat16", "int8"] = "float32") -> None:
        """Write model.safetensors, config.json and tokenizer.json, laid out as on the hub.

        storage: "float32" loads back bit for bit. "bfloat16" and "int8" round every matrix to a smaller file."""
        if storage not in STORAGES:
            raise LimpetError(f"storage is one of {', '.join(STORAGES)}, not {storage!r}")
        state = {f"backbone.{name}": tensor.cpu().float() for name, tensor in self.network.state_dict().items()}
        model_files.write_folder(Path(folder), self.config(), self.tokenizer, STORAGES[storage](state))


# From a folder to a model


def from_folder(
    folder: Path | None = None,
    *,
    device: torch.device | str | None = None,
    precision: str = "float32",
    weights: Literal["ema", "raw"] = "ema",
) -> Duo:
    """A Duo model from a folder, or from one file of weights with or without a config.json beside it.

    Sizes come from the tensors; config.json adds what they cannot tell. The network is laid out without memory and
    every parameter is assigned from the file, so nothing can be left at an initial value."""
    dtype, device = dtype_of(precision, tuple(PRECISIONS)), model_files.usable_device(device)
    path = model_files.weights_in(folder, WHAT)
    config = model_files.read_config(path.parent, FIELDS, WHAT)
    state, kept = model_files.open_weights(
        path, weights, lambda stored: [name for name, _ in empty_network(stored, config, path).named_parameters()]
    )
    network = empty_network(state, config, path)
    set_precision(network, dtype)
    if state["vocab_embed.embedding"].dtype == dtype:  # in memory as in the file, not larger
        network.vocab_embed.to(dtype)
    fill(network, state, path, f"{WHAT} of {network.shape.blocks} blocks", device)
    tokenizer, reason = model_files.find_tokenizer(path.parent, network.shape.vocab_size)
    mask = _mask(config, tokenizer, network.shape.vocab_size, path)
    info = {"file": str(path), "weights": kept, "tokenizer": reason} | ({} if mask is None else {"mask": mask})
    if "model_length" not in config:
        info["assumed"] = f"length {network.shape.length}, the released models', as no config.json says"
    return Duo(
        network,
        name=str(folder),
        tokenizer=tokenizer,
        schedule=SCHEDULES[config.get("schedule", "log-linear")],
        predicts=config.get("predicts", "leave-one-out"),
        precision=precision,
        mask=mask,
        info=info,
    )


def _mask(config: Mapping[str, Any], tokenizer: HuggingFaceTokenizer | None, vocab_size: int, path: Path) -> int | None:
    """The token that has probability zero: config.json names it, or for SDLLM-Duo the tokenizer."""
    mask: int | None = config.get("mask_token_id")
    if mask is None and str(config.get("model_type")).lower() == "sdllm-duo":
        mask = None if tokenizer is None else tokenizer.special.get("mask")
        if mask is None:
            raise LimpetError(
                f'{path} does not tell which token is the mask: put {{"mask_token_id": ...}} in config.json'
            )
    if mask is not None and mask >= vocab_size:
        raise LimpetError(f"{path.parent / 'config.json'} has mask_token_id {mask}, and its model {vocab_size} tokens")
    return mask


def empty_network(state: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> DuoNetwork:
    """The network that has these tensors, without memory. Its sizes are read off their shapes."""
    anchors = ("vocab_embed.embedding", "sigma_map.mlp.2.weight", "blocks.0.mlp.0.weight")
    blocks, ((vocab_size, width), (cond, _), (hidden, _)) = sizes_in(state, anchors, "blocks.", path, WHAT)
    rotary = tuple(state[ROTARY].shape) if ROTARY in state else ()
    heads = config.get("n_heads") or (width // (2 * rotary[0]) if len(rotary) == 1 and rotary[0] else None)
    if not heads:
        raise LimpetError(f'{path} does not tell how many heads its model has: put {{"n_heads": ...}} in a config.json')
    check_heads(width, heads, path)
    length = config.get("model_length", DuoShape.length)
    with torch.device("meta"):
        positions = "vocab_embed.positions" in state
        return DuoNetwork(DuoShape(vocab_size, length, width, blocks, heads, cond, hidden, positions))
