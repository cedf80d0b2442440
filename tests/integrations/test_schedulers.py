"""limpet's schedulers in diffusers' pipeline draw the tokens of `limpet.sample`; limpet's samplers draw those of
diffusers' schedulers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import limpet
from gemma_cases import CANVAS, PROMPT, SAMPLER_TEXTS, SEED, folder_of, on_our_uniforms, transformers
from limpet import CRS, LimpetError, Mend
from limpet.generation import reply
from limpet.models.diffusion_gemma import Gemma
from limpet.models.loading import load
from limpet.samplers import State, as_sampler, builtin, names, params
from thinned import thinned

diffusers = pytest.importorskip("diffusers", minversion="0.42")
from limpet.integrations.diffusers import (  # noqa: E402
    SCHEDULERS,
    CommittedRevealScheduler,
    MendScheduler,
    scheduler_for,
)

pytestmark = pytest.mark.usefixtures("offline")
SAMPLES, CALLS = 3, 8
NAME = "google/diffusiongemma-26B-A4B-it"


class Processor:
    """Returns the same ids for every row: all that the pipeline needs of a processor."""

    tokenizer = SimpleNamespace(eos_token_id=None)

    def apply_chat_template(self, messages: list[Any], **_: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([PROMPT] * len(messages))}


@pytest.fixture(scope="module", params=[1.0, 0.2])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("gemma") / "model", request.param)


@pytest.fixture(scope="module")
def original(folder: Path) -> Any:
    return transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def model(folder: Path) -> Gemma:
    model = load(folder, device="cpu")
    assert isinstance(model, Gemma)
    model.ends = (10**6,)
    return model


def pipeline(original: Any, scheduler: Any) -> Any:
    pipe = diffusers.DiffusionGemmaPipeline(original, scheduler, Processor())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_pipeline(
    original: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch, canvases: int = 2, undrawn: int = 0, **options: Any
) -> tuple[Tensor, list[tuple[int, Tensor, Tensor]]]:
    """The pipeline's tokens on limpet's uniforms; of every call its number, the logits, and the canvas after it."""
    calls: list[tuple[int, Tensor, Tensor]] = []

    def record(_: Any, number: int, call: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        calls.append((call, tensors["logits"].clone(), tensors["canvas"].clone()))
        return {}

    with on_our_uniforms(SAMPLES, monkeypatch, undrawn):
        out = pipeline(original, scheduler)(
            prompt=["?"] * SAMPLES,
            gen_length=canvases * CANVAS,
            num_inference_steps=CALLS,
            output_type="seq",
            callback_on_step_end=record,
            callback_on_step_end_tensor_inputs=["canvas", "logits"],
            **{"confidence_threshold": None, **options},
        )
    return out.sequences, calls


@pytest.mark.parametrize("text", thinned(SAMPLER_TEXTS))
def test_the_pipeline_draws_the_tokens_of_reply(
    model: Gemma, original: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first canvas is that of `limpet.sample` after the prompt, all canvases are those of `reply`."""
    sampler = as_sampler(text, nfe=CALLS)
    tokens, calls = run_pipeline(original, scheduler_for(sampler, SEED), monkeypatch)
    assert torch.equal(tokens, reply(model, sampler, SAMPLES, SEED, 2 * CANVAS, PROMPT).tokens)
    first = limpet.sample(model.after(torch.tensor([PROMPT])), sampler, n=SAMPLES, seed=SEED)
    if "settled" not in text:  # reply ends a canvas early, sample does not
        assert torch.equal(tokens[:, :CANVAS], first.tokens)
    assert len(calls) == 2 * CALLS


def test_every_sampler_that_needs_no_fixed_tokens_has_a_scheduler() -> None:
    kinds = [names.find(name) for name in builtin.BUILTIN]
    assert {one.kind for one in SCHEDULERS.values()} == {kind for kind in kinds if not kind.needs_fixed}
    assert {as_sampler(text, nfe=CALLS).name for text in SAMPLER_TEXTS} | {"guided"} == set(builtin.BUILTIN)
    assert SCHEDULERS["CommittedRevealScheduler"] is CommittedRevealScheduler
    with pytest.raises(LimpetError, match="guided needs fixed tokens"):
        scheduler_for("guided nfe=6")
    for kind in SCHEDULERS.values():
        again = kind.from_config(kind(num_inference_steps=12, seed=3).config)
        assert again.sampler == kind.kind(nfe=12)
        assert again.config.seed == 3


@pytest.mark.parametrize("text", SAMPLER_TEXTS)
def test_a_sampler_says_what_its_next_call_gives_the_network(model: Gemma, text: str) -> None:
    sampler, state = as_sampler(text, nfe=CALLS), None
    for step in limpet.steps(model, sampler, SAMPLES, SEED, trace=False):
        before: State = sampler.init(step.context) if state is None else state
        assert torch.equal(step.model_input, sampler.model_input(before))
        state = step.state


def test_its_early_stop_leaves_finished_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that the pipeline has stopped keeps its tokens until the canvas ends, and the others do not change."""
    folder = folder_of(tmp_path / "model", 0.03)
    original = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()
    scheduler = CommittedRevealScheduler(seed=SEED, warmup=0.0, budget=8.0, spacing=0)
    stop: dict[str, Any] = {"confidence_threshold": 9.0, "stability_threshold": 1}
    unstopped, _ = run_pipeline(original, scheduler, monkeypatch, canvases=1)
    tokens, calls = run_pipeline(original, scheduler, monkeypatch, canvases=1, **stop)
    tops = torch.stack([logits.argmax(-1) for _, logits, _ in calls])  # (calls, B, L)
    stops = [
        next((r for r in range(1, len(tops)) if tops[r, row].equal(tops[r - 1, row])), None) for row in range(SAMPLES)
    ]
    assert any(stop is not None and stop < CALLS - 2 for stop in stops)
    for row, stop in enumerate(stops):
        if stop is None:
            assert torch.equal(tokens[row], unstopped[row])
            continue
        assert torch.equal(tokens[row], tops[stop, row])
        for _, _, canvas in calls[stop + 2 :]:  # the scheduler can see the stop from the second call after it
            assert torch.equal(canvas[row], tokens[row])


def test_a_row_that_the_caller_changed_is_left_alone() -> None:
    scheduler, shape = CommittedRevealScheduler(seed=3), (2, 12, 9)
    scheduler.set_timesteps(6)
    generator = torch.Generator().manual_seed(0)
    canvas = torch.randint(9, shape[:2], generator=generator)
    logits = [3 * torch.randn(shape, generator=generator) for _ in range(6)]
    plain = [canvas]
    for call in range(6):
        plain.append(scheduler.step(logits[call], call, plain[-1]).prev_sample)
    scheduler.set_timesteps(6)  # begins again
    held, stopped = canvas, torch.full((12,), 4)
    for call in range(6):
        held = scheduler.step(logits[call], call, held).prev_sample
        if call >= 3:
            assert torch.equal(held[0], stopped)
        if call == 2:
            held = torch.stack([stopped, held[1]])
        assert torch.equal(held[1], plain[call + 1][1])


def test_it_saves_and_loads(tmp_path: Path) -> None:
    scheduler = MendScheduler(num_inference_steps=9, seed=5, budget=0.7, revise=2, horizon=None)
    scheduler.save_pretrained(tmp_path)
    again = MendScheduler.from_pretrained(tmp_path)
    settings = set(dict(scheduler.config)) - {"_use_default_values"}
    assert all(again.config[name] == scheduler.config[name] for name in settings)
    assert again.sampler == scheduler.sampler == Mend(nfe=9, budget=0.7, revise=2)
    other = CommittedRevealScheduler.from_config(scheduler.config, budget=0.2)  # its own defaults elsewhere
    assert other.sampler == CRS(nfe=9, budget=0.2)
    assert set(dict(CommittedRevealScheduler().config)) >= set(params(CRS)) - {"nfe"}
    own = CommittedRevealScheduler.from_config(diffusers.EntropyBoundScheduler(num_inference_steps=20).config)
    assert own.sampler == CRS(nfe=20)


def test_a_wrong_setting_is_one_sentence() -> None:
    with pytest.raises(LimpetError, match="crs has budget -1; it takes"):
        CommittedRevealScheduler(budget=-1)
    with pytest.raises(LimpetError, match="has no parameter 'budgt'; did you mean budget"):
        CommittedRevealScheduler(budgt=1)
    for seed in ("8200", -1, 2**64, 1.5):
        with pytest.raises(LimpetError, match=r"seed is .*; it takes a whole number from 0"):
            CommittedRevealScheduler(seed=seed)
    assert CommittedRevealScheduler(9, 5).sampler.nfe == 9
    with pytest.raises(LimpetError, match="crs has nfe 1; it takes"):
        CommittedRevealScheduler().set_timesteps(1)
    with pytest.raises(LimpetError, match="step 3 of a canvas came after 0 steps"):
        CommittedRevealScheduler().step(torch.zeros(1, 4, 3), 3, torch.zeros(1, 4, dtype=torch.long))


def test_without_a_seed_the_generator_decides(original: Any) -> None:
    def tokens(seed: int) -> Tensor:
        generator, pipe = torch.Generator().manual_seed(seed), pipeline(original, CommittedRevealScheduler())
        settings = {"gen_length": 2 * CANVAS, "num_inference_steps": 3, "output_type": "seq"}
        return pipe(prompt=["?"], generator=generator, **settings).sequences

    assert torch.equal(tokens(1), tokens(1))
    assert not torch.equal(tokens(1), tokens(2))


def test_the_page_shows_it_in_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "diffusers.md").read_text()
    first, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(first.splitlines()) <= 10
    assert NAME in first
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    folder = folder_of(tmp_path / "model", 0.2)
    for code in (first, *others):
        exec(code.replace(NAME, str(folder)).replace("gen_length=256", f"gen_length={CANVAS}"), names)
    assert names["pipe"].scheduler.sampler == Mend(budget=0.25)
    assert capsys.readouterr().out.strip()


# diffusers' schedulers, beside limpet's samplers


@pytest.mark.parametrize(
    ("scheduler", "sampler"),
    [
        (diffusers.EntropyBoundScheduler(entropy_bound=9.0), "entropy-bound bound=9 settled=none"),
        (diffusers.BlockRefinementScheduler(threshold=0.3), "block-refinement threshold=.3 editing=.9"),
    ],
)
def test_limpets_samplers_draw_the_tokens_of_diffusers_schedulers(
    model: Gemma, original: Any, scheduler: Any, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every call. EntropyBound is the same but for its last call, which returns the argmax here."""
    is_bound = sampler.startswith("entropy-bound")
    _, calls = run_pipeline(original, scheduler, monkeypatch, canvases=1, undrawn=0 if is_bound else CALLS)
    text = f"{sampler} nfe={CALLS} distribution=predicted"
    steps = limpet.steps(model.after(torch.tensor([PROMPT])), text, SAMPLES, SEED, trace=False)
    for (call, logits, canvas), step in zip(calls, steps, strict=True):
        assert torch.equal(step.tokens, logits.argmax(-1) if is_bound and call == CALLS - 1 else canvas)
