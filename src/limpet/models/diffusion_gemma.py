"""DiffusionGemma (26B, 3.8B of them active): transformers' own network as a denoiser of one canvas after other text.

A causal encoder reads prompt and finished canvases into a cache; the decoder attends to the cache and to the whole
canvas, and is told the distributions of its last call. It predicts a posterior, and is told no time."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from limpet.diffusion.process import LINEAR, seen_signal
from limpet.errors import LimpetError, extra
from limpet.models import Canvas, model_files
from limpet.models.duo import MOST_BLOCKS, MOST_LENGTH, MOST_WIDTH, dtype_of
from limpet.models.tensor_files import Unread, digest_of, fill
from limpet.models.time_agnostic import COUNT, FALSE, NUMBER
from limpet.models.tokenizers import Tokenizer, read_template

WHAT = "a DiffusionGemma model"
KINDS = ("sliding_attention", "full_attention")
WIDTH = (f"a whole number from 1 to {MOST_WIDTH}", lambda value: type(value) is int and 0 < value <= MOST_WIDTH)
TOKEN = ("a token's id or null", lambda value: value is None or (type(value) is int and 0 <= value < MOST_LENGTH))
ENDS = ("tokens' ids or null", lambda value: all(map(TOKEN[1], value if isinstance(value, list) else [value])))
OVERRIDES = ("head_dim", "num_key_value_heads")
ROPE: dict[str, Callable[[Any], bool]] = {
    "rope_theta": NUMBER[1],
    "partial_rotary_factor": lambda value: NUMBER[1](value) and value <= 1,
    "rope_type": lambda value: value in ("default", "proportional"),
}
TEXT: model_files.Takes = {  # of the text's part of config.json: all that transformers is told, and nothing else
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "global_head_dim",
                     "num_attention_heads", "num_key_value_heads", "num_experts", "top_k_experts"), WIDTH),
    "num_global_key_value_heads": ("a count or null", lambda value: value is None or WIDTH[1](value)),
    "num_hidden_layers": (f"from 1 to {MOST_BLOCKS}", lambda value: type(value) is int and 0 < value <= MOST_BLOCKS),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "sliding_window"), COUNT),
    "hidden_activation": ('"gelu_pytorch_tanh"', lambda value: value == "gelu_pytorch_tanh"),
    "rms_norm_eps": NUMBER,
    "final_logit_softcapping": NUMBER,
    "attention_bias": FALSE,
    "layer_types": (
        f"a list of {' and '.join(KINDS)}",
        lambda value: isinstance(value, list) and len(value) <= MOST_BLOCKS and all(one in KINDS for one in value),
    ),
    "use_bidirectional_attention": ('"vision" or null', lambda value: value in ("vision", None)),
    "rope_parameters": (
        "rope_theta, rope_type and partial_rotary_factor of each kind of layer",
        lambda value: isinstance(value, dict) and set(value) == set(KINDS) and all(
            isinstance(one, dict) and all(key in ROPE and ROPE[key](part) for key, part in one.items())
            for one in value.values()
        ),
    ),
    "per_layer_config": (
        f"{' and '.join(OVERRIDES)} of some layers",
        lambda value: isinstance(value, dict) and len(value) <= MOST_BLOCKS and all(
            str(layer).isdecimal() and isinstance(one, dict)
            and all(key in OVERRIDES and WIDTH[1](part) for key, part in one.items())
            for layer, one in value.items()
        ),
    ),
    "bos_token_id": TOKEN,
    "pad_token_id": TOKEN,
    "eos_token_id": ENDS,
}  # fmt: skip
TAKES: model_files.Takes = {
    "canvas_length": COUNT,
    "text_config": ("a text's settings", lambda value: isinstance(value, dict)),
    "tie_word_embeddings": ("true", lambda value: value is True),
    **dict.fromkeys(
        ("vision_config", "image_token_id", "boi_token_id", "eoi_token_id"), ("anything", lambda value: True)
    ),
}
# Images are not read: the smallest eyes there can be are laid out without memory, and left out.
NO_EYES = {"model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
           "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 1}  # fmt: skip


class Gemma(Canvas):
    """The canvas after some text; after nothing but the token that begins one, until told (`after`).

    A distribution holds the evidence of its own token at the level that the whole canvas looks to have: written labels look
    clean."""

    predicts, schedule, carries = "posterior", LINEAR, True
    tokenizer: Tokenizer | None

    def __init__(
        self,
        network: Any,
        *,
        name: str = "gemma",
        tokenizer: Tokenizer | None = None,
        template: str | None = None,
        ends: tuple[int, ...] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.network, self.name, self.tokenizer, self.template = network, name, tokenizer, template
        text = network.config.text_config
        self.vocab_size, self.length = int(text.vocab_size), int(network.config.canvas_length)
        self.ends = ids_of(text.eos_token_id) if ends is None else ends
        self.pad, self.begin = text.pad_token_id or 0, text.bos_token_id
        self.precision = str(network.dtype).removeprefix("torch.")
        parameters = dict(network.named_parameters())
        counts = [parameter.numel() for parameter in parameters.values()]
        self.info = {**(info or {}), "parameters": sum(counts), "tensors": len(counts)}
        said = text.to_dict()
        facts = {field: said[field] for field in sorted(TEXT) if field in said} | {"canvas": self.length}
        self.digest = digest_of(parameters, facts)
        self.cache: Any = None

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.network.device)

    def after(self, text: Tensor, rows: Tensor | None = None) -> Gemma:
        """Encoded once, and never again: canvases only read it."""
        cache = self._nothing() if self.cache is None else self._read(self.cache, len(text), rows)
        start = cache.get_seq_length()
        places = torch.arange(start, start + text.shape[1], device=self.device)[None]
        with torch.no_grad():
            self.network.model.encoder(
                input_ids=text.to(self.device), attention_mask=None, past_key_values=cache, position_ids=places
            )
        twin = copy.copy(self)
        twin.cache = cache
        rows = torch.arange(len(text)) if rows is None else rows.cpu()
        told = f"{self.digest} {rows.tolist()} {text.tolist()}"
        twin.digest = hashlib.sha256(told.encode()).hexdigest()
        return twin

    def prompt(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise LimpetError(f"{self.name} has no tokenizer: give the prompt as token ids")
        if self.template is None:
            return [*([] if self.begin is None else [self.begin]), *self.tokenizer.encode(text)]
        render = extra("transformers.utils.chat_template_utils", "gemma").render_jinja_template
        written = {f"{name}_token": self.tokenizer.written(one) for name, one in
                   (("bos", self.begin), ("eos", next(iter(self.ends), None)), ("pad", self.pad))
                   if one is not None}  # fmt: skip
        try:
            said, _ = render([[{"role": "user", "content": text}]], chat_template=self.template,
                             add_generation_prompt=True, **written)  # fmt: skip
        except Exception as error:  # a template may do anything but what its sandbox forbids
            raise LimpetError(f"the chat template of {self.name} cannot be filled in ({error}): mend it") from error
        return self.tokenizer.encode(said[0])

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.body_carried(tokens, t, None, None)

    def body_carried(self, tokens: Tensor, t: float | Tensor, clean: Tensor | None, carried: Tensor | None) -> Tensor:
        cache = self._read(self._begun if self.cache is None else self.cache, len(tokens))
        decoder = self.network.model.decoder
        told = nullcontext()
        if carried is not None:  # the decoder itself would make it of all distributions at once
            told = decoder.self_conditioning.register_forward_pre_hook(lambda module, given: (given[0], carried))
        with torch.no_grad(), told:
            seen = decoder(decoder_input_ids=tokens, past_key_values=cache)
        return cast(Tensor, seen.last_hidden_state)

    def head(self, features: Tensor) -> Tensor:
        cap = self.network.final_logit_softcapping
        with torch.no_grad():
            return cast(Tensor, torch.tanh(self.network.lm_head(features).float() / cap) * cap)

    def carry(self, logits: Tensor) -> Tensor:
        """The mean embedding of each distribution."""
        embedding = self.network.model.decoder.embed_tokens
        with torch.no_grad():
            probs = logits.to(embedding.weight.dtype).softmax(-1, dtype=torch.float32).to(embedding.weight.dtype)
            return cast(Tensor, (probs @ embedding.weight) * embedding.embed_scale.to(probs.dtype))

    def evidence(self, signal: float | Tensor, clean: Tensor) -> Tensor:
        return seen_signal(signal, clean)

    def _nothing(self) -> Any:
        return extra("transformers", "gemma").DynamicCache(config=self.network.config.text_config)

    @cached_property
    def _begun(self) -> Any:
        return self.after(torch.tensor([[self.begin or 0]])).cache

    def _read(self, cache: Any, count: int, rows: Tensor | None = None) -> Any:
        """A cache for so many samples, or for some of its own; what is added to it stays out of the one it is of."""
        held = len(cache.layers[0].keys)
        if rows is None and held not in (1, count):
            raise LimpetError(f"{self.name} was told what stands before {held} samples, and is asked of {count}")
        cache = copy.copy(cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in cache.layers:
            for part in ("keys", "values"):
                whole = getattr(layer, part)
                setattr(layer, part, whole.expand(count, -1, -1, -1) if held == 1 or rows is None else whole[rows])
        return cache


# From a folder to a network


def make(folder: Path | None = None, *, device: torch.device | str | None = None, precision: str = "float32") -> Gemma:
    """A DiffusionGemma model from a folder as it lies on the hub, in one file or in parts: its text, without its eyes.

    transformers lays the network out, from settings that were checked, without memory; every number comes from the
    files, read with suspicion."""
    transformers = extra("transformers", "gemma")
    if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
        raise LimpetError(
            f"transformers {transformers.__version__} does not know DiffusionGemma: install 5.22 or later"
        )
    if folder is None:
        raise LimpetError(f"{WHAT} is read from files: give its folder")
    place, dtype, path = model_files.usable_device(device), dtype_of(precision), model_files.weights_in(folder)
    config = model_files.read_config(path.parent, TAKES, WHAT)
    text = model_files.checked(config.get("text_config", {}), TEXT, path.parent / "config.json", WHAT)
    state, _ = model_files.open_weights(path, "raw", lambda stored: [])
    told = {field: value for field, value in text.items() if field in TEXT}
    if told.get("top_k_experts", 0) > told.get("num_experts", 0):
        raise LimpetError(f"{path.parent / 'config.json'} has top_k_experts {told['top_k_experts']} of num_experts "
                          f"{told.get('num_experts', 0)}: fetch or copy it again")  # fmt: skip
    length = config.get("canvas_length", 256)
    try:
        settings = transformers.DiffusionGemmaConfig(text_config=told, vision_config=NO_EYES, canvas_length=length)
        with torch.device("meta"):
            network = transformers.DiffusionGemmaForBlockDiffusion(settings).to(dtype)
    except Exception as error:  # whatever the library makes of settings that do not go together
        raise LimpetError(
            f"{path.parent / 'config.json'} lays out no network ({error}): fetch or copy it again"
        ) from error
    filled(network, state, path, place)
    tokenizer, reason = model_files.find_tokenizer(path.parent, settings.text_config.vocab_size)
    spoken = model_files.read_config(path.parent, {"eos_token_id": ENDS}, WHAT, "generation_config.json")
    ends = ids_of(spoken.get("eos_token_id")) or ids_of(settings.text_config.eos_token_id)
    beyond = [one for one in (*ends, settings.text_config.bos_token_id, settings.text_config.pad_token_id)
              if one is not None and one >= settings.text_config.vocab_size]  # fmt: skip
    if beyond:
        raise LimpetError(f"{path.parent} begins, ends or pads a text with {beyond[0]}, which is no token of its model")
    return Gemma(
        network,
        name=str(folder),
        tokenizer=tokenizer,
        template=read_template(path.parent),
        ends=ends,
        info={"file": str(path), "weights": "as stored", "tokenizer": reason},
    )


def ids_of(said: int | list[int | None] | None) -> tuple[int, ...]:
    return tuple(one for one in (said if isinstance(said, list) else [said]) if one is not None)


def filled(network: Any, state: Mapping[str, Unread], path: Path, device: torch.device) -> None:
    """Give a network without memory its numbers. Encoder and decoder are one network but for a scalar in each layer,
    and the head is the embedding: what they share is read once."""
    encoder, decoder, rotation = network.model.encoder, network.model.decoder, type(network.model.decoder.rotary_emb)
    reader = encoder.language_model
    encoder.vision_tower = encoder.embed_vision = None
    for module in (reader, decoder):
        module.rotary_emb = None
        del module.embed_tokens.embed_scale
        for layer in module.layers:  # it is stored, as parameters are
            scalar = layer.layer_scalar
            del layer.layer_scalar
            layer.layer_scalar = nn.Parameter(scalar)
    shared = [name for name, _ in reader.named_parameters() if not name.endswith("layer_scalar")]
    for name in shared:
        _owner(reader, name)._parameters[name.rpartition(".")[2]] = None
    fill(network.model, _text_alone(state, shared), path, f"{WHAT} of {len(decoder.layers)} layers", device)
    own = dict(decoder.named_parameters())
    for name in shared:
        _owner(reader, name)._parameters[name.rpartition(".")[2]] = own[name]
    network.lm_head.weight = own["embed_tokens.weight"]
    for module in (reader, decoder):
        module.rotary_emb = rotation(network.config.text_config).to(device)
        scale = torch.tensor(module.embed_tokens.scalar_embed_scale, device=device)
        module.embed_tokens.register_buffer("embed_scale", scale, persistent=False)
    network.eval()


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _text_alone(state: Mapping[str, Unread], shared: list[str]) -> dict[str, Unread]:
    """The stored tensors without those of the eyes; what encoder and decoder share under the decoder's name, wherever
    it is stored."""
    named = {
        name: one for name, one in state.items() if not name.startswith(("encoder.vision", "encoder.embed_vision"))
    }
    for name in shared:
        of_reader = named.pop(f"encoder.language_model.{name}", None)
        if of_reader is not None:
            named.setdefault(f"decoder.{name}", of_reader)
    head = named.pop("lm_head.weight", None)
    if head is not None:
        named.setdefault("decoder.embed_tokens.weight", head)
    return named
