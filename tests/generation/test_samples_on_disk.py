"""Samples are saved as JSON lines and read back; a file that holds no run of samples is refused in one sentence."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import pytest
import torch

import limpet
from limpet import CRS, LimpetError, Native, Samples
from limpet.models.exact import Markov

WORDS = limpet.load("exact:words")


@pytest.fixture(scope="module")
def samples() -> Samples:
    return limpet.sample(WORDS, CRS(nfe=4, budget=0.25), n=5, seed=3, first=10, prompt="sand ")


def test_samples_come_back(samples, tmp_path):
    samples.save(tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [json.loads(json.dumps(one.to_dict())) for one in samples]
    back = Samples.load(tmp_path / "a.jsonl")
    assert (back, back.texts, back.sampler) == (samples, samples.texts, samples.sampler)


def test_a_text_may_hold_other_line_ends(samples, tmp_path):
    strange = replace(samples, _decode=lambda ids: "one\u2028two\x85\n")
    strange.save(tmp_path / "a.jsonl")
    assert Samples.load(tmp_path / "a.jsonl") == strange


def test_samples_without_texts_come_back(tmp_path):
    chain = limpet.sample(Markov(torch.ones(3), torch.ones(3, 3), 6), "native nfe=2", n=2)
    chain.save(tmp_path / "a.jsonl")
    assert Samples.load(tmp_path / "a.jsonl") == chain


def test_a_slice_is_what_would_have_been_sampled_there(samples):
    again = limpet.sample(WORDS, CRS(nfe=4, budget=0.25), n=2, seed=3, first=11, prompt="sand ")
    part = samples[1:3]
    assert (part.first, part.texts) == (11, again.texts)
    assert type(part.memory) is type(again.memory)
    assert all(torch.equal(a, b) for a, b in zip(part.memory, again.memory, strict=True))


def test_samples_are_equal_where_their_records_are(samples):
    assert samples == replace(samples, memory=())
    others = (samples[:4], replace(samples, seed=4), replace(samples, tokens=samples.tokens.flip(0)),
              replace(samples, sampler=CRS(nfe=4)), list(samples))  # fmt: skip
    assert all(samples != other for other in others)
    with pytest.raises(TypeError, match="unhashable"):
        hash(samples)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda rows: [], "it is empty"),
        (lambda rows: [rows[0], rows[1] | {"seed": 9}], "line 2 is of another run than line 1"),
        (lambda rows: [{"text": "a"}], "KeyError"),
        (lambda rows: [3], "TypeError"),
        (lambda rows: [rows[0] | {"tokens": [[1], 2]}], "does not hold the samples"),
        (lambda rows: [rows[0] | {"sampler": {"sampler": "./no.py:Mine"}}], "give sampler="),
        (
            lambda rows: [rows[0] | {"sampler": {"sampler": "gibbs", "predictor": "./no.py:Mine"}}],
            "give sampler=",
        ),
        (lambda rows: [rows[0] | {"sampler": {"sampler": "crs", "horizon": 0}}], "crs has horizon 0"),
    ],
)
def test_another_file_is_refused_and_no_code_of_it_runs(samples, tmp_path, spoil, sentence):
    (tmp_path / "no.py").write_text("raise SystemExit('it was run')")
    rows = spoil([one.to_dict() for one in samples])
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(LimpetError, match=re.escape(sentence)):
        Samples.load(tmp_path / "a.jsonl")


def test_a_sampler_of_your_own_is_passed_when_loading(tmp_path):
    @dataclass(frozen=True)
    class Own(Native):
        pass

    samples = limpet.sample(WORDS, Own(nfe=2), n=2)
    samples.save(tmp_path / "a.jsonl")
    assert Samples.load(tmp_path / "a.jsonl", Own(nfe=2)) == samples
    with pytest.raises(LimpetError, match="sampler"):
        Samples.load(tmp_path / "a.jsonl", Own(nfe=3))
