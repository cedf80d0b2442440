"""transformers' own `generate` with a limpet sampler gives the tokens of `limpet.reply`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gemma_cases import CANVAS, PROMPT, SAMPLER_TEXTS, SEED, folder_of, transformers
from limpet import LimpetError
from limpet.generation import reply
from limpet.integrations.transformers import sampler_for
from limpet.models.diffusion_gemma import Gemma
from limpet.models.loading import load
from limpet.samplers import as_sampler

pytestmark = pytest.mark.usefixtures("offline")
SAMPLES, CALLS = 3, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("gemma") / "model", 0.5)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ours(folder: Path) -> Gemma:
    model = load(folder, device="cpu")
    assert isinstance(model, Gemma)
    return model


class Streamer:
    """Records what `generate` streams."""

    def __init__(self) -> None:
        self.drafts: list[Tensor] = []
        self.parts: list[Tensor] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        self.parts.append(value)

    def put_draft(self, value: Tensor) -> None:
        self.drafts.append(value)

    def end(self) -> None:
        self.has_ended = True


def generated(model: Any, rows: int = SAMPLES, canvases: int = 2, **options: Any) -> Tensor:
    prompt = torch.tensor([PROMPT]).expand(rows, -1)
    settings = {"max_new_tokens": canvases * CANVAS, "eos_token_id": None, "pad_token_id": 0}
    tokens: Tensor = model.generate(prompt, **settings | options).sequences[:, len(PROMPT) :]
    return tokens


@pytest.mark.parametrize("text", SAMPLER_TEXTS)
def test_generate_draws_the_tokens_of_reply(ours: Gemma, theirs: Any, text: str) -> None:
    """Two canvases of three rows; a row is the same in a batch of one, up to a network's rounding."""
    sampler = as_sampler(text, nfe=CALLS)
    ours.ends = (10**6,)
    expected = reply(ours, sampler, SAMPLES, SEED, 2 * CANVAS, PROMPT)
    tokens = generated(sampler_for(theirs, sampler, SEED))
    assert torch.equal(tokens, expected.tokens)
    assert torch.equal(generated(sampler_for(theirs, sampler, SEED), rows=1), expected.tokens[:1])


def test_rows_end_with_their_end_tokens_and_a_streamer_sees_every_canvas(ours: Gemma, theirs: Any) -> None:
    sampler = as_sampler("mend", nfe=CALLS)
    ours.ends = (10**6,)
    plain = reply(ours, sampler, SAMPLES, SEED, 3 * CANVAS, PROMPT).tokens
    ours.ends = int(plain[0, 5]), int(plain[2, CANVAS + 2])
    expected = reply(ours, sampler, SAMPLES, SEED, 3 * CANVAS, PROMPT).tokens
    streamer = Streamer()
    model = sampler_for(theirs, sampler, SEED)
    tokens = generated(model, canvases=3, eos_token_id=list(ours.ends), streamer=streamer)
    assert torch.equal(tokens, expected)
    assert torch.equal(torch.cat(streamer.parts, -1)[:, len(PROMPT) :], tokens)
    assert len(streamer.drafts) == CALLS * tokens.shape[1] // CANVAS
    assert streamer.has_ended
    # The last draft of a canvas is the canvas, before what follows an end is padded.
    assert torch.equal(streamer.drafts[CALLS - 1][1], plain[1, :CANVAS])
    assert any(not torch.equal(draft[1], plain[1, :CANVAS]) for draft in streamer.drafts[: CALLS - 1])


def test_transformers_own_streamer_and_samplers_still_work(theirs: Any, folder: Path, capsys: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    streamer = transformers.TextDiffusionStreamer(tokenizer=tokenizer)
    model = sampler_for(theirs, f"mend nfe={CALLS}", SEED)
    prompt = torch.tensor([PROMPT])
    tokens = model.generate(prompt, max_new_tokens=CANVAS, eos_token_id=None, streamer=streamer).sequences
    assert tokenizer.decode(tokens[0, len(PROMPT) :]) in capsys.readouterr().out
    assert type(theirs) is transformers.DiffusionGemmaForBlockDiffusion  # the model itself stays as it is
    assert isinstance(model, transformers.DiffusionGemmaForBlockDiffusion)
    assert model.model is theirs.model
    torch.manual_seed(0)
    own = generated(theirs, max_denoising_steps=3)
    torch.manual_seed(0)
    assert torch.equal(own, generated(theirs, max_denoising_steps=3))


def test_calls_and_seeds(ours: Gemma, theirs: Any) -> None:
    """`max_denoising_steps` is nfe; without a seed, torch's generator decides, once for each call of `generate`."""
    ours.ends = (10**6,)
    expected = reply(ours, "mend nfe=4", SAMPLES, SEED, CANVAS, PROMPT).tokens
    assert torch.equal(generated(sampler_for(theirs, "mend", SEED), canvases=1, max_denoising_steps=4), expected)
    config = type(theirs.generation_config)(max_denoising_steps=4)
    assert torch.equal(generated(sampler_for(theirs, "mend", SEED), canvases=1, generation_config=config), expected)
    unseeded = sampler_for(theirs, "mend nfe=4")
    torch.manual_seed(1)
    first, second = generated(unseeded, canvases=1), generated(unseeded, canvases=1)
    torch.manual_seed(1)
    assert torch.equal(first, generated(unseeded, canvases=1))
    assert not torch.equal(first, second)


def test_a_canvas_to_begin_with_and_compilation(theirs: Any) -> None:
    model = sampler_for(theirs, "native nfe=4", SEED)
    canvas = torch.full((SAMPLES, CANVAS), 60)
    from_canvas = generated(model, canvases=1, decoder_input_ids=canvas)
    assert (from_canvas == 60).float().mean() > (generated(model, canvases=1) == 60).float().mean()
    with pytest.raises(LimpetError, match="give it disable_compile=True too"):
        generated(model, cache_implementation="static")


def test_a_wrong_model_sampler_or_seed_is_one_sentence(theirs: Any) -> None:
    with pytest.raises(LimpetError, match="a Linear cannot be given a sampler"):
        sampler_for(torch.nn.Linear(2, 2), "mend")
    with pytest.raises(LimpetError, match="guided needs fixed tokens"):
        sampler_for(theirs, "guided nfe=6")
    with pytest.raises(LimpetError, match="there is no sampler 'mnd'"):
        sampler_for(theirs, "mnd")
    with pytest.raises(LimpetError, match="seed is -1"):
        sampler_for(theirs, "mend", -1)
