"""Triton's interpreter as the tests of kernels need it: imported for what it changes."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    """The bounds of a loop may be tensors: a scalar is held as an array of one, which NumPy 2.4 makes no int of."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_index
