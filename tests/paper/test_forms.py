"""The study of Mend's forms: its arms are what they say, and its forms do what their parameters say, on exact sources."""

import pytest
import torch

from limpet import load, sample
from limpet.diffusion.rng import CounterRNG
from limpet.paper.studies import forms, preset, study
from limpet.samplers import Mend
from limpet.samplers.context import generate, open_context

WORDS = load("exact:words")


def walked(sampler, n=4):
    """Every state and what was marked, of some samples."""
    fixed = torch.full((n, WORDS.length), -1)
    return list(generate(sampler, open_context(WORDS, CounterRNG(1, torch.arange(n)), fixed)))


def mended(sampler):
    """(calls, samples, length) bool."""
    return torch.stack([info.marks["mended"] for _, info in walked(sampler) if info is not None])


@pytest.mark.parametrize("size", ["mini-gpu", "smoke"])
def test_every_form_stands_at_the_numbers_of_calls_that_it_should(size):
    size = preset(size)
    cells = {cell.name: cell for cell in study("forms", size).samples}
    every = [arm for arms in forms.FORMS.values() for arm in arms]
    assert len(every) == len(set(every)) >= 30
    for role in size.captions:
        for nfe in forms.calls(size):
            for what, arms in {**forms.CURVES, **forms.FORMS}.items():
                for arm in arms:
                    held = nfe in size.nfes or what in (*forms.CURVES, *forms.FAR)
                    assert (f"{role}/{nfe}/{arm}" in cells) == held
                    assert not held or cells[f"{role}/{nfe}/{arm}"].sampler.nfe == nfe
    assert len({cell.sampler for cell in cells.values() if cell.name.startswith(f"{role}/{size.nfes[0]}/")}) == len(
        every
    ) + sum(map(len, forms.CURVES.values()))  # no two are the same


def test_numbers_of_calls_go_beyond_a_presets_own():
    assert forms.calls(preset("mini-gpu")) == [4, 8, 16, 32, 64, 128]


def test_a_form_that_changes_nothing_is_mend():
    assert (sample(WORDS, forms.Form(nfe=12), n=8).tokens == sample(WORDS, Mend(nfe=12), n=8).tokens).all()
    assert mended(Mend(nfe=12)).any()


def test_labels_change_only_where_the_gain_is_enough():
    form = forms.Form(nfe=12, least=2.0)
    walk = walked(form)
    seen = 0
    for _, info in walk:
        changed = info.marks["mended"]
        assert (info.outcome.gain[changed] > 2).all() if changed.any() else True
        seen += int(changed.sum())
    assert 0 < seen < int(mended(Mend(nfe=12)).sum())


@pytest.mark.parametrize("rest", [1, 3])
def test_a_label_is_left_alone_once_it_is_stored_or_mended(rest):
    changed = mended(forms.Form(nfe=16, rest=rest, spacing=0))
    stored = torch.stack([info.marks["chosen"] for _, info in walked(forms.Form(nfe=16, rest=rest, spacing=0))])
    assert changed.any()
    for call, sample_, position in changed.nonzero().tolist():
        before = (changed | stored)[max(0, call - rest) : call, sample_, position]
        assert not before.any()


def test_labels_change_only_in_a_part_of_the_path():
    late, early = mended(forms.Form(nfe=16, first=0.5)), mended(forms.Form(nfe=16, last=0.75))
    assert late[8:].any()
    assert not late[:8].any()
    assert early[:13].any()
    assert not early[13:].any()
