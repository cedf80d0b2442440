"""limpet's samplers inside SGLang, in the place of its own sampler for DiffusionGemma.

SGLang calls `register` by the entry point `sglang.srt.plugins`. The YAML file of `--dllm-algorithm-config` then names a
sampler, as in `sampler: mend nfe=48`. Without that line SGLang's own sampler runs.

A request is one sample under the server's seed: its own seed is the number of the sample. So a text is a function of
the server's seed, the request's seed and the prompt, whatever else is in the batch, up to the network's rounding."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limpet.diffusion.rng import SAMPLE_LIMIT, SEED_LIMIT, CounterRNG, canvas_seed
from limpet.errors import LimpetError, import_extra
from limpet.generation import SEED, memory_like
from limpet.integrations.given_logits import advance, check_sampler, first_state
from limpet.samplers import State, as_sampler

renoise = import_extra("sglang.srt.dllm.algorithm.gemma4_renoise", "sglang")
NAME = "Gemma4Renoise"  # the only algorithm that SGLang lets DiffusionGemma use
SETTINGS = ("sampler", "seed", "block_size", "capture_input_preparation")


class CanvasNumber(NamedTuple):
    """What decides the random numbers of a request's current canvas."""

    sample: int  # its number under the server's seed
    canvas: int


def register() -> None:
    """Put limpet's samplers in the place of SGLang's own: the function of the entry point."""
    import_extra("sglang.srt.dllm.algorithm", "sglang").algo_name_to_cls[NAME] = CanvasAlgorithm
    hooks = import_extra("sglang.srt.plugins.hook_registry", "sglang")
    target = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
    hooks.HookRegistry.register(target, add_requests, hooks.HookType.AFTER)


def add_requests(forward_batch: Any, _: Any, batch: Any, *__: Any, **___: Any) -> None:
    """Let a forward batch say which request each row is: it holds no seeds otherwise."""
    config = getattr(batch, "dllm_config", None)
    if config is not None:
        forward_batch.limpet_requests = [request_of(one, config.block_size) for one in batch.reqs or ()]


def request_of(request: Any, block_size: int) -> CanvasNumber:
    """The number of a request's sample, by default from its id, and the number of its canvas."""
    seed = request.sampling_params.sampling_seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(str(request.rid).encode(), digest_size=4).digest(), "little")
    return CanvasNumber(seed, len(request.output_ids) // block_size)


class CanvasAlgorithm(renoise.Gemma4Renoise):  # type: ignore[misc, name-defined]
    """Any limpet sampler for canvases without fixed tokens: native, CRS, Mend and the others."""

    takes_seeds = False  # whether requests may have seeds; set as the process reads its configuration

    def __init__(self, config: Any) -> None:
        settings = config.algorithm_config or {}
        self.sampler = None
        if not (isinstance(settings, dict) and "sampler" in settings):
            super().__init__(config)
            return
        unknown = [name for name in settings if name not in SETTINGS]
        seed = settings.get("seed", SEED)
        if unknown or type(seed) is not int or not 0 <= seed < SEED_LIMIT:
            what = f"seed {seed!r}" if not unknown else str(unknown[0])
            raise LimpetError(
                f"the file of --dllm-algorithm-config has {what}; beside sampler it takes {', '.join(SETTINGS[1:])}, "
                "and the seed is a whole number from 0, of at most 64 bits"
            )
        self.sampler = check_sampler(as_sampler(settings["sampler"]))
        own = copy.copy(config)
        own.algorithm_config = {"max_denoising_steps": self.sampler.nfe, "seed": seed}
        super().__init__(own)
        type(self).takes_seeds = True

    @classmethod
    def validate_request(cls, req: Any) -> str | None:
        seed = req.sampling_params.sampling_seed
        if not cls.takes_seeds or seed is None:
            return super().validate_request(req)  # type: ignore[no-any-return]
        if not 0 <= seed < SAMPLE_LIMIT:
            return f"sampling_seed is {seed}; it takes a whole number from 0 to {SAMPLE_LIMIT - 1}"
        unseeded = copy.copy(req)
        unseeded.sampling_params = copy.copy(req.sampling_params)
        unseeded.sampling_params.sampling_seed = None
        return super().validate_request(unseeded)  # type: ignore[no-any-return]

    def init_step_state(self, forward_batch: Any) -> list[Any]:
        """One state for each request: what SGLang's loop reads of it, limpet's state, and which request it is."""
        if self.sampler is None:
            return super().init_step_state(forward_batch)  # type: ignore[no-any-return]
        states = []
        for request in forward_batch.limpet_requests:
            rng = self._rng([request], forward_batch.input_ids.device)
            first = first_state(self.sampler, rng, self.block_size, self.vocab_size)
            current = self.sampler.model_input(first)[0]
            common = {"step": self.max_denoising_steps, "self_conditioning": None, "finished": False}
            states.append({**common, "current": current, "limpet": first, "request": request})
        return states

    @torch.no_grad()
    def step(self, forward_batch: Any, full_logits: Tensor, states: list[Any]) -> list[bool]:
        """One call of every unfinished request. Those at the same call of the same canvas are one batch."""
        if self.sampler is None:
            return super().step(forward_batch, full_logits, states)  # type: ignore[no-any-return]
        logits = full_logits.view(len(states), self.block_size, self.vocab_size)
        groups: dict[tuple[int, int], list[int]] = {}
        for index, state in enumerate(states):
            if not state["finished"]:
                groups.setdefault((state["limpet"].call, state["request"].canvas), []).append(index)
        for rows in groups.values():
            self._advance([states[row] for row in rows], logits if len(rows) == len(logits) else logits[rows])
        self._write_input_ids(forward_batch, states)
        return [state["finished"] for state in states]

    def _advance(self, states: list[Any], logits: Tensor) -> None:
        """One call of some requests, in place."""
        assert self.sampler is not None
        rng = self._rng([state["request"] for state in states], logits.device)
        after = advance(self.sampler, stacked([state["limpet"] for state in states]), rng, logits)
        for row, (state, finished) in enumerate(zip(states, after.finished.tolist(), strict=True)):
            soft = None
            if not finished:  # one request at a time: the distributions of a canvas take much memory
                soft = self._soft_embeddings((logits[row] / after.temperature).softmax(-1, dtype=torch.float32))
            one = slice(row, row + 1)
            memory = [part[one] for part in after.state.memory]
            own = after.state._replace(tokens=after.state.tokens[one], memory=memory_like(after.state.memory, memory))
            state.update(step=state["step"] - 1, current=after.canvas[row], limpet=own)
            state.update(self_conditioning=soft, finished=finished)

    def _rng(self, requests: Sequence[CanvasNumber], device: torch.device) -> CounterRNG:
        """The random numbers of some requests at the same canvas: those of `limpet.reply` under the server's seed."""
        samples = torch.tensor([request.sample for request in requests], device=device)
        return CounterRNG(canvas_seed(self.seed, requests[0].canvas), samples)


def stacked(states: Sequence[State]) -> State:
    """Several samples' states after as many calls, as one batch."""
    first = states[0]
    memory = [torch.cat(parts) for parts in zip(*(state.memory for state in states), strict=True)]
    return first._replace(
        tokens=torch.cat([state.tokens for state in states]), memory=memory_like(first.memory, memory)
    )
