"""A sample does not depend on its batch, bit for bit: every built-in network, and small networks of every family."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import limpet
from limpet.diffusion.process import clipped_snr
from limpet.diffusion.rng import CounterRNG
from limpet.generation import Inputs, rollout
from limpet.models import Cache, Denoiser, ModelInput, gidd, sumi
from limpet.models.duo import Duo, DuoShape
from limpet.models.model_files import builtin_names
from limpet.models.time_agnostic import TimeAgnostic
from limpet.samplers import parse
from model_cases import random_network

NETWORKS = [name for name in builtin_names() if not name.endswith("judge")]
LENGTH = {"mini": 8, "mini-distilled": 8}  # tokens; the other models have a length of their own
SAMPLERS = ["native nfe=3 top_p=.9 interleave=true", "mend nfe=4 refresh=2"]
SHAPE = DuoShape(vocab_size=53, length=13, width=32, blocks=2, heads=2, cond=32, hidden=64)


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(model: Denoiser, sampler: str, numbers: list[int], length: int | None = None) -> Tensor:
    """The samples of these numbers, in one batch."""
    fixed = torch.full((len(numbers), length or model.length), -1)
    *_, last = rollout(model, parse(sampler)[1], Inputs(fixed, CounterRNG(1, torch.tensor(numbers))))
    return last.tokens


def family(name: str, precision: str = "float32", seed: int = 0) -> Denoiser:
    """A small random network."""
    if name in ("duo", "udlm"):
        predicts = "posterior" if name == "udlm" else "leave-one-out"
        return Duo(random_network(SHAPE, seed), predicts=predicts, precision=precision)
    torch.manual_seed(seed)
    sizes = (SHAPE.vocab_size, SHAPE.length, SHAPE.width, SHAPE.blocks, SHAPE.heads, SHAPE.hidden)
    network = (
        gidd.GiddNetwork(gidd.GiddShape(*sizes)) if name == "gidd" else sumi.SumiNetwork(sumi.SumiShape(*sizes, 1))
    )
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    clean = "fixed" if name == "gidd" else "ignored"
    return TimeAgnostic(network, schedule=clipped_snr(), clean_tokens=clean, precision=precision)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_sample_of_a_built_in_network_does_not_depend_on_its_batch(name, precision, threads):
    """Alone, among five and among 64, in another order. Two threads wait for each other, so they draw fewer."""
    model = limpet.load(name, device="cpu", precision=precision)
    for sampler, size in [(SAMPLERS[0], 64), (SAMPLERS[1], 24)] if threads == 1 else [(SAMPLERS[1], 24)]:
        length = LENGTH.get(name)
        many = draw(model, sampler, list(range(size)), length)
        for numbers in ([3], [19, 7, 0, 22, 3]):
            assert torch.equal(draw(model, sampler, numbers, length), many[numbers])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["duo", "udlm", "gidd", "sumi"])
def test_a_sample_of_every_family_does_not_depend_on_its_batch(name, precision):
    model = family(name, precision)
    for sampler in [*SAMPLERS, "crs nfe=4"]:
        many = draw(model, sampler, list(range(32)))
        for numbers in ([3], [19, 7, 0, 22, 3]):
            assert torch.equal(draw(model, sampler, numbers), many[numbers])


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["duo", "udlm"]),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 6), min_size=1, max_size=7, unique=True),
    st.lists(st.integers(0, 90), max_size=40, unique=True),
)
def test_features_and_logits_have_the_same_bits_in_any_batch(name, seed, chosen, read):
    """Of some of seven samples among them all: all positions, some of them, and some beside kept keys and values."""
    model = family(name, seed=seed)
    tokens = torch.randint(SHAPE.vocab_size, (7, SHAPE.length), generator=torch.Generator().manual_seed(seed))
    is_read = torch.zeros(tokens.numel(), dtype=torch.bool)
    is_read[read] = True
    is_read = is_read.view_as(tokens)

    def logits(rows: list[int], some: bool, cached: bool) -> Tensor:
        wanted = is_read[rows] if some else torch.ones_like(is_read[rows])
        flat, cache = wanted.flatten().nonzero()[:, 0], None
        if cached:
            first = Cache(None, (), [])
            model.backbone(ModelInput(tokens[rows], 0.7, cache=first))
            cache = Cache(flat, tuple(first.after), [])
        features = model.backbone(ModelInput(tokens[rows], 0.4, lambda: flat, cache=cache))
        together = torch.zeros(*wanted.shape, SHAPE.vocab_size)
        if len(flat):
            together[wanted] = model.head(features[wanted])
        return together

    for some, cached in ((False, False), (True, False), (True, True)):
        every = logits(list(range(7)), some, cached)
        assert torch.equal(logits(chosen, some, cached), every[chosen])
