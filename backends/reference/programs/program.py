"""Small steps as programs: the kernel calls of all layers, recorded once per number of sequences, repeated by one call.

A step of one token each of a few sequences takes less time to compute than hundreds of Python calls take, and than
threads take to wake up hundreds of times. A program runs in one parallel region; its threads wait for each other
between kernels. Its inputs are in arrays of its own.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagoda.backends.cpu_kernels.emission.emit import I32, I64, Emitter
from pagoda.backends.cpu_kernels.emission.jit import Kernel, StepMemory, gomp, record
from pagoda.backends.reference.execution import Prefixes, StepBatch, ViewBatch
from pagoda.backends.reference.memory import LayerCache

logger = logging.getLogger(__name__)

MOST_SEQUENCES: Final = 64
"""Largest number of sequences of a program: in larger steps calls cost little beside the products."""

_MOST_FORMS: Final = 4
"""Programs of one number of sequences: their shared prefixes differ."""

Caches = Mapping[int, LayerCache]
RunLayers = Callable[[Tensor, StepBatch, Caches], Tensor]
"""(embeddings [S, D], batch, caches by number) -> hidden states [S, D]"""


class RecordedSteps:
    """The programs of a model over its caches."""

    def __init__(self, run: RunLayers, max_len: int) -> None:
        self._run = run
        self._max_len = max_len
        self._recordable = True
        self._threads: dict[int, _ThreadSteps] = {}
        """By the identifier of the thread."""

    def records(self, num_tokens: int) -> bool:
        """Return whether a step of `num_tokens` sequences, a token each, becomes a program, as far as is known."""
        return self._recordable and num_tokens <= MOST_SEQUENCES

    def run(self, x: Tensor, batch: StepBatch, caches: Caches) -> Tensor | None:
        """Return the hidden states [S, D] of embeddings [S, D]; None for a step that a program does not compute."""
        count = len(batch.sequences)
        one_token_each = batch.num_decodes == count == len(x)
        if not self.records(count) or not one_token_each or batch.states:
            return None
        thread = threading.get_ident()
        memory = _memory(caches)
        steps = self._threads.get(thread)
        if steps is None or steps.caches != memory:
            steps = self._threads[thread] = _ThreadSteps(memory, _Inputs(x, batch, self._max_len))
        for step in steps.programs.get(count, ()):
            if step.fits(batch):
                steps.inputs.copy(x, batch)
                return step.repeat(batch)
        recorded, hidden = steps.record(self._run, x, batch, caches)
        self._recordable = recorded
        return hidden


def _memory(caches: Caches) -> tuple[int, ...]:
    """Return what tells allocations of the caches apart: where the first array is, and its shape."""
    first = next(array for cache in caches.values() for array in cache.arrays)
    return first.data_ptr(), *first.shape


class _Inputs:
    """What the programs of a thread read: the first rows of arrays for MOST_SEQUENCES sequences."""

    def __init__(self, x: Tensor, batch: StepBatch, max_len: int) -> None:
        """`x`, `batch`: any step of the model."""
        self._x = x.new_empty(MOST_SEQUENCES, x.shape[1])
        self._positions = batch.positions.new_empty(MOST_SEQUENCES)
        self._context = np.empty(MOST_SEQUENCES, np.int32)
        self._slots = {number: view.write_slots.new_empty(MOST_SEQUENCES) for number, view in batch.views.items()}
        self._tables = {
            number: np.zeros((MOST_SEQUENCES, -(-max_len // view.block_size)), np.int32)
            for number, view in batch.views.items()
        }

    def copy(self, x: Tensor, batch: StepBatch) -> None:
        """Copy those of a step."""
        count = len(x)
        self._x[:count] = x
        self._positions[:count] = batch.positions
        self._context[:count] = batch.context
        for number, view in batch.views.items():
            self._slots[number][:count] = view.write_slots
            self._tables[number][:count, : view.table.shape[1]] = view.table

    def of(self, batch: StepBatch) -> tuple[Tensor, StepBatch]:
        """Return embeddings and batch of a step that was copied, in these arrays."""
        count = len(batch.sequences)
        context = self._context[: len(batch.sequences)]
        views = {
            number: replace(
                view,
                write_slots=self._slots[number][:count],
                table=self._tables[number][:count],
                context=context,
                found_prefixes={},
            )
            for number, view in batch.views.items()
        }
        own = replace(batch, positions=self._positions[:count], views=views, context=context, _tiles={})
        return self._x[:count], own


@dataclass(frozen=True, slots=True)
class _Step:
    """A program for a number of sequences, and the lengths of the arrays of their shared prefixes."""

    program: Program
    views: Mapping[int, ViewBatch]
    """By number of the view, with the shared prefixes that the program reads."""

    hidden: Tensor
    """The program's result [S, D]."""

    def fits(self, batch: StepBatch) -> bool:
        """Return whether the program computes a step."""
        return all(
            _form(own) == _form(batch.views[number].prefixes(*key))
            for number, view in self.views.items()
            for key, own in view.found_prefixes.items()
        )

    def repeat(self, batch: StepBatch) -> Tensor:
        """Return the hidden states of a step that fits, and that the inputs hold."""
        for number, view in self.views.items():
            for key, own in view.found_prefixes.items():
                if own is not None and (given := batch.views[number].prefixes(*key)) is not None:
                    own.copy_from(given)
        self.program(torch.get_num_threads())
        return self.hidden.clone()


def _form(prefixes: Prefixes | None) -> tuple[int, ...]:
    return () if prefixes is None else prefixes.form


@dataclass(frozen=True, slots=True)
class _ThreadSteps:
    """The programs of one thread by their number of sequences: they share inputs and memory."""

    caches: tuple[int, ...]
    """What `_memory` returned for the caches."""

    inputs: _Inputs
    memory: StepMemory = field(default_factory=StepMemory)
    programs: dict[int, list[_Step]] = field(default_factory=dict)

    def record(self, run: RunLayers, x: Tensor, batch: StepBatch, caches: Caches) -> tuple[bool, Tensor]:
        """Run a step, and keep it as a program if kernels compute all of it. Return whether they do, and the result."""
        self.inputs.copy(x, batch)
        program_x, program_batch = self.inputs.of(batch)
        with record(self.memory) as recording, _Foreign() as foreign:
            hidden = run(program_x, program_batch, caches)
        if foreign.operations:
            logger.debug("steps are not recorded: torch computes %s", ", ".join(sorted(foreign.operations)))
            return False, hidden
        logger.debug("recorded the %d kernels of a step of %d sequences", len(recording.calls), len(x))
        step = _Step(Program(recording.calls), program_batch.views, hidden)
        steps = self.programs.setdefault(len(x), [])
        steps[_MOST_FORMS - 1 :] = []
        steps.insert(0, step)
        return True, hidden.clone()


class _Foreign(TorchDispatchMode):
    """Notes which operations torch itself computes meanwhile."""

    _VIEWS: Final = frozenset(
        {"alias", "detach", "empty", "select", "slice", "split", "split_with_sizes", "t", "transpose", "view"}
    )
    """Operations that compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in self._VIEWS:
            self.operations.add(name)
        return func(*args, **(kwargs or {}))


class Program:
    """Kernel calls in their order."""

    def __init__(self, calls: list[tuple[int, array[int]]]) -> None:
        """`calls`: kernels' addresses and words, which point to memory that the caller keeps."""
        width = max(len(words) for _, words in calls)
        self._first = np.zeros((len(calls), width), np.int64)
        """Words of all calls before a run."""
        for row, (_, words) in zip(self._first, calls):
            row[: len(words)] = words
        self._words = self._first.copy()
        rows = self._words.ctypes.data + np.arange(len(calls)) * self._words.strides[0]
        self._calls = np.stack([np.array([address for address, _ in calls], np.int64), rows], 1)
        team = getattr(gomp(), "omp_get_num_threads", None)
        self._header = np.array([0, len(calls), self._calls.ctypes.data, _address(team)], np.int64)
        self._kernel = _interpreter()

    def __call__(self, threads: int) -> None:
        """Run all calls."""
        self._words[:] = self._first
        self._header[0] = 0
        self._kernel.call(self._header.ctypes.data, threads)


def _address(function: Any) -> int:
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _interpreter() -> Kernel:
    """Return the kernel that calls others in turn.

    Words: how many arrivals there were at the ends of kernels, number of calls, address of the calls (int64 [n, 2]:
    kernel, its words), address of the function that returns the number of threads, or 0: there is one.
    """
    e = Emitter()
    builder = e.builder
    arrivals = e.at(e.parameters["words"], 0)
    calls = builder.inttoptr(e.word(2), I64.as_pointer())
    team_size = e.word(3)
    threads = e.variable(I64)
    builder.store(I64(1), threads)
    with builder.if_then(builder.icmp_signed("!=", team_size, I64(0))):
        get_threads = builder.inttoptr(team_size, ir.FunctionType(I32, []).as_pointer())
        builder.store(builder.sext(builder.call(get_threads, []), I64), threads)
    with e.loop(0, e.word(1)) as index:
        kernel = builder.inttoptr(e.load_int(calls, e.mul(index, 2)), e.function.type)
        words = builder.inttoptr(e.load_int(calls, e.add(e.mul(index, 2), 1)), I64.as_pointer())
        builder.call(kernel, [words])
        builder.atomic_rmw("add", arrivals, I64(1), "acq_rel")
        e.wait(arrivals, e.mul(builder.load(threads), e.add(index, 1)))
    e.finish()
    return Kernel(e.module)
