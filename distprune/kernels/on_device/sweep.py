"""SparseGPT's sweep (arXiv 2301.00774, Algorithm 1): each program has a few rows, and goes through their columns."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "num_columns", "num_pruned", "m"])
def sweep(weight, stays, upper, errors, num_in, num_rows, num_columns, num_pruned, m, ROWS: tl.constexpr,
          WIDTH: tl.constexpr):  # fmt: skip
    """Prune ``num_columns`` columns in their order, and take the error of each from those behind it.

    ``weight`` and ``stays`` (rows, in), int8, and ``upper`` (in, in) begin with the first of these columns. Errors
    (rows, WIDTH) are written for the columns beyond. Beside what does not stay, the ``num_pruned`` of every ``m``
    columns go, as they come up, that have the least (w / U_jj)^2, of equals the first.
    """
    rows, columns = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None], tl.arange(0, WIDTH)
    is_column = columns < num_columns
    there, place = (rows < num_rows) & is_column[None, :], rows * num_in + columns[None, :]
    w, stay = tl.load(weight + place, there, 0.0), tl.load(stays + place, there, 1) != 0
    diagonal = tl.load(upper + columns.to(tl.int64) * (num_in + 1), is_column, 1.0)
    inverse = tl.div_rn(tl.full([WIDTH], 1.0, tl.float32), diagonal)[None, :]
    row, next_at = tl.load(upper + columns, is_column & (columns > 0), 0.0), upper + num_in
    for start in range(0, num_columns, m):
        keys = (w * inverse * (w * inverse)).to(tl.int32, bitcast=True)  # in the order of what is not negative
        keys = tl.where(((columns >= start) & (columns < start + m))[None, :], keys, 0x7FFFFFFF)
        for _ in range(num_pruned):
            is_lowest = columns[None, :] == tl.argmin(keys, axis=1)[:, None]
            stay, keys = stay & ~is_lowest, tl.where(is_lowest, 0x7FFFFFFF, keys)
        for i in range(start, tl.minimum(start + m, num_columns)):
            next_row = tl.load(next_at + columns, is_column & (columns > i + 1), 0.0)  # before it is needed
            error = tl.sum(tl.where((columns == i)[None, :] & ~stay, w * inverse, 0.0), axis=1)
            w -= error[:, None] * row[None, :]
            row, next_at = next_row, next_at + num_in
    tl.store(weight + place, tl.where(stay, w, 0.0), there)
    tl.store(stays + place, stay.to(tl.int8), there)
    tl.store(errors + rows * WIDTH + columns[None, :], tl.where(stay, 0.0, w * inverse), there)
