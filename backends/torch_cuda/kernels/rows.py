"""Rows that lie any distance apart."""

from __future__ import annotations

from torch import Tensor


def row_stride(x: Tensor) -> int:
    """Elements from a row of x [T, n] to the next. Of a single row torch may say anything, for which a kernel would be
    compiled anew: its width instead.
    """
    return x.stride(0) if len(x) > 1 else x.shape[1]
