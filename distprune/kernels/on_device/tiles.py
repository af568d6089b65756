"""What all kernels read: segments of tensors, tile by tile, as keys.

Nouns: a *key* is an int32 that sorts as the score does; NaN has one above ``last_key``. A *competition* is what is
ranked together. A *position* is the place of an element in its competition, over all ranks: that of the member's first,
and the flat index. A *segment* is a stretch of one tensor, of one program. A *run* is local elements whose flat indices
follow each other; the runs of a segment are as long as each other, and equally far apart.
"""

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
def write(segment, start, lanes, goes, valid, WRITES_MASK: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Write a mask of what stays, or +0.0 where an element ``goes``."""
    if WRITES_MASK:
        store(tl.load(segment + OUT), start, lanes, (~goes).to(tl.int8) & 1, valid, tl.int8, ALIGNED)
    else:
        values = load(tl.load(segment + VALUES), start, lanes, valid, DTYPE, ALIGNED)
        store(tl.load(segment + VALUES), start, lanes, tl.where(goes, 0.0, values), valid, DTYPE, ALIGNED)


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
def flat_index(segment, start, lanes, CONTIGUOUS: tl.constexpr):
    """Return the flat indices, in the whole tensor, of elements of a segment."""
    local, first = tl.load(segment + START) + start + lanes, tl.load(segment + FLAT)
    if CONTIGUOUS:
        return first + local
    run = tl.load(segment + RUN)
    return first + local // run * tl.load(segment + STRIDE) + local % run


@triton.jit
def hashed(segment, start, lanes, CONTIGUOUS: tl.constexpr):
    """Return what ``scores/random.py`` makes of flat indices, int32."""
    if CONTIGUOUS:  # one 64-bit number a tile
        begin = flat_index(segment, start, 0, CONTIGUOUS)
        low = begin.to(tl.uint32) + lanes.to(tl.uint32)
        mixed = low + (begin >> 32).to(tl.uint32) * 0x9E3779B9
        mixed += tl.where(low < begin.to(tl.uint32), 0x9E3779B9, 0).to(tl.uint32)  # past 2**32 within the tile
    else:
        flat = flat_index(segment, start, lanes, CONTIGUOUS)
        mixed = flat.to(tl.uint32) + (flat >> 32).to(tl.uint32) * 0x9E3779B9
    mixed += tl.load(segment + FIRST).to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x21F0AAAD
    mixed = (mixed ^ (mixed >> 15)) + tl.load(segment + SECOND).to(tl.uint32)
    mixed *= 0xD35A2D97
    mixed ^= mixed >> 15
    return (mixed & 0x7FFFFFFF).to(tl.int32, bitcast=True)


@triton.jit
def keys_of(segment, start, lanes, valid, last_key, SCORE: tl.constexpr, MARKED: tl.constexpr, DTYPE: tl.constexpr,
            GRAD: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr, CONTIGUOUS: tl.constexpr,
            WEIGHTS_TOO: tl.constexpr = False):  # fmt: skip
    """Return keys, and which are NaN; ``WEIGHTS_TOO``: or of NaN weights.

    ``WIDE``: those of float32, in which other dtypes compete.
    What is ``MARKED`` has -1, but beside scores with a sign one less than the lowest; of magnitudes a zero has 0 in
    any case.
    """
    GONE: tl.constexpr = -0x7F800001 if SCORE == VALUE else -1
    values = load(tl.load(segment + VALUES), start, lanes, valid, DTYPE, ALIGNED)
    if SCORE == KEYS:
        keys = values.to(tl.int32)
        is_nan = valid & (keys > last_key)
    else:
        bits, infinity = magnitude(values)
        is_nan = valid & (bits > infinity) & (WEIGHTS_TOO or SCORE == MAGNITUDE)
        if SCORE == MAGNITUDE:
            keys = magnitude(values.to(tl.float32))[0] if WIDE else bits
        else:
            if SCORE == RANDOM:
                keys = hashed(segment, start, lanes, CONTIGUOUS)
            else:
                scores = load(tl.load(segment + OTHER), start, lanes, valid, GRAD, ALIGNED).to(tl.float32)
                keys, infinity = magnitude(values.to(tl.float32) * scores if SCORE == TAYLOR else scores)
                is_nan |= valid & (keys > infinity)
                if SCORE == VALUE:
                    keys = tl.where(scores < 0, -keys, keys)
            if MARKED == ZEROS:
                keys, is_nan = tl.where(bits == 0, GONE, keys), is_nan & (bits != 0)
    if (MARKED == MASKED) | (MARKED == LEFT):
        is_marked = load(tl.load(segment + MASK), start, lanes, valid, tl.int8, ALIGNED) != 0
        keys = tl.where(is_marked, keys, GONE) if MARKED == MASKED else tl.where(is_marked, 0x7FFFFFFF, keys)
        is_nan &= is_marked == (MARKED == MASKED)
    return keys, is_nan


@triton.jit
def add(pointer, flags):
    tl.atomic_add(pointer, tl.sum(flags.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def nans_of(segment, totals, last_key, BLOCK: tl.constexpr, SCORE: tl.constexpr, MARKED: tl.constexpr,
            DTYPE: tl.constexpr, GRAD: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
            CONTIGUOUS: tl.constexpr, WEIGHTS_TOO: tl.constexpr):  # fmt: skip
    """Add to ``totals`` (tensors, 3) how many elements of a segment are NaN."""
    lanes, numel, nans = tl.arange(0, BLOCK), tl.load(segment + NUMEL), tl.zeros([BLOCK], tl.int32)
    for start in range(0, numel, BLOCK):
        valid = in_tile(lanes, start, numel, BLOCK, ALIGNED)
        nans += keys_of(segment, start, lanes, valid, last_key, SCORE, MARKED, DTYPE, GRAD, WIDE, ALIGNED,
                        CONTIGUOUS, WEIGHTS_TOO)[1].to(tl.int32)  # fmt: skip
    add(totals + tl.load(segment + TENSOR) * 3 + 2, nans)
