"""The hidden-coordinate audit against the denoiser called directly on inputs written out by hand, and its counts."""

from __future__ import annotations

import pytest
import torch

from audit_cases import audited, long_source, smoke, tiny_network
from limpet.models.loading import load
from limpet.paper.studies import hidden
from limpet.paper.studies.hidden import Event, Settings, events, observe
from limpet.paper.studies.trajectories import opened, spread, states
from limpet.samplers import CRS, Native
from limpet.samplers.crs import NEVER, OPEN


def test_spread_is_even_and_holds_both_ends():
    assert spread(3, 8) == [0, 1, 2]
    assert spread(8, 8) == list(range(8))
    assert spread(41, 7) == [0, 7, 13, 20, 27, 33, 40]
    assert spread(0, 8) == []


def test_events_are_spaced_along_the_order_of_selection():
    committed_at = torch.tensor([[5, 3, OPEN, 3, 9], [OPEN, NEVER, NEVER, 7, OPEN]])
    labels = torch.tensor([[10, 11, 0, 13, 14], [0, 0, 0, 23, 0]])
    assert events(committed_at, labels, 3) == [
        Event(0, 1, 3, 11), Event(0, 0, 5, 10), Event(0, 4, 9, 14), Event(1, 3, 7, 23),
    ]  # fmt: skip
    assert [event.position for event in events(committed_at, labels, 8)] == [1, 3, 0, 4, 3]


@pytest.mark.parametrize("model", [tiny_network(), load("exact:words")], ids=["network", "exact"])
def test_the_three_views_are_the_denoiser_called_directly(model):
    crs, settings = CRS(nfe=12, budget=4.0), Settings(paths=3, nfe=12)
    path = opened(model, settings, 4, trace=True)
    along = list(states(crs, path))
    native = list(states(Native(nfe=12), opened(model, settings, 4)))
    assert [state.call for state in along] == list(range(12))
    differs = 0
    for event in events(along[-1].memory.committed_at, along[-1].memory.labels, 5):
        for offset in (1, 3):
            call = event.call + offset
            if call > 11:
                continue
            (seen,) = observe(crs, path, along[call], native[call], [event])
            state = along[call]
            overwritten = [
                int(state.memory.labels[event.path, i])
                if int(state.memory.committed_at[event.path, i]) < call
                else int(state.tokens[event.path, i])
                for i in range(state.tokens.shape[1])
            ]
            restored = list(overwritten)
            restored[event.position] = int(state.tokens[event.path, event.position])
            revisable = native[call].tokens[event.path].tolist()
            inputs = {"overwritten": overwritten, "restored": restored, "revisable": revisable}
            for view, tokens in inputs.items():
                probs = model.logits(torch.tensor([tokens]), crs.times[call])[0, event.position].double().softmax(-1)
                assert seen[view] == pytest.approx(float(probs[event.label]), abs=2e-6), view
            assert seen["changed"] == (restored != overwritten)
            differs += abs(seen["restored"] - seen["overwritten"]) > 1e-4
    # A distribution that leaves its own position out cannot tell whether it was overwritten; a network can.
    assert (differs > 0) == (model.name == "tiny-distilled")


def test_the_mutable_state_goes_on_under_a_label():
    """Restoring needs the state that the sampler itself no longer draws: it moves, and by the revisable step's distribution."""
    model = load("exact:words")
    along = list(states(CRS(nfe=32), opened(model, Settings(paths=4), 4, trace=True)))
    first = along[-1].memory.committed_at == 10
    assert first.any()
    assert (along[-1].tokens[first] != along[11].tokens[first]).any()


def test_conditional_rows_are_over_the_changed_events():
    result = smoke(hidden, load("exact:words"))
    for offset in (1, 2, 4):
        (share,) = result.of("changed", offset=offset)
        (kept,) = result.of("restored, where it changed", offset=offset)
        per_shard = share.events / 2
        assert kept.events == pytest.approx(sum(share.estimate.values / 100 * per_shard))


def test_paper_preset_counts():
    """Eight events on each of 32 paths. The last selection is in the last call that draws, so that its event is gone
    from offset two on: 256, 224, 224, and at offset eight those whose seventh event comes no later than call 55."""
    preset = hidden.PRESETS["paper"]
    settings = preset.settings
    assert (len(preset.shards), settings.paths, settings.events, settings.offsets) == (4, 8, 8, (1, 2, 4, 8))
    result = audited(hidden, [long_source()], settings, preset.shards)
    counts = [result.of("restored", offset=offset)[0].events for offset in settings.offsets]
    assert counts[:3] == [256, 224, 224]
    assert 192 <= counts[3] <= 224
    assert sum(counts) > 900
