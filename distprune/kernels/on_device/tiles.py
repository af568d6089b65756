"""What all kernels read: segments of tensors, tile by tile, as keys.

Nouns: a *key* is an int32 that sorts as the score does; NaN has one above ``last_key``. A *competition* is what is
ranked together. A *position* is the place of an element in its competition, over all ranks: that of the member's first,
and the flat index. A *segment* is a stretch of one tensor, of one program. A *run* is local elements whose flat indices
follow each other; the runs of a segment are as long as each other, and equally far apart.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# |w|, |g|, |w g|, a hash, given keys, given scores with a sign; those without are as gradients.
MAGNITUDE, GRADIENT, TAYLOR, RANDOM, KEYS, VALUE = (tl.constexpr(i) for i in range(6))

# What was pruned before has the lowest key: nothing, zero weights, or where a mask is False. ``LEFT``: where a mask is
# True is what was not dropped, which has the highest key.
UNMARKED, ZEROS, MASKED, LEFT = (tl.constexpr(i) for i in range(4))

# Columns of a segment, int64; pointers first. ``OTHER``: gradient or score. ``ZEROTH``: the position of flat index 0.
VALUES, OTHER, OUT, MASK, NUMEL, TENSOR, COMPETITION, ZEROTH, FLAT, START, RUN, STRIDE, FIRST, SECOND, OWNED = (
    tl.constexpr(i) for i in range(15)
)
NUM_COLUMNS = tl.constexpr(15)


class Kind(NamedTuple):
    """What all segments of a launch have in common; kernels are compiled for it.

    ``aligned``: to 16 bytes, in multiples of 16 elements. ``contiguous``: each segment is one run. ``wide``: keys are
    those of float32, in which other dtypes compete.
    """

    dtype: tl.dtype
    other: tl.dtype  # of gradients, or scores
    aligned: bool
    contiguous: bool
    score: int = 0
    marked: int = 0
    wide: bool = False
    checks_weights: bool = False  # a weight that is NaN counts as one, also where scores are not the weights


@triton.jit
def load(address, start, lanes, valid, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + start + lanes, mask=valid, other=0)


@triton.jit
def store(address, start, lanes, numbers, valid, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    tl.store(pointer + start + lanes, numbers.to(DTYPE), mask=valid)


@triton.jit
def write(segment, start, lanes, goes, valid, WRITES_MASK: tl.constexpr, KIND: tl.constexpr):
    """Write a mask of what stays, or +0.0 where an element ``goes``."""
    if WRITES_MASK:
        store(tl.load(segment + OUT), start, lanes, (~goes).to(tl.int8) & 1, valid, tl.int8, KIND.aligned)
    else:
        values = load(tl.load(segment + VALUES), start, lanes, valid, KIND.dtype, KIND.aligned)
        store(tl.load(segment + VALUES), start, lanes, tl.where(goes, 0.0, values), valid, KIND.dtype, KIND.aligned)


@triton.jit
def in_tile(lanes, start, numel, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return which lanes have an element; in steps of 16, if all is aligned, so that loads are vectors."""
    num = tl.minimum(numel - start, BLOCK).to(tl.int32)
    if ALIGNED:
        num = tl.multiple_of(num, 16)
    return lanes < num


@triton.jit
def magnitude(values):
    """Return the bits without the sign, int32, and those of infinity: above are NaNs."""
    if values.dtype == tl.float32:
        bits, infinity = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000
    else:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        infinity = 0x7C00 if values.dtype == tl.float16 else 0x7F80
    return bits, infinity


@triton.jit
def flat_index(segment, start, lanes, KIND: tl.constexpr):
    """Return the flat indices, in the whole tensor, of elements of a segment."""
    local, first = tl.load(segment + START) + start + lanes, tl.load(segment + FLAT)
    if KIND.contiguous:
        return first + local
    run = tl.load(segment + RUN)
    return first + local // run * tl.load(segment + STRIDE) + local % run


@triton.jit
def hashed(segment, start, lanes, KIND: tl.constexpr):
    """Return what ``scores/random.py`` makes of flat indices, int32."""
    if KIND.contiguous:  # one 64-bit number a tile
        begin = flat_index(segment, start, 0, KIND)
        low = begin.to(tl.uint32) + lanes.to(tl.uint32)
        mixed = low + (begin >> 32).to(tl.uint32) * 0x9E3779B9
        mixed += tl.where(low < begin.to(tl.uint32), 0x9E3779B9, 0).to(tl.uint32)  # past 2**32 within the tile
    else:
        flat = flat_index(segment, start, lanes, KIND)
        mixed = flat.to(tl.uint32) + (flat >> 32).to(tl.uint32) * 0x9E3779B9
    mixed += tl.load(segment + FIRST).to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x21F0AAAD
    mixed = (mixed ^ (mixed >> 15)) + tl.load(segment + SECOND).to(tl.uint32)
    mixed *= 0xD35A2D97
    mixed ^= mixed >> 15
    return (mixed & 0x7FFFFFFF).to(tl.int32, bitcast=True)


@triton.jit
def keys_of(segment, start, lanes, valid, last_key, KIND: tl.constexpr):
    """Return keys, and which are NaN.

    What is ``MARKED`` has -1, but beside scores with a sign one less than the lowest; of magnitudes a zero has 0 in
    any case.
    """
    GONE: tl.constexpr = -0x7F800001 if KIND.score == VALUE else -1
    values = load(tl.load(segment + VALUES), start, lanes, valid, KIND.dtype, KIND.aligned)
    if KIND.score == KEYS:
        keys = values.to(tl.int32)
        is_nan = valid & (keys > last_key)
    else:
        bits, infinity = magnitude(values)
        is_nan = valid & (bits > infinity) & (KIND.checks_weights or KIND.score == MAGNITUDE)
        if KIND.score == MAGNITUDE:
            keys = magnitude(values.to(tl.float32))[0] if KIND.wide else bits
        else:
            if KIND.score == RANDOM:
                keys = hashed(segment, start, lanes, KIND)
            else:
                scores = load(tl.load(segment + OTHER), start, lanes, valid, KIND.other, KIND.aligned).to(tl.float32)
                keys, infinity = magnitude(values.to(tl.float32) * scores if KIND.score == TAYLOR else scores)
                is_nan |= valid & (keys > infinity)
                if KIND.score == VALUE:
                    keys = tl.where(scores < 0, -keys, keys)
            if KIND.marked == ZEROS:
                keys, is_nan = tl.where(bits == 0, GONE, keys), is_nan & (bits != 0)
    if (KIND.marked == MASKED) | (KIND.marked == LEFT):
        is_marked = load(tl.load(segment + MASK), start, lanes, valid, tl.int8, KIND.aligned) != 0
        keys = tl.where(is_marked, keys, GONE) if KIND.marked == MASKED else tl.where(is_marked, 0x7FFFFFFF, keys)
        is_nan &= is_marked == (KIND.marked == MASKED)
    return keys, is_nan


@triton.jit
def add(pointer, flags):
    tl.atomic_add(pointer, tl.sum(flags.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def nans_of(segment, totals, last_key, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Add to ``totals`` (tensors, 3) how many elements of a segment are NaN."""
    lanes, numel, nans = tl.arange(0, BLOCK), tl.load(segment + NUMEL), tl.zeros([BLOCK], tl.int32)
    for start in range(0, numel, BLOCK):
        valid = in_tile(lanes, start, numel, BLOCK, KIND.aligned)
        nans += keys_of(segment, start, lanes, valid, last_key, KIND)[1].to(tl.int32)
    add(totals + tl.load(segment + TENSOR) * 3 + 2, nans)
