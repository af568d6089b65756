"""What CUDA's operations take, by torch's own table of operations and dtypes."""

from __future__ import annotations

import json
import sys
import types
import unittest
from collections import defaultdict
from typing import Any

import torch

from tests.device.build import cached, run_as_main
from tests.device.counter import Ran

__all__ = ["not_on_cuda"]

_TAKEN = {("embedding", "int64"), ("embedding", "int32"), ("cumsum", "bool")}  # indices; made int64 first


def not_on_cuda(ran: Ran) -> dict[str, str]:
    """Return which operations that ran CUDA does not have for one of their dtypes, with the line that they ran for.

    Of what the table does not know (copies, views, products of matrices in place) nothing is said.
    """
    # In a process of its own: it takes seconds and memory, and asks for what only torch's tests need.
    file = cached(f"cuda-{torch.__version__}.json", lambda path: run_as_main(__name__, path))
    table = json.loads(file.read_text())
    found = {}
    for (operation, dtypes), line in ran.items():
        name = operation.split(".")[1]
        known = next((table[each] for each in (name, name.strip("_"), name.rstrip("_")) if each in table), None)
        there = [dtype for dtype in dtypes if "@" not in dtype and (name, dtype) not in _TAKEN]
        missing = [dtype for dtype in there if known is not None and dtype not in known]
        if missing:
            found[f"{operation} of {', '.join(dtypes)}"] = line
    return found


def _make_table() -> dict[str, list[str]]:
    expecttest: Any = types.ModuleType("expecttest")
    expecttest.TestCase, expecttest.assert_expected_inline = unittest.TestCase, None
    sys.modules.setdefault("expecttest", expecttest)
    from torch.testing._internal.common_methods_invocations import op_db

    table: dict[str, set[str]] = defaultdict(set)
    for each in op_db:
        names = {each.aten_name, each.name.split(".")[-1], *(alias.name.split(".")[-1] for alias in each.aliases)}
        for name in names - {None, ""}:
            table[name] |= {str(dtype).removeprefix("torch.") for dtype in each.dtypesIfCUDA or each.dtypes}
    return {name: sorted(dtypes) for name, dtypes in table.items()}


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        json.dump(_make_table(), file)
