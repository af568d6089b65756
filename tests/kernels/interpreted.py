"""Triton's interpreter, which runs kernels on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest

interpreter = pytest.importorskip("triton.runtime.interpreter")

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Numpy 2.4 no longer makes an int of a (1,) array, which bounds of loops are that were loaded."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor
