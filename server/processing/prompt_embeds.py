"""Prompt embeddings: from a request's base64 or a caller's array to rows in the model's dtype.

Neither torch nor unrestricted unpickling is needed; see common.weights.torch_bin.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import PromptTooLongError, RequestError, WeightError
from pagoda.common.weights import dtypes
from pagoda.common.weights.torch_bin import read_tensor
from pagoda.server.core_client.ipc_messages import EngineInfo

FIELD: Final = "prompt_embeds"

Array = npt.NDArray[Any]

_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Rows of embeddings, one per position of the prompt."""

    count: int
    rows: bytes = field(repr=False)  # Rows of D numbers each, in the model's dtype.

    def part(self, kept: slice) -> PromptEmbeds:
        """Return some of the positions."""
        size = len(self.rows) // self.count
        begin, end, _ = kept.indices(self.count)
        return PromptEmbeds(end - begin, self.rows[begin * size : end * size])


def from_base64(text: str, info: EngineInfo, keep: int | None = None) -> PromptEmbeds:
    """Decode the base64 of a tensor [P, D] saved by torch.save. Raises RequestError. `keep`: see `from_array`."""
    _check_enabled(info)
    try:
        values = read_tensor(b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        reason = f": {error}" if isinstance(error, WeightError) else ", it is not valid base64"
        raise RequestError(FIELD, f"{FIELD} must be the base64 of what torch.save writes of a tensor{reason}") from None
    return from_array(values, info, keep)


def from_array(values: Any, info: EngineInfo, keep: int | None = None) -> PromptEmbeds:
    """Convert a torch tensor, or an array of numpy or jax, [P, D] or [1, P, D]. Raises RequestError.

    `keep`: tokens that truncation keeps of a prompt longer than the context; None: no truncation.
    """
    _check_enabled(info)
    array = _array(values)
    name = dtypes.dtype_name(array.dtype)
    if name not in _DTYPES:
        raise RequestError(FIELD, f"{FIELD} must hold {', '.join(_DTYPES[:3])} or float64, not {name[:40]}")
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or array.shape[1] != info.embeds_width:
        shape = f"{list(array.shape)[:8]}"
        raise RequestError(FIELD, f"{FIELD} must have the shape [tokens, {info.embeds_width}], not {shape}")
    if not len(array):
        raise RequestError(FIELD, f"{FIELD} is empty: it has no rows")
    longest = info.limits.max_model_len - 1
    if len(array) > longest and keep is None:
        raise PromptTooLongError(
            FIELD,
            f"{FIELD} has {len(array)} rows, but the context is {info.limits.max_model_len} tokens and the answer "
            f"needs at least 1; shorten it to {longest} or set truncate_prompt_tokens",
            num_tokens=len(array),
            limit=longest,
        )
    return PromptEmbeds(len(array), _as_bytes(array, info.dtype))


def _check_enabled(info: EngineInfo) -> None:
    if not info.embeds_width:
        raise RequestError(FIELD, f"{FIELD} is switched off; start the server with --enable-prompt-embeds")


def _array(values: Any) -> Array:
    """Convert to numpy; torch tensors convert themselves, so torch is not imported."""
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu()
            values = values.float() if values.dtype.itemsize == 2 and values.is_floating_point() else values
            values = values.numpy()
        return np.asarray(values)
    except Exception as error:  # Sparse, quantised or invalid tensors raise various errors.
        raise RequestError(FIELD, f"{FIELD} must be a dense tensor or array ({type(error).__name__})") from None


def _as_bytes(array: Array, dtype: str) -> bytes:
    """Return the values in the model's dtype. Raises RequestError unless they are finite there."""
    values = array if dtypes.dtype_name(array.dtype) == dtype else _converted(array, dtype)
    if not np.isfinite(dtypes.to_float32(values) if values.dtype.names else values).all():
        raise RequestError(FIELD, f"{FIELD} holds numbers that are not finite in the model's {dtype}")
    return values.tobytes()


def _converted(array: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        wide = dtypes.to_float32(array) if array.dtype.names else array.astype(np.float32)
        return dtypes.to_bfloat16(wide) if dtype == "bfloat16" else wide.astype(dtype)
