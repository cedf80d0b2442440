"""From a model and a sampler to samples: what is resolved, what comes back, and what is refused."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import limpet
from limpet import CRS, LimpetError, Native
from limpet.diffusion.rng import CounterRNG
from limpet.generation import Inputs, context_of, rollout, split_text
from limpet.models.exact import Markov
from limpet.models.exact_sources import source
from limpet.samplers import Context, State, StepInfo, from_dict
from limpet.samplers.crs import NEVER, OPEN, Memory

WORDS = source("exact:words")
CHAIN = Markov(torch.ones(3), torch.ones(3, 3), 6)  # no tokenizer
QUICK = CRS(nfe=3)


def context(fixed: Tensor) -> Context:
    return context_of(WORDS, Inputs(fixed, CounterRNG(0, torch.arange(len(fixed)))))


@pytest.mark.parametrize(
    ("nfe", "warmup", "after", "count", "budget"),
    [(8, 2, 5, 205, 102.4), (16, 5, 10, 103, 51.2), (32, 10, 21, 49, 24.381), (64, 21, 42, 25, 12.190)],
)
def test_caps_and_budgets_at_length_1024(nfe: int, warmup: int, after: int, count: int, budget: float) -> None:
    sampler, ctx = CRS(nfe=nfe), context(torch.full((3, 1024), -1))
    assert sampler.warmup_calls == warmup
    assert nfe - 1 - sampler.warmup_calls == after
    most, allowance = sampler.limits(ctx)
    assert most.tolist() == [count] * 3
    assert allowance.tolist() == pytest.approx([budget] * 3, abs=5e-4)
    assert len(sampler.times) == nfe
    assert [ctx.signal(t) for t in sampler.times] == pytest.approx([1 - 0.999 * t for t in sampler.times], abs=1e-15)
    assert sampler.times[sampler.warmup_calls] == pytest.approx(0.67, abs=1e-4)


@pytest.mark.parametrize(("warmup", "count"), [(0.016, 17), (0.17, 20), (0.33, 25), (0.5, 34)])
def test_caps_follow_the_warmup(warmup: float, count: int) -> None:
    most, _ = CRS(nfe=64, warmup=warmup).limits(context(torch.full((1, 1024), -1)))
    assert most.tolist() == [count]


def test_caps_and_budgets_are_of_free_positions() -> None:
    """Fifty of a hundred tokens fixed: the paper's prompt study has D = 25 and K = 2; each sample has its own."""
    fixed = torch.full((2, 100), -1)
    fixed[0, :50] = 1
    ctx = context(fixed)
    most, allowance = CRS(nfe=64).limits(ctx)
    assert most.tolist() == [2, 3]
    assert (allowance * 42).tolist() == pytest.approx([25, 50])
    assert ctx.generated.tolist() == ctx.free.sum(-1).tolist() == [50, 100]


@pytest.mark.parametrize("kind", [Native, CRS])
def test_the_top_p_of_each_call(kind: type[Native]) -> None:
    ctx = context(torch.full((1, 160), -1))

    def top_p(**params: float) -> list[float]:
        sampler = kind(nfe=8, **params)
        states = [State(call, ctx.noise()) for call in range(8)]
        return [sampler.transition(ctx, state, ctx.free, ctx.no_positions).support.top_p for state in states]

    assert top_p() == [1.0] * 8
    assert top_p(top_p=0.9) == [0.9] * 8
    assert top_p(late_top_p=0.8) == [1.0] * 2 + [0.8] * 6
    assert top_p(top_p=0.9, late_top_p=1.0) == [0.9] * 2 + [1.0] * 6


def test_the_noise_that_a_trajectory_begins_with_is_uniform_and_holds_fixed_tokens() -> None:
    fixed = torch.full((50, 160), -1)
    fixed[:, 7] = 3
    noise = context(fixed).noise()
    assert (noise[:, 7] == 3).all()
    counts = noise[:, 8:].flatten().bincount(minlength=27).double()
    expected = counts.sum() / 27
    assert ((counts - expected) ** 2 / expected).sum() < 70  # 26 degrees of freedom: one in a hundred thousand


def test_what_comes_back() -> None:
    out = limpet.sample(WORDS, CRS(nfe=5), n=3, seed=7, first=10)
    assert out.tokens.shape == (3, 160)
    assert out.tokens.dtype == torch.long
    assert out.tokens.min() >= 0
    assert out.tokens.max() < 27
    assert out.nfe == 5
    assert out.texts == [WORDS.tokenizer.decode(row) for row in out.tokens.tolist()]
    assert out.committed.tolist() == (out.memory.committed_at < NEVER).sum(-1).tolist()
    assert (out.committed > 0).all()
    rows = [one.to_dict() for one in out]
    assert [row["sample"] for row in rows] == [10, 11, 12]
    for i, row in enumerate(json.loads(json.dumps(rows))):
        assert row["text"] == out.texts[i]
        assert row["tokens"] == out.tokens[i].tolist()
        assert row["committed"] == out.committed[i]
        assert (row["seed"], row["model"], row["digest"], row["nfe"]) == (7, "exact:words", WORDS.digest, 5)
        again = limpet.sample(WORDS, from_dict(row["sampler"]), n=1, seed=row["seed"], first=row["sample"])
        assert again.tokens[0].tolist() == row["tokens"]


def test_defaults() -> None:
    """Without a sampler: the recommended one with 64 calls; eight samples under seed 8200; the model's own length."""
    assert torch.equal(
        limpet.sample(CHAIN).tokens, limpet.sample(CHAIN, limpet.recommended(64), n=8, seed=8200, length=6).tokens
    )


def test_a_model_without_a_tokenizer() -> None:
    out = limpet.sample(CHAIN, QUICK, n=2)
    with pytest.raises(LimpetError, match=r"has no tokenizer, so its samples have no text; use \.tokens"):
        _ = out.texts
    assert [one.text for one in out] == [None, None]
    with pytest.raises(LimpetError, match="has no tokenizer: give the prompt as token ids"):
        limpet.sample(CHAIN, QUICK, n=1, prompt="abc")


def test_calls_and_head_rows_are_counted_over_batches() -> None:
    whole, parts = (limpet.sample(WORDS, CRS(nfe=6), n=5, batch_size=size) for size in (5, 2))
    assert whole.nfe == parts.nfe == 6
    assert whole.head_rows == parts.head_rows
    assert 0 < whole.head_rows < 1


def test_prompts_as_text_as_ids_and_for_each_sample() -> None:
    ids = WORDS.tokenizer.encode("moon tide ")
    one, two, three = (
        limpet.sample(WORDS, QUICK, n=2, prompt=prompt) for prompt in ("moon tide ", ids, torch.tensor([ids, ids]))
    )
    assert all(text.startswith("moon tide ") for text in one.texts)
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.tokens, three.tokens)
    whole = list(range(6))
    assert limpet.sample(CHAIN, QUICK, n=1, prompt=[x % 3 for x in whole]).tokens[0].tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.equal(limpet.sample(CHAIN, QUICK, n=2, prompt=[]).tokens, limpet.sample(CHAIN, QUICK, n=2).tokens)


def test_fixed_positions_as_a_mapping_a_row_or_a_table() -> None:
    row = torch.tensor([-1, 2, -1, -1, 0, -1])
    outs = [limpet.sample(CHAIN, QUICK, n=2, fixed=fixed) for fixed in ({1: 2, 4: 0}, row, row.expand(2, -1))]
    assert outs[0].tokens[:, [1, 4]].tolist() == [[2, 0], [2, 0]]
    assert all(torch.equal(out.tokens, outs[0].tokens) for out in outs)
    table = torch.tensor([[-1] * 6, [1] * 6])
    assert limpet.sample(CHAIN, QUICK, n=2, fixed=table).tokens[1].tolist() == [1] * 6


def test_progress_is_reported_after_every_call() -> None:
    reports: list[tuple[int, int]] = []
    limpet.sample(CHAIN, CRS(nfe=4), n=5, batch_size=2, progress=lambda done, total: reports.append((done, total)))
    assert [total for _, total in reports] == [20] * 12
    assert [done for done, _ in reports] == [2, 4, 6, 8, 10, 12, 14, 16, 17, 18, 19, 20]


def test_a_bar_changes_nothing() -> None:
    assert torch.equal(limpet.sample(CHAIN, QUICK, n=2, progress=True).tokens, limpet.sample(CHAIN, QUICK, n=2).tokens)


MEMORY = Memory(torch.zeros(2, 6, dtype=torch.long), torch.full((2, 6), OPEN))


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"n": 0}, "n is 0; ask for at least one"),
        ({"n": -3}, "n is -3; ask for at least one"),
        ({"length": -1}, "length is -1; it takes a whole number from 1"),
        ({"length": 0}, "length is 0; it takes a whole number from 1"),
        ({"length": 7}, "knows sequences of 6 tokens; it was given 7"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"prompt": [0] * 7}, "the prompt has 7 tokens, the sequence 6: shorten it or raise length"),
        ({"prompt": [0, 3]}, r"token 3 is outside the vocabulary of 3 \(0 to 2\)"),
        ({"prompt": [0, -1]}, "token -1 is outside the vocabulary of 3"),
        ({"prompt": torch.zeros(3, 2, dtype=torch.long)}, r"prompt has shape \(3, 2\); it takes \(P,\) .* or \(2, P\)"),
        ({"prompt": torch.zeros(2, 1, 1, dtype=torch.long)}, r"prompt has shape \(2, 1, 1\)"),
        ({"prompt": 3}, r"prompt has shape \(\)"),
        ({"fixed": {6: 0}}, "fixed position 6 is outside a sequence of 6"),
        ({"fixed": {-1: 0}}, "fixed position -1 is outside a sequence of 6"),
        ({"fixed": {0: 3}}, "token 3 is outside the vocabulary of 3"),
        ({"fixed": {0: -7}}, "token -7 is outside the vocabulary of 3"),
        ({"fixed": torch.zeros(5, dtype=torch.long)}, r"fixed has shape \(5,\); it takes \(6,\) or \(2, 6\)"),
        ({"prompt": 2.5}, r"prompt has shape \(\)"),
        ({"prompt": [1.0, 2.0]}, r"the prompt is \[1.0, 2.0\]; token ids are whole numbers"),
        ({"prompt": torch.tensor([1.9])}, "the prompt is tensor.*; token ids are whole numbers"),
        ({"prompt": [[1.5], [0.0]]}, r"the prompt is \[1.5\]; token ids are whole numbers"),
        ({"prompt": [True, False]}, "the prompt is .*; token ids are whole numbers"),
        ({"prompt": [None]}, r"the prompt is \[None\]; token ids are whole numbers"),
        ({"prompt": [10**30]}, "token ids are whole numbers of at most 64 bits"),
        ({"fixed": {0: 1.5}}, "what is fixed is 1.5; token ids are whole numbers"),
        ({"fixed": {0: [1.0, 2.0]}}, "what is fixed is .*; token ids are whole numbers"),
        ({"fixed": {0.5: 1}}, "fixed position 0.5 is no whole number"),
        ({"fixed": torch.full((6,), 1.5)}, "what is fixed is .*; token ids are whole numbers"),
        ({"fixed": torch.ones(6, dtype=torch.bool)}, "what is fixed is .*; token ids are whole numbers"),
        ({"fixed": 5}, r"fixed has shape \(\)"),
        ({"replay": MEMORY, "n": 3}, r"replayed samples have shape \(2, 6\), these \(3, 6\)"),
        ({"replay": MEMORY, "sampler": Native(nfe=3)}, "native cannot replay: leave replay out"),
        ({"replay": (), "sampler": Native(nfe=3)}, "native cannot replay: leave replay out"),
        ({"replay": ()}, "this memory has 0 parts"),
        ({"sampler": CRS(values="recorded")}, "crs has values 'recorded', which a replay alone can fill: give replay="),
        ({"seed": -1}, "seed is -1 and first 0; they are whole numbers from 0"),
        ({"seed": 2**64}, "they are whole numbers from 0, the seed of at most 64 bits"),
        ({"first": -2}, "seed is 8200 and first -2"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_sampled_is_one_sentence(how: dict, sentence: str) -> None:
    how = {"sampler": QUICK, "n": 2, **how}
    with pytest.raises(LimpetError, match=sentence) as caught:
        limpet.sample(CHAIN, **how)
    assert "\n" not in str(caught.value)


def test_strange_letters_in_a_prompt_are_one_sentence() -> None:
    with pytest.raises(LimpetError, match="it was given 'M'"):
        limpet.sample(WORDS, QUICK, n=1, prompt="Moon")


def test_a_large_budget_commits_everything() -> None:
    out = limpet.sample(WORDS, CRS(nfe=4, budget=1e9, spacing=0), n=2)
    assert (out.committed == 160).all()


def test_parameters_are_finite() -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(LimpetError, match="crs has budget"):
            CRS(budget=value)


# Prompts and fixed tokens


def test_each_sample_may_begin_with_its_own_prompt() -> None:
    """Of any length each; what is generated depends on the sample's number alone."""
    prompts = ["sand ", "re", "", "wind"]
    for own in (prompts, [WORDS.tokenizer.encode(prompt) for prompt in prompts]):
        out = limpet.sample(WORDS, QUICK, n=4, seed=5, prompt=own)
        assert out.prompt_lengths.tolist() == [5, 2, 0, 4]
        assert out.prompt_length == 0
        for i, (one, prompt) in enumerate(zip(out, prompts, strict=True)):
            alone = limpet.sample(WORDS, QUICK, n=1, seed=5, first=i, prompt=prompt)
            assert alone[0] == one
            assert (one.prompt_length, one.prompt) == (len(prompt), prompt)
            assert one.text.startswith(prompt)
    with pytest.raises(LimpetError, match=r"prompt has shape \(3,\); it takes \(P,\) for all .* or 2 texts"):
        limpet.sample(WORDS, QUICK, n=2, prompt=["a", "b", "c"])
    with pytest.raises(LimpetError, match="prompt 2 of 2 has 161 tokens, the sequence 160"):
        limpet.sample(WORDS, QUICK, n=2, prompt=["a", "b" * 161])


def test_one_prompt_of_ids_is_for_all_samples_in_whatever_form() -> None:
    ids = WORDS.tokenizer.encode("sand")  # as many as there are samples
    wanted = limpet.sample(WORDS, QUICK, n=4, prompt="sand").tokens
    for prompt in (ids, tuple(ids), torch.tensor(ids), torch.tensor(ids).numpy(), list(torch.tensor(ids))):
        assert torch.equal(limpet.sample(WORDS, QUICK, n=4, prompt=prompt).tokens, wanted)
    for own in ([ids] * 4, torch.tensor([ids] * 4), torch.tensor([ids] * 4).numpy(), [torch.tensor(ids)] * 4):
        assert torch.equal(limpet.sample(WORDS, QUICK, n=4, prompt=own).tokens, wanted)
    assert torch.equal(limpet.sample(WORDS, QUICK, n=4, prompt=[]).tokens, limpet.sample(WORDS, QUICK, n=4).tokens)


def test_words_are_fixed_by_the_tokenizer() -> None:
    by_word = limpet.sample(WORDS, QUICK, n=2, fixed={5: "sand", 20: 3, 30: [19, 5]})
    spelled = {5 + i: token for i, token in enumerate(WORDS.tokenizer.encode("sand"))}
    by_id = limpet.sample(WORDS, QUICK, n=2, fixed={**spelled, 20: 3, 30: 19, 31: 5})
    assert torch.equal(by_word.tokens, by_id.tokens)
    for one in by_word:
        assert one.fixed == [[at, one.tokens[at]] for at in (5, 6, 7, 8, 20, 30, 31)]
    with pytest.raises(LimpetError, match="position 6 is fixed twice: move 'and'"):
        limpet.sample(WORDS, QUICK, n=1, fixed={5: "sand", 6: "and"})
    with pytest.raises(LimpetError, match="has no tokenizer: give what is fixed as token ids"):
        limpet.sample(CHAIN, QUICK, n=1, fixed={0: "a"})


def test_a_text_is_cut_into_parts_that_are_the_whole() -> None:
    """Also where a character lies in ids on both sides of the cut."""
    halves = {1: "caf", 2: "\ufffd", 3: "s"}

    def decode(ids: list[int]) -> str:
        return "".join(halves[i] for i in ids).replace("\ufffd\ufffd", "\u00e9")

    assert split_text(decode, [1, 2, 2, 3], 2) == ("caf", "\u00e9s")
    assert split_text(decode, [1, 2, 2, 3], 3) == ("caf\u00e9", "s")
    assert split_text(decode, [1, 2, 2, 3], 0) == ("", "caf\u00e9s")
    assert split_text(decode, [1, 3], 2) == ("cafs", "")


# Samples as a sequence


def test_samples_are_a_plain_sequence() -> None:
    out = limpet.sample(WORDS, "crs nfe=4", n=5, seed=3)
    assert [one.index for one in out] == [0, 1, 2, 3, 4]
    assert out[np.int64(1)] == out[1] == list(out)[1]
    assert out[-1] == out[4]
    assert [one.index for one in out[::2]] == [0, 2, 4]
    assert [one.index for one in out[::-1]] == [4, 3, 2, 1, 0]
    assert out[::2].tokens.tolist() == out.tokens[[0, 2, 4]].tolist()
    assert len(out[3:3]) == 0
    assert out[1] in out
    assert out.index(out[2]) == 2
    assert out[1:3] == limpet.sample(WORDS, "crs nfe=4", n=2, seed=3, first=1)
    for which in (5, -6):
        with pytest.raises(IndexError, match="there are 5 samples"):
            _ = out[which]
    with pytest.raises(TypeError):
        _ = out["first"]


def test_a_file_of_every_second_sample_is_read_back(tmp_path) -> None:
    out = limpet.sample(WORDS, "crs nfe=4", n=5, prompt="sand ")[::2]
    out.save(tmp_path / "some.jsonl")
    assert limpet.Samples.load(tmp_path / "some.jsonl") == out


def test_a_sampler_may_be_a_text() -> None:
    wanted = limpet.sample(WORDS, CRS(nfe=6, budget=0.25), n=2)
    assert limpet.sample(WORDS, "crs nfe=6 budget=.25", n=2) == wanted
    with pytest.raises(LimpetError, match='a text such as "crs nfe=16", not 16'):
        limpet.sample(WORDS, 16)
    with pytest.raises(LimpetError, match="there is no sampler 'nativ'"):
        limpet.sample(WORDS, "nativ")


# The loop


def test_steps_yield_every_call_and_end_with_the_sample() -> None:
    sampler = CRS(nfe=6)
    found = list(limpet.steps(WORDS, sampler, n=2, seed=4, prompt="sand "))
    wanted = limpet.sample(WORDS, sampler, n=2, seed=4, prompt="sand ")
    assert [step.call for step in found] == [0, 1, 2, 3, 4, 5]
    assert [step.t for step in found] == list(sampler.times)
    assert torch.equal(found[-1].tokens, wanted.tokens)
    assert [found[-1].text(i) for i in range(2)] == wanted.texts
    assert torch.equal(found[-1].committed.sum(-1), wanted.committed)
    for step in found:
        assert (step.visible <= step.committed).all()
        assert step.deficit[:, 5:].isfinite().all()  # every prediction is inspected
        assert (step.model_input[:, :5] == wanted.fixed[:, :5]).all()
    sparse = list(limpet.steps(WORDS, sampler, n=2, seed=4, prompt="sand ", trace=False))
    assert [torch.equal(a.model_input, b.model_input) for a, b in zip(found, sparse, strict=True)] == [True] * 6
    assert torch.equal(sparse[-1].tokens, wanted.tokens)
    assert not sparse[0].deficit.isfinite().any()


def test_a_rollout_goes_on_from_where_another_stopped() -> None:
    inputs = Inputs(torch.full((2, 160), -1), CounterRNG(5, torch.arange(2)))
    sampler = CRS(nfe=8)
    whole = list(rollout(WORDS, sampler, inputs))
    first = list(rollout(WORDS, sampler, inputs, stop=3))
    rest = list(rollout(WORDS, sampler, inputs, start=first[-1].state))
    assert [step.call for step in first] == [0, 1, 2]
    assert torch.equal(rest[-1].tokens, whole[-1].tokens)


@dataclass(frozen=True)
class Miscounting(Native):
    """Says that two calls were made after each."""

    def step(self, ctx: Context, state: State) -> tuple[State, StepInfo]:
        after, info = super().step(ctx, state)
        return after._replace(call=state.call + 2), info


def test_a_sampler_that_miscounts_is_one_sentence() -> None:
    with pytest.raises(LimpetError, match="returned a state of 2 calls after call 1: count them"):
        limpet.sample(CHAIN, Miscounting(nfe=4), n=1)


def test_public_names_are_those_of_the_stub() -> None:
    """`__init__.pyi` says to type checkers what the table of `__init__.py` says to Python."""
    written = ast.parse(Path(limpet.__file__).with_suffix(".pyi").read_text()).body
    imported = {one.name: line.module for line in written if isinstance(line, ast.ImportFrom) for one in line.names}
    assert imported == limpet._MODULE_OF
    for name in limpet.__all__:
        assert getattr(limpet, name) is not None
