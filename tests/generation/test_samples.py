"""From a model and a sampler to samples: what is resolved, what comes back, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

import limpet
from limpet import CRS, LimpetError, Native
from limpet.diffusion.rng import CounterRNG
from limpet.generation import cut
from limpet.models.exact import Markov
from limpet.models.exact_sources import source
from limpet.samplers import from_dict
from limpet.samplers.context import Context, State, open_context
from limpet.samplers.crs import NEVER, OPEN, Memory

WORDS = source("exact:words")
CHAIN = Markov(torch.ones(3), torch.ones(3, 3), 6)  # no tokenizer
QUICK = CRS(nfe=3)


def path_of(fixed: Tensor) -> Context:
    return open_context(WORDS, CounterRNG(0, torch.arange(len(fixed))), fixed)


@pytest.mark.parametrize(
    ("nfe", "warmup", "after", "count", "budget"),
    [(8, 2, 5, 205, 102.4), (16, 5, 10, 103, 51.2), (32, 10, 21, 49, 24.381), (64, 21, 42, 25, 12.190)],
)
def test_caps_and_budgets_at_length_1024(nfe: int, warmup: int, after: int, count: int, budget: float) -> None:
    sampler, ctx = CRS(nfe=nfe), path_of(torch.full((3, 1024), -1))
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
    most, _ = CRS(nfe=64, warmup=warmup).limits(path_of(torch.full((1, 1024), -1)))
    assert most.tolist() == [count]


def test_caps_and_budgets_are_of_what_is_generated() -> None:
    """Fifty of a hundred tokens given: the paper's prefix study has D = 25 and K = 2; each sample has its own."""
    fixed = torch.full((2, 100), -1)
    fixed[0, :50] = 1
    ctx = path_of(fixed)
    most, allowance = CRS(nfe=64).limits(ctx)
    assert most.tolist() == [2, 3]
    assert (allowance * 42).tolist() == pytest.approx([25, 50])
    assert ctx.generated.tolist() == ctx.free.sum(-1).tolist() == [50, 100]


@pytest.mark.parametrize("kind", [Native, CRS])
def test_the_top_p_of_each_call(kind: type[Native]) -> None:
    ctx = path_of(torch.full((1, 160), -1))

    def top_p(**params: float) -> list[float]:
        sampler = kind(nfe=8, **params)
        states = [State(call, ctx.noise()) for call in range(8)]
        return [sampler.transition(ctx, state, ctx.free, ctx.no_positions).support.top_p for state in states]

    assert top_p() == [1.0] * 8
    assert top_p(top_p=0.9) == [0.9] * 8
    assert top_p(late_top_p=0.8) == [1.0] * 2 + [0.8] * 6
    assert top_p(top_p=0.9, late_top_p=1.0) == [0.9] * 2 + [1.0] * 6


def test_the_noise_that_a_path_begins_with_is_uniform_and_holds_what_is_given() -> None:
    fixed = torch.full((50, 160), -1)
    fixed[:, 7] = 3
    noise = path_of(fixed).noise()
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
    rows = list(out.rows())
    assert [row["sample"] for row in rows] == [10, 11, 12]
    for i, row in enumerate(json.loads(json.dumps(rows))):
        assert row["text"] == out.texts[i]
        assert row["tokens"] == out.tokens[i].tolist()
        assert row["committed"] == out.committed[i]
        assert (row["seed"], row["model"], row["digest"], row["nfe"]) == (7, "exact:words", WORDS.digest, 5)
        again = limpet.sample(WORDS, from_dict(row["sampler"]), n=1, seed=row["seed"], first=row["sample"])
        assert again.tokens[0].tolist() == row["tokens"]


def test_defaults() -> None:
    """Without a sampler: CRS with 64 calls; eight samples under seed 8200; the model's own length."""
    assert torch.equal(limpet.sample(CHAIN).tokens, limpet.sample(CHAIN, CRS(), n=8, seed=8200, length=6).tokens)


def test_a_model_without_a_tokenizer() -> None:
    out = limpet.sample(CHAIN, QUICK, n=2)
    with pytest.raises(LimpetError, match=r"has no tokenizer, so its samples have no text; use \.tokens"):
        _ = out.texts
    assert [row["text"] for row in out.rows()] == [None, None]
    with pytest.raises(LimpetError, match="has no tokenizer: give the prefix as token ids"):
        limpet.sample(CHAIN, QUICK, n=1, prefix="abc")


def test_calls_and_head_rows_are_counted_over_batches() -> None:
    whole, parts = (limpet.sample(WORDS, CRS(nfe=6), n=5, batch_size=size) for size in (5, 2))
    assert whole.nfe == parts.nfe == 6
    assert whole.head_rows == parts.head_rows
    assert 0 < whole.head_rows < 1


def test_prefixes_as_text_as_ids_and_for_each_sample() -> None:
    ids = WORDS.tokenizer.encode("moon tide ")
    one, two, three = (
        limpet.sample(WORDS, QUICK, n=2, prefix=prefix) for prefix in ("moon tide ", ids, torch.tensor([ids, ids]))
    )
    assert all(text.startswith("moon tide ") for text in one.texts)
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.tokens, three.tokens)
    whole = list(range(6))
    assert limpet.sample(CHAIN, QUICK, n=1, prefix=[x % 3 for x in whole]).tokens[0].tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.equal(limpet.sample(CHAIN, QUICK, n=2, prefix=[]).tokens, limpet.sample(CHAIN, QUICK, n=2).tokens)


def test_fixed_positions_as_a_mapping_a_row_or_a_table() -> None:
    row = torch.tensor([-1, 2, -1, -1, 0, -1])
    outs = [limpet.sample(CHAIN, QUICK, n=2, fixed=fixed) for fixed in ({1: 2, 4: 0}, row, row.expand(2, -1))]
    assert outs[0].tokens[:, [1, 4]].tolist() == [[2, 0], [2, 0]]
    assert all(torch.equal(out.tokens, outs[0].tokens) for out in outs)
    table = torch.tensor([[-1] * 6, [1] * 6])
    assert limpet.sample(CHAIN, QUICK, n=2, fixed=table).tokens[1].tolist() == [1] * 6


def test_a_watcher_is_told_after_every_call() -> None:
    told = []
    limpet.sample(
        CHAIN,
        CRS(nfe=4),
        n=5,
        batch_size=2,
        progress=lambda state, info, done, total: told.append((info.call, done, total)),
    )
    assert [call for call, _, _ in told] == [0, 1, 2, 3] * 3
    assert [total for _, _, total in told] == [20] * 12
    done = [done for _, done, _ in told]
    assert done == sorted(set(done))
    assert done[-1] == 20


def test_a_bar_changes_nothing() -> None:
    assert torch.equal(limpet.sample(CHAIN, QUICK, n=2, progress=True).tokens, limpet.sample(CHAIN, QUICK, n=2).tokens)


MEMORY = Memory(torch.zeros(2, 6, dtype=torch.long), torch.full((2, 6), OPEN))


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"n": 0}, "n is 0; ask for at least one"),
        ({"n": -3}, "n is -3; ask for at least one"),
        ({"length": -1}, "length is -1; ask for at least one"),
        ({"length": 0}, "length is 0; ask for at least one"),
        ({"length": 7}, "knows sequences of 6 tokens; it was given 7"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"prefix": [0] * 7}, "the prefix has 7 tokens, the sequence 6: shorten it or raise length"),
        ({"prefix": [0, 3]}, r"token 3 is outside the vocabulary of 3 \(0 to 2\)"),
        ({"prefix": [0, -1]}, "token -1 is outside the vocabulary of 3"),
        ({"prefix": torch.zeros(3, 2, dtype=torch.long)}, r"prefix has shape \(3, 2\); it takes \(P,\) .* or \(2, P\)"),
        ({"prefix": torch.zeros(2, 1, 1, dtype=torch.long)}, r"prefix has shape \(2, 1, 1\)"),
        ({"prefix": 3}, r"prefix has shape \(\)"),
        ({"fixed": {6: 0}}, "fixed position 6 is outside a sequence of 6"),
        ({"fixed": {-1: 0}}, "fixed position -1 is outside a sequence of 6"),
        ({"fixed": {0: 3}}, "token 3 is outside the vocabulary of 3"),
        ({"fixed": {0: -7}}, "token -7 is outside the vocabulary of 3"),
        ({"fixed": torch.zeros(5, dtype=torch.long)}, r"fixed has shape \(5,\); it takes \(6,\) or \(2, 6\)"),
        ({"replay": MEMORY, "n": 3}, r"replayed samples have shape \(2, 6\), these \(3, 6\)"),
        ({"replay": MEMORY, "sampler": Native(nfe=3)}, "native replays nothing: leave replay out"),
        ({"replay": (), "sampler": Native(nfe=3)}, "native replays nothing: leave replay out"),
        ({"replay": ()}, "crs replays labels and the calls that committed them; this memory has 0 parts"),
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


def test_strange_letters_in_a_prefix_are_one_sentence() -> None:
    with pytest.raises(LimpetError, match="it was given 'M'"):
        limpet.sample(WORDS, QUICK, n=1, prefix="Moon")


def test_infinite_budgets_are_fine() -> None:
    out = limpet.sample(WORDS, CRS(nfe=4, budget=math.inf, spacing=0), n=2)
    assert (out.committed == 160).all()


# Texts that are given


def test_each_sample_may_begin_with_its_own_prefix() -> None:
    """Of any length each; what is generated has the randomness of the sample's number, whoever stands beside it."""
    prompts = ["sand ", "re", "", "wind"]
    for given in (prompts, [WORDS.tokenizer.encode(prompt) for prompt in prompts]):
        out = limpet.sample(WORDS, QUICK, n=4, seed=5, prefix=given)
        assert out.prefixes.tolist() == [5, 2, 0, 4]
        assert out.prefix == 0
        for i, (row, prompt) in enumerate(zip(out.rows(), prompts, strict=True)):
            alone = limpet.sample(WORDS, QUICK, n=1, seed=5, first=i, prefix=prompt)
            assert next(alone.rows()) == row
            assert (row["prefix"], row["prefix_text"]) == (len(prompt), prompt)
            assert row["text"].startswith(prompt)
    with pytest.raises(LimpetError, match=r"prefix has shape \(3,\); it takes \(P,\) for all .* or 2 texts"):
        limpet.sample(WORDS, QUICK, n=2, prefix=["a", "b", "c"])
    with pytest.raises(LimpetError, match="prefix 2 of 2 has 161 tokens, the sequence 160"):
        limpet.sample(WORDS, QUICK, n=2, prefix=["a", "b" * 161])


def test_one_prefix_of_ids_is_for_all_samples_in_whatever_form() -> None:
    ids = WORDS.tokenizer.encode("sand")  # as many as there are samples
    wanted = limpet.sample(WORDS, QUICK, n=4, prefix="sand").tokens
    for prefix in (ids, tuple(ids), torch.tensor(ids), torch.tensor(ids).numpy(), list(torch.tensor(ids))):
        assert torch.equal(limpet.sample(WORDS, QUICK, n=4, prefix=prefix).tokens, wanted)
    for own in ([ids] * 4, torch.tensor([ids] * 4), torch.tensor([ids] * 4).numpy(), [torch.tensor(ids)] * 4):
        assert torch.equal(limpet.sample(WORDS, QUICK, n=4, prefix=own).tokens, wanted)
    assert torch.equal(limpet.sample(WORDS, QUICK, n=4, prefix=[]).tokens, limpet.sample(WORDS, QUICK, n=4).tokens)


def test_words_are_fixed_by_the_tokenizer() -> None:
    by_word = limpet.sample(WORDS, QUICK, n=2, fixed={5: "sand", 20: 3, 30: [19, 5]})
    spelled = {5 + i: token for i, token in enumerate(WORDS.tokenizer.encode("sand"))}
    by_id = limpet.sample(WORDS, QUICK, n=2, fixed={**spelled, 20: 3, 30: 19, 31: 5})
    assert torch.equal(by_word.tokens, by_id.tokens)
    assert [row["fixed"] for row in by_word.rows()] == [[[at, int(row[at])] for at in (5, 6, 7, 8, 20, 30, 31)]
                                                       for row in by_word.tokens]  # fmt: skip
    with pytest.raises(LimpetError, match="position 6 is given twice: move 'and'"):
        limpet.sample(WORDS, QUICK, n=1, fixed={5: "sand", 6: "and"})
    with pytest.raises(LimpetError, match="has no tokenizer: give what is fixed as token ids"):
        limpet.sample(CHAIN, QUICK, n=1, fixed={0: "a"})


def test_a_text_is_cut_into_parts_that_are_the_whole() -> None:
    """Also where a character lies in ids on both sides of the cut."""
    halves = {1: "caf", 2: "\ufffd", 3: "s"}

    def decode(ids: list[int]) -> str:
        return "".join(halves[i] for i in ids).replace("\ufffd\ufffd", "\u00e9")

    assert cut(decode, [1, 2, 2, 3], 2) == ("caf", "\u00e9s")
    assert cut(decode, [1, 2, 2, 3], 3) == ("caf\u00e9", "s")
    assert cut(decode, [1, 2, 2, 3], 0) == ("", "caf\u00e9s")
    assert cut(decode, [1, 3], 2) == ("cafs", "")
