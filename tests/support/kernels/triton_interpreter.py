"""Triton's interpreter as the tests of kernels need it: imported for what it changes."""

from __future__ import annotations

import math
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


# Each number in an interpreted kernel is an object whose type, shape and number of elements are made again, and each
# call of a function by a kernel exchanges the functions of the language again: half of the time of these tests.

_make_block, _find_dtype, _launch = tl.core.block_type.__init__, interpreter._get_np_dtype, interpreter._patch_lang
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_dtypes: dict[tuple[str, bool], Any] = {}
_languages: dict[Any, frozenset[str]] = {}
_patched: set[str] = set()
"""Modules of the language whose functions are exchanged until the kernel ends."""


def _block(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = (getattr(size, "value", size) for size in shape)
    key = type(element_ty), str(element_ty), getattr(element_ty, "const", None), *sizes
    if key in _blocks:
        self.__dict__.update(_blocks[key])
    else:
        _make_block(self, element_ty, shape)
        _blocks[key] = dict(self.__dict__)


def _tensor(self: Any, handle: Any, type: Any) -> None:
    sizes = tuple(type.shape) if type.is_block() else ()
    if sizes not in _shapes:
        _shapes[sizes] = tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes[sizes]


def _dtype(tt_dtype: Any) -> Any:
    key = str(tt_dtype.scalar), isinstance(tt_dtype.scalar, tl.pointer_type)
    if key not in _dtypes:
        _dtypes[key] = _find_dtype(tt_dtype)
    return _dtypes[key]


def _patch_once(fn: Any) -> Any:
    """Exchange the functions of the modules that a kernel or what it calls can see, once for each kernel's launch."""
    if fn not in _languages:
        seen = (value for value in fn.__globals__.values() if value is tl or value is tl.core)
        _languages[fn] = frozenset(module.__name__ for module in seen)
    if _patched and _languages[fn] <= _patched:
        return None
    inner, scope = bool(_patched), _launch(fn)
    _patched.update(_languages[fn])
    if not inner:
        restore = scope.restore
        scope.restore = lambda: (_patched.clear(), restore())
    return scope


tl.core.block_type.__init__, tl.core.tensor.__init__ = _block, _tensor
interpreter._get_np_dtype, interpreter._patch_lang = _dtype, _patch_once
