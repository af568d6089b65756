"""Groups and rows, each decided by itself. ``totals`` (tensors, 3): pruned, gone before, NaN.

Of what stays a mask is written, or into the weights +0.0 where they do not. If ``num_nans`` is not 0, nothing is.
"""

import triton
import triton.language as tl

from distprune.kernels.on_device.tiles import KEYS, NUM_COLUMNS, NUMEL, TENSOR, add, in_tile, keys_of, nans_of, write

LAST_KEY = tl.constexpr(0x7FFFFFFF)  # of int32


@triton.jit(do_not_specialize=["last_key"])
def count_nans(segments, firsts, totals, last_key, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Count what is NaN of each tensor."""
    program = tl.program_id(0)
    for i in range(tl.load(firsts + program), tl.load(firsts + program + 1)):
        nans_of(segments + i * NUM_COLUMNS, totals, last_key, BLOCK, KIND)


@triton.jit(do_not_specialize=["gone", "last_key"])
def keep_n_of_m(segments, firsts, totals, num_nans, gone, last_key, N: tl.constexpr, M: tl.constexpr,
                GROUPS: tl.constexpr, WRITES_MASK: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Prune the ``M - N`` lowest of every ``M``, and what was gone."""
    PADDED: tl.constexpr = triton.next_power_of_2(M)
    program, column = tl.program_id(0), tl.arange(0, PADDED)[None, :]
    lanes = tl.arange(0, GROUPS)[:, None] * M + column
    end = tl.where(tl.load(num_nans) == 0, tl.load(firsts + program + 1), 0)
    for i in range(tl.load(firsts + program), end):
        segment = segments + i * NUM_COLUMNS
        numel = tl.load(segment + NUMEL)
        num_pruned = tl.zeros([GROUPS, PADDED], tl.int32)
        gone_and_nan = tl.zeros([GROUPS, PADDED], tl.int32)  # 16 bits each: a segment has fewer tiles
        for start in range(0, numel, GROUPS * M):
            valid = in_tile(lanes, start, numel, GROUPS * M, KIND.aligned)
            if PADDED > M:
                valid &= column < M
            keys, is_nan = keys_of(segment, start, lanes, valid, last_key, KIND)
            # Below what stands for those that went; given keys may be any int32.
            ranks, stays = keys.to(tl.int64) if KIND.score == KEYS else keys - 1, valid
            for _ in tl.static_range(M - N):
                lowest = tl.argmin(tl.where(stays, ranks, LAST_KEY + (KIND.score == KEYS)), axis=1)  # first of equals
                stays &= column != lowest[:, None]
            is_gone = valid & (keys == gone)
            goes = (valid & ~stays) | is_gone
            num_pruned += goes.to(tl.int32)
            gone_and_nan += is_gone.to(tl.int32) + ((is_nan & WRITES_MASK).to(tl.int32) << 16)
            write(segment, start, lanes, goes, valid, WRITES_MASK, KIND)
        add(totals + tl.load(segment + TENSOR) * 3, tl.sum(num_pruned, axis=1))
        add(totals + tl.load(segment + TENSOR) * 3 + 1, tl.sum(gone_and_nan & 0xFFFF, axis=1))
        add(totals + tl.load(segment + TENSOR) * 3 + 2, tl.sum(gone_and_nan >> 16, axis=1))


@triton.jit
def num_less(segment, row, keys, valid, least, step, last_key, num_in, IS_ONE: tl.constexpr, WIDTH: tl.constexpr,
             KIND: tl.constexpr):  # fmt: skip
    """Return how many keys of a row are less than ``least``, than a ``step`` more, and than two: 21 bits each."""
    nums, lanes = tl.zeros([], tl.int64), tl.arange(0, WIDTH)
    for start in range(0, num_in, WIDTH):
        if not IS_ONE:
            valid = in_tile(lanes, start, num_in, WIDTH, KIND.aligned)
            keys, _ = keys_of(segment, row + start, lanes, valid, last_key, KIND)
        are_less = (keys < least).to(tl.int64) + ((keys < least + step).to(tl.int64) << 21)
        are_less += (keys < least + 2 * step).to(tl.int64) << 42
        nums += tl.sum(tl.where(valid, are_less, 0), axis=0)
    return (nums & 0x1FFFFF).to(tl.int32), ((nums >> 21) & 0x1FFFFF).to(tl.int32), (nums >> 42).to(tl.int32)


@triton.jit(do_not_specialize=["gone", "last_key", "num_lowest"])
def keep_in_rows(segments, firsts, totals, num_nans, gone, last_key, num_in, num_lowest, IS_ONE: tl.constexpr,
                 WIDTH: tl.constexpr, BITS: tl.constexpr, WRITES_MASK: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Prune the ``num_lowest`` of every row of ``num_in``, and what was gone.

    The key of the last that goes, which has an odd number of ``BITS``, is found from the highest down. ``IS_ONE``: a
    row is one tile, and is read once.
    """
    program, lanes = tl.program_id(0), tl.arange(0, WIDTH)
    end = tl.where(tl.load(num_nans) == 0, tl.load(firsts + program + 1), 0)
    for i in range(tl.load(firsts + program), end):
        segment = segments + i * NUM_COLUMNS
        num_pruned, num_gone, num_nan = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for row in range(0, tl.load(segment + NUMEL), num_in):
            whole = in_tile(lanes, 0, num_in, WIDTH, KIND.aligned)
            keys, is_nan = keys_of(segment, row, lanes, whole, last_key, KIND)
            last = tl.zeros([], tl.int32)
            if KIND.score == KEYS:  # others are not negative, but for what is gone
                num_low, _, _ = num_less(segment, row, keys, whole, 0, 0, last_key, num_in, IS_ONE, WIDTH, KIND)
                last = tl.where(num_low >= num_lowest, -2147483648, 0).to(tl.int32)
            for shift in range(BITS - 1, -1, -2):  # two bits at a time, after the first
                step = tl.where(shift == BITS - 1, 0, 1 << shift).to(tl.int32)
                least = last + tl.where(shift == BITS - 1, 1 << (BITS - 1), step).to(tl.int32)
                one, two, three = num_less(
                    segment, row, keys, whole, least, step, last_key, num_in, IS_ONE, WIDTH, KIND
                )
                num = (one < num_lowest).to(tl.int32) + (two < num_lowest).to(tl.int32)
                num += (three < num_lowest).to(tl.int32)
                last = tl.where(shift == BITS - 1, tl.where(num > 0, least, last), last + num * step)
            num_low, _, _ = num_less(segment, row, keys, whole, last, 0, last_key, num_in, IS_ONE, WIDTH, KIND)
            num_ties = num_lowest - num_low
            for start in range(0, num_in, WIDTH):
                valid = in_tile(lanes, start, num_in, WIDTH, KIND.aligned)
                if not IS_ONE:
                    keys, is_nan = keys_of(segment, row + start, lanes, valid, last_key, KIND)
                ties = (valid & (keys == last)).to(tl.int32)
                is_gone = valid & (keys == gone)
                is_early = (ties != 0) & (tl.cumsum(ties, axis=0) <= num_ties)
                goes = (valid & (num_lowest > 0) & ((keys < last) | is_early)) | is_gone
                num_ties -= tl.sum(ties, axis=0)
                num_pruned += tl.sum(goes.to(tl.int32), axis=0)
                num_gone += tl.sum(is_gone.to(tl.int32), axis=0)
                if WRITES_MASK:  # else they were counted
                    num_nan += tl.sum(is_nan.to(tl.int32), axis=0)
                write(segment, row + start, lanes, goes, valid, WRITES_MASK, KIND)
        tl.atomic_add(totals + tl.load(segment + TENSOR) * 3, num_pruned.to(tl.int64), sem="relaxed")
        tl.atomic_add(totals + tl.load(segment + TENSOR) * 3 + 1, num_gone.to(tl.int64), sem="relaxed")
        tl.atomic_add(totals + tl.load(segment + TENSOR) * 3 + 2, num_nan.to(tl.int64), sem="relaxed")
