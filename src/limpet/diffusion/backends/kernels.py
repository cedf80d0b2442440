"""Triton kernels of the GPU backend: planning the rows, processing one row of logits, selection.

Float arguments of a kernel are float32, so float64 numbers are passed as integers with the same bits. Uniforms have the
bits of `rng.py`: Philox is computed where it is used and never stored."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from limpet.diffusion.rng import Purpose

COINS = tl.constexpr(int(Purpose.COINS))
TOKENS = tl.constexpr(int(Purpose.TOKENS))
INFINITY = tl.constexpr(float("inf"))
# Arguments that change at every step: do not specialise the kernel on their values.
SCALARS = ["seed", "step", "draw", "uniform", "fresh", "noise", "stay", "pull", "top_p", "beta"]


@triton.jit
def _number(bits):
    """The float64 with these bits."""
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _unit(high, low):
    """`rng.uniform53`."""
    return ((high >> 5).to(tl.int64) * 67108864 + (low >> 6).to(tl.int64)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _uniforms(seed, step, position, sample, purpose: tl.constexpr):
    """`CounterRNG.uniforms`."""
    c0 = position.to(tl.uint32)
    zero = c0 & 0
    a, b, c, d = tl.philox(seed, c0, zero + tl.cast(step, tl.uint32), zero + sample.to(tl.uint32), zero + purpose)
    return _unit(a, b), _unit(c, d)


@triton.jit(do_not_specialize=SCALARS)
def plan(
    tokens, revise, inspect, samples, needed, moved, top, deficit, gain, seeds,
    seed: tl.int64, step: tl.int64, fresh: tl.int64, noise: tl.int64, vocab, length, size,
    NOISY: tl.constexpr, GAIN: tl.constexpr, SEEDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark the positions that need a distribution, and write the outcome of all others."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    sample = tl.load(samples + i // length, inside, other=0)
    seed = tl.load(seeds + i // length, inside, other=0) if SEEDS else seed
    u, _ = _uniforms(seed, step, i % length, sample, COINS)
    free = tl.load(revise + i, inside, other=0) != 0
    reads = (u < _number(fresh)) & free
    inspected = tl.load(inspect + i, inside, other=0) != 0
    token = tl.load(tokens + i, inside, other=0)
    if NOISY:
        _, any = _uniforms(seed, step, i % length, sample, TOKENS)
        token = tl.where(free & (u >= _number(fresh)) & (u < _number(noise)), (any * vocab).to(tl.int64), token)
    tl.store(needed + i, (reads | inspected).to(tl.int32), inside)
    tl.store(moved + i, token, inside)
    tl.store(top + i, tl.zeros([BLOCK], tl.int64), inside)
    tl.store(deficit + i, tl.full([BLOCK], INFINITY, tl.float64), inside)
    if GAIN:
        tl.store(gain + i, tl.full([BLOCK], -INFINITY, tl.float64), inside)


@triton.jit
def pack(needed, count, index, nonfinite_at, message, size, BLOCK: tl.constexpr):
    """Pack the marked positions in order, and write their number and `nonfinite_at` to `message`.

    count: the inclusive cumulative sum of `needed`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(message, tl.load(count + size - 1).to(tl.int64))
        tl.store(message + 1, tl.load(nonfinite_at))
        tl.store(message + 2, tl.load(nonfinite_at + 1))
    inside = i < size
    marked = inside & (tl.load(needed + i, inside, other=0) != 0)
    tl.store(index + tl.load(count + i, inside, other=1) - 1, i, marked)


@triton.jit
def _logits(
    row, i, input_id, shift, beta, VOCAB: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr,
    EDGE: tl.constexpr = True,
):  # fmt: skip
    """Some logits of a row, converted like `backends.log_probs`: the evidence of `input_id` is removed from a posterior
    (READ & 1), then the temperature is applied (READ & 2; beta is its inverse). -inf beyond the end of the row."""
    if EDGE:
        x = tl.load(row + i, i < WIDTH, other=-INFINITY).to(FLOAT)
        x = tl.where(i < VOCAB, x, -INFINITY) if WIDTH > VOCAB else x
    else:
        x = tl.load(row + i).to(FLOAT)
    if READ & 1:
        x = tl.where(i == input_id, x - shift.to(FLOAT), x)
    if READ & 2:
        x = x * beta.to(FLOAT)
    return x


@triton.jit
def _larger(
    best, at, row, i, skip, input_id, shift, beta,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr, EDGE: tl.constexpr,
    GAIN: tl.constexpr,
):  # fmt: skip
    """Update each lane's largest logit and its index with one more block; with GAIN, the index `skip` is excluded."""
    x = _logits(row, i, input_id, shift, beta, VOCAB, WIDTH, READ, FLOAT, EDGE)
    if GAIN:
        x = tl.where(i == skip, -INFINITY, x)
    return tl.maximum(best, x), tl.where(x > best, i, at)


@triton.jit
def _heavier(
    mass, ahead, row, i, largest, z, at_z, input_id, shift, beta,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, NUCLEUS: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Update each lane's mass, and its mass of the tokens that rank before z, with one more block."""
    w = tl.exp(_logits(row, i, input_id, shift, beta, VOCAB, WIDTH, READ, FLOAT, EDGE) - largest)
    if NUCLEUS:
        ahead += tl.where((w > at_z) | ((w == at_z) & (i < z)), w, 0.0).to(tl.float64)
    return mass + w.to(tl.float64), ahead


@triton.jit
def _fits(mass, limit, PAPER: tl.constexpr):
    """`truncation._fits`: whether top-p keeps one more token after tokens of this mass."""
    if PAPER:
        return mass < limit
    else:
        return mass <= limit


@triton.jit
def _parted(
    mass, under, over, row, i, largest, middle, high, input_id, shift, beta,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr, INT: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Update each lane's mass above `middle` and the nearest weights on both sides with one more block."""
    w = tl.exp(_logits(row, i, input_id, shift, beta, VOCAB, WIDTH, READ, FLOAT, EDGE) - largest)
    bits = w.to(INT, bitcast=True)
    up = bits > middle
    mass += tl.where(up, w, 0.0).to(tl.float64)
    return mass, tl.maximum(under, tl.where(up, 0, bits)), tl.minimum(over, tl.where(up, bits, high))


@triton.jit
def _nucleus(
    row, largest, input_id, shift, beta, total, top_p, limit, PAPER: tl.constexpr,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr, INT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`truncation.nucleus`: (threshold, cut, mass). Kept are the weights above the threshold, and those equal to it
    with ids up to `cut`.

    Weights are compared as integers, by their bits, which have the order of non-negative floats. The threshold is the
    smallest weight above which the mass fits. Each pass halves the range and snaps it to weights that occur."""
    WHOLE: tl.constexpr = VOCAB // BLOCK * BLOCK
    lanes = tl.arange(0, BLOCK)
    # All weights up to this one have less mass than 1 - p together, so the threshold is above it.
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
                mass, under, over, row, start + lanes, largest, middle, high, input_id, shift, beta,
                VOCAB, WIDTH, READ, FLOAT, INT, False,
            )  # fmt: skip
        if WHOLE < VOCAB:
            mass, under, over = _parted(
                mass, under, over, row, WHOLE + lanes, largest, middle, high, input_id, shift, beta,
                VOCAB, WIDTH, READ, FLOAT, INT, True,
            )  # fmt: skip
        weight = tl.sum(mass, 0)
        if _fits(weight, limit, PAPER):
            high = tl.max(under, 0)
            above = weight
        else:
            low = tl.min(over, 0) - 1

    # How many tokens with exactly the threshold's weight fit. The comparisons correct a rounded quotient.
    w = high.to(FLOAT, bitcast=True).to(tl.float64)
    ties = tl.floor((limit - above) / w).to(tl.int64) + 1
    ties = tl.where((ties > 1) & (_fits(above + (ties - 1) * w, limit, PAPER) == 0), ties - 1, ties)
    ties = tl.where(_fits(above + ties * w, limit, PAPER), ties + 1, ties)
    counted = tl.full([], 0, tl.int64)
    cut = tl.zeros([], tl.int32) + VOCAB
    start = tl.full([], 0, tl.int32)
    while (start < VOCAB) & (counted < ties):
        i = start + lanes
        bits = tl.exp(_logits(row, i, input_id, shift, beta, VOCAB, WIDTH, READ, FLOAT) - largest).to(INT, bitcast=True)
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
    row, largest, input_id, shift, beta, threshold, cut, target,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, FLOAT: tl.constexpr, INT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`backends.inverse_cdf`: the first kept id whose cumulative weight exceeds the target."""
    lanes = tl.arange(0, BLOCK)
    before = tl.full([], 0.0, tl.float64)
    token = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)  # the result if rounding keeps every sum below the target
    start = tl.full([], 0, tl.int32)
    while (start < VOCAB) & (token < 0):
        i = start + lanes
        w = tl.exp(_logits(row, i, input_id, shift, beta, VOCAB, WIDTH, READ, FLOAT) - largest)
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
    logits, stride, index, tokens, inputs, shifts, against, revise, inspect, samples, moved, top, deficit, gain,
    nonfinite_at, seeds, seed: tl.int64, step: tl.int64, draw: tl.int64, uniform: tl.int64, fresh: tl.int64,
    stay: tl.int64, pull: tl.int64, top_p: tl.int64, beta: tl.int64, length,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, NUCLEUS: tl.constexpr, PAPER: tl.constexpr, READ: tl.constexpr,
    GAIN: tl.constexpr, FRESH: tl.constexpr, SEEDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of logits for each program: argmax, deficit and gain where the position is inspected, and the next token
    where the route reads the distribution. The row is read twice. A draw reads it up to the drawn token. The nucleus is
    computed only if the draw or coin two depends on it."""
    FLOAT: tl.constexpr = tl.float64 if logits.dtype.element_ty == tl.float64 else tl.float32
    INT: tl.constexpr = tl.int64 if logits.dtype.element_ty == tl.float64 else tl.int32
    WHOLE: tl.constexpr = VOCAB // BLOCK * BLOCK  # the ids of full blocks, which need no mask
    row = logits + tl.program_id(0).to(tl.int64) * stride
    place = tl.load(index + tl.program_id(0))
    z = tl.load(tokens + place)
    skip = tl.load(against + place) if GAIN else z
    input_id = tl.load(inputs + place) if READ & 1 else z
    beta = _number(beta)
    shift = tl.load(shifts + place // length) if READ & 1 else beta
    lanes = tl.arange(0, BLOCK)

    best = tl.full([BLOCK], -INFINITY, FLOAT)
    at = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, WHOLE, BLOCK, loop_unroll_factor=8):
        best, at = _larger(
            best, at, row, start + lanes, skip, input_id, shift, beta, VOCAB, WIDTH, READ, FLOAT, False, GAIN
        )
    if WHOLE < VOCAB:
        best, at = _larger(
            best, at, row, WHOLE + lanes, skip, input_id, shift, beta, VOCAB, WIDTH, READ, FLOAT, True, GAIN
        )
    largest = tl.max(best, 0)
    first_best = tl.min(tl.where(best == largest, at, VOCAB), 0)
    if GAIN:  # `largest` does not include `skip` yet
        own = _logits(row, skip, input_id, shift, beta, VOCAB, WIDTH, READ, FLOAT)
        if tl.load(inspect + place) != 0:
            tl.store(gain + place, (largest - own).to(tl.float64))
        first_best = tl.where((own > largest) | ((own == largest) & (skip < first_best)), skip.to(tl.int32), first_best)
        largest = tl.maximum(largest, own)

    at_z = tl.exp(_logits(row, z, input_id, shift, beta, VOCAB, WIDTH, READ, FLOAT) - largest)
    mass = tl.zeros([BLOCK], tl.float64)
    ahead = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(
        0, WHOLE, BLOCK, loop_unroll_factor=8
    ):  # backwards: the blocks read last are still in the cache
        mass, ahead = _heavier(
            mass, ahead, row, WHOLE - BLOCK - start + lanes, largest, z, at_z, input_id, shift, beta,
            VOCAB, WIDTH, NUCLEUS, READ, FLOAT, False,
        )  # fmt: skip
    if WHOLE < VOCAB:
        mass, ahead = _heavier(
            mass, ahead, row, WHOLE + lanes, largest, z, at_z, input_id, shift, beta,
            VOCAB, WIDTH, NUCLEUS, READ, FLOAT, True,
        )  # fmt: skip
    total = tl.sum(mass, 0)
    if total != total:  # non-finite logits: any such position will do for the error
        tl.store(nonfinite_at, step)
        tl.store(nonfinite_at + 1, place.to(tl.int64))

    if tl.load(inspect + place) != 0:
        tl.store(top + place, first_best.to(tl.int64))
        tl.store(deficit + place, (total - 1) / total)

    position = place % length
    sample = tl.load(samples + place // length)
    seed = tl.load(seeds + place // length) if SEEDS else seed
    first, second = _uniforms(seed, step, position, sample, COINS)
    if (first < _number(fresh)) & (tl.load(revise + place) != 0):
        is_fresh = first >= _number(uniform) if FRESH else False
        draws = (first < _number(draw)) | is_fresh
        stay_weight = _number(stay)
        pull_weight = _number(pull)
        threshold = tl.full([], -1, INT)
        cut = tl.zeros([], tl.int32) + VOCAB
        prob_at_z = at_z.to(tl.float64) / total
        kept = second * (stay_weight + pull_weight * prob_at_z) < stay_weight
        if NUCLEUS:
            limit = _number(top_p) * total
            inside = (tl.sum(ahead, 0) == 0) | _fits(tl.sum(ahead, 0), limit, PAPER)
            # The mass of the nucleus is between `limit` and `total`. Mostly coin two has the same result for both.
            prob_at_z = tl.where(inside, prob_at_z, 0.0)
            most = second * (stay_weight + pull_weight * prob_at_z * (1 - 1e-12)) < stay_weight
            least = second * (stay_weight + pull_weight * prob_at_z * (total / limit) * (1 + 1e-12)) < stay_weight
            kept = least
            if ((most | is_fresh) & draws) | (most != least):
                threshold, cut, total = _nucleus(
                    row, largest, input_id, shift, beta, total, _number(top_p), limit,
                    PAPER, VOCAB, WIDTH, READ, FLOAT, INT, BLOCK,
                )  # fmt: skip
                prob_at_z = tl.where(inside, at_z.to(tl.float64) / total, 0.0)
                kept = second * (stay_weight + pull_weight * prob_at_z) < stay_weight
        if kept | is_fresh:
            for_draw, for_uniform = _uniforms(seed, step, position, sample, TOKENS)
            token = (for_uniform * VOCAB).to(tl.int64)
            if draws:
                token = _draw(
                    row, largest, input_id, shift, beta, threshold, cut, for_draw * total,
                    VOCAB, WIDTH, READ, FLOAT, INT, BLOCK,
                ).to(tl.int64)  # fmt: skip
            tl.store(moved + place, token)


@triton.jit
def select(deficit, eligible, count, budget, chosen, length, spacing, BLOCK: tl.constexpr):
    """One sample for each program: accept the smallest deficit and exclude its neighbours, up to count and budget."""
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
