"""Compile every kernel for sm_90, without a GPU; print what each is, and how many bytes of registers spill. JSON."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from distprune.kernels.on_device import hold, rows, select, sweep
from distprune.kernels.on_device.tiles import Kind

_PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
_POINTERS = ("segments", "firsts", "states", "histogram", "num_nans", "totals", "strides", "counts", "least")


def spilled(kernel: Any, constants: dict[str, Any], num_warps: int) -> int:
    types = {**dict.fromkeys(_POINTERS, "*i64"), "samples": "*i32", "stays": "*i8"}
    types |= dict.fromkeys(("weight", "upper", "errors"), "*fp32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in types and name not in ("firsts", "num_nans")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(built.asm["ptx"])
        command = [str(_PTXAS), "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return max(int(num) for num in re.findall(r"(\d+) bytes spill", said))


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """Yield the kernels as they are launched: by score, dtype and layout."""
    scores = {"magnitude": 0, "gradient": 1, "taylor": 2, "random": 3, "keys": 4, "value": 5}
    kinds = [*itertools.product(scores, (tl.float32, tl.bfloat16), (True, False)), ("magnitude", tl.float16, True)]
    for score, dtype, is_plain in kinds:
        if not is_plain and (dtype is not tl.float32 or score not in ("magnitude", "random")):
            continue
        dtypes = tl.int32 if score == "keys" else dtype, dtype
        kind = {"KIND": Kind(*dtypes, is_plain, is_plain, scores[score], 1)}
        name = f"{score} {dtype} {'' if is_plain else 'unaligned, strided'}"
        tile = {"KIND": kind["KIND"]._replace(checks_weights=True), "BLOCK": 1024}
        yield f"sample_keys {name}", select.sample_keys, {**tile, "NUM": 1 << 18}, 4
        for first in (True, False):
            yield f"count {first} {name}", select.count, {**tile, "BITS": 12, "LOOKS_FOR_NANS": first}, 4
        for writes_mask in (True, False)[: 1 + (score != "keys")]:
            yield f"write_lowest {name}", select.write_lowest, {**tile, "WRITES_MASK": writes_mask}, 4
        if score not in ("keys", "value"):
            yield f"count_nans {name}", rows.count_nans, tile, 4
        if score not in ("magnitude", "keys"):
            continue
        for n, m in ((2, 4), (4, 8), (8, 16), (3, 5), (16, 32)):
            groups = {"N": n, "M": m, "GROUPS": (1024 if m <= 16 else 512) >> (m - 1).bit_length()}
            for writes_mask in (True, False)[: 1 + (score != "keys")]:
                how = {"WRITES_MASK": writes_mask, **kind, **groups}
                yield f"keep_n_of_m {writes_mask} {n}:{m} {name}", rows.keep_n_of_m, how, 4
        for width in (1024, 4096, 8192):
            num_bits = 31 if dtype is tl.float32 or score == "keys" else 15
            row = {"IS_ONE": width < 8192 or is_plain, "WIDTH": width, "BITS": num_bits}
            for writes_mask in (True, False)[: 1 + (score != "keys")]:
                how = {"WRITES_MASK": writes_mask, **kind, **row}
                yield f"keep_in_rows {writes_mask} {width} {name}", rows.keep_in_rows, how, width // 256
    yield "narrow", select.narrow, {"BITS": 12}, 8
    for word in (tl.int16, tl.int32):
        tile = {"KIND": Kind(word, word, True, True), "BLOCK": 1024}
        yield f"count {word}", hold.count, {**tile, "FLOATS": True, "MASKED": True}, 4
        yield f"read_held {word}", hold.read_held, tile, 4
        for signs in (0, 1, -1):
            yield f"mask {word} {signs}", hold.mask, {**tile, "WHERE": True, "SIGNS": signs}, 4
    yield "sweep", sweep.sweep, {"ROWS": 4, "WIDTH": 128}, 1


if __name__ == "__main__":
    wanted = sys.argv[1:]
    found = {name: spilled(*how) for name, *how in kernels() if not wanted or any(w in name for w in wanted)}
    sys.stdout.write(json.dumps(found) + "\n")
