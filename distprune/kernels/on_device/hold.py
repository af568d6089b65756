"""Zeros that are held while an optimizer steps: a weight is held where its bits are those of +0.0."""

import triton
import triton.language as tl

from distprune.kernels.on_device.tiles import NUM_COLUMNS, NUMEL, OUT, START, TENSOR, VALUES, add, in_tile, load, store

# Columns of ``totals``, by tensor: places of the mask that changed; held, where it is True; whether there were too few.
CHANGED, HELD, TOO_FEW = (tl.constexpr(i) for i in range(3))


@triton.jit
def count(segments, firsts, counts, FLOATS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
          KIND: tl.constexpr):  # fmt: skip
    """Add to ``counts`` (tensors) how many are zero, also -0.0 of ``FLOATS``; ``MASKED``: where the mask is True."""
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    for i in range(tl.load(firsts + program), tl.load(firsts + program + 1)):
        segment = segments + i * NUM_COLUMNS
        numel, num_zeros = tl.load(segment + NUMEL), tl.zeros([BLOCK], tl.int32)
        for start in range(0, numel, BLOCK):
            valid = in_tile(lanes, start, numel, BLOCK, KIND.aligned)
            words = load(tl.load(segment + VALUES), start, lanes, valid, KIND.dtype, KIND.aligned)
            is_zero = valid & ((words << 1 if FLOATS else words) == 0)
            if MASKED:
                is_zero &= load(tl.load(segment + OUT), start, lanes, valid, tl.int8, KIND.aligned) != 0
            num_zeros += is_zero.to(tl.int32)
        add(counts + tl.load(segment + TENSOR), num_zeros)


@triton.jit
def read_held(segments, firsts, counts, least, totals, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Write into the masks which weights are held, and what changed into ``totals`` (tensors, 3).

    Of a tensor with fewer than ``least`` zeros, of those counted, the mask stays as it is.
    """
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    for i in range(tl.load(firsts + program), tl.load(firsts + program + 1)):
        segment = segments + i * NUM_COLUMNS
        numel, tensor = tl.load(segment + NUMEL), tl.load(segment + TENSOR)
        too_few = tl.load(counts + tensor) < tl.load(least + tensor)
        num_held, num_changed = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        for start in range(0, numel, BLOCK):
            valid = in_tile(lanes, start, numel, BLOCK, KIND.aligned)
            before = load(tl.load(segment + OUT), start, lanes, valid, tl.int8, KIND.aligned) != 0
            is_held = load(tl.load(segment + VALUES), start, lanes, valid, KIND.dtype, KIND.aligned) == 0
            is_held = tl.where(too_few, before, is_held)
            num_changed += (valid & (is_held != before)).to(tl.int32)
            num_held += (valid & is_held).to(tl.int32)
            store(tl.load(segment + OUT), start, lanes, is_held.to(tl.int8), valid, tl.int8, KIND.aligned)
        add(totals + tensor * 3 + CHANGED, num_changed)
        add(totals + tensor * 3 + HELD, num_held)
        if tl.load(segment + START) == 0:
            tl.store(totals + tensor * 3 + TOO_FEW, too_few.to(tl.int64))


@triton.jit
def mask(segments, firsts, WHERE: tl.constexpr, SIGNS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Write +0.0 where the mask is ``WHERE``; ``SIGNS`` 1: and -0.0 where it is not, and the number has become +0.0.

    ``SIGNS`` -1: write +0.0 over every -0.0, and read no mask. Where what is held is True, as a rule nothing changes
    (after a step, and of gradients that were clipped): only what does is stored.
    """
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    for i in range(tl.load(firsts + program), tl.load(firsts + program + 1)):
        segment = segments + i * NUM_COLUMNS
        numel = tl.load(segment + NUMEL)
        for start in range(0, numel, BLOCK):
            valid = in_tile(lanes, start, numel, BLOCK, KIND.aligned)
            words = load(tl.load(segment + VALUES), start, lanes, valid, KIND.dtype, KIND.aligned)
            if SIGNS < 0:
                goes = words << 1 == 0
            else:
                goes = (load(tl.load(segment + OUT), start, lanes, valid, tl.int8, KIND.aligned) != 0) == WHERE
            negative: tl.constexpr = -(1 << (KIND.dtype.primitive_bitwidth - 1))
            new = tl.where(goes, 0, tl.where(words == 0, negative, words) if SIGNS > 0 else words)
            changes = valid & (new != words) if WHERE or SIGNS < 0 else valid
            store(tl.load(segment + VALUES), start, lanes, new, changes, KIND.dtype, KIND.aligned)
