"""The Triton kernels of `fused.py`, which explains them; importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _residual(z, lower, upper):
    above, below = z - upper, lower - z
    return tl.where(above > 0, above, 0.0) - tl.where(below > 0, below, 0.0)


@triton.jit
def _largest(r, z, weights):
    """The largest |r| times its weight of each sample; infinite where z is not a number, which no comparison shows."""
    worst = tl.max(tl.abs(r) * weights, 1)
    broken = tl.max((z != z).to(tl.int32), 1) > 0
    return tl.where(broken, float("inf"), worst)


@triton.jit
def _times(
    r, matrix, scratch, samples, columns, inside, rows, stride_in, stride_out,
    PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """R M for the samples of this program, in chunks; then r goes through memory, since registers cannot be sliced."""
    if CHUNK < PADDED:
        tl.debug_barrier()
        tl.store(scratch + samples[:, None] * rows + columns[None, :], r, mask=inside)
        tl.debug_barrier()
    total = tl.zeros_like(r)
    for first in tl.static_range(0, PADDED, CHUNK):
        part = first + tl.arange(0, CHUNK)
        square = (part[:, None] < rows) & (columns[None, :] < rows)
        block = tl.load(matrix + part[:, None] * stride_in + columns[None, :] * stride_out, mask=square, other=0.0)
        if CHUNK < PADDED:
            mask = _both(inside, part, rows)
            some = tl.load(scratch + samples[:, None] * rows + part[None, :], mask=mask, other=0.0)
        else:
            some = r
        total += tl.dot(some, block, input_precision="ieee", out_dtype=r.dtype)
    return total


@triton.jit
def _both(inside, part, rows):
    """Samples that there are, and rows of a chunk that there are."""
    there = tl.max(inside.to(tl.int32), 1) > 0
    return there[:, None] & (part[None, :] < rows)


@triton.jit
def forward(
    position, lower, upper, transfers, strictness, finite, scratch, codes, status, steps,
    batch, rows, count, max_steps, first_tol, tol,
    RECORD: tl.constexpr, PADDED: tl.constexpr, SAMPLES: tl.constexpr, CHUNK: tl.constexpr,
    CONVERGED: tl.constexpr, GOING: tl.constexpr, NONFINITE: tl.constexpr,
):  # fmt: skip
    """All steps of some samples."""
    samples = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    columns = tl.arange(0, PADDED)
    there = samples < batch
    inside = there[:, None] & (columns[None, :] < rows)
    place = samples[:, None] * rows + columns[None, :]
    z = tl.load(position + place, mask=inside, other=0.0)
    low = tl.load(lower + place, mask=inside, other=0.0)
    high = tl.load(upper + place, mask=inside, other=0.0)
    weights = tl.load(strictness + columns, mask=columns < rows, other=0.0)[None, :]
    sound = tl.load(finite + samples, mask=there, other=0) != 0
    pinned = low == high
    r = _residual(z, low, high)
    worst = _largest(r, z, 1.0)
    state = tl.where(worst <= first_tol, CONVERGED, GOING)
    state = tl.where(sound & (worst < float("inf")), state, NONFINITE)
    state = tl.where(there, state, CONVERGED)
    taken = tl.zeros((SAMPLES,), tl.int64)
    k = 0
    while (k < max_steps) & (tl.max((state == GOING).to(tl.int32), 0) > 0):
        going = state == GOING
        matrix = transfers + tl.minimum(k, count - 1).to(tl.int64) * rows * rows
        trial = z - _times(r, matrix, scratch, samples, columns, inside, rows, rows, 1, PADDED, CHUNK)
        after = _residual(trial, low, high)
        worst = _largest(after, trial, weights)
        moved = going & (worst < float("inf"))
        if RECORD:
            code = tl.where(r < 0, 2, tl.where((r != 0) | pinned, 1, 0))
            code = tl.where(moved[:, None], code, 0).to(tl.int8)
            offset = (k * batch).to(tl.int64) * rows
            tl.store(codes + offset + place, code, mask=inside & going[:, None])
        taken += going.to(tl.int64)
        settled = tl.where(worst <= tol, CONVERGED, GOING)
        state = tl.where(going, tl.where(moved, settled, NONFINITE), state)
        z = tl.where(moved[:, None], trial, z)
        r = tl.where(moved[:, None], after, r)
        k += 1
    tl.store(position + place, z, mask=inside)
    tl.store(status + samples, state.to(tl.int64), mask=there)
    tl.store(steps + samples, taken, mask=there)


@triton.jit
def backward(
    cotangent, codes, steps, transfers, scratch, to_lower, to_upper, batch, rows, count,
    BOUNDS: tl.constexpr, PADDED: tl.constexpr, SAMPLES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """All steps of some samples, from the last to the first."""
    samples = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    columns = tl.arange(0, PADDED)
    there = samples < batch
    inside = there[:, None] & (columns[None, :] < rows)
    place = samples[:, None] * rows + columns[None, :]
    b = tl.load(cotangent + place, mask=inside, other=0.0)
    taken = tl.load(steps + samples, mask=there, other=0)
    lower, upper = tl.zeros_like(b), tl.zeros_like(b)
    k = tl.max(taken, 0) - 1
    while k >= 0:
        matrix = transfers + tl.minimum(k, count - 1) * rows * rows
        product = _times(b, matrix, scratch, samples, columns, inside, rows, 1, rows, PADDED, CHUNK)
        code = tl.load(codes + k * batch * rows + place, mask=inside & (k < taken)[:, None], other=0)
        q = tl.where(code != 0, product, 0.0)
        b -= q
        if BOUNDS:
            lower += tl.where(code == 2, q, 0.0)
            upper += tl.where(code == 1, q, 0.0)
        k -= 1
    tl.store(cotangent + place, b, mask=inside)
    if BOUNDS:
        tl.store(to_lower + place, lower, mask=inside)
        tl.store(to_upper + place, upper, mask=inside)


@triton.jit
def settle(
    trial, position, residual, lower, upper, strictness, finite, codes, status, steps, rows, limit,
    FIRST: tl.constexpr, RECORD: tl.constexpr, BLOCK: tl.constexpr,
    CONVERGED: tl.constexpr, GOING: tl.constexpr, NONFINITE: tl.constexpr,
):  # fmt: skip
    """One sample after a step to `trial`: its status, and, if it moves, its new position and residual."""
    sample = tl.program_id(0)
    start = sample.to(tl.int64) * rows
    worst = tl.zeros((BLOCK,), trial.dtype.element_ty)
    first = 0
    while first < rows:
        columns = first + tl.arange(0, BLOCK)
        inside = columns < rows
        z = tl.load(trial + start + columns, mask=inside, other=0.0)
        low = tl.load(lower + start + columns, mask=inside, other=0.0)
        high = tl.load(upper + start + columns, mask=inside, other=0.0)
        r = tl.abs(_residual(z, low, high))
        if not FIRST:
            r *= tl.load(strictness + columns, mask=inside, other=0.0)
        worst = tl.maximum(worst, tl.where(z != z, float("inf"), r))
        first += BLOCK
    most = tl.max(worst, 0)
    state = tl.where(most <= limit, CONVERGED, GOING)
    if FIRST:
        sound = tl.load(finite + sample) != 0
        tl.store(status + sample, tl.where(sound & (most < float("inf")), state, NONFINITE).to(tl.int64))
        tl.store(steps + sample, 0)
        moved = True
    else:
        before = tl.load(status + sample)
        going = before == GOING
        moved = going & (most < float("inf"))
        tl.store(status + sample, tl.where(going, tl.where(moved, state, NONFINITE), before))
        tl.store(steps + sample, tl.load(steps + sample) + going.to(tl.int64))
    first = 0
    while first < rows:
        columns = first + tl.arange(0, BLOCK)
        inside = columns < rows
        low = tl.load(lower + start + columns, mask=inside, other=0.0)
        high = tl.load(upper + start + columns, mask=inside, other=0.0)
        z = tl.load(trial + start + columns, mask=inside, other=0.0)
        if RECORD and not FIRST:
            r = tl.load(residual + start + columns, mask=inside, other=0.0)
            code = tl.where(r < 0, 2, tl.where((r != 0) | (low == high), 1, 0))
            tl.store(codes + start + columns, tl.where(moved, code, 0).to(tl.int8), mask=inside)
        tl.store(position + start + columns, z, mask=inside & moved)
        tl.store(residual + start + columns, _residual(z, low, high), mask=inside & moved)
        first += BLOCK


@triton.jit
def pull(cotangent, product, codes, to_lower, to_upper, size, BOUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """One step back: the violated rows of the product are taken from the cotangent, and given to the bounds."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    code = tl.load(codes + place, mask=inside, other=0)
    q = tl.where(code != 0, tl.load(product + place, mask=inside, other=0.0), 0.0)
    tl.store(cotangent + place, tl.load(cotangent + place, mask=inside, other=0.0) - q, mask=inside)
    if BOUNDS:
        lower = tl.load(to_lower + place, mask=inside, other=0.0) + tl.where(code == 2, q, 0.0)
        upper = tl.load(to_upper + place, mask=inside, other=0.0) + tl.where(code == 1, q, 0.0)
        tl.store(to_lower + place, lower, mask=inside)
        tl.store(to_upper + place, upper, mask=inside)
