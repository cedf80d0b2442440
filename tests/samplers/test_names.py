"""Samplers by name: texts of a command line, dictionaries, files, copies."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import limpet
from limpet import CRS, LimpetError, Mend, Native, Sampler, registry, samplers

NATIVE_PARAMETERS = {
    "nfe": st.integers(2, 2000),
    "warmup": st.floats(0, 1),
    "temperature": st.floats(0.01, 9),
    "top_p": st.floats(0.01, 1),
    "late_top_p": st.none() | st.floats(0.01, 1),
    "top_k": st.none() | st.integers(1, 99),
    "min_p": st.floats(0, 1),
    "final_step": st.sampled_from(["argmax", "sample"]),
}
CRS_PARAMETERS = {
    "horizon": st.none() | st.integers(1, 99),
    "budget": st.floats(0, 9),
    "write": st.sampled_from(["input", "output", "both"]),
}


@given(
    kind=st.sampled_from([Native, CRS, Mend]),
    native=st.fixed_dictionaries(NATIVE_PARAMETERS),
    crs=st.fixed_dictionaries(CRS_PARAMETERS),
)
def test_dictionaries_and_copies(kind: type[Sampler], native: dict[str, Any], crs: dict[str, Any]) -> None:
    values = native | (crs if kind is not Native else {})
    sampler = kind(**values)
    written = sampler.to_dict()
    assert list(written) == ["sampler", *(field.name for field in fields(kind) if field.name != "refresh")]  # 1
    assert written["sampler"] == sampler.name == kind.__name__.lower()
    for again in (
        samplers.from_dict(written),
        samplers.from_dict(json.loads(json.dumps(written))),
        samplers.from_dict({"sampler": sampler.name, **values}),
        pickle.loads(pickle.dumps(sampler)),
        copy.deepcopy(sampler),
        sampler.replace(),
    ):
        assert type(again) is kind
        assert again == sampler
        assert hash(again) == hash(sampler)


@pytest.mark.parametrize(
    ("text", "caption", "sampler"),
    [
        ("native", "native", Native()),
        ("native final_step=argmax", "native final_step=argmax", Native(final_step="argmax")),
        ("crs budget=.25 horizon=none", "crs budget=0.25", CRS(budget=0.25)),
        ("crs horizon=3 late-top-p=.9", "crs late_top_p=0.9 horizon=3", CRS(horizon=3, late_top_p=0.9)),
        ("small: crs nfe=8", "small", CRS(nfe=8)),
        ("top-p .9: native top_p=0.9 nfe=16", "top-p .9", Native(top_p=0.9, nfe=16)),
        ("  crs   count=2 ", "crs count=2", CRS(count=2)),
    ],
)
def test_a_sampler_is_read_from_text(text: str, caption: str, sampler: Sampler) -> None:
    assert samplers.parse(text) == (caption, sampler)
    assert samplers.as_sampler(text) == samplers.as_sampler(sampler) == sampler


def test_common_parameters_do_not_replace_those_of_the_text() -> None:
    """A sampler that does not have one ignores it."""
    common = {"nfe": 16, "horizon": 2, "budget": None}
    assert samplers.parse("native", **common)[1] == Native(nfe=16)
    assert samplers.parse("crs nfe=8", **common)[1] == CRS(nfe=8, horizon=2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("psy", "there is no sampler 'psy', did you mean psi? there are native, crs"),
        ("", "there is no sampler ''"),
        ("crs 16", "sampler 'crs 16' has '16'; after the sampler it takes parameters such as nfe=16"),
        ("crs buget=.25", "crs has no parameter 'buget'; did you mean budget?"),
        ("native horizon=2", "native has no parameter 'horizon'"),
        ("crs nfe=many", "crs has nfe 'many'; it takes a whole number from 2"),
        ("crs nfe=none", "crs has nfe 'none'; it takes a whole number from 2"),
        ("crs horizon=0", "crs has horizon 0; it takes None or a whole number from 1"),
        ("crs write=nowhere", "crs has write 'nowhere'; it takes one of input, output, both"),
        ("./nowhere.py:Mine", "./nowhere.py cannot be read"),
    ],
)
def test_a_wrong_text_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(LimpetError) as caught:
        samplers.parse(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_dictionary_is_one_sentence() -> None:
    for values, sentence in (
        ({"nfe": 8, "warmup": 0.5}, "a sampler needs its name, as sampler; this has nfe, warmup"),
        ({}, "this has nothing"),
        ({"sampler": "policy"}, "there is no sampler 'policy'"),
        ({"sampler": "crs", "horizn": 1}, "crs has no parameter 'horizn'; did you mean horizon?"),
        ({"sampler": "crs", "momentum": 1}, "crs has no parameter 'momentum'; it takes nfe, refresh, warmup"),
        ({"sampler": "crs", 3: 1}, "crs has no parameter 3; it takes"),
    ):
        with pytest.raises(LimpetError) as caught:
            samplers.from_dict(values)
        assert sentence in str(caught.value)
    with pytest.raises(LimpetError, match="native has no parameter 'horizon'"):
        Native().replace(horizon=3)


MINE = """
from dataclasses import dataclass
import limpet

@dataclass(frozen=True)
class Mine(limpet.Native):
    \"\"\"Native with two more parameters.\"\"\"

    loud: bool = limpet.param(False, "Loud.")
    pitch: str = limpet.param("low", "Pitch.")

def helper():
    pass
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def test_a_sampler_in_a_file(mine: Path) -> None:
    caption, sampler = samplers.parse(f"{mine}:Mine nfe=4 loud=true pitch=high")
    assert (sampler.nfe, sampler.loud, sampler.pitch) == (4, True, "high")
    assert sampler.name == f"{mine}:Mine"
    assert caption == "mine.py:Mine loud=True pitch=high"
    for again in (
        samplers.from_dict(sampler.to_dict()),
        pickle.loads(pickle.dumps(sampler)),
        copy.deepcopy(sampler),
        sampler.replace(),
    ):
        assert type(again) is type(sampler)
        assert again == sampler
    model = limpet.load("exact:words")
    out = limpet.sample(model, sampler, n=2)
    assert torch.equal(out.tokens, limpet.sample(model, Native(nfe=4), n=2).tokens)
    assert out[0].sampler == sampler.to_dict()
    with pytest.raises(LimpetError, match=r"mine\.py:Mine has loud 'perhaps'; it takes true or false"):
        samplers.parse(f"{mine}:Mine loud=perhaps")
    with pytest.raises(LimpetError, match="has no 'Yours'"):
        samplers.find(f"{mine}:Yours")
    with pytest.raises(LimpetError, match=r"mine\.py:helper is no sampler: it takes a frozen dataclass"):
        samplers.find(f"{mine}:helper")
    (mine.parent / "broken.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(LimpetError, match=r"broken\.py cannot be run \(ModuleNotFoundError: "):
        samplers.find(f"{mine.parent}/broken.py:Mine")


def test_a_file_with_other_content_is_another_sampler(mine: Path) -> None:
    first = samplers.find(f"{mine}:Mine")
    assert samplers.find(f"{mine}:Mine") is first
    before = registry.code_digest(first)
    assert before is not None
    mine.write_text(MINE.replace("False", "True"))
    second = samplers.find(f"{mine}:Mine")
    assert (first().loud, second().loud) == (False, True)
    assert registry.code_digest(second) != before
    assert registry.code_digest(CRS) is registry.code_digest(Native) is None
