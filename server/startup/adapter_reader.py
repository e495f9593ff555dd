"""Reads LoRA adapters in a separate process: a pattern, a name or a header of a stranger's adapter may take hours.

    python -P -m pagoda.server.startup.adapter_reader MEMORY        (started by AdapterReader, never by hand)

The first frame has the base model, each further one the folder of an adapter. MEMORY: bytes that reading may use.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np

from pagoda.common.engine.lora.adapter import LORA_FIELD, Adapter
from pagoda.common.errors import ModelError, RequestError
from pagoda.common.models.family import Rule
from pagoda.common.models.primitives import Param
from pagoda.common.weights.lora.peft import BaseModel, read_adapter
from pagoda.common.weights.lora.weights import (
    AdapterWeights,
    Float32,
    LowRank,
    copy_elements,
    factor_elements,
    slot_elements,
)
from pagoda.server.processing.workers.worker import ChildWorker, Handler, WorkerEndedError, WorkerTimeoutError, serve

PROGRAM: Final = (sys.executable, "-P", "-m", "pagoda.server.startup.adapter_reader")
SECONDS: Final = 30.0
"""Maximum time of reading an adapter, in seconds of processor time: a busy machine refuses none."""
ELAPSED_SECONDS: Final = 600.0
"""Maximum time on however slow a disk."""

_COPIES: Final = 6
"""Of an adapter in float32: the file, as it is read, scaled, padded, as a message, and a spare one."""
_SPARE_BYTES: Final = 1 << 28
_WEIGHTS: Final = b"w"
_ERROR: Final = b"e"
_ALIGNMENT: Final = 64
_RULES: Final[Mapping[str, Any]] = {kind.__name__: kind for kind in get_args(Rule)}


class _Base(msgspec.Struct, frozen=True):
    """A BaseModel as a message. `rules`: each with the name of its class."""

    rules: list[tuple[str, msgspec.Raw]]
    params: dict[str, Param]
    adaptable: dict[str, Param]
    max_rank: int
    copied: tuple[str, ...]


class _Matrix(msgspec.Struct, frozen=True):
    """Where the factors of a parameter are: those of `a` first, then `b`, then the whole copy if there is one."""

    name: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    copy: tuple[int, ...] | None


class _Head(msgspec.Struct, frozen=True):
    """The beginning of a message with an adapter, before its numbers."""

    rank: int
    matrices: list[_Matrix]
    magnitudes: dict[str, int]  # Of DoRA: parameter -> how many numbers it has. They follow the matrices.


class AdapterReader:
    """Reads adapters of one base model. Thread-safe. The process starts with the first adapter."""

    def __init__(
        self,
        base: BaseModel,
        program: Sequence[str] = PROGRAM,
        seconds: float = SECONDS,
        elapsed: float = ELAPSED_SECONDS,
    ) -> None:
        matrices = base.adaptable.values()
        elements = slot_elements(matrices, base.max_rank) + factor_elements(matrices)
        elements += copy_elements(base.adaptable, base.copied)
        memory = _COPIES * 4 * elements + _SPARE_BYTES
        self._seconds = seconds
        self._elapsed = elapsed
        self._worker = ChildWorker(
            (*program, str(memory)), seconds, elapsed, lambda: _encoded_base(base), name="LoRA adapters"
        )

    def read(self, adapter: Adapter) -> AdapterWeights:
        """Return an adapter as its files have it, DoRA's magnitudes too. Raises RequestError if it cannot be used."""
        try:
            reply = self._worker.call(str(Path(adapter.path).absolute()).encode("utf-8", "surrogateescape"))
        except WorkerTimeoutError:
            raise _refused(adapter, f"it was not read within {self._elapsed:g} s; is its disk too slow?") from None
        except WorkerEndedError as error:
            limit = f"more than {self._seconds:g} s of processor time" if error.out_of_time else "too much memory"
            raise _refused(adapter, f"it needs {limit}; save it again with fewer modules and patterns") from None
        if reply[:1] == _ERROR:
            raise _refused(adapter, reply[1:].decode("utf-8", "replace"))
        return _decoded(reply)


def _refused(adapter: Adapter, reason: str) -> RequestError:
    return RequestError(LORA_FIELD, f"adapter {adapter.name}: {reason}")


def _encoded_base(base: BaseModel) -> bytes:
    rules = [(type(rule).__name__, msgspec.Raw(msgspec.msgpack.encode(rule))) for rule in base.rules]
    message = _Base(rules, dict(base.params), dict(base.adaptable), base.max_rank, base.copied)
    return msgspec.msgpack.encode(message)


def _decoded_base(setup: bytes) -> BaseModel:
    message = msgspec.msgpack.decode(setup, type=_Base)
    rules: list[Rule] = [msgspec.msgpack.decode(rule, type=_RULES[kind]) for kind, rule in message.rules]
    return BaseModel(tuple(rules), message.params, message.adaptable, message.max_rank, message.copied)


def _encoded(weights: AdapterWeights) -> bytes:
    """Return an adapter as a message: the length of the head, the head, and the numbers from a multiple of 64 on."""
    matrices = [
        _Matrix(name, matrix.a.shape, matrix.b.shape, None if matrix.copy is None else matrix.copy.shape)
        for name, matrix in weights.matrices.items()
    ]
    magnitudes = {name: len(numbers) for name, numbers in weights.magnitudes.items()}
    head = msgspec.msgpack.encode(_Head(weights.rank, matrices, magnitudes))
    begin = _WEIGHTS + len(head).to_bytes(4, "big") + head
    pieces: list[bytes | memoryview] = [begin, bytes(-len(begin) % _ALIGNMENT)]
    for matrix in weights.matrices.values():
        pieces += [_bytes_of(array) for array in (matrix.a, matrix.b, matrix.copy) if array is not None]
    pieces += [_bytes_of(numbers) for numbers in weights.magnitudes.values()]
    return b"".join(pieces)


def _bytes_of(numbers: Float32) -> memoryview:
    return np.ascontiguousarray(numbers, np.float32).data.cast("B")


def _decoded(message: bytearray) -> AdapterWeights:
    """Return the adapter of a message, whose memory it uses."""
    end = 5 + int.from_bytes(message[1:5], "big")
    head = msgspec.msgpack.decode(message[5:end], type=_Head)
    numbers = np.frombuffer(message, np.float32, offset=end + -end % _ALIGNMENT)
    matrices: dict[str, LowRank] = {}
    for matrix in head.matrices:
        a, numbers = _taken(numbers, matrix.a)
        b, numbers = _taken(numbers, matrix.b)
        copy = None
        if matrix.copy is not None:
            copy, numbers = _taken(numbers, matrix.copy)
        matrices[matrix.name] = LowRank(a, b, copy=copy)
    magnitudes: dict[str, Float32] = {}
    for name, count in head.magnitudes.items():
        magnitudes[name], numbers = _taken(numbers, (count,))
    return AdapterWeights(head.rank, matrices, magnitudes)


def _taken(numbers: Float32, shape: tuple[int, ...]) -> tuple[Float32, Float32]:
    """Return the first numbers in a shape, and the rest."""
    size = int(np.prod(shape))
    return numbers[:size].reshape(shape), numbers[size:]


# The child.


def handler(setup: bytes) -> Handler:
    """Return what reads adapters of a base model."""
    base = _decoded_base(setup)

    def read(path: bytes) -> bytes:
        try:
            return _encoded(read_adapter(Path(path.decode("utf-8", "surrogateescape")), base))
        except (ModelError, OSError) as error:
            return _ERROR + str(error).encode("utf-8", "replace")

    return read


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(handler, int(sys.argv[1]))
