"""The hidden-coordinate audit against the denoiser called directly on inputs written out by hand, and its counts."""

from __future__ import annotations

import pytest
import torch

from audit_cases import long_source, run_audit, run_smoke, tiny_network
from limpet.generation import rollout
from limpet.models.loading import load
from limpet.paper.studies import hidden
from limpet.paper.studies.hidden import CommitEvent, HiddenSettings, beliefs_at, commit_events
from limpet.paper.studies.trajectories import audit_inputs, evenly_spaced
from limpet.samplers import CRS, Native


def trajectories(model, crs, n, seed):
    """The inputs, and every step of the CRS trajectory and of its paired native one."""
    settings = HiddenSettings(n=n, nfe=crs.nfe)
    inputs, plain = (audit_inputs(model, settings, seed, trace=trace) for trace in (True, False))
    native = Native(nfe=crs.nfe, final_step="argmax")
    return inputs, list(rollout(model, crs, inputs)), list(rollout(model, native, plain))


def test_evenly_spaced_numbers_hold_both_ends():
    assert evenly_spaced(3, 8) == [0, 1, 2]
    assert evenly_spaced(8, 8) == list(range(8))
    assert evenly_spaced(41, 7) == [0, 7, 13, 20, 27, 33, 40]
    assert evenly_spaced(0, 8) == []


def test_events_are_spaced_along_the_order_of_selection():
    none = 2**31 - 1
    committed_at = torch.tensor([[5, 3, none, 3, 9], [none, none - 1, none, 7, none]])
    values = torch.tensor([[10, 11, 0, 13, 14], [0, 0, 0, 23, 0]])
    assert commit_events(committed_at, values, 12, 3) == [
        CommitEvent(0, 1, 3, 11), CommitEvent(0, 0, 5, 10), CommitEvent(0, 4, 9, 14), CommitEvent(1, 3, 7, 23),
    ]  # fmt: skip
    assert [event.position for event in commit_events(committed_at, values, 12, 8)] == [1, 3, 0, 4, 3]


@pytest.mark.parametrize("model", [tiny_network(), load("exact:words")], ids=["network", "exact"])
def test_the_three_views_are_the_denoiser_called_directly(model):
    crs = CRS(nfe=12, budget=4.0)
    inputs, committing, revisable = trajectories(model, crs, 3, 4)
    values, committed_at = committing[-1].state.memory
    differs = 0
    for event in commit_events(committed_at, values, 12, 5):
        for call in (event.call + offset for offset in (1, 3) if event.call + offset < 12):
            (belief,) = beliefs_at(inputs, committing, revisable, call, [event])
            state, (sample, place) = committing[call - 1].state, (event.sample, event.position)
            overwritten = [
                int(value if at < call else token)
                for value, at, token in zip(*(part[sample] for part in (*state.memory, state.tokens)), strict=True)
            ]
            restored = list(overwritten)
            restored[place] = int(state.tokens[sample, place])
            views = {
                "overwritten": overwritten,
                "restored": restored,
                "revisable": revisable[call - 1].tokens[sample].tolist(),
            }
            for view, tokens in views.items():
                probs = model.logits(torch.tensor([tokens]), crs.times[call])[0, place].double().softmax(-1)
                assert belief[view] == pytest.approx(float(probs[event.token]), abs=2e-6), view
            assert belief["changed"] == (restored != overwritten)
            differs += abs(belief["restored"] - belief["overwritten"]) > 1e-4
    # A distribution that leaves its own position out cannot tell whether it was overwritten; a network can.
    assert (differs > 0) == (model.name == "tiny-distilled")


def test_the_noisy_state_goes_on_under_a_committed_token():
    """Restoring needs the state that the sampler itself no longer draws."""
    _, steps, _ = trajectories(load("exact:words"), CRS(nfe=32), 4, 4)
    first = steps[-1].state.memory.committed_at == 10
    assert first.any()
    assert (steps[30].tokens[first] != steps[10].tokens[first]).any()


def test_conditional_rows_are_over_the_changed_events():
    result = run_smoke(hidden, load("exact:words"))
    for offset in (1, 2, 4):
        (share,) = result.find("changed", offset=offset)
        (kept,) = result.find("restored, where it changed", offset=offset)
        per_seed = share.events / 2
        assert kept.events == pytest.approx(sum(share.estimate.values / 100 * per_seed))


def test_paper_preset_counts():
    """Eight events on each of 32 trajectories. The last selection is in the last call that draws, so its event is gone
    from offset two on; at offset eight the seventh events that come after call 55 are gone too."""
    preset = hidden.PRESETS["paper"]
    settings = preset.settings
    assert (len(preset.seeds), settings.n, settings.events, settings.offsets) == (4, 8, 8, (1, 2, 4, 8))
    result = run_audit(hidden, [long_source()], settings, preset.seeds)
    counts = [result.find("restored", offset=offset)[0].events for offset in settings.offsets]
    assert counts[:3] == [256, 224, 224]
    assert 192 <= counts[3] <= 224
    assert sum(counts) > 900
