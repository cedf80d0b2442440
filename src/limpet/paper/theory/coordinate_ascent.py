"""Revising tokens as coordinate ascent: one at a time raises the log-probability, several at once may lower it.

Let q be the distribution of the denoiser's input at signal s: the data distribution p under the forward process. An
exact leave-one-out distribution h_i gives q's conditional at position i, s h_i + (1 - s) / V. So when the token at i
becomes the argmax of h_i, ln q rises by exactly

    gain_i = ln (s max h_i + (1 - s) / V) - ln (s h_i(token) + (1 - s) / V)  >=  0,

which at s = 1 is the gain that `Mend` ranks by. docs/theory.md has the whole proposition."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.diffusion.selection import select
from limpet.models.exact import Source
from limpet.paper.theory import problems
from limpet.paper.theory.checks import Check, worst_case
from limpet.paper.theory.problems import RANDOM, describe, length_of, random_distributions, tiny, truth
from limpet.paper.theory.selection_risk import evidence

Joints = tuple[str, Tensor, int]  # a name for the table, (B, V**L) data distributions, V


class ExactPredictions(NamedTuple):
    """What the exact denoisers of B sources predict on every input, S = V**L of them."""

    log_q: Tensor  # (B, S) of the input
    probs: Tensor  # (B, S, L, V) leave-one-out
    top: Tensor  # (B, S, L) their argmax
    gain: Tensor  # (B, S, L) the rise of ln q when this token alone becomes the argmax
    inputs: Tensor  # (S, L)


def predict(joint: Tensor, vocab_size: int, signal: float = 1.0) -> ExactPredictions:
    """The predictions at one signal. Impossible inputs have log_q = -inf, and may have uniform predictions."""
    length, distributions = length_of(joint, vocab_size), []
    for i, clean in enumerate(evidence(joint, vocab_size, signal)):  # (B, V at i, V, ..., V elsewhere)
        q = signal * clean + (1 - signal) * clean.mean(1, keepdim=True)
        probs = (clean / clean.sum(1, keepdim=True)).nan_to_num(1 / vocab_size).movedim(1, -1)
        probs = probs.unsqueeze(1 + i).expand(-1, *[vocab_size] * length, -1)  # independent of the token at i
        distributions.append(probs.flatten(1, -2))
        log_q = q.movedim(1, 1 + i).flatten(1).log()
    probs, inputs = torch.stack(distributions, 2), problems.sequences(vocab_size, length)
    largest, top = probs.max(-1)
    own = probs.gather(-1, inputs[None, ..., None].expand(len(probs), -1, -1, 1))[..., 0]
    uniform = (1 - signal) / vocab_size
    gain = ((signal * largest + uniform) / (signal * own + uniform)).log()
    return ExactPredictions(log_q, probs, top, gain, inputs)


def revise(at: ExactPredictions, where: Tensor) -> Tensor:
    """(B, S) the code of each input when the tokens at (B, S, L) `where` become their argmax, all at once."""
    return problems.encode(torch.where(where, at.top, at.inputs), at.probs.shape[-1])


def rise(at: ExactPredictions, where: Tensor) -> Tensor:
    """(B, S): the rise of ln q from that."""
    return at.log_q.gather(-1, revise(at, where)) - at.log_q


def choose(at: ExactPredictions, spacing: int, most: int) -> Tensor:
    """(B, S, L) bool: as `Mend` chooses, the tokens with the largest gains, more than `spacing` apart."""
    gain = at.gain.flatten(0, 1)
    return select(-gain, gain > 0, most, math.inf, spacing).view_as(at.gain)


def each_position(length: int) -> Tensor:
    """(L, L) bool: in each row one position."""
    return torch.eye(length, dtype=torch.bool)


def revise_in_order(at: ExactPredictions, where: Tensor) -> Tensor:
    """(B, S) the code of each input when the tokens change one after the other, each given those before it."""
    codes = torch.arange(len(at.inputs)).expand(len(where), -1)
    for i, here in enumerate(each_position(where.shape[-1])):
        codes = torch.where(where[..., i], revise(at, here.expand_as(where)).gather(-1, codes), codes)
    return codes


def reaches_fixed_point(step: Tensor) -> Tensor:
    """(B, S) bool: whether repeating `step` from each input ends in an input that it does not change."""
    far = step
    for _ in range(step.shape[-1].bit_length()):  # doubles the number of steps: more than there are inputs
        far = far.gather(-1, far)
    return step.gather(-1, far) == far


# Claims


def check_one(joints: Joints, signal: float = 1.0, model_signal: float | None = None) -> list[Check]:
    """One token at a time, at every position. A denoiser at another signal than the input's breaks the claim."""
    name, joint, vocab_size = joints
    at = predict(joint, vocab_size, signal)
    if model_signal is not None:
        other = predict(joint, vocab_size, model_signal)
        at = at._replace(top=other.top, gain=other.gain)
    rises = torch.stack([rise(at, here.expand_as(at.gain)) for here in each_position(at.gain.shape[-1])], -1)
    name, q = (name, "p") if signal == 1 else (f"{name}, noise {1 - signal:.1g}", "q")
    before = at.log_q[..., None]
    return [
        worst_case(f"rise of ln {q} at one token = its gain", name, rises, "=", at.gain),
        worst_case(f"ln {q} <= ln {q} with one token revised", name, before, "<=", before + rises),
    ]


def check_two(joints: Joints) -> Check:
    """Two tokens at once, at all pairs: both gains, and the log odds ratio of their values given the rest.

    That ratio is how much more the second prediction favours its change once the first token has changed."""
    name, joint, vocab_size = joints
    at = predict(joint, vocab_size)
    inputs, positions = at.inputs.expand_as(at.gain), each_position(at.gain.shape[-1])
    rises, sums = [], []
    for i, first in enumerate(positions):
        after = revise(at, first.expand_as(at.gain))[..., None].expand(-1, -1, vocab_size)
        for j, second in enumerate(positions):
            if j == i:
                continue
            probs = at.probs[:, :, j].gather(1, after)
            new, old = (probs.gather(-1, token[:, :, j, None])[..., 0] for token in (at.top, inputs))
            ratio = (new / old).log() - at.gain[..., j]
            rises.append(rise(at, (first | second).expand_as(at.gain)))
            sums.append(at.gain[..., i] + at.gain[..., j] + ratio)
    return worst_case("rise at two tokens = gains + ln odds ratio", name, torch.stack(rises), "=", torch.stack(sums))


def check_many(joints: Joints, spacing: int) -> list[Check]:
    """All tokens that gain, more than `spacing` apart, at once: a claim where `spacing` is at least a chain's order."""
    name, joint, vocab_size = joints
    at, name = predict(joint, vocab_size), f"{name}, spacing {spacing}"
    where = choose(at, spacing, at.inputs.shape[-1])
    differs = (revise(at, where) != revise_in_order(at, where)).double()
    gains = torch.where(where, at.gain, 0.0).sum(-1)
    return [
        worst_case("rise of ln p at many tokens = sum of gains", name, rise(at, where), "=", gains),
        worst_case("at once, and not as one after the other", name, differs, "=", 0.0),
    ]


def check_rest(joints: Joints) -> list[Check]:
    """Revised one at a time, every input reaches a fixed point; all at once, some do not."""
    name, joint, vocab_size = joints
    at = predict(joint, vocab_size)
    one, many = (
        1 - float(reaches_fixed_point(revise(at, where)).double().mean())
        for where in (choose(at, length_of(joint, vocab_size), 1), at.gain > 0)
    )
    return [
        Check("share of inputs without a fixed point, one at a time", name, one, "=", 0.0),
        Check("share without a fixed point: all at once ~ one at a time", name, many, "~", one),
    ]


def check_denoiser(source: Source, signal: float) -> Check:
    """The distributions above are those of the sampler's denoiser."""
    at = predict(truth(source)[None], source.vocab_size, signal)
    distance = problems.total_variation(problems.probs_at(source, at.inputs, signal), at.probs[0])
    statement, name = "denoiser's distribution = distribution by enumeration (TV)", f"noise {1 - signal:.1g}"
    return worst_case(statement, f"{describe(source)}, {name}", distance[at.log_q[0] > -math.inf], "=", 0.0)


def two_sites() -> list[Check]:
    """The smallest example: two tokens of two symbols that disagree, where the source prefers that they agree."""
    rows, start = [], 1
    for p in ((0.4, 0.2, 0.1, 0.3), (0.5, 0.0, 0.0, 0.5)):  # of 00, 01, 10 and 11
        at = predict(torch.tensor([p], dtype=torch.float64), 2)
        both = revise(at, at.gain > 0)[0]
        one = revise(at, choose(at, spacing=2, most=1))[0]
        name, probs = f"two sites, p = {', '.join(f'{each:g}' for each in p)}", at.log_q[0].exp().tolist()
        rows += [
            Check("both of 01 revised twice is 01", name, float(both[both[start]]), "=", float(start)),
            Check("p of 01 < p with one revised", name, probs[start], "<", probs[one[start]]),
            Check("p with both revised <= p of 01", name, probs[both[start]], "<=", probs[start]),
        ]
    return rows


# Measurements without a claim


def falling_share(source: Source, signal: float) -> float:
    """The share of single revisions, predicted at this signal, that lower the data distribution of the input."""
    joint = truth(source)[None]
    clean, noisy = predict(joint, source.vocab_size), predict(joint, source.vocab_size, signal)
    falling = changing = 0
    for i, here in enumerate(each_position(source.length)):
        gains = noisy.gain[..., i] > 0
        change = rise(clean._replace(top=noisy.top), here.expand_as(noisy.gain))
        changing, falling = changing + int(gains.sum()), falling + int((gains & (change < 0)).sum())
    return falling / changing


def interaction(source: Source, signal: float, distance: int) -> float:
    """The mean size of what two revisions at once add to the sum of their gains, over inputs of q and over all pairs at
    this distance that both gain."""
    at = predict(truth(source)[None], source.vocab_size, signal)
    total = weight = 0.0
    for i in range(source.length - distance):
        pair = torch.zeros(source.length, dtype=torch.bool)
        pair[[i, i + distance]] = True
        added = rise(at, pair.expand_as(at.gain)) - at.gain[..., pair].sum(-1)
        mass = at.log_q.exp() * (at.gain[..., pair] > 0).all(-1)
        total, weight = total + float((mass * added.abs()).sum()), weight + float(mass.sum())
    return total / weight


def random_joints(vocab_size: int, length: int, seed: int) -> Joints:
    name = f"{RANDOM:,} random joint distributions, V={vocab_size}, L={length}"
    return name, random_distributions(RANDOM, vocab_size**length, seed=seed), vocab_size


def random_chains(count: int, vocab_size: int, length: int, order: int, seed: int) -> Joints:
    """Chains in which a token depends on the `order` before it."""
    joint = random_distributions(count, vocab_size**order, seed=seed)
    rows = random_distributions(count, vocab_size**order, vocab_size, seed=seed + 1)
    for _ in range(length - order):
        joint = (joint.view(count, -1, vocab_size**order, 1) * rows[:, None]).flatten(1)
    return f"{count:,} random chains of order {order}, V={vocab_size}, L={length}", joint, vocab_size


def checks() -> list[Check]:
    joints = random_joints(3, 4, seed=100)
    rows = [check_denoiser(source, signal) for source in tiny() for signal in (1.0, 0.6)]
    rows += check_one(joints) + check_one(joints, signal=0.6)
    rows += [check_two(joints), *check_rest(joints), *two_sites()]
    rows += check_many(random_chains(RANDOM, 3, 5, 1, seed=101), spacing=1)
    rows += check_many(random_chains(RANDOM, 2, 6, 2, seed=103), spacing=2)
    for source in tiny()[1:]:
        name, noisy, clean = f"{describe(source)}, noise 0.4", falling_share(source, 0.6), falling_share(source, 1.0)
        rows.append(Check("share of revisions that lower p: noisy ~ clean", name, noisy, "~", clean))
        far, near = interaction(source, 0.6, 3), interaction(source, 0.6, 1)
        rows.append(Check("what two revisions add, nats: 3 apart ~ neighbours", name, far, "~", near))
    return rows
