"""A limpet model for lm-evaluation-harness, which has no plug-ins: `python -m limpet.integrations.lm_eval` runs its
command line with the model `limpet` beside its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limpet.errors import LimpetError, import_extra
from limpet.generation import SEED, prompt_tokens, reply, sample, split_text
from limpet.models import Canvas
from limpet.models.loading import load
from limpet.samplers import as_sampler

interface = import_extra("lm_eval.api.model", "lm-eval")
ANSWER_TOKENS = 256  # where a task does not say how many


def register() -> None:
    """Add the model `limpet` to the harness's registry."""
    import_extra("lm_eval.models", "lm-eval")  # registers the harness's own
    registry = import_extra("lm_eval.api.registry", "lm-eval").model_registry
    if "limpet" not in registry.keys():  # noqa: SIM118  it is no dictionary
        registry.register("limpet", target="limpet.integrations.lm_eval:LimpetLM")


class LimpetLM(interface.LM):  # type: ignore[misc, name-defined]
    """Answers to `generate_until` tasks. Answer i of a task is sample i under the seed, in any batch up to rounding.

    pretrained: what `limpet.load` takes. sampler: such as "mend nfe=16". length: tokens of a sequence, prompt included
    (default: the model's). A task's temperature and do_sample are not used; the sampler has its own."""

    def __init__(
        self,
        pretrained: str = "mini",
        sampler: str = "crs",
        seed: int = SEED,
        length: int | None = None,
        precision: str = "float32",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.denoiser = load(str(pretrained), device=device, precision=precision)
        if self.denoiser.tokenizer is None:
            raise LimpetError(f"{pretrained} has no tokenizer, and tasks are texts: load a model with one")
        self.sampler, self.seed, self.length = as_sampler(sampler), seed, length or self.denoiser.length
        self.batch_size = None if batch_size in (None, "auto", "") else int(batch_size)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each request: a context, and the texts at which its answer stops."""
        questions = [request.args for request in requests]
        if isinstance(self.denoiser, Canvas):
            return [self._reply(self.denoiser, index, *one) for index, one in enumerate(questions)]
        prompts = [self._prompt(context, settings) for context, settings in questions]
        tokens = sample(
            self.denoiser,
            self.sampler,
            len(questions),
            self.seed,
            self.length,
            prompt=prompts,
            batch_size=self.batch_size,
        ).tokens.tolist()
        assert self.denoiser.tokenizer is not None
        answers = []
        for ids, prompt, (_, settings) in zip(tokens, prompts, questions, strict=True):
            kept = ids[: len(prompt) + most_tokens(settings)]
            answers.append(cut(split_text(self.denoiser.tokenizer.decode, kept, len(prompt))[1], settings))
        return answers

    def _prompt(self, context: str, settings: dict[str, Any]) -> list[int]:
        """A context's last tokens: room for the answer is left, half of the sequence at most."""
        ids = prompt_tokens(self.denoiser, context)
        room = self.length - min(most_tokens(settings), self.length // 2)
        return ids if self.denoiser.prompt_layout else ids[-room:]

    def _reply(self, model: Canvas, index: int, context: str, settings: dict[str, Any]) -> str:
        most = most_tokens(settings)
        ids = model.prompt(context)
        tokens = reply(model, self.sampler, 1, self.seed, most, ids, first=index).tokens[0, :most].tolist()
        assert model.tokenizer is not None
        return cut(model.tokenizer.decode([i for i in tokens if i not in (*model.ends, model.pad)]), settings)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise LimpetError("limpet's models have no exact likelihood: choose tasks of the type generate_until")

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        raise LimpetError("limpet's models have no exact likelihood: choose tasks of the type generate_until")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        about = {"model_digest": self.denoiser.digest, "sampler": self.sampler.to_dict()}
        return {**about, "sampler_seed": self.seed, "sequence_length": self.length}


def most_tokens(settings: dict[str, Any]) -> int:
    """The most tokens of an answer."""
    return int(settings.get("max_gen_toks") or ANSWER_TOKENS)


def cut(answer: str, settings: dict[str, Any]) -> str:
    """An answer up to the first of the texts at which it stops."""
    until = settings.get("until") or []
    for stop in [until] if isinstance(until, str) else until:
        answer = answer.partition(stop)[0] if stop else answer
    return answer


def main() -> None:
    """The harness's command line."""
    register()
    import_extra("lm_eval.__main__", "lm-eval").cli_evaluate()


if __name__ == "__main__":
    main()
