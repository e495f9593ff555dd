"""What all attention kernels share: shape, arguments, and where the paged cache has a sequence's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from pagoda.backends.cpu_kernels.emission.emit import F32, I16, I32, LANES, Emitter

NEVER: Final = -1e30
"""A largest score before any key."""

STATE_EXTRA: Final = 2 * LANES
"""Numbers of a prefix's state besides the sum of weighted values, see `paired_attention.prefix_kernel`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for."""

    head_dim: int
    value_dim: int
    kv_heads: int
    group: int
    """Query heads per KV head."""

    block_size: int
    scale: float
    bfloat16: bool
    """Whether queries, cache and results are bfloat16; else float32."""

    tile_rows: int = 48
    """Heads of all tokens of a task, at most."""

    @property
    def supported(self) -> bool:
        """Whether heads are whole vectors and tiles fit the stack."""
        whole = self.head_dim % LANES == 0 and self.value_dim % LANES == 0
        return whole and max(self.head_dim, self.value_dim) <= 256 and self.group <= self.tile_rows

    @property
    def tile_tokens(self) -> int:
        """Tokens of a prompt in one task."""
        return self.tile_rows // self.group

    @property
    def keys(self) -> int:
        """Scores of a block, in whole vectors."""
        return -(-self.block_size // LANES) * LANES

    @property
    def state_width(self) -> int:
        """Numbers of the state of a head after a prefix."""
        return self.value_dim + STATE_EXTRA

    @property
    def kind(self) -> Any:
        """LLVM's type of the arrays' elements."""
        return I16 if self.bfloat16 else F32


class PagedKernel:
    """A kernel under construction, its arguments, and the block table."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.e = Emitter()
        e = self.e
        kind = shape.kind
        self.q = e.pointer(0, kind)
        self.q_stride = e.argument(1)
        self.k = e.pointer(2, kind)
        self.v = e.pointer(3, kind)
        self.slots = e.argument(4)
        self.table = e.pointer(5, I32)
        self.table_stride = e.argument(6)
        self.rows = e.pointer(7, I32)
        self.window = e.argument(8)
        self.out = e.pointer(9, kind)
        self.out_stride = e.argument(10)

    @property
    def module(self) -> ir.Module:
        """The kernel's module."""
        return self.e.module

    def first_seen(self, position: Any) -> Any:
        """Return the first position that a token sees."""
        e = self.e
        limited = e.most(e.add(position, e.builder.neg(self.window), 1), 0)
        return e.builder.select(e.builder.icmp_signed(">", self.window, e.integer(0)), limited, e.integer(0))

    def slot_of(self, row: Any, page: Any, head: Any) -> Any:
        """Return the number of the first slot of a page of a sequence in the arrays of all heads."""
        e = self.e
        block = e.load_int(self.table, e.add(e.mul(row, self.table_stride), page))
        return e.add(e.mul(head, self.slots), e.mul(block, self.shape.block_size))

    def head_start(self, token: Any, stride: Any, head: Any, group: Any, width: int) -> Any:
        """Return where a query head of a token begins in an array [tokens, heads, width].

        `stride`: from token to token; `head`: the KV head; `group`: the query head's number among those of the KV head.
        """
        e = self.e
        of_head = e.mul(e.add(e.mul(head, self.shape.group), group), width)
        return e.add(e.mul(token, stride), of_head)
