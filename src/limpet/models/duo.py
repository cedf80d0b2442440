"""The Duo transformer in plain PyTorch: any size, body and head apart, parameter names as released.

UDLM and SDLLM-Duo are the same network over other vocabularies; config.json tells them apart."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.diffusion.backends import has_triton
from limpet.diffusion.process import LOG_LINEAR, SCHEDULES, Schedule
from limpet.errors import LimpetError
from limpet.models import Denoiser, Needed, float8, model_files
from limpet.models.tensor_files import STORAGES, digest_of, fill
from limpet.models.tokenizers import Tokenizer

Rows = tuple[Tensor, Tensor]  # some positions of a batch: (R,) samples and (R,) places in them
Parts = tuple[Callable[[Tensor, Tensor, Needed], Tensor], Callable[[Tensor], Tensor]]  # a network's body and its head

Precision = Literal["float32", "bfloat16", "float8"]
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}  # of weights in memory
ROTARY = "rotary_emb.inv_freq"  # kept in the files, though no parameter: it tells the heads and can be checked
ALIGNMENT = 64  # columns of logits: whole tiles for the matrix units, wide loads for whoever reads the rows
MOST_WIDTH = 1 << 20  # of features; as far beyond
MOST_LENGTH = 1 << 24  # of a sample
MOST_BLOCKS = 512  # far beyond any model of this kind; a file that names a million must not keep us busy
KINDS = ("duo", "udlm", "sdllm-duo")
TAKES: model_files.Takes = {
    "model_type": (" or ".join(KINDS), lambda value: isinstance(value, str) and value.lower() in KINDS),
    "causal": ("false", lambda value: value is False),
    "n_heads": ("a whole number from 1", lambda value: type(value) is int and value > 0),
    "model_length": (
        f"a whole number from 1 to {MOST_LENGTH}",
        lambda value: type(value) is int and 0 < value <= MOST_LENGTH,
    ),
    "schedule": (" or ".join(SCHEDULES), lambda value: isinstance(value, str) and value in SCHEDULES),
    "predicts": ("leave-one-out or posterior", lambda value: value in ("leave-one-out", "posterior")),
    "mask_token_id": ("a token's id, or null", lambda value: value is None or (type(value) is int and value >= 0)),
}


@dataclass(frozen=True)
class Shape:
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


class Norm(nn.Module):
    """Layer norm in float32 with a gain and no bias, whatever the precision around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight)


class Linear(nn.Linear):
    """A linear map in its own weight's precision: this is where bfloat16 enters."""

    def forward(self, input: Tensor) -> Tensor:
        x = input.to(self.weight.dtype)
        if x.dtype != torch.bfloat16 or x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        rows = x.flatten(0, -2)  # a CPU keeps a kernel in memory for every number of rows: let there be few
        padded = F.pad(rows, (0, 0, 0, round_up(len(rows)) - len(rows)))
        return F.linear(padded, self.weight, self.bias)[: len(rows)].view(*x.shape[:-1], self.out_features)

    def part(self, x: Tensor, outputs: slice) -> Tensor:
        """Some of the outputs."""
        return F.linear(
            x.to(self.weight.dtype), self.weight[outputs], None if self.bias is None else self.bias[outputs]
        )


def round_up(rows: int) -> int:
    """The next of few numbers of rows: multiples of 16, and from 64 on four to every doubling."""
    step = max(16, (1 << max(rows - 1, 0).bit_length()) // 8)
    return -(-rows // step) * step


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class SigmaMap(nn.Module):
    """sigma -> conditioning vector: a sinusoid of 256 features, cosines first, and a two-layer net."""

    FREQUENCIES = 128

    def __init__(self, cond: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * self.FREQUENCIES, cond), nn.SiLU(), nn.Linear(cond, cond))

    def forward(self, sigma: Tensor) -> Tensor:
        k = torch.arange(self.FREQUENCIES, dtype=torch.float32, device=sigma.device)
        angle = sigma.float()[:, None] * torch.exp(-math.log(10000) * k / self.FREQUENCIES)
        return F.silu(self.mlp(torch.cat([angle.cos(), angle.sin()], -1)))


class Rotary(nn.Module):
    """Rotation of queries and keys by position, in halves."""

    inv_freq: Tensor

    def __init__(self, head_width: int, base: float = 10000) -> None:
        super().__init__()
        half = torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu")
        frequencies, place = 1.0 / base ** (half / head_width), torch.get_default_device()  # rounded as released
        # They are no weights: also a network that is laid out without memory has them.
        self.register_buffer("inv_freq", frequencies if place.type == "meta" else frequencies.to(place))

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(length, dtype=torch.float32, device=self.inv_freq.device)
        angle = position[:, None] * self.inv_freq
        return angle.cos(), angle.sin()


def rows_of(index: Tensor | None, tokens: Tensor) -> Rows | None:
    """Flat positions of a batch as samples and positions; None for all."""
    length = tokens.shape[1]
    return None if index is None else (index.long() // length, index.long() % length)


def in_place(features: Tensor, at: Rows | None, tokens: Tensor) -> Tensor:
    """(B, L, D): the features of some rows where they belong; the others may hold anything."""
    if at is None:
        return features
    placed = features.new_empty(*tokens.shape, features.shape[-1])
    placed[at] = features
    return placed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(qkv: Tensor, heads: int, rotary: tuple[Tensor, Tensor], causal: bool = False) -> Tensor:
    """(B, L, 3 width) queries, keys and values of all heads, side by side -> (B, L, width)."""
    q, k, v = qkv.reshape(*qkv.shape[:2], 3, heads, -1).transpose(1, 3).unbind(2)  # (B, heads, L, head width)
    mixed = F.scaled_dot_product_attention(rotate(q, *rotary), rotate(k, *rotary), v, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)


def attend_at(x: Tensor, qkv: Linear | float8.Product, heads: int, rotary: tuple[Tensor, Tensor], at: Rows) -> Tensor:
    """(B, L, width) -> (R, width): `attend` to every position from some of them: no other queries are made.

    Samples may need different numbers: each gets as many queries as the one that needs most."""
    (samples, places), (batch, length, width) = at, x.shape
    k, v = qkv.part(x, slice(width, None)).reshape(batch, length, 2, heads, -1).transpose(1, 3).unbind(2)
    cos, sin = (part[places, None] for part in rotary)
    q = rotate(qkv.part(x[at], slice(width)).reshape(-1, heads, width // heads), cos, sin)  # (R, heads, head width)
    counts = samples.bincount(minlength=batch)
    slots = torch.arange(len(samples), device=x.device) - (counts.cumsum(0) - counts)[samples]
    padded = q.new_zeros(batch, max(1, int(counts.max())), *q.shape[1:])
    padded[samples, slots] = q
    mixed = F.scaled_dot_product_attention(padded.transpose(1, 2), rotate(k, *rotary), v)
    return mixed.transpose(1, 2)[samples, slots].flatten(1)


class Layers(nn.Module):
    """What every transformer block here is made of: attention and MLP, each with a norm before it."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = Norm(width)
        self.attn_qkv: Linear | float8.Product = Linear(width, 3 * width, bias=False)
        self.attn_out = Linear(width, width, bias=False)
        self.norm2 = Norm(width)
        self.mlp = nn.Sequential(Linear(width, hidden), nn.GELU(approximate="tanh"), Linear(hidden, width))


class Block(Layers):
    """Attention and MLP, each modulated by the noise level on the way in and gated on the way out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.width, shape.heads, shape.hidden)
        self.adaLN_modulation = Linear(shape.cond, 6 * shape.width)

    def forward(self, x: Tensor, cond: Tensor, rotary: tuple[Tensor, Tensor], at: Rows | None = None) -> Tensor:
        modulation = self.adaLN_modulation(cond)[:, None].chunk(6, -1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation
        normed = _modulate(self.norm1(x), shift_attn, scale_attn)
        if at is None:
            mixed = attend(self.attn_qkv(normed), self.heads, rotary)
        else:  # from here on positions are mixed through keys and values alone: only some of them, (R, width), go on
            x, mixed = x[at], attend_at(normed, self.attn_qkv, self.heads, rotary, at)
            gate_attn, shift_mlp, scale_mlp, gate_mlp = (
                part[at[0], 0] for part in (gate_attn, shift_mlp, scale_mlp, gate_mlp)
            )
        x = x + gate_attn * self.attn_out(mixed)
        return cast(Tensor, x + gate_mlp * self.mlp(_modulate(self.norm2(x), shift_mlp, scale_mlp)))


class Embedding(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(shape.vocab_size, shape.width))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))
        self.positions = None
        if shape.learned_positions:
            self.positions = nn.Parameter(torch.empty(shape.length, shape.width))
            nn.init.kaiming_uniform_(self.positions, a=math.sqrt(5))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = F.embedding(tokens, self.embedding).float()
        return embedded if self.positions is None else embedded + self.positions[: tokens.shape[1]].float()


class OutputLayer(nn.Module):
    """The last norm, still part of the body, and the linear map that is the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_final = Norm(shape.width)
        self.linear = Linear(shape.width, shape.vocab_size)
        self.adaLN_modulation = Linear(shape.cond, 2 * shape.width)

    def forward(self, x: Tensor, cond: Tensor, at: Rows | None = None) -> Tensor:
        shift, scale = self.adaLN_modulation(cond)[:, None].chunk(2, -1)
        if at is not None:
            shift, scale = shift[at[0], 0], scale[at[0], 0]
        return _modulate(self.norm_final(x), shift, scale)


class Network(nn.Module):
    """Noisy tokens and sigma -> features; features -> logits.

    It starts as the identity with a uniform distribution: modulations and head at zero, the released initialisation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.vocab_embed = Embedding(shape)
        self.sigma_map = SigmaMap(shape.cond)
        self.rotary_emb = Rotary(shape.width // shape.heads)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.output_layer = OutputLayer(shape)
        for name, parameter in self.named_parameters():
            if "adaLN_modulation" in name or name.startswith("output_layer.linear"):
                nn.init.zeros_(parameter)

    def body(self, tokens: Tensor, sigma: Tensor, needed: Needed = lambda: None) -> Tensor:
        """(B, L) tokens, (B,) sigma -> (B, L, width) features, the head's input, at the needed positions; the others
        may hold anything."""
        x, index = self.vocab_embed(tokens), needed()
        cond = self.sigma_map(sigma)
        rotary, at = self.rotary_emb(tokens.shape[1]), rows_of(index, tokens)
        for number, block in enumerate(self.blocks, 1):
            x = block(x, cond, rotary, at if number == len(self.blocks) else None)
        features: Tensor = self.output_layer(x, cond, at)
        return in_place(features, at, tokens)

    def head(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.output_layer.linear(features))

    def forward(self, tokens: Tensor, sigma: Tensor) -> Tensor:
        return self.head(self.body(tokens, sigma))


def set_precision(network: nn.Module, dtype: torch.dtype) -> None:
    """Store the linear maps of blocks and output in `dtype`; norms, embedding and sigma map stay as they are."""
    for module in network.modules():
        if isinstance(module, Linear):
            module.to(dtype)


def dtype_of(precision: str, taken: tuple[str, ...] = ("float32", "bfloat16")) -> torch.dtype:
    """What linear maps are stored in, for a network that runs in the precisions that are `taken`."""
    if precision not in taken:
        raise LimpetError(f"precision is one of {', '.join(taken)}, not {precision!r}")
    return PRECISIONS[precision]


def in_float8(network: Network) -> Network:
    """The network with float8 products in its blocks; all other weights are shared.

    Two maps stay as they are. Attention's output would have to be rounded in a pass of its own, which takes what its
    small product saves; and the head's rounding is not averaged over anything, but is the distribution's."""
    held = [*network.parameters(), *network.buffers()]
    twin = copy.deepcopy(network, {id(tensor): tensor for tensor in held})
    for block in cast(list[Block], list(twin.blocks)):
        block.attn_qkv = float8.Product(cast(Linear, block.attn_qkv))
        first, last = (float8.Product(cast(Linear, block.mlp[place])) for place in (0, 2))
        block.mlp = nn.Sequential(first, float8.Gelu(), last)
    return twin


class AlignedHead:
    """A linear head over a padded vocabulary, whose result is a view of the real one.

    Rows of 50258 logits start anywhere, and matrix kernels that write them are slow; rows of 50304 are aligned. The
    padded weight is the only one: the linear map keeps a view of it."""

    def __init__(self, linear: nn.Linear) -> None:
        self.vocab_size = linear.out_features
        padding = -linear.out_features % ALIGNMENT
        self.weight, self.bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        if padding:
            with torch.inference_mode(False), torch.no_grad():
                self.weight = F.pad(self.weight, (0, 0, 0, padding))
                self.bias = None if self.bias is None else F.pad(self.bias, (0, padding))
                linear.weight.data = self.weight[: self.vocab_size]

    def __call__(self, features: Tensor) -> Tensor:
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias)[..., : self.vocab_size]


class Duo(Denoiser):
    """A Duo network that can be sampled: called with t, it tells the network sigma.

    `mask` is a token that noise may be but no clean text has: its trainer gave it no chance, and neither does the head.
    In bfloat16 the linear maps and attention of the blocks and the output run in bfloat16, and so are the logits;
    sigma, norms and the residual stream stay float32, and so does an embedding that is stored so. In float8 the
    products that make queries, keys and values and those of the MLPs run in float8, and all else as in bfloat16; the
    weights are kept in bfloat16 and rounded where they run."""

    tokenizer: Tokenizer | None

    def __init__(
        self,
        network: Network,
        *,
        name: str = "duo",
        tokenizer: Tokenizer | None = None,
        schedule: Schedule = LOG_LINEAR,
        predicts: Literal["leave-one-out", "posterior"] = "leave-one-out",
        precision: str = "float32",
        mask: int | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        dtype = dtype_of(precision, tuple(PRECISIONS))
        if network.output_layer.linear.weight.dtype != dtype:  # on a copy: rounding the caller's weights loses them
            network = copy.deepcopy(network)
            set_precision(network, dtype)
        self.network = network
        self.vocab_size, self.length = network.shape.vocab_size, network.shape.length
        self.name, self.tokenizer, self.schedule, self.predicts = name, tokenizer, schedule, predicts
        self.precision, self.mask = precision, mask
        sizes = [parameter.numel() for parameter in network.parameters()]
        self.info = {**(info or {}), "parameters": sum(sizes), "tensors": len(sizes), "shape": asdict(network.shape)}
        facts = {"heads": network.shape.heads, "schedule": schedule.name, "predicts": predicts}
        facts |= {} if mask is None else {"mask": mask}
        facts |= {"products": precision} if precision == "float8" else {}  # the others are in the tensors' dtypes
        self.digest = digest_of(dict(network.named_parameters()), facts)
        self._parts: dict[torch.device, Parts] = {}

    @property
    def device(self) -> torch.device:
        return self.network.vocab_embed.embedding.device

    def to(self, device: torch.device | str) -> Duo:
        self.network.to(device)
        self._parts.clear()  # made from the weights where they were
        return self

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.body_at(tokens, t, lambda: None)

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        sigma = self.schedule.sigma(t)
        if sigma.dim():
            sigma = sigma.to(tokens.device, torch.float32)
        else:  # filled in on the device, so that no copy waits for it
            sigma = torch.full(tokens.shape[:1], float(sigma), dtype=torch.float32, device=tokens.device)
        with torch.no_grad():
            return self._on(tokens.device)[0](tokens, sigma, needed)

    def head(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self._on(features.device)[1](features)
            if self.mask is not None:
                logits[..., self.mask] = -math.inf
            return logits

    def _on(self, device: torch.device) -> Parts:
        """Body and head as they run on a device, made when first needed there: on a GPU faster ones that compute the
        same."""
        if device not in self._parts:
            network = in_float8(self.network) if self.precision == "float8" else self.network
            body: Callable[[Tensor, Tensor, Needed], Tensor] = network.body
            if has_triton(device) and not self.network.shape.learned_positions:
                from limpet.models.duo_triton import FusedBody

                body = FusedBody(network)
            head = AlignedHead(network.output_layer.linear) if device.type == "cuda" else network.head
            self._parts[device] = body, head
        return self._parts[device]

    def config(self) -> dict[str, object]:
        """What the tensors cannot tell, and the sizes again under the released names, as config.json holds them."""
        sizes = zip(RELEASED, astuple(self.network.shape), strict=False)
        about = {"causal": False, "schedule": self.schedule.name, "predicts": self.predicts}
        about |= {} if self.mask is None else {"mask_token_id": self.mask}
        return {"model_type": "duo", **dict(sizes), **about}

    def save(self, folder: str | os.PathLike[str], storage: Literal["float32", "bfloat16", "int8"] = "float32") -> None:
        """Write model.safetensors, config.json and tokenizer.json, laid out as on the hub.

        float32 loads back bit for bit; bfloat16 and int8 store every matrix smaller, and load back as rounded."""
        if storage not in STORAGES:
            raise LimpetError(f"storage is one of {', '.join(STORAGES)}, not {storage!r}")
        state = {f"backbone.{name}": tensor.cpu().float() for name, tensor in self.network.state_dict().items()}
        model_files.write_folder(Path(folder), self.config(), self.tokenizer, STORAGES[storage](state))


# From a folder to a model


def make(
    folder: Path | None = None,
    *,
    device: torch.device | str | None = None,
    precision: str = "float32",
    weights: Literal["ema", "raw"] = "ema",
) -> Duo:
    """A Duo model from a folder, or from one file of weights with or without a config.json beside it.

    Sizes come from the tensors; config.json adds what they cannot tell. The network is laid out without memory and
    every parameter is assigned from the file, so nothing can be left at an initial value."""
    if folder is None:
        raise LimpetError("a Duo model is read from files: give its folder")
    dtype, place, path = (
        dtype_of(precision, tuple(PRECISIONS)),
        model_files.usable_device(device),
        model_files.weights_in(folder),
    )
    config = model_files.read_config(path.parent, TAKES, "a Duo model")
    state, kept = model_files.open_weights(
        path, weights, lambda stored: [name for name, _ in empty_network(stored, config, path).named_parameters()]
    )
    network = empty_network(state, config, path)
    set_precision(network, dtype)
    if state["vocab_embed.embedding"].dtype == dtype:  # stored so, it takes no more memory than it has to tell
        network.vocab_embed.to(dtype)
    fill(network, state, path, f"a Duo model of {network.shape.blocks} blocks", place)
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


def _mask(config: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int, path: Path) -> int | None:
    """The token that the trainer gave no chance: as config.json says, and of SDLLM-Duo else as the tokenizer does."""
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


def empty_network(state: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> Network:
    """The network that has these tensors, names and shapes without memory: its sizes are read off theirs."""
    anchors = ("vocab_embed.embedding", "sigma_map.mlp.2.weight", "blocks.0.mlp.0.weight")
    sizes = [tuple(state[name].shape) if name in state else () for name in anchors]
    if any(len(size) != 2 or min(size) < 1 for size in sizes):
        raise LimpetError(f"{path} does not hold a Duo model: it lacks the matrices {', '.join(anchors)}")
    (vocab_size, width), (cond, _), (hidden, _) = sizes
    blocks = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    if blocks > MOST_BLOCKS:
        raise LimpetError(f"{path} does not hold a Duo model: it names {blocks} blocks, and {MOST_BLOCKS} is the most")
    if max(width, cond, hidden) > MOST_WIDTH:
        raise LimpetError(f"{path} does not hold a Duo model: it is {max(width, cond, hidden)} wide")
    rotary = tuple(state[ROTARY].shape) if ROTARY in state else ()
    heads = config.get("n_heads") or (width // (2 * rotary[0]) if len(rotary) == 1 and rotary[0] else None)
    if not heads:
        raise LimpetError(f'{path} does not tell how many heads its model has: put {{"n_heads": ...}} in a config.json')
    if width % heads or width // heads % 2:
        raise LimpetError(f"{path} has width {width}, which {heads} heads do not share evenly: check its config.json")
    with torch.device("meta"):
        length = config.get("model_length", Shape.length)
        positions = "vocab_embed.positions" in state
        return Network(Shape(vocab_size, length, width, blocks, heads, cond, hidden, positions))
