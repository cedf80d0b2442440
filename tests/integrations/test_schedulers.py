"""limpet's schedulers in diffusers' stock pipeline: the tokens of `limpet.sample`, early stops, saving and loading; and
the stock schedulers in that pipeline beside limpet's denoiser and samplers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import limpet
from gemma_cases import CANVAS, SEED, folder_of, on_our_uniforms, transformers
from limpet import CRS, BlockRefinement, EntropyBound, LimpetError, Mend, Sampler
from limpet.canvases import reply
from limpet.models.diffusion_gemma import Gemma
from limpet.models.loading import load
from limpet.samplers import params

diffusers = pytest.importorskip("diffusers", minversion="0.42")
from limpet.integrations.diffusers import CommittedRevealScheduler, MendScheduler  # noqa: E402

pytestmark = pytest.mark.usefixtures("offline")
SAMPLES, CALLS = 3, 7
NAME = "google/diffusiongemma-26B-A4B-it"


class Processor:
    """A prompt that is ids already, for every row the same; as much of a processor as the pipeline asks of."""

    tokenizer = SimpleNamespace(eos_token_id=None)

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def apply_chat_template(self, messages: list[Any], **_: Any) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([self.ids] * len(messages))}


PROMPT = [2, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52]


@pytest.fixture(scope="module", params=[1.0, 0.2])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("gemma") / "model", request.param)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ours(folder: Path) -> Gemma:
    model = load(folder, device="cpu")
    assert isinstance(model, Gemma)
    model.ends = (10**6,)
    return model


def piped(
    theirs: Any,
    scheduler: Any,
    monkeypatch: pytest.MonkeyPatch,
    canvases: int = 2,
    stop: float | None = None,
    undrawn: int = 0,
    **told: Any,
) -> tuple[Tensor, list[tuple[int, Tensor, Tensor]]]:
    """The pipeline's tokens on limpet's uniforms; of every call its number, the logits, and the canvas after it."""
    pipe = diffusers.DiffusionGemmaPipeline(theirs, scheduler, Processor(PROMPT))
    pipe.set_progress_bar_config(disable=True)
    seen: list[tuple[int, Tensor, Tensor]] = []

    def note(_: Any, number: int, call: int, held: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append((call, held["logits"].clone(), held["canvas"].clone()))
        return {}

    with on_our_uniforms(SAMPLES, monkeypatch, undrawn):
        out = pipe(
            prompt=["?"] * SAMPLES, gen_length=canvases * CANVAS, num_inference_steps=CALLS, confidence_threshold=stop,
            output_type="seq", callback_on_step_end=note, callback_on_step_end_tensor_inputs=["canvas", "logits"],
            **told,
        )  # fmt: skip
    return out.sequences, seen


ARMS: list[tuple[Any, Sampler]] = [
    (CommittedRevealScheduler, CRS(nfe=CALLS)),
    (CommittedRevealScheduler, CRS(nfe=CALLS, budget=4.0, horizon=2, temperature=0.8, final_step="sample")),
    (CommittedRevealScheduler, CRS(nfe=CALLS, budget=4.0, top_p=0.9, spacing=1)),
    (MendScheduler, Mend(nfe=CALLS)),
    (MendScheduler, Mend(nfe=CALLS, budget=8.0, warmup=0.1, mend=3, turns=1)),
]


@pytest.mark.parametrize(("kind", "sampler"), ARMS, ids=lambda one: getattr(one, "caption", ""))
def test_the_stock_pipeline_gives_the_tokens_of_sample(
    ours: Gemma, theirs: Any, kind: Any, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first canvas is `limpet.sample`'s after the prompt, all of them are `reply`'s; labels were written."""
    own = {name: getattr(sampler, name) for name in params(type(sampler)) if name != "nfe"}
    made, seen = piped(theirs, kind(seed=SEED, **own), monkeypatch)
    first = limpet.sample(ours.after(torch.tensor([PROMPT])), sampler, n=SAMPLES, seed=SEED)
    assert torch.equal(made[:, :CANVAS], first.tokens)
    assert torch.equal(made, reply(ours, sampler, SAMPLES, SEED, 2 * CANVAS, PROMPT).tokens)
    assert first.committed.sum() > 0
    assert len(seen) == 2 * CALLS


def test_its_early_stop_leaves_finished_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that the pipeline has stopped is that row until the canvas ends, and the others are what they would be."""
    folder = folder_of(tmp_path / "model", 0.03)
    theirs = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()
    scheduler = CommittedRevealScheduler(seed=SEED, warmup=0.0, budget=8.0, spacing=0)
    free, _ = piped(theirs, scheduler, monkeypatch, canvases=1)
    made, seen = piped(theirs, scheduler, monkeypatch, canvases=1, stop=9.0, stability_threshold=1)
    tops = torch.stack([logits.argmax(-1) for _, logits, _ in seen])  # (calls, B, L)
    stops = [
        next((r for r in range(1, len(tops)) if tops[r, row].equal(tops[r - 1, row])), None) for row in range(SAMPLES)
    ]
    assert any(stop is not None and stop < CALLS - 2 for stop in stops)
    for row, stop in enumerate(stops):
        if stop is None:
            assert torch.equal(made[row], free[row])
            continue
        assert torch.equal(made[row], tops[stop, row])
        for _, _, canvas in seen[stop + 2 :]:  # the call after the stop is the first that the scheduler hears of it
            assert torch.equal(canvas[row], made[row])


def test_a_row_that_comes_back_changed_is_left_alone() -> None:
    scheduler, shape = CommittedRevealScheduler(seed=3), (2, 12, 9)
    scheduler.set_timesteps(6)
    generator = torch.Generator().manual_seed(0)
    canvas = torch.randint(9, shape[:2], generator=generator)
    logits = [3 * torch.randn(shape, generator=generator) for _ in range(6)]
    plain = [canvas]
    for call in range(6):
        plain.append(scheduler.step(logits[call], call, plain[-1]).prev_sample)
    scheduler.set_timesteps(6)  # the first canvas again
    held, stopped = canvas, torch.full((12,), 4)
    for call in range(6):
        held = scheduler.step(logits[call], call, held).prev_sample
        if call >= 3:
            assert torch.equal(held[0], stopped)
        if call == 2:
            held = torch.stack([stopped, held[1]])
        assert torch.equal(held[1], plain[call + 1][1])


def test_it_saves_and_loads(tmp_path: Path) -> None:
    scheduler = MendScheduler(num_inference_steps=9, seed=5, budget=0.7, mend=2, horizon=None)
    scheduler.save_pretrained(tmp_path)
    again = MendScheduler.from_pretrained(tmp_path)
    settings = set(dict(scheduler.config)) - {"_use_default_values"}
    assert all(again.config[name] == scheduler.config[name] for name in settings)
    assert again.walked == scheduler.walked == Mend(nfe=9, budget=0.7, mend=2)
    other = CommittedRevealScheduler.from_config(scheduler.config, budget=0.2)  # its own defaults elsewhere
    assert other.walked == CRS(nfe=9, budget=0.2)
    assert set(dict(CommittedRevealScheduler().config)) >= set(params(CRS)) - {"nfe"}
    stock = CommittedRevealScheduler.from_config(diffusers.EntropyBoundScheduler(num_inference_steps=20).config)
    assert stock.walked == CRS(nfe=20)


def test_a_setting_that_it_does_not_take_is_one_sentence() -> None:
    with pytest.raises(LimpetError, match="crs has budget -1; it takes"):
        CommittedRevealScheduler(budget=-1)
    with pytest.raises(LimpetError, match="has no parameter 'budgt'; did you mean budget"):
        CommittedRevealScheduler(budgt=1)
    for seed in ("8200", -1, 2**64, 1.5):
        with pytest.raises(LimpetError, match=r"seed is .*; it takes a whole number from 0"):
            CommittedRevealScheduler(seed=seed)
    assert CommittedRevealScheduler(9, 5).walked.nfe == 9
    with pytest.raises(LimpetError, match="crs has nfe 1; it takes"):
        CommittedRevealScheduler().set_timesteps(1)
    with pytest.raises(LimpetError, match="step 3 of a canvas came after 0 steps"):
        CommittedRevealScheduler().step(torch.zeros(1, 4, 3), 3, torch.zeros(1, 4, dtype=torch.long))


def test_without_a_seed_it_is_the_generators(theirs: Any) -> None:
    def made(seed: int) -> Tensor:
        pipe = diffusers.DiffusionGemmaPipeline(theirs, CommittedRevealScheduler(), Processor(PROMPT))
        pipe.set_progress_bar_config(disable=True)
        return pipe(prompt=["?"], gen_length=2 * CANVAS, num_inference_steps=3, output_type="seq",
                    generator=torch.Generator().manual_seed(seed)).sequences  # fmt: skip

    assert torch.equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))


def test_the_page_shows_it_in_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "diffusers.md").read_text()
    first, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(first.splitlines()) <= 10
    assert NAME in first
    monkeypatch.chdir(tmp_path)
    within: dict[str, Any] = {}
    folder = folder_of(tmp_path / "model", 0.2)
    for code in (first, *others):
        exec(code.replace(NAME, str(folder)).replace("gen_length=256", f"gen_length={CANVAS}"), within)
    assert within["pipe"].scheduler.walked.nfe == 48
    assert capsys.readouterr().out.strip()


# The stock schedulers, in the stock pipeline, beside limpet


@pytest.mark.parametrize(
    ("scheduler", "sampler"),
    [
        (diffusers.EntropyBoundScheduler(), EntropyBound(nfe=CALLS, probs="predicted", settled=None)),
        (diffusers.EntropyBoundScheduler(entropy_bound=9.0),
         EntropyBound(nfe=CALLS, bound=9.0, probs="predicted", settled=None)),
        (diffusers.BlockRefinementScheduler(), BlockRefinement(nfe=CALLS, probs="predicted")),
        (diffusers.BlockRefinementScheduler(threshold=0.3, editing_threshold=0.2),
         BlockRefinement(nfe=CALLS, probs="predicted", threshold=0.3, editing=0.2)),
    ],
)  # fmt: skip
def test_stock_schedulers_give_the_tokens_of_limpets_samplers(
    ours: Gemma, theirs: Any, scheduler: Any, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every canvas that the network sees; the last call of EntropyBound alone, which limpet reads out by argmax."""
    undrawn = 0 if isinstance(sampler, EntropyBound) else CALLS
    _, seen = piped(theirs, scheduler, monkeypatch, canvases=1, undrawn=undrawn)
    states: list[Tensor] = []
    context = ours.after(torch.tensor([PROMPT]))
    limpet.sample(context, sampler, SAMPLES, SEED, progress=lambda state, *_: states.append(state.tokens))
    for (call, logits, canvas), state in zip(seen, states, strict=True):
        reads = isinstance(sampler, EntropyBound) and call == CALLS - 1
        assert torch.equal(state, logits.argmax(-1) if reads else canvas)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_along_discrete_ddims_path_limpets_denoiser_says_the_same(
    ours: Gemma, theirs: Any, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two canvases, told of each call before; its step is the native one's in distribution, by `test_diffusers_parity`."""
    torch.manual_seed(0)
    canvases: list[Tensor] = []
    decoder = theirs.model.decoder
    with decoder.register_forward_pre_hook(
        lambda module, args, named: canvases.append(named["decoder_input_ids"].clone()), with_kwargs=True
    ):
        pipe = diffusers.DiffusionGemmaPipeline(theirs, diffusers.DiscreteDDIMScheduler(), Processor(PROMPT))
        pipe.set_progress_bar_config(disable=True)
        said: list[Tensor] = []
        out = pipe(prompt=["?"] * SAMPLES, gen_length=2 * CANVAS, num_inference_steps=CALLS, temperature=temperature,
                   confidence_threshold=None, output_type="seq", callback_on_step_end_tensor_inputs=["logits"],
                   callback_on_step_end=lambda _, n, t, held: said.append(held["logits"].clone()) or {})  # fmt: skip
    context = ours.after(torch.tensor([PROMPT]))
    for number, (canvas, logits) in enumerate(zip(canvases, said, strict=True)):
        if number == CALLS:
            context = context.after(out.sequences[:, :CANVAS])
        carried = None if number % CALLS == 0 else ours.carry(said[number - 1].flatten(0, 1)).view(SAMPLES, CANVAS, -1)
        assert torch.allclose(context.head(context.body_carried(canvas, 0.5, None, carried)), logits, atol=1e-4)
