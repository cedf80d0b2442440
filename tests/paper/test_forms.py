"""The study of variants of Mend: its cells, and what the parameters of `MendVariant` do on an exact source."""

import pytest
import torch

from limpet import load, sample
from limpet.diffusion.rng import CounterRNG
from limpet.generation import Inputs, rollout
from limpet.paper.studies import forms, preset, study
from limpet.samplers import Mend

WORDS = load("exact:words")


def steps(sampler, n=4):
    return list(rollout(WORDS, sampler, Inputs(torch.full((n, WORDS.length), -1), CounterRNG(1, torch.arange(n)))))


def masks(sampler, name="revised"):
    """(calls, samples, length) bool."""
    return torch.stack([step.masks[name] for step in steps(sampler)])


@pytest.mark.parametrize("size", ["mini-gpu", "smoke"])
def test_every_variant_runs_at_its_numbers_of_calls(size):
    size = preset(size)
    cells = {cell.name: cell for cell in study("forms", size).sample_cells}
    every = [text for texts in forms.FORMS.values() for text in texts]
    assert len(every) == len(set(every)) >= 30
    for role in size.captions:
        for nfe in forms.calls(size):
            for changed, texts in {**forms.CURVES, **forms.FORMS}.items():
                runs = nfe in size.nfes or changed in (*forms.CURVES, *forms.AT_MORE_CALLS)
                assert {f"{role}/{nfe}/{text}" in cells for text in texts} == {runs}
    assert all(cell.sampler.nfe == int(name.split("/")[1]) for name, cell in cells.items())
    here = [cell.sampler for name, cell in cells.items() if name.startswith(f"{role}/{size.nfes[0]}/")]
    assert len(set(here)) == len(here)  # no two are the same
    assert forms.calls(preset("mini-gpu")) == [4, 8, 16, 32, 64, 128]


def test_a_variant_that_changes_nothing_is_mend():
    assert (sample(WORDS, forms.MendVariant(nfe=12), n=8).tokens == sample(WORDS, Mend(nfe=12), n=8).tokens).all()
    assert masks(Mend(nfe=12)).any()


def test_tokens_are_revised_only_where_the_gain_is_enough():
    revised = 0
    for step in steps(forms.MendVariant(nfe=12, min_gain=2.0)):
        mask = step.masks["revised"]
        assert not mask.any() or (step.outcome.gain[mask] > 2).all()
        revised += int(mask.sum())
    assert 0 < revised < int(masks(Mend(nfe=12)).sum())


@pytest.mark.parametrize("rest", [1, 3])
def test_a_token_rests_once_it_is_committed_or_revised(rest):
    sampler = forms.MendVariant(nfe=16, rest=rest, spacing=0)
    revised, chosen = masks(sampler), masks(sampler, "chosen")
    assert revised.any()
    for call, row, position in revised.nonzero().tolist():
        assert not (revised | chosen)[max(0, call - rest) : call, row, position].any()


def test_tokens_are_revised_only_in_a_part_of_the_trajectory():
    late, early = masks(forms.MendVariant(nfe=16, revise_from=0.5)), masks(forms.MendVariant(nfe=16, revise_until=0.75))
    assert late[8:].any()
    assert not late[:8].any()
    assert early[:13].any()
    assert not early[13:].any()
