"""Embeddings as a prompt: the base64 of a request, or an array of a caller, as rows that the engine takes.

Nothing is unpickled freely and nobody's torch is needed: see common.weights.torch_tensor. Knows the model's width and
dtype, not the device.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagoda.common.errors import RequestError, WeightError
from pagoda.common.weights import dtypes
from pagoda.common.weights.torch_tensor import read_tensor
from pagoda.server.ipc_messages import EngineInfo

FIELD: Final = "prompt_embeds"

Array = npt.NDArray[Any]

_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """`count` rows for the engine, one for each place of the prompt: D numbers each, in the model's dtype."""

    count: int
    rows: bytes = field(repr=False)

    def part(self, kept: slice) -> PromptEmbeds:
        """Some of the places."""
        size = len(self.rows) // self.count
        begin, end, _ = kept.indices(self.count)
        return PromptEmbeds(end - begin, self.rows[begin * size : end * size])


def from_base64(text: str, info: EngineInfo, keep: int | None = None) -> PromptEmbeds:
    """What torch.save wrote of a tensor [P, D]. Raises RequestError. `keep`: see `from_array`."""
    _check_enabled(info)
    try:
        values = read_tensor(b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        why = f": {error}" if isinstance(error, WeightError) else ", it is no base64"
        raise RequestError(FIELD, f"{FIELD} must be the base64 of what torch.save writes of a tensor{why}") from None
    return from_array(values, info, keep)


def from_array(values: Any, info: EngineInfo, keep: int | None = None) -> PromptEmbeds:
    """A torch tensor, or an array of numpy or jax, [P, D] or [1, P, D]. Raises RequestError.

    `keep`: truncate_prompt_tokens, for prompts that are longer than the context and will be cut; None: they are not.
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
    if len(array) >= info.max_model_len and keep is None:
        raise RequestError(
            FIELD,
            f"{FIELD} has {len(array)} rows, but the context is {info.max_model_len} tokens and the answer needs at "
            f"least 1; shorten it to {info.max_model_len - 1} or set truncate_prompt_tokens",
        )
    return PromptEmbeds(len(array), _as_bytes(array, info.dtype))


def _check_enabled(info: EngineInfo) -> None:
    if not info.embeds_width:
        raise RequestError(FIELD, f"{FIELD} is switched off; start the server with --enable-prompt-embeds")


def _array(values: Any) -> Array:
    """In numpy's hands. A tensor of torch is asked for it, so torch is not imported here."""
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu()
            values = values.float() if values.dtype.itemsize == 2 and values.is_floating_point() else values
            values = values.numpy()
        return np.asarray(values)
    except Exception as error:  # whatever a sparse, a quantised or a made-up tensor raises
        raise RequestError(FIELD, f"{FIELD} must be a dense tensor or array ({type(error).__name__})") from None


def _as_bytes(array: Array, dtype: str) -> bytes:
    """The values in the model's dtype. Raises RequestError for those that are not finite there."""
    own = array if dtypes.dtype_name(array.dtype) == dtype else _converted(array, dtype)
    if not np.isfinite(dtypes.to_float32(own) if own.dtype.names else own).all():
        raise RequestError(FIELD, f"{FIELD} holds numbers that are not finite in the model's {dtype}")
    return own.tobytes()


def _converted(array: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        wide = dtypes.to_float32(array) if array.dtype.names else array.astype(np.float32)
        return dtypes.to_bfloat16(wide) if dtype == "bfloat16" else wide.astype(dtype)
