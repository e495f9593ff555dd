"""Triton's interpreter as the tests of kernels need it: imported for what it changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
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
    left, right = _floats(a), _floats(b)
    if left.dtype.kind != "f" or right.dtype.kind != "f":
        return _dot(self, a, b, d, *options)
    product = np.einsum("...mk,...kn->...mn", left.astype(d.data.dtype), right.astype(d.data.dtype))
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _floats(operand: Any) -> Any:
    """Return the numbers of an operand, those of 8 bits in 16."""
    if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
        return interpreter._convert_float(operand.data, operand.dtype, tl.float16, None).view(np.float16)
    return operand.data


interpreter.InterpreterBuilder.create_dot = _dot_by_rows
