"""The k lowest of each competition: a sample, counts within a range, the next range, and what goes.

A sample says between which two keys the k-th lies, for all but certain. A pass over all elements counts those below
the range, and puts those within into bins, by key and, if there are bins to spare, by position; the bin that holds the
k-th is the next range, until one element is left. So ties need no care of their own. (A radix digit needs atomics in
shared memory, which Triton lacks: ``tl.histogram`` takes 20 times as long as the read.) What is gone is always below.
"""

import triton
import triton.language as tl

from distprune.kernels.on_device.tiles import (
    COMPETITION,
    FLAT,
    KEYS,
    NUM_COLUMNS,
    NUMEL,
    OWNED,
    RUN,
    START,
    STRIDE,
    TENSOR,
    VALUE,
    ZEROTH,
    add,
    flat_index,
    in_tile,
    keys_of,
    nans_of,
    write,
)

# Columns of a competition's state, int64: the inclusive range that holds the k-th lowest, and which of it that is.
K, KEY_LOW, KEY_HIGH, LOW, HIGH, NUM_POSITIONS, LEFT = (tl.constexpr(i) for i in range(7))  # LOW, HIGH: of positions
NUM_STATES = tl.constexpr(7)
LAST_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def bin_layout(key_low, key_high, low, high, BITS: tl.constexpr):
    """Return ``down``, ``up`` and ``by``: the bin is (key - key_low >> down << up) + (position - low >> by)."""
    down, up, by = 0, BITS, 0
    while (key_high - key_low) >> down >> BITS != 0:
        down += 1
    while (key_high - key_low) >> down >> (BITS - up) != 0:
        up -= 1
    while (high - low) >> by >> up != 0:
        by += 1
    return down, tl.where(by > 30, 0, up), tl.where((by > 30) | (up == 0), 31, by)  # too far for int32: by key alone


@triton.jit(do_not_specialize=["last_key"])
def sample_keys(segments, firsts, strides, samples, last_key, NUM: tl.constexpr, BLOCK: tl.constexpr,
                KIND: tl.constexpr):  # fmt: skip
    """Put the key of one position of every ``strides`` into ``samples`` (competitions, NUM): any, by a hash.

    Of several ranks the owner of the position has it.
    """
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    for i in range(tl.load(firsts + program), tl.load(firsts + program + 1)):
        segment = segments + i * NUM_COLUMNS
        if tl.load(segment + OWNED) != 0:
            competition, numel = tl.load(segment + COMPETITION), tl.load(segment + NUMEL)
            zeroth, begin = tl.load(segment + ZEROTH), tl.load(segment + START)
            stride, num_positions = tl.load(strides + competition * 2), tl.load(strides + competition * 2 + 1)
            first = zeroth + flat_index(segment, 0, 0, KIND)
            last = zeroth + flat_index(segment, numel - 1, 0, KIND)
            for number in range(first // stride, last // stride + 1, BLOCK):
                numbers = number + lanes.to(tl.int64)
                jitter = (numbers + competition).to(tl.uint32) * 0x9E3779B1
                jitter = (jitter ^ (jitter >> 15)) * 0x85EBCA6B
                jitter ^= jitter >> 13
                length = tl.maximum(tl.minimum(num_positions - numbers * stride, stride), 1)
                flat = numbers * stride + jitter.to(tl.int64) % length - zeroth - tl.load(segment + FLAT)
                if KIND.contiguous:
                    offsets, valid = flat - begin, flat >= 0
                else:
                    run, apart = tl.load(segment + RUN), tl.load(segment + STRIDE)
                    offsets = flat // apart * run + flat % apart - begin
                    valid = (flat >= 0) & (flat % apart < run)
                valid &= (offsets >= 0) & (offsets < numel)
                keys, _ = keys_of(segment, 0, offsets, valid, last_key, KIND)
                tl.store(samples + competition * NUM + numbers + 1, keys, mask=valid)


@triton.jit(do_not_specialize=["last_key"])
def count(segments, firsts, states, histogram, num_nans, last_key, BITS: tl.constexpr, LOOKS_FOR_NANS: tl.constexpr,
          BLOCK: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Add what is in each range to ``histogram`` (competitions, bins + 2), and behind the bins what is below."""
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    for i in range(tl.load(firsts + program), tl.load(firsts + program + 1)):
        segment = segments + i * NUM_COLUMNS
        competition, numel, zeroth = tl.load(segment + COMPETITION), tl.load(segment + NUMEL), tl.load(segment + ZEROTH)
        state, bins = states + competition * NUM_STATES, histogram + competition * ((1 << BITS) + 2)
        key_low, key_high = tl.load(state + KEY_LOW), tl.load(state + KEY_HIGH)
        low, high = tl.load(state + LOW), tl.load(state + HIGH)
        is_owned = tl.load(segment + OWNED) != 0
        is_open = is_owned & ((key_low < key_high) | (low < high))
        if (is_owned & LOOKS_FOR_NANS) | is_open:
            down, up, by = bin_layout(key_low, key_high, low, high, BITS)
            first_key, extent = key_low.to(tl.int32), (key_high - key_low).to(tl.uint32)
            below, nans = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
            for start in range(0, numel, BLOCK):
                first = zeroth + flat_index(segment, start, 0, KIND)
                last = zeroth + flat_index(segment, tl.minimum(start + BLOCK, numel) - 1, 0, KIND)
                if LOOKS_FOR_NANS | ((first <= high) & (last >= low)):
                    valid = in_tile(lanes, start, numel, BLOCK, KIND.aligned)
                    keys, is_nan = keys_of(segment, start, lanes, valid, last_key, KIND)
                    if KIND.contiguous:  # positions as int32, from the bin on in which the tile begins
                        begin, end = tl.maximum(low - first, 0), tl.minimum(numel - start, high + 1 - first)
                        here = lanes >= tl.minimum(begin, BLOCK).to(tl.int32)
                        here &= lanes < tl.minimum(end, BLOCK).to(tl.int32)
                        first_bin = tl.where(up == 0, 0, (first - low) >> by)
                        rest = tl.where(up == 0, 0, first - low - (first_bin << by)).to(tl.int32)
                        bin_of_place = (rest + lanes) >> by
                    else:
                        positions, first_bin = zeroth + flat_index(segment, start, lanes, KIND), 0
                        here = valid & (positions >= low) & (positions <= high)
                        bin_of_place = tl.where(up == 0, 0, (positions - low) >> by).to(tl.int32)
                    above_low = (keys - first_key).to(tl.uint32, bitcast=True)
                    index = (above_low >> down << up).to(tl.int32, bitcast=True) + bin_of_place
                    counted = here & (above_low <= extent)
                    if (KIND.score == KEYS) | (KIND.score == VALUE):  # others differ by less than 2**31
                        counted &= keys >= first_key
                    tl.atomic_add(bins + first_bin + index, 1, counted, sem="relaxed")
                    below += (here & (keys < first_key)).to(tl.int32)
                    if LOOKS_FOR_NANS:
                        nans += is_nan.to(tl.int32)
            if is_open:
                add(bins + (1 << BITS), below)
            if LOOKS_FOR_NANS:
                add(num_nans, nans)


@triton.jit(do_not_specialize=["gone"])
def narrow(states, histogram, gone, BITS: tl.constexpr):
    """Make the bin that holds the k-th the new range; one program a competition. Its histogram is zero again."""
    BINS: tl.constexpr = 1 << BITS
    state, bins = states + tl.program_id(0) * NUM_STATES, histogram + tl.program_id(0) * (BINS + 2)
    key_low, key_high = tl.load(state + KEY_LOW), tl.load(state + KEY_HIGH)
    low, high, last = tl.load(state + LOW), tl.load(state + HIGH), tl.load(state + NUM_POSITIONS) - 1
    if (key_low < key_high) | (low < high):
        lanes = tl.arange(0, BINS)
        nums, below = tl.load(bins + lanes), tl.load(bins + BINS)
        has_all_positions = (low == 0) & (high == last)  # else what is below was passed over before
        rank = tl.where(has_all_positions, tl.load(state + K) - below, tl.load(state + LEFT))
        ends = tl.cumsum(nums, axis=0)
        index = tl.sum((ends < rank).to(tl.int64), axis=0)
        left = rank - tl.sum(tl.where(ends < rank, nums, 0), axis=0)
        num_there = tl.sum(tl.where(lanes == index, nums, 0), axis=0)
        tl.debug_barrier()  # all warps have read
        tl.store(bins + lanes, tl.zeros([BINS], tl.int64))
        tl.store(bins + BINS, tl.zeros([], tl.int64))

        down, up, by = bin_layout(key_low, key_high, low, high, BITS)
        new_key_low = key_low + (index >> up << down)
        new_key_high = tl.minimum(new_key_low + (tl.zeros([], tl.int64) + 1 << down) - 1, key_high)
        new_low = tl.where(up == 0, low, low + ((index & ((1 << up) - 1)) << by))
        new_high = tl.where(up == 0, high, tl.minimum(new_low + (tl.zeros([], tl.int64) + 1 << by) - 1, high))

        # By the sample alone: the k-th lies beside the range. Below its lowest key there is only what is gone.
        missed_below, missed_above = rank <= 0, index == BINS
        only_gone = missed_below & (key_low <= gone + 1)
        new_key_low = tl.where(missed_below, gone + 1, tl.where(missed_above, key_high, new_key_low))
        new_key_high = tl.where(missed_below, key_low - 1, tl.where(missed_above, LAST_KEY, new_key_high))
        new_low = tl.where(missed_below | missed_above, 0, new_low)
        new_high = tl.where(missed_below | missed_above, last, new_high)
        # All of one key, or all of it up to here.
        all_go = (left == num_there) & (new_key_low == new_key_high) & ~missed_below & ~missed_above
        tl.store(state + KEY_LOW, tl.where(only_gone, gone, new_key_low))
        tl.store(state + KEY_HIGH, tl.where(only_gone, gone, new_key_high))
        tl.store(state + LOW, tl.where(only_gone, last, tl.where(all_go, new_high, new_low)))
        tl.store(state + HIGH, tl.where(only_gone, last, new_high))
        tl.store(state + LEFT, left)


@triton.jit(do_not_specialize=["gone", "last_key"])
def write_lowest(segments, firsts, states, num_nans, totals, gone, last_key, WRITES_MASK: tl.constexpr,
                 BLOCK: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Write +0.0 where an element goes, or a mask of what stays, if nothing is NaN.

    ``totals`` (tensors, 3): pruned, gone before, NaN.
    """
    program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    if tl.load(num_nans) == 0:
        for i in range(tl.load(firsts + program), tl.load(firsts + program + 1)):
            segment = segments + i * NUM_COLUMNS
            numel, state = tl.load(segment + NUMEL), states + tl.load(segment + COMPETITION) * NUM_STATES
            key, last = tl.load(state + KEY_HIGH).to(tl.int32), tl.load(state + HIGH)
            num_pruned, num_gone = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
            for start in range(0, numel, BLOCK):
                valid = in_tile(lanes, start, numel, BLOCK, KIND.aligned)
                keys, _ = keys_of(segment, start, lanes, valid, last_key, KIND)
                if KIND.contiguous:  # ties are compared as int32, with how many places of the tile go
                    num = last + 1 - tl.load(segment + ZEROTH) - flat_index(segment, start, 0, KIND)
                    is_early = lanes < tl.minimum(tl.maximum(num, 0), BLOCK).to(tl.int32)
                else:
                    is_early = tl.load(segment + ZEROTH) + flat_index(segment, start, lanes, KIND) <= last
                goes = valid & ((keys < key) | ((keys == key) & is_early))
                num_pruned += goes.to(tl.int32)
                num_gone += (valid & (keys == gone)).to(tl.int32)
                write(segment, start, lanes, goes, valid, WRITES_MASK, KIND)
            add(totals + tl.load(segment + TENSOR) * 3, num_pruned)
            add(totals + tl.load(segment + TENSOR) * 3 + 1, num_gone)
    else:  # they are named
        for i in range(tl.load(firsts + program), tl.load(firsts + program + 1)):
            nans_of(segments + i * NUM_COLUMNS, totals, last_key, BLOCK, KIND)
