"""The mean-field view of labels that change: one at a time they climb the distribution that they are seen under; neighbours that
change at once may fall.

Let q be the distribution of the denoiser's input at some signal s: the data distribution p under the forward process, p itself where s is
1. An exact leave-one-out distribution h_i gives q's conditional at position i, s h_i + (1 - s) / V. So an input whose label at i
becomes the argmax of h_i rises in ln q by exactly

    gain_i = ln (s max h_i + (1 - s) / V) - ln (s h_i(label) + (1 - s) / V)  >=  0,

which at s = 1 is the gain that `Mend` ranks by. Two labels that change at once add a term of their own, the log odds
ratio of old and new values given all the rest: it is 0 where the two are independent given the rest, and can outweigh
both gains where they are not. On a Markov chain without noise it is 0 as soon as one label between them stays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.diffusion.selection import select
from limpet.experiments.contents import Panel
from limpet.models.exact import Source
from limpet.paper.theory.problems import (
    RANDOM,
    chain,
    describe,
    encode,
    length_of,
    probs_at,
    random_distributions,
    sequences,
    tiny,
    total_variation,
    truth,
)
from limpet.paper.theory.selection_risk import evidence
from limpet.paper.theory.sides import Sides, line, worst

Joints = tuple[str, Tensor, int]  # what they are called, (B, V**L) data distributions, V


class Look(NamedTuple):
    """What exact denoisers make of every input, S = V**L of them, of B sources."""

    log_q: Tensor  # (B, S) of the input
    probs: Tensor  # (B, S, L, V) leave-one-out
    top: Tensor  # (B, S, L) its argmax
    gain: Tensor  # (B, S, L) what ln q rises by when this label alone becomes the argmax
    inputs: Tensor  # (S, L)


def look(joint: Tensor, vocab_size: int, signal: float = 1.0) -> Look:
    """Inputs that q never shows have log_q = -inf; a distribution that cannot be told there is uniform."""
    length, distributions = length_of(joint, vocab_size), []
    for i, seen in enumerate(evidence(joint, vocab_size, signal)):  # (B, V at i, V, ..., V elsewhere)
        q = signal * seen + (1 - signal) * seen.mean(1, keepdim=True)
        probs = (seen / seen.sum(1, keepdim=True)).nan_to_num(1 / vocab_size).movedim(1, -1)
        probs = probs.unsqueeze(1 + i).expand(-1, *[vocab_size] * length, -1)  # it does not depend on the token at i
        distributions.append(probs.flatten(1, -2))
        log_q = q.movedim(1, 1 + i).flatten(1).log()
    probs, inputs = torch.stack(distributions, 2), sequences(vocab_size, length)
    largest, top = probs.max(-1)
    own = probs.gather(-1, inputs[None, ..., None].expand(len(probs), -1, -1, 1))[..., 0]
    even = (1 - signal) / vocab_size
    gain = ((signal * largest + even) / (signal * own + even)).log()
    return Look(log_q, probs, top, gain, inputs)


def changed(seen: Look, where: Tensor) -> Tensor:
    """(B, S) the code of each input whose labels become their argmax, all at once, where (B, S, L) says so."""
    return encode(torch.where(where, seen.top, seen.inputs), seen.probs.shape[-1])


def risen(seen: Look, where: Tensor) -> Tensor:
    """(B, S): by how much ln q rises then."""
    return seen.log_q.gather(-1, changed(seen, where)) - seen.log_q


def chosen(seen: Look, apart: int, most: int) -> Tensor:
    """(B, S, L) bool: as `Mend` chooses, the labels that gain most, more than `apart` apart."""
    gain = seen.gain.flatten(0, 1)
    return select(-gain, gain > 0, most, math.inf, apart).view_as(seen.gain)


def alone(length: int) -> Iterator[Tensor]:
    """(L,) bool: each position, and no other."""
    yield from torch.eye(length, dtype=torch.bool)


def in_order(seen: Look, where: Tensor) -> Tensor:
    """(B, S) the code of each input whose labels change one after the other instead, each seeing those before it."""
    codes = torch.arange(len(seen.inputs)).expand(len(where), -1)
    for i, here in enumerate(alone(where.shape[-1])):
        once = changed(seen, here.expand_as(where)).gather(-1, codes)
        codes = torch.where(where[..., i], once, codes)
    return codes


def at_rest(step: Tensor) -> Tensor:
    """(B, S) bool: whether a path that follows `step` from each input comes to one that it leaves alone."""
    far = step
    for _ in range(step.shape[-1].bit_length()):  # twice as far each time: farther than there are inputs
        far = far.gather(-1, far)
    return step.gather(-1, far) == far


# What is claimed


def check_one(joints: Joints, signal: float = 1.0, told: float | None = None) -> list[Sides]:
    """One label at a time, whichever it is. The denoiser may be told another signal than the input has, to fail."""
    name, joint, vocab_size = joints
    name = name if signal == 1 else f"{name}, noise {1 - signal:.1g}"
    seen, where = look(joint, vocab_size, signal), alone(length_of(joint, vocab_size))
    if told is not None:
        other = look(joint, vocab_size, told)
        seen = seen._replace(top=other.top, gain=other.gain)
    rises = torch.stack([risen(seen, here.expand_as(seen.gain)) for here in where], -1)
    before, q = seen.log_q[..., None], "p" if signal == 1 else "q"
    return [
        worst(f"rise of ln {q} at one label = its gain", name, rises, "=", seen.gain),
        worst(f"ln {q} <= ln {q} with one label changed", name, before, "<=", before + rises),
    ]


def check_two(joints: Joints) -> Sides:
    """Two labels at once, whichever they are: both gains, and the log odds ratio of their values given the rest, which
    is how much more the second distribution favours its change once the first label has changed."""
    name, joint, vocab_size = joints
    seen = look(joint, vocab_size)
    inputs, found = seen.inputs.expand_as(seen.gain), []
    for i, first in enumerate(alone(length := inputs.shape[-1])):
        after = changed(seen, first.expand_as(seen.gain))  # (B, S)
        for j, second in enumerate(alone(length)):
            if j == i:
                continue
            probs = seen.probs[:, :, j].gather(1, after[..., None].expand(-1, -1, vocab_size))
            new, old = (probs.gather(-1, token[:, :, j, None])[..., 0] for token in (seen.top, inputs))
            ratio = (new / old).log() - seen.gain[..., j]
            rise = risen(seen, (first | second).expand_as(seen.gain))
            found.append((rise, seen.gain[..., i] + seen.gain[..., j] + ratio))
    left, right = (torch.stack(side) for side in zip(*found, strict=True))
    return worst("rise at two labels = gains + ln odds ratio", name, left, "=", right)


def check_many(joints: Joints, apart: int) -> list[Sides]:
    """All labels that gain, more than `apart` apart, at once: a claim where `apart` reaches as far as the chain."""
    name, joint, vocab_size = joints
    seen, name = look(joint, vocab_size), f"{name}, apart {apart}"
    where = chosen(seen, apart, seen.inputs.shape[-1])
    other = (changed(seen, where) != in_order(seen, where)).double()
    gains = torch.where(where, seen.gain, 0.0).sum(-1)
    return [
        worst("rise of ln p at many labels = sum of gains", name, risen(seen, where), "=", gains),
        worst("at once, and not as one after the other", name, other, "=", 0.0),
    ]


def check_rest(joints: Joints) -> list[Sides]:
    """One at a time, every path comes to rest; all at once, not every one does."""
    name, joint, vocab_size = joints
    seen, every = look(joint, vocab_size), length_of(joint, vocab_size)
    restless = [1 - float(at_rest(changed(seen, where)).double().mean())
                for where in (chosen(seen, every, 1), seen.gain > 0)]  # fmt: skip
    return [
        Sides("share of labels never at rest, one at a time", name, restless[0], "=", 0.0),
        Sides("share never at rest: all at once ~ one at a time", name, restless[1], "~", restless[0]),
    ]


def check_denoiser(source: Source, signal: float) -> Sides:
    """That the distributions above are those that the sampler's denoiser gives."""
    seen = look(truth(source)[None], source.vocab_size, signal)
    far = total_variation(probs_at(source, seen.inputs, signal), seen.probs[0])
    name = f"{describe(source)}, noise {1 - signal:.1g}"
    return worst(
        "distribution of the denoiser = distribution by enumeration (TV)",
        name,
        far[seen.log_q[0] > -math.inf],
        "=",
        0.0,
    )


def two_sites() -> list[Sides]:
    """The smallest example: two labels of two symbols that disagree, where the source would have them agree."""
    found = []
    for p in ((0.4, 0.2, 0.1, 0.3), (0.5, 0.0, 0.0, 0.5)):  # of 00, 01, 10 and 11
        seen, start = look(torch.tensor([p], dtype=torch.float64), 2), 1
        both = changed(seen, seen.gain > 0)[0]
        one = changed(seen, chosen(seen, apart=2, most=1))[0]
        name, at = f"two sites, p = {', '.join(f'{each:g}' for each in p)}", seen.log_q[0].exp()
        found += [
            Sides("both of 01 changed twice is 01", name, float(both[both[start]]), "=", float(start)),
            Sides("p of 01 < p with one changed", name, float(at[start]), "<", float(at[one[start]])),
            Sides("p with both changed <= p of 01", name, float(at[both[start]]), "<=", float(at[start])),
        ]
    return found


# What is not claimed, measured


def falls(source: Source, signal: float) -> float:
    """The share of single changes by the distribution at this signal that lower the data distribution of the sequence that is seen."""
    joint = truth(source)[None]
    clean, noisy = look(joint, source.vocab_size), look(joint, source.vocab_size, signal)
    lower = changing = 0
    for i, here in enumerate(alone(source.length)):
        gains = noisy.gain[..., i] > 0
        change = risen(clean._replace(top=noisy.top), here.expand_as(noisy.gain))
        changing, lower = changing + int(gains.sum()), lower + int((gains & (change < 0)).sum())
    return lower / changing


def interaction(source: Source, signal: float, distance: int) -> float:
    """The mean size, over inputs of q and all pairs so far apart that both gain, of what two changes at once add to
    the sum of their gains."""
    seen = look(truth(source)[None], source.vocab_size, signal)
    total = weight = 0.0
    for i in range(source.length - distance):
        pair = torch.zeros(source.length, dtype=torch.bool)
        pair[[i, i + distance]] = True
        rest = risen(seen, pair.expand_as(seen.gain)) - seen.gain[..., pair].sum(-1)
        mass = seen.log_q.exp() * (seen.gain[..., pair] > 0).all(-1)
        total, weight = total + float((mass * rest.abs()).sum()), weight + float(mass.sum())
    return total / weight


def random_joints(vocab_size: int, length: int, seed: int) -> Joints:
    name = f"{RANDOM:,} random joint distributions, V={vocab_size}, L={length}"
    return name, random_distributions(RANDOM, vocab_size**length, seed=seed), vocab_size


def random_chains(count: int, vocab_size: int, length: int, order: int, seed: int) -> Joints:
    """Chains in which a token depends on the `order` before it."""
    first = random_distributions(count, vocab_size**order, seed=seed)
    rows = random_distributions(count, vocab_size**order, vocab_size, seed=seed + 1)
    joint = first
    for _ in range(length - order):
        past = joint.view(count, -1, vocab_size**order, 1)
        joint = (past * rows[:, None]).flatten(1)
    return f"{count:,} random chains of order {order}, V={vocab_size}, L={length}", joint, vocab_size


def sides() -> list[Sides]:
    joints = random_joints(3, 4, seed=100)
    found = [check_denoiser(source, signal) for source in tiny() for signal in (1.0, 0.6)]
    found += check_one(joints) + check_one(joints, signal=0.6)
    found += [check_two(joints), *check_rest(joints), *two_sites()]
    found += check_many(random_chains(RANDOM, 3, 5, 1, seed=101), apart=1)
    found += check_many(random_chains(RANDOM, 2, 6, 2, seed=103), apart=2)
    for source in tiny()[1:]:
        name = f"{describe(source)}, noise 0.4"
        noisy, clean = (falls(source, signal) for signal in (0.6, 1.0))
        found.append(Sides("share of changes that lower p: noisy ~ clean", name, noisy, "~", clean))
        far, near = (interaction(source, 0.6, distance) for distance in (3, 1))
        found.append(Sides("what two changes add, nats: 3 apart ~ neighbours", name, far, "~", near))
    return found


def panels() -> Iterator[Panel]:
    sources = {"Markov chain, V=3, L=7": chain(7), "mixture, V=3, L=5": tiny()[1]}
    for title, source in sources.items():
        apart = range(1, source.length)
        lines = [
            line(f"noise {noise:g}", apart, [interaction(source, 1 - noise, distance) for distance in apart], ".-")
            for noise in (0.0, 0.2, 0.4, 0.6)
        ]
        yield Panel(title, "distance of two labels", "added to the sum of gains, nats", lines)
    shares = torch.linspace(0, 0.9, 10).tolist()
    lines = [
        line(describe(source), shares, [falls(source, 1 - noise) for noise in shares], ".-") for source in tiny()[1:]
    ]
    yield Panel(
        "one label at a time", "noise that the distribution is of", "share that lowers the data distribution", lines
    )
