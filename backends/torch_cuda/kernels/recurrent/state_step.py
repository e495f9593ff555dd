"""The sequences of a step over recurrent states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pagoda.backends.torch_decoder.mixers.recurrence import Inputs, Mix

CHUNK: Final = 64
"""Tokens of a prefill that are computed at once; the state passes from chunk to chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """The sequences of a step, and the states of one layer, which the step replaces.

    The first `num_decodes` sequences have one token each, sequence s token s; kv_len 0 is padding: no state is read or
    written. Token j of another sequence is query_start[s] + j; these are cut into `chunks`, int32 [n, 2] of
    `make_tiles` for CHUNK tokens; those behind the end of a sequence do nothing. A sequence whose kv_len is its number
    of tokens starts from zero states, whatever its block holds.
    """

    states: Tensor  # float32 [P, E], any row stride: of a sequence in block tables[s, 0]
    tables: Tensor  # int32 [S, W]
    query_start: Tensor  # int32 [S+1]
    kv_lens: Tensor  # int32 [S]
    chunks: Tensor | None  # None: there are only sequences of one token
    num_decodes: int
    positions: Tensor | None = None  # int32 [T], for mixers with RoPE
    keeps_states: bool = True  # False: blocks stay as they are, the states after the step are dropped

    def prefill_arguments(self) -> dict[str, Tensor]:
        """Return a kernel's arguments: states, and tables, query_start and kv_lens of the sequences after decodes."""
        first = self.num_decodes
        return {
            "states": self.states,
            "tables": self.tables[first:],
            "query_start": self.query_start[first:],
            "kv_lens": self.kv_lens[first:],
        }

    def check(self, elements: int) -> None:
        """Raise ValueError for other shapes or types, `elements` in the state of a sequence."""
        if self.states.shape[1] != elements or self.states.dtype != torch.float32 or self.states.stride(1) != 1:
            shape = tuple(self.states.shape)
            raise ValueError(f"states are {self.states.dtype} {shape}, not float32 of {elements} per sequence")
        if self.num_decodes and not self.keeps_states:
            raise ValueError("sequences of one token replace their states")
        vectors = {"tables": self.tables, "query_start": self.query_start, "kv_lens": self.kv_lens}
        for name, vector in vectors.items():
            if vector.dtype != torch.int32 or vector.stride(-1) != 1:
                raise ValueError(f"{name} are {vector.dtype}, not int32 rows")

    def sequences(self) -> Iterator[tuple[slice, int, Tensor]]:
        """Yield the rows of each sequence, its block, and its state before the step; on CPU tensors."""
        spans = [(s, s, s + 1) for s in range(self.num_decodes) if self.kv_lens[s]]
        if self.chunks is not None:
            starts = self.query_start.tolist()
            named = sorted(set(self.chunks[:, 0].tolist()))
            spans += [(s, starts[s], starts[s + 1]) for s in named if starts[s] < starts[s + 1]]
        for s, begin, end in spans:
            block = int(self.tables[s, 0])
            is_new = int(self.kv_lens[s]) == end - begin
            before = torch.zeros_like(self.states[0]) if is_new else self.states[block]
            yield slice(begin, end), block, before

    def update(self, inputs: Inputs, mix: Mix, out: Tensor) -> Tensor:
        """Write to out [T, channels] what a plain rule makes of inputs [T, ...]; replace the states. On CPU tensors."""
        for rows, block, before in self.sequences():
            mixed, after = mix(tuple(part[None, rows] for part in inputs), before[None])
            out[rows] = mixed[0]
            self.write(block, 0, after[0])
        return out

    def write(self, block: int, begin: int, after: Tensor) -> None:
        """Replace the elements from `begin` on of the state in a block, if states are kept. On CPU tensors."""
        if self.keeps_states:
            self.states[block, begin : begin + len(after)] = after
