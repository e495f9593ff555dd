"""Triton's interpreter as the tests of kernels need it: imported for what it changes."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    """The bounds of a loop may be tensors: a scalar is held as an array of one, which NumPy 2.4 makes no int of."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_index


_dot = interpreter.InterpreterBuilder.create_dot


def _dot_by_rows(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """A row's product is the same wherever it lies, as on a GPU. Of OpenBLAS that is not true on every processor."""
    if a.data.dtype != np.float32 or b.data.dtype != np.float32:
        return _dot(self, a, b, d, *options)
    product = np.einsum("...mk,...kn->...mn", a.data, b.data)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot_by_rows
