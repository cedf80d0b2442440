"""DiffusionGemma (26B, 3.8B active): transformers' own network as a denoiser of one canvas after other text.

A causal encoder reads the prompt and finished canvases into a cache. The decoder attends to the cache and to the whole
canvas, and is given the distributions of its previous call. It predicts a posterior, and is not given the time."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from limpet.diffusion.process import LINEAR, inferred_signal
from limpet.errors import LimpetError, import_extra
from limpet.models import Canvas, ModelInput, model_files
from limpet.models.model_files import FALSE, NUMBER, Field, Fields, whole_number
from limpet.models.networks import MAX_BLOCKS, MAX_LENGTH, MAX_WIDTH, dtype_of
from limpet.models.tensor_files import Unread, digest_of, fill
from limpet.models.tokenizers import HuggingFaceTokenizer, read_template

WHAT = "a DiffusionGemma model"
LAYER_TYPES = ("sliding_attention", "full_attention")
WIDTH, LENGTH = whole_number(MAX_WIDTH), whole_number(MAX_LENGTH)
ANYTHING: Field = ("anything", lambda value: True)
TOKEN: Field = ("a token's id or null", lambda value: value is None or (type(value) is int and 0 <= value < MAX_LENGTH))
ENDS: Field = ("tokens' ids or null", lambda value: all(map(TOKEN[1], value if isinstance(value, list) else [value])))
WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "global_head_dim", "num_attention_heads",
    "num_key_value_heads", "num_experts", "top_k_experts",
)  # fmt: skip
OVERRIDES = ("head_dim", "num_key_value_heads")
ROPE: dict[str, Callable[[Any], bool]] = {
    "rope_theta": NUMBER[1],
    "partial_rotary_factor": lambda value: NUMBER[1](value) and value <= 1,
    "rope_type": lambda value: value in ("default", "proportional"),
}


def _is_rope(value: Any) -> bool:
    """Whether it has the settings of the rotation of each type of layer."""
    return isinstance(value, dict) and set(value) == set(LAYER_TYPES) and all(map(_is_rope_of_a_type, value.values()))


def _is_rope_of_a_type(value: Any) -> bool:
    return isinstance(value, dict) and all(name in ROPE and ROPE[name](one) for name, one in value.items())


def _is_per_layer(value: Any) -> bool:
    """Whether it has other widths for some layers."""
    if not isinstance(value, dict) or len(value) > MAX_BLOCKS:
        return False
    return all(str(layer).isdecimal() and _is_override(one) for layer, one in value.items())


def _is_override(value: Any) -> bool:
    return isinstance(value, dict) and all(name in OVERRIDES and WIDTH[1](one) for name, one in value.items())


def _is_layer_types(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_BLOCKS and all(one in LAYER_TYPES for one in value)


TEXT_FIELDS: Fields = {  # of text_config: transformers is given these, and no others
    **dict.fromkeys(WIDTHS, WIDTH),
    "num_global_key_value_heads": ("a count or null", lambda value: value is None or WIDTH[1](value)),
    "num_hidden_layers": (f"from 1 to {MAX_BLOCKS}", whole_number(MAX_BLOCKS)[1]),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "sliding_window"), LENGTH),
    "hidden_activation": ('"gelu_pytorch_tanh"', lambda value: value == "gelu_pytorch_tanh"),
    "rms_norm_eps": NUMBER,
    "final_logit_softcapping": NUMBER,
    "attention_bias": FALSE,
    "layer_types": (f"a list of {' and '.join(LAYER_TYPES)}", _is_layer_types),
    "use_bidirectional_attention": ('"vision" or null', lambda value: value in ("vision", None)),
    "rope_parameters": ("rope_theta, rope_type and partial_rotary_factor of each type of layer", _is_rope),
    "per_layer_config": (f"{' and '.join(OVERRIDES)} of some layers", _is_per_layer),
    "bos_token_id": TOKEN,
    "pad_token_id": TOKEN,
    "eos_token_id": ENDS,
}
FIELDS: Fields = {
    "canvas_length": LENGTH,
    "text_config": ("a text's settings", lambda value: isinstance(value, dict)),
    "tie_word_embeddings": ("true", lambda value: value is True),
    **dict.fromkeys(("vision_config", "image_token_id", "boi_token_id", "eoi_token_id"), ANYTHING),
}
# Images are not read: the smallest vision network is laid out without memory, and removed.
ONES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "position_embedding_size")
NO_VISION = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 8) | dict.fromkeys(ONES, 1)


class Gemma(Canvas):
    """The canvas after some text. Without `after`, the text is the begin token alone.

    A prediction holds the evidence of its own token at the noise level that the network infers from the whole canvas:
    committed tokens look clean."""

    predicts, schedule, self_conditioned = "posterior", LINEAR, True
    tokenizer: HuggingFaceTokenizer | None

    def __init__(
        self,
        network: Any,
        *,
        name: str = "gemma",
        tokenizer: HuggingFaceTokenizer | None = None,
        template: str | None = None,
        ends: tuple[int, ...] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.network, self.name, self.tokenizer, self.template = network, name, tokenizer, template
        text = network.config.text_config
        self.vocab_size, self.length = int(text.vocab_size), int(network.config.canvas_length)
        self.ends = token_ids(text.eos_token_id) if ends is None else ends
        self.pad, self.begin = text.pad_token_id or 0, text.bos_token_id
        self.precision = str(network.dtype).removeprefix("torch.")
        parameters = dict(network.named_parameters())
        counts = [parameter.numel() for parameter in parameters.values()]
        self.info = {**(info or {}), "parameters": sum(counts), "tensors": len(counts)}
        settings = text.to_dict()
        facts = {field: settings[field] for field in sorted(TEXT_FIELDS) if field in settings}
        self.digest = digest_of(parameters, facts | {"canvas": self.length})
        self.cache: Any = None

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.network.device)

    @device.setter
    def device(self, device: torch.device | str) -> None:
        if self.cache is not None:
            raise LimpetError(f"{self.name} has read a text on {self.device}: move it to {device} before that")
        self.network.to(device)
        self.__dict__.pop("_begin_cache", None)

    def after(self, text: Tensor, rows: Tensor | None = None) -> Gemma:
        cache = self._empty_cache() if self.cache is None else self._copied(self.cache, len(text), rows)
        start = cache.get_seq_length()
        places = torch.arange(start, start + text.shape[1], device=self.device)[None]
        with torch.no_grad():
            self.network.model.encoder(
                input_ids=text.to(self.device), attention_mask=None, past_key_values=cache, position_ids=places
            )
        twin = copy.copy(self)
        twin.cache = cache
        rows = torch.arange(len(text)) if rows is None else rows.cpu()
        content = f"{self.digest} {rows.tolist()} {text.tolist()}"
        twin.digest = hashlib.sha256(content.encode()).hexdigest()
        return twin

    def prompt(self, chat: str | Sequence[Mapping[str, str]]) -> list[int]:
        if self.tokenizer is None:
            raise LimpetError(f"{self.name} has no tokenizer: give the prompt as token ids")
        if self.template is None:
            if not isinstance(chat, str):
                raise LimpetError(f"{self.name} has no chat template: give the prompt as a text")
            return [*([] if self.begin is None else [self.begin]), *self.tokenizer.encode(chat)]
        render = import_extra("transformers.utils.chat_template_utils", "gemma").render_jinja_template
        special = {"bos": self.begin, "eos": next(iter(self.ends), None), "pad": self.pad}
        texts = {f"{name}_token": self.tokenizer.token_text(id) for name, id in special.items() if id is not None}
        messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else list(chat)
        try:
            rendered, _ = render([messages], chat_template=self.template, add_generation_prompt=True, **texts)
        except Exception as error:  # a template may do anything that its sandbox allows
            raise LimpetError(f"the chat template of {self.name} cannot be filled in ({error}): correct it") from error
        return self.tokenizer.encode(rendered[0])

    def backbone(self, inputs: ModelInput) -> Tensor:
        cache = self._copied(self._begin_cache if self.cache is None else self.cache, len(inputs.tokens))
        decoder = self.network.model.decoder
        hook = nullcontext()
        if inputs.previous is not None:  # the decoder's own code would compute it for all distributions at once
            hook = decoder.self_conditioning.register_forward_pre_hook(lambda _, args: (args[0], inputs.previous))
        with torch.no_grad(), hook:
            output = decoder(decoder_input_ids=inputs.tokens, past_key_values=cache)
        return cast(Tensor, output.last_hidden_state)

    def head(self, features: Tensor) -> Tensor:
        cap = self.network.final_logit_softcapping
        with torch.no_grad():
            return cast(Tensor, torch.tanh(self.network.lm_head(features).float() / cap) * cap)

    def self_condition(self, logits: Tensor) -> Tensor:
        """The mean embedding of each distribution."""
        embedding = self.network.model.decoder.embed_tokens
        with torch.no_grad():
            probs = logits.to(embedding.weight.dtype).softmax(-1, dtype=torch.float32).to(embedding.weight.dtype)
            return cast(Tensor, (probs @ embedding.weight) * embedding.embed_scale.to(probs.dtype))

    def evidence_signal(self, signal: float | Tensor, clean_share: Tensor) -> Tensor:
        return inferred_signal(signal, clean_share)

    def _empty_cache(self) -> Any:
        return import_extra("transformers", "gemma").DynamicCache(config=self.network.config.text_config)

    @cached_property
    def _begin_cache(self) -> Any:
        """The cache after the begin token alone."""
        return self.after(torch.tensor([[self.begin or 0]])).cache

    def _copied(self, cache: Any, count: int, rows: Tensor | None = None) -> Any:
        """A copy of a cache for so many samples, or for some of its own. What is added to the copy stays out of the
        original."""
        samples = len(cache.layers[0].keys)
        if rows is None and samples not in (1, count):
            raise LimpetError(f"{self.name} was given the text before {samples} samples, and is asked for {count}")
        cache = copy.copy(cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in cache.layers:
            for part in ("keys", "values"):
                every = getattr(layer, part)
                expand = samples == 1 or rows is None
                setattr(layer, part, every.expand(count, -1, -1, -1) if expand else every[rows])
        return cache


# From a folder to a network


def from_folder(
    folder: Path | None = None, *, device: torch.device | str | None = None, precision: str = "float32"
) -> Gemma:
    """A DiffusionGemma model from a folder as it lies on the hub, in one file or in parts, without its vision network.

    transformers lays the network out without memory, from checked settings. Every number comes from the files."""
    transformers = import_extra("transformers", "gemma")
    if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
        raise LimpetError(
            f"transformers {transformers.__version__} does not know DiffusionGemma: install 5.22 or later"
        )
    path = model_files.weights_in(folder, WHAT)
    device, dtype = model_files.usable_device(device), dtype_of(precision)
    network = _empty_network(transformers, path, dtype)
    state, _ = model_files.open_weights(path, "raw", lambda stored: [])
    fill_network(network, state, path, device)
    text = network.config.text_config
    tokenizer, reason = model_files.find_tokenizer(path.parent, text.vocab_size)
    generation = model_files.read_config(path.parent, {"eos_token_id": ENDS}, WHAT, "generation_config.json")
    ends = token_ids(generation.get("eos_token_id")) or token_ids(text.eos_token_id)
    beyond = [id for id in (*ends, text.bos_token_id, text.pad_token_id) if id is not None and id >= text.vocab_size]
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


def _empty_network(transformers: Any, path: Path, dtype: torch.dtype) -> Any:
    """The network that a folder's config describes, without memory."""
    config = model_files.read_config(path.parent, FIELDS, WHAT)
    file = path.parent / "config.json"
    text = model_files.check_fields(config.get("text_config", {}), TEXT_FIELDS, file, WHAT)
    known = {field: value for field, value in text.items() if field in TEXT_FIELDS}
    top, experts = known.get("top_k_experts", 0), known.get("num_experts", 0)
    if top > experts:
        raise LimpetError(f"{file} has top_k_experts {top} of num_experts {experts}: fetch or copy it again")
    length, vision = config.get("canvas_length", 256), {"model_type": "gemma4_vision", **NO_VISION}
    try:
        settings = transformers.DiffusionGemmaConfig(text_config=known, vision_config=vision, canvas_length=length)
        with torch.device("meta"):
            return transformers.DiffusionGemmaForBlockDiffusion(settings).to(dtype)
    except Exception as error:  # the library may raise anything for settings that do not go together
        raise LimpetError(f"{file} lays out no network ({error}): fetch or copy it again") from error


def token_ids(ids: int | list[int | None] | None) -> tuple[int, ...]:
    """A setting of one token, several or none, as a tuple."""
    return tuple(one for one in (ids if isinstance(ids, list) else [ids]) if one is not None)


def fill_network(network: Any, state: Mapping[str, Unread], path: Path, device: torch.device) -> None:
    """Read the numbers of a network that is laid out without memory.

    Encoder and decoder share all tensors but one scalar in each layer, and the head is the embedding. What they share
    is read once."""
    encoder, decoder = network.model.encoder, network.model.decoder
    reader, rotation = encoder.language_model, type(decoder.rotary_emb)
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
        _set_parameter(reader, name, None)
    fill(network.model, _text_tensors(state, shared), path, f"{WHAT} of {len(decoder.layers)} layers", device)
    own = dict(decoder.named_parameters())
    for name in shared:
        _set_parameter(reader, name, own[name])
    network.lm_head.weight = own["embed_tokens.weight"]
    for module in (reader, decoder):
        module.rotary_emb = rotation(network.config.text_config).to(device)
        scale = torch.tensor(module.embed_tokens.scalar_embed_scale, device=device)
        module.embed_tokens.register_buffer("embed_scale", scale, persistent=False)
    network.eval()


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    owner, _, own_name = name.rpartition(".")
    module.get_submodule(owner).register_parameter(own_name, parameter)


def _text_tensors(state: Mapping[str, Unread], shared: list[str]) -> dict[str, Unread]:
    """The stored tensors without the vision network's. Shared ones get the decoder's name, whatever they had."""
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
