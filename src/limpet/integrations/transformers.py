"""limpet's samplers behind `generate` of transformers' DiffusionGemma, streaming included."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from limpet.diffusion.rng import SEED_LIMIT, CounterRNG, canvas_seed
from limpet.errors import LimpetError
from limpet.integrations.given_logits import Advanced, advance, check_sampler, first_state
from limpet.samplers import Sampler, State, as_sampler


def sampler_for(model: Any, sampler: Sampler | str, seed: int | None = None) -> Any:
    """The same model with another sampler behind its `generate`. The weights are shared; `model` itself stays as it is.

    model: a DiffusionGemmaForBlockDiffusion. sampler: a Sampler or a text such as "mend nfe=48"; a
    `max_denoising_steps` that `generate` is given takes the place of its nfe. seed: of every call of `generate`, in
    which a row is then a function of the seed and its number (default: drawn from torch's generator). The texts are
    those of `limpet.reply`. Settings of transformers' own sampler and of its early stop are not used."""
    kind = type(model)
    if not hasattr(kind, "_denoising_step"):
        raise LimpetError(f"a {kind.__name__} cannot be given a sampler: load a DiffusionGemmaForBlockDiffusion")
    if seed is not None and not (type(seed) is int and 0 <= seed < SEED_LIMIT):
        raise LimpetError(f"seed is {seed!r}; it takes a whole number from 0, of at most 64 bits, or None")
    twin = copy.copy(model)
    twin.__class__ = type(kind.__name__, (SamplerOverrides, kind), {"__module__": kind.__module__})
    twin.limpet_sampler, twin.limpet_seed = check_sampler(as_sampler(sampler)), seed
    return twin


class CanvasSampler:
    """The samples of one call of `generate`, canvas by canvas."""

    def __init__(self, sampler: Sampler, seed: int, length: int, vocab_size: int) -> None:
        self.sampler, self.seed, self.length, self.vocab_size = sampler, seed, length, vocab_size
        self.canvas = -1
        self.state: State
        self.rng: CounterRNG

    def initialize_canvas(self, batch_size: int, device: torch.device) -> Tensor:
        """Begin the next canvas."""
        self.canvas += 1
        self.rng = CounterRNG(canvas_seed(self.seed, self.canvas), torch.arange(batch_size, device=device))
        self.state = first_state(self.sampler, self.rng, self.length, self.vocab_size)
        return self.state.tokens

    def advance(self, canvas: Tensor, logits: Tensor) -> Advanced:
        """One call, given the logits of the canvas. The first canvas may be the caller's own."""
        start = self.state._replace(tokens=canvas) if self.state.call == 0 else self.state
        after = advance(self.sampler, start, self.rng, logits)
        self.state = after.state
        return after


class SamplerOverrides:
    """What `generate` of DiffusionGemma calls, with a limpet sampler."""

    limpet_sampler: Sampler
    limpet_seed: int | None
    config: Any
    model: Any

    def _prepare_generation_config(self, generation_config: Any = None, **options: Any) -> Any:
        calls = options.get("max_denoising_steps") or getattr(generation_config, "max_denoising_steps", None)
        options["max_denoising_steps"] = calls or self.limpet_sampler.nfe
        return super()._prepare_generation_config(generation_config, **options)  # type: ignore[misc]

    def _prepare_sampler(self, generation_config: Any) -> CanvasSampler:
        seed = self.limpet_seed
        if seed is None:
            seed = int(torch.empty((), dtype=torch.long).random_())
        sampler = self.limpet_sampler.replace(nfe=generation_config.max_denoising_steps)
        return CanvasSampler(sampler, seed, self.config.canvas_length, self.config.text_config.vocab_size)

    def _prepare_logits_processor(self, generation_config: Any, logits_processor: Any = None) -> Any:
        """The caller's own. The sampler has the temperature."""
        return [] if logits_processor is None else logits_processor

    def _prepare_diffusion_stopping_criteria(self, generation_config: Any) -> None:
        """None: the sampler says which samples are finished."""

    def _compile_functions(self, *_: Any) -> Any:
        raise LimpetError("a static cache makes generate compile its sampler: give it disable_compile=True too")

    def _denoising_step(
        self,
        decoder_forward: Any,
        current_canvas: Tensor,
        argmax_canvas: Tensor,
        input_ids: Tensor,
        decoder_position_ids: Tensor,
        self_conditioning_logits: Tensor | None,
        mask_mapping: Any,
        past_key_values: Any,
        finished_denoising: Tensor,
        cur_step: int,
        sampler: CanvasSampler,
        logits_processor: Any,
        diffusion_stopping_criteria: None,
        **model_kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One call: the next canvas, the draft that a streamer shows, the logits that the next call reads, and which
        rows are finished. After the last call the draft is the output."""
        logits = decoder_forward(
            decoder_input_ids=current_canvas,
            self_conditioning_logits=self_conditioning_logits,
            decoder_attention_mask=mask_mapping,
            past_key_values=past_key_values,
            decoder_position_ids=decoder_position_ids,
            **model_kwargs,
        ).logits
        if logits_processor:
            logits = logits_processor(input_ids, logits, cur_step=cur_step)
        after = sampler.advance(current_canvas, logits)
        draft = torch.where(after.finished[:, None], after.canvas, logits.argmax(-1))
        read = logits if after.temperature == 1 else logits / after.temperature
        return after.canvas, draft, read.to(self.model.decoder.embed_tokens.weight.dtype), after.finished
