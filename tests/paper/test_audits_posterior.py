"""Audits read predictions as samplers do, also of models that predict the posterior and are given clean tokens."""

from __future__ import annotations

import pytest
import torch

from limpet.generation import rollout
from limpet.models import Denoiser, ModelInput
from limpet.models.loading import load
from limpet.paper.studies.hidden import HiddenSettings, beliefs_at, commit_events
from limpet.paper.studies.temperature import TemperatureSettings, with_and_without
from limpet.paper.studies.trajectories import audit_inputs, forward_states, predictions
from limpet.samplers import CRS, Native

WORDS = load("exact:words")


class TimelessPosterior(Denoiser):
    """The exact posterior of a source, from a model that infers the signal level from how many tokens are clean."""

    name, digest, precision = "timeless", "timeless", "float64"
    vocab_size, length, predicts, clean_tokens = WORDS.vocab_size, WORDS.length, "posterior", "committed"

    def __init__(self, is_self_conditioned: bool = False) -> None:
        self.self_conditioned = is_self_conditioned

    def evidence_signal(self, signal, clean_share):
        return signal + (1 - signal) * clean_share

    def backbone(self, inputs: ModelInput):
        if self.self_conditioned and inputs.t < 1:
            assert inputs.previous is not None, "a call after the first needs the previous prediction"
        signal = self.schedule.signal(inputs.t).expand(len(inputs.tokens))
        level = self.evidence_signal(signal, inputs.clean.double().mean(-1))[:, None, None]
        own = torch.nn.functional.one_hot(inputs.tokens, self.vocab_size)
        return WORDS.probs(inputs.tokens, signal).log() + (level * own + (1 - level) / self.vocab_size).log()

    def head(self, features):
        return features


def exact(tokens, t):
    return WORDS.probs(tokens, WORDS.schedule.signal(t).expand(len(tokens)))


@pytest.mark.parametrize("is_self_conditioned", [False, True])
def test_later_beliefs_are_the_exact_leave_one_out_probabilities(is_self_conditioned):
    model, crs = TimelessPosterior(is_self_conditioned), CRS(nfe=12, budget=4.0)
    native = Native(nfe=12, final_step="argmax")
    inputs = audit_inputs(model, HiddenSettings(n=3, nfe=12), 4, trace=True)
    committing, revisable = (list(rollout(model, sampler, inputs)) for sampler in (crs, native))
    values, committed_at = committing[-1].state.memory
    events = [event for event in commit_events(committed_at, values, 12, 6) if event.call <= 8]
    assert max(step.visible.double().mean() for step in committing) > 0.5
    for event in events:
        for call in (event.call + 1, event.call + 3):
            (belief,) = beliefs_at(inputs, committing, revisable, call, [event])
            for view, step in (("overwritten", committing[call]), ("revisable", revisable[call])):
                probs = exact(step.model_input, step.t)[event.sample, event.position]
                assert belief[view] == pytest.approx(float(probs[event.token]), abs=1e-9), view
            # A leave-one-out probability is the same whatever stands at its own position.
            assert belief["restored"] == pytest.approx(belief["overwritten"], abs=1e-9)


@pytest.mark.parametrize("is_self_conditioned", [False, True])
def test_the_temperature_audit_reads_exact_leave_one_out_distributions(is_self_conditioned):
    model, crs = TimelessPosterior(is_self_conditioned), CRS(nfe=12)
    steps = list(rollout(model, crs, audit_inputs(model, TemperatureSettings(n=3), 5, trace=True)))
    for call in range(crs.warmup_calls, 10):
        step, before = steps[call], steps[call - 1].state
        pairs = torch.stack(with_and_without(step, before, WORDS.length)).exp()
        open_ = ~step.committed
        wanted = torch.stack([exact(tokens, step.t)[open_] for tokens in (step.model_input, before.tokens)])
        assert torch.allclose(pairs, wanted, atol=1e-9)


def test_forward_states_are_read_leave_one_out():
    states = forward_states(WORDS.draw(4, 1), (0.5,), WORDS, 1)[0]
    (_, wanted), (_, found) = (predictions(model, states, 0.5) for model in (WORDS, TimelessPosterior()))
    assert torch.allclose(found, wanted, atol=1e-9)
