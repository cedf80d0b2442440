"""The fused step's Triton kernels: which rows need a distribution, what one row of logits says, and what the selector takes.

A float argument of a kernel is float32, so float64 numbers arrive as the integer that has their bits.
Uniforms are the bits of streams.py: Philox is computed where it is used, never stored."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from limpet.diffusion.rng import Purpose

COINS = tl.constexpr(int(Purpose.COINS))
TOKENS = tl.constexpr(int(Purpose.TOKENS))
INFINITY = tl.constexpr(float("inf"))
# New at every step: compile for none.
SCALARS = ["seed", "step", "draw", "uniform", "fresh", "noise", "stay", "pull", "top_p", "cool"]


@triton.jit
def _number(bits):
    """The float64 with these bits."""
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _unit(high, low):
    """streams.uniform53."""
    return ((high >> 5).to(tl.int64) * 67108864 + (low >> 6).to(tl.int64)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _uniforms(seed, step, position, sample, purpose: tl.constexpr):
    """Stream.uniforms."""
    c0 = position.to(tl.uint32)
    zero = c0 & 0
    a, b, c, d = tl.philox(seed, c0, zero + tl.cast(step, tl.uint32), zero + sample.to(tl.uint32), zero + purpose)
    return _unit(a, b), _unit(c, d)


@triton.jit(do_not_specialize=SCALARS)
def plan(
    tokens, revise, inspect, samples, needed, moved, top, deficit, gain,
    seed: tl.int64, step: tl.int64, fresh: tl.int64, noise: tl.int64, vocab, length, size,
    NOISY: tl.constexpr, GAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark the positions where coin one asks for the distribution or the distribution is inspected; fill in what the others return."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    sample = tl.load(samples + i // length, inside, other=0)
    u, _ = _uniforms(seed, step, i % length, sample, COINS)
    free = tl.load(revise + i, inside, other=0) != 0
    asks = (u < _number(fresh)) & free
    looks = tl.load(inspect + i, inside, other=0) != 0
    token = tl.load(tokens + i, inside, other=0)
    if NOISY:
        _, any = _uniforms(seed, step, i % length, sample, TOKENS)
        token = tl.where(free & (u >= _number(fresh)) & (u < _number(noise)), (any * vocab).to(tl.int64), token)
    tl.store(needed + i, (asks | looks).to(tl.int32), inside)
    tl.store(moved + i, token, inside)
    tl.store(top + i, tl.zeros([BLOCK], tl.int64), inside)
    tl.store(deficit + i, tl.full([BLOCK], INFINITY, tl.float64), inside)
    if GAIN:
        tl.store(gain + i, tl.full([BLOCK], -INFINITY, tl.float64), inside)


@triton.jit
def pack(needed, place, index, nonfinite_at, told, size, BLOCK: tl.constexpr):
    """The marked positions, in order; `place` counts them up to and with each position. What the host is told: how
    many there are, and what the nonfinite_at says of the calls before."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(told, tl.load(place + size - 1).to(tl.int64))
        tl.store(told + 1, tl.load(nonfinite_at))
        tl.store(told + 2, tl.load(nonfinite_at + 1))
    inside = i < size
    marked = inside & (tl.load(needed + i, inside, other=0) != 0)
    tl.store(index + tl.load(place + i, inside, other=1) - 1, i, marked)


@triton.jit
def _logits(
    row, i, seen, shift, cool, VOCAB: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr,
    EDGE: tl.constexpr = True,
):  # fmt: skip
    """Some logits of a row, as `steps.log_probs` reads them: the evidence of `seen` taken out if the model predicts a
    posterior (READ & 1), then tempered (READ & 2); at the edge, -inf beyond the row's end."""
    if EDGE:
        x = tl.load(row + i, i < WIDTH, other=-INFINITY).to(FLOAT)
        x = tl.where(i < VOCAB, x, -INFINITY) if WIDTH > VOCAB else x
    else:
        x = tl.load(row + i).to(FLOAT)
    if READ & 1:
        x = tl.where(i == seen, x - shift.to(FLOAT), x)
    if READ & 2:
        x = x * cool.to(FLOAT)
    return x


@triton.jit
def _larger(
    best, at, row, i, but, seen, shift, cool,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr, EDGE: tl.constexpr,
    GAIN: tl.constexpr,
):  # fmt: skip
    """Each lane's largest logit and where it stands, with one more block seen; with GAIN, `but` is left out."""
    x = _logits(row, i, seen, shift, cool, VOCAB, WIDTH, READ, FLOAT, EDGE)
    if GAIN:
        x = tl.where(i == but, -INFINITY, x)
    return tl.maximum(best, x), tl.where(x > best, i, at)


@triton.jit
def _heavier(
    mass, ahead, row, i, largest, z, at_z, seen, shift, cool,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, NUCLEUS: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Each lane's mass, and the mass ahead of z in the order of the nucleus, with one more block seen."""
    w = tl.exp(_logits(row, i, seen, shift, cool, VOCAB, WIDTH, READ, FLOAT, EDGE) - largest)
    if NUCLEUS:
        ahead += tl.where((w > at_z) | ((w == at_z) & (i < z)), w, 0.0).to(tl.float64)
    return mass + w.to(tl.float64), ahead


@triton.jit
def _fits(mass, limit, PAPER: tl.constexpr):
    """Whether a token may still be added after tokens of this mass (support._kept)."""
    if PAPER:
        return mass < limit
    else:
        return mass <= limit


@triton.jit
def _parted(
    mass, under, over, row, i, largest, middle, high, seen, shift, cool,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr, INT: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Each lane's mass above the middle, and the weights next to it on both sides, with one more block seen."""
    w = tl.exp(_logits(row, i, seen, shift, cool, VOCAB, WIDTH, READ, FLOAT, EDGE) - largest)
    bits = w.to(INT, bitcast=True)
    up = bits > middle
    mass += tl.where(up, w, 0.0).to(tl.float64)
    return mass, tl.maximum(under, tl.where(up, 0, bits)), tl.minimum(over, tl.where(up, bits, high))


@triton.jit
def _nucleus(
    row, largest, seen, shift, cool, total, top_p, limit, PAPER: tl.constexpr,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr, INT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """support.nucleus without a sort: (threshold, cut, mass). Kept are the weights above the threshold, and of those
    equal to it the ids up to the cut.

    Weights are compared as integers, by their bits, which order non-negative floats. The threshold is the smallest
    whose mass above it fits; every pass halves the range and snaps it to weights that occur."""
    WHOLE: tl.constexpr = VOCAB // BLOCK * BLOCK
    lanes = tl.arange(0, BLOCK)
    # All weights up to this one weigh less than 1 - p together, so the threshold lies above it.
    low = (0.999 * (1 - top_p) * total / VOCAB).to(FLOAT).to(INT, bitcast=True)
    high = tl.full([], 1.0, FLOAT).to(INT, bitcast=True)
    above = tl.full([], 0.0, tl.float64)  # the mass above `high`
    while high - low > 1:
        middle = low + (high - low) // 2
        mass = tl.zeros([BLOCK], tl.float64)
        under = tl.full([BLOCK], 0, INT)
        over = tl.zeros([BLOCK], INT) + high
        for start in range(0, WHOLE, BLOCK):
            mass, under, over = _parted(
                mass, under, over, row, start + lanes, largest, middle, high, seen, shift, cool,
                VOCAB, WIDTH, READ, FLOAT, INT, False,
            )  # fmt: skip
        if WHOLE < VOCAB:
            mass, under, over = _parted(
                mass, under, over, row, WHOLE + lanes, largest, middle, high, seen, shift, cool,
                VOCAB, WIDTH, READ, FLOAT, INT, True,
            )  # fmt: skip
        weight = tl.sum(mass, 0)
        if _fits(weight, limit, PAPER):
            high = tl.max(under, 0)
            above = weight
        else:
            low = tl.min(over, 0) - 1

    # How many tokens of exactly the threshold's weight fit; rounding may put the quotient one off.
    w = high.to(FLOAT, bitcast=True).to(tl.float64)
    ties = tl.floor((limit - above) / w).to(tl.int64) + 1
    ties = tl.where((ties > 1) & (_fits(above + (ties - 1) * w, limit, PAPER) == 0), ties - 1, ties)
    ties = tl.where(_fits(above + ties * w, limit, PAPER), ties + 1, ties)
    counted = tl.full([], 0, tl.int64)
    cut = tl.zeros([], tl.int32) + VOCAB
    start = tl.full([], 0, tl.int32)
    while (start < VOCAB) & (counted < ties):
        i = start + lanes
        bits = tl.exp(_logits(row, i, seen, shift, cool, VOCAB, WIDTH, READ, FLOAT) - largest).to(INT, bitcast=True)
        tie = ((bits == high) & (i < VOCAB)).to(tl.int32)
        here = tl.sum(tie, 0)
        if counted + here >= ties:
            rank = tl.cumsum(tie, 0) + counted
            cut = tl.max(tl.where((tie != 0) & (rank <= ties), i, -1), 0)
            counted = ties
        else:
            counted += here
        start += BLOCK
    return high, cut, above + counted * w


@triton.jit
def _draw(
    row, largest, seen, shift, cool, threshold, cut, target,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr, INT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """steps.inverse_cdf: the first kept id whose cumulated weight passes the target."""
    lanes = tl.arange(0, BLOCK)
    before = tl.full([], 0.0, tl.float64)
    token = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)  # should rounding keep every sum under the target
    start = tl.full([], 0, tl.int32)
    while (start < VOCAB) & (token < 0):
        i = start + lanes
        w = tl.exp(_logits(row, i, seen, shift, cool, VOCAB, WIDTH, READ, FLOAT) - largest)
        bits = w.to(INT, bitcast=True)
        kept = (w > 0) & ((bits > threshold) | ((bits == threshold) & (i <= cut)))
        w = tl.where(kept, w, 0.0).to(tl.float64)
        here = tl.sum(w, 0)
        last = tl.maximum(last, tl.max(tl.where(kept, i, 0), 0))
        if before + here > target:
            first = tl.min(tl.where(kept & (before + tl.cumsum(w, 0) > target), i, VOCAB), 0)
            token = tl.minimum(first, last)
        before += here
        start += BLOCK
    return tl.where(token < 0, last, token)


@triton.jit(do_not_specialize=SCALARS)
def rows(
    logits, stride, index, tokens, inputs, shifts, against, revise, inspect, samples, moved, top, deficit, gain, nonfinite_at,
    seed: tl.int64, step: tl.int64, draw: tl.int64, uniform: tl.int64, fresh: tl.int64, stay: tl.int64, pull: tl.int64,
    top_p: tl.int64, cool: tl.int64, length,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, NUCLEUS: tl.constexpr, PAPER: tl.constexpr, READ: tl.constexpr,
    GAIN: tl.constexpr, FRESH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of logits each: the argmax, the deficit and the gain where they are asked for, the next token where coin
    one asks for the distribution. The row is read twice; a draw reads up to where it falls, and a nucleus is sought only where
    the draw, or coin two, depends on it."""
    FLOAT: tl.constexpr = tl.float64 if logits.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if logits.dtype.element_ty == tl.float64 else tl.int32
    WHOLE: tl.constexpr = VOCAB // BLOCK * BLOCK  # the ids of whole blocks, where nothing need be masked
    row = logits + tl.program_id(0).to(tl.int64) * stride
    place = tl.load(index + tl.program_id(0))
    z = tl.load(tokens + place)
    but = tl.load(against + place) if GAIN else z
    seen = tl.load(inputs + place) if READ & 1 else z
    cool = _number(cool)
    shift = tl.load(shifts + place // length) if READ & 1 else cool
    lanes = tl.arange(0, BLOCK)

    best = tl.full([BLOCK], -INFINITY, FLOAT)
    at = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, WHOLE, BLOCK, loop_unroll_factor=8):
        best, at = _larger(best, at, row, start + lanes, but, seen, shift, cool, VOCAB, WIDTH, READ, FLOAT, False, GAIN)
    if WHOLE < VOCAB:
        best, at = _larger(best, at, row, WHOLE + lanes, but, seen, shift, cool, VOCAB, WIDTH, READ, FLOAT, True, GAIN)
    largest = tl.max(best, 0)
    first_best = tl.min(tl.where(best == largest, at, VOCAB), 0)
    if GAIN:  # the largest of the others so far
        own = _logits(row, but, seen, shift, cool, VOCAB, WIDTH, READ, FLOAT)
        if tl.load(inspect + place) != 0:
            tl.store(gain + place, (largest - own).to(tl.float64))
        first_best = tl.where((own > largest) | ((own == largest) & (but < first_best)), but.to(tl.int32), first_best)
        largest = tl.maximum(largest, own)

    at_z = tl.exp(_logits(row, z, seen, shift, cool, VOCAB, WIDTH, READ, FLOAT) - largest)
    mass = tl.zeros([BLOCK], tl.float64)
    ahead = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, WHOLE, BLOCK, loop_unroll_factor=8):  # backwards: what was read last is still near
        mass, ahead = _heavier(
            mass, ahead, row, WHOLE - BLOCK - start + lanes, largest, z, at_z, seen, shift, cool,
            VOCAB, WIDTH, NUCLEUS, READ, FLOAT, False,
        )  # fmt: skip
    if WHOLE < VOCAB:
        mass, ahead = _heavier(
            mass, ahead, row, WHOLE + lanes, largest, z, at_z, seen, shift, cool,
            VOCAB, WIDTH, NUCLEUS, READ, FLOAT, True,
        )  # fmt: skip
    total = tl.sum(mass, 0)
    if total != total:  # a distribution that is none: any of its positions will do for the error
        tl.store(nonfinite_at, step)
        tl.store(nonfinite_at + 1, place.to(tl.int64))

    if tl.load(inspect + place) != 0:
        tl.store(top + place, first_best.to(tl.int64))
        tl.store(deficit + place, (total - 1) / total)

    position = place % length
    sample = tl.load(samples + place // length)
    first, second = _uniforms(seed, step, position, sample, COINS)
    if (first < _number(fresh)) & (tl.load(revise + place) != 0):
        anew = first >= _number(uniform) if FRESH else False
        draws = (first < _number(draw)) | anew
        stay_weight = _number(stay)
        pull_weight = _number(pull)
        threshold = tl.full([], -1, INT)
        cut = tl.zeros([], tl.int32) + VOCAB
        prob_at_z = at_z.to(tl.float64) / total
        kept = second * (stay_weight + pull_weight * prob_at_z) < stay_weight
        if NUCLEUS:
            limit = _number(top_p) * total
            inside = (tl.sum(ahead, 0) == 0) | _fits(tl.sum(ahead, 0), limit, PAPER)
            # The nucleus weighs between `limit` and `total`: mostly coin two falls the same way for both.
            prob_at_z = tl.where(inside, prob_at_z, 0.0)
            most = second * (stay_weight + pull_weight * prob_at_z * (1 - 1e-12)) < stay_weight
            least = second * (stay_weight + pull_weight * prob_at_z * (total / limit) * (1 + 1e-12)) < stay_weight
            kept = least
            if ((most | anew) & draws) | (most != least):
                threshold, cut, total = _nucleus(
                    row, largest, seen, shift, cool, total, _number(top_p), limit,
                    PAPER, VOCAB, WIDTH, READ, FLOAT, INT, BLOCK,
                )  # fmt: skip
                prob_at_z = tl.where(inside, at_z.to(tl.float64) / total, 0.0)
                kept = second * (stay_weight + pull_weight * prob_at_z) < stay_weight
        if kept | anew:
            for_draw, for_uniform = _uniforms(seed, step, position, sample, TOKENS)
            token = (for_uniform * VOCAB).to(tl.int64)
            if draws:
                token = _draw(
                    row, largest, seen, shift, cool, threshold, cut, for_draw * total,
                    VOCAB, WIDTH, READ, FLOAT, INT, BLOCK,
                ).to(tl.int64)  # fmt: skip
            tl.store(moved + place, token)


@triton.jit
def select(deficit, eligible, count, budget, chosen, length, spacing, BLOCK: tl.constexpr):
    """One sample each: take the smallest deficit, bar its neighbours, until count or budget is spent."""
    sample = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < length
    place = sample.to(tl.int64) * length + i
    score = tl.load(deficit + place, inside, other=INFINITY)
    score = tl.where(inside & (tl.load(eligible + place, inside, other=0) != 0), score, INFINITY)
    left = tl.load(count + sample)
    room = tl.load(budget + sample)
    taken = tl.zeros([BLOCK], tl.uint8)
    spent = tl.full([], 0.0, tl.float64)
    best = tl.min(score, 0)
    while (left > 0) & (best < INFINITY) & (spent + best <= room):
        at = tl.min(tl.where(score == best, i, BLOCK), 0)
        taken = tl.where(i == at, 1, taken).to(tl.uint8)
        score = tl.where(tl.abs(i - at) <= spacing, INFINITY, score)
        spent += best
        left -= 1
        best = tl.min(score, 0)
    tl.store(chosen + place, taken, inside)
