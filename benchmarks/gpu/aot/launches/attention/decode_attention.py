"""The launches of decode_attention that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.attention.decode_attention.kernel import (
    CHUNK,
    DecodeShape,
    attend,
    blocks,
    multiplies8,
    reduce,
)
from pagoda.backends.torch_cuda.kernels.attention.shared import padded
from pagoda.backends.torch_cuda.kernels.frame.launch import Chip
from pagoda.benchmarks.gpu.aot.launch import TRITON_TYPES, Launch

KV_HEADS: Final = 8
PAGE: Final = 16


@dataclass(frozen=True, slots=True)
class DecodeAttentionArgs:
    """The specialisation for one model. Sinks have the type of the queries."""

    shape: DecodeShape
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    chunk: int = 0
    lookback: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    root: bool = False  # of the distances
    direct: bool = False  # without a work list

    @property
    def name(self) -> str:
        """E.g. h128-g4-q1-bf16-fp8e4nv-direct."""
        shape = self.shape
        traits = (
            ("window", self.window),
            ("chunk", self.chunk),
            ("lookback", self.lookback),
            ("softcap", self.softcap),
        )
        traits = (*traits, ("sinks", self.sinks), ("slopes", self.slopes), ("root", self.root), ("direct", self.direct))
        width = f"h{shape.head_dim}" + (f"v{shape.value_dim}" if shape.value_dim else "")
        parts = [f"{width}-g{shape.group}-q{shape.query_len}", TRITON_TYPES[self.dtype]]
        parts += [TRITON_TYPES[shape.cache]] if shape.cache != self.dtype else []
        return "-".join([*parts, *(name for name, on in traits if on)])

    def attend(self, chip: Chip) -> Launch:
        """Return the launch over the pieces."""
        use = blocks(self.shape, chip)
        cached = TRITON_TYPES[self.shape.cache]
        quantised = self.shape.cache.itemsize == 1
        if quantised and not chip.float8:
            cached = "i8"
        queries = f"*{TRITON_TYPES[self.dtype]}"
        scratch = {} if self.direct else dict.fromkeys(("partial", "tops", "sums"), "*fp32")
        items = {} if self.direct else {"items": "*i32"}
        scales = {"k_scale": "*fp32", "v_scale": "*fp32"} if quantised else {}
        sinks = {"sinks": queries} if self.sinks else {}
        slopes = {"slopes": "*fp32"} if self.slopes else {}
        signature = {
            "q": queries,
            "keys": f"*{cached}",
            "values": f"*{cached}",
            "tables": "*i32",
            "kv_lens": "*i32",
            **items,
            "out": queries,
            **scratch,
            **sinks,
            **slopes,
            **scales,
            "scale": "fp32",
            "page_stride": "i32:16",
            **({"value_page_stride": "i32:16"} if self.shape.value_dim else {}),
            "table_stride": "i32",
        }
        constants = {
            **dict.fromkeys(set(attend.arg_names) - set(signature)),
            **self._common(),
            "PAGE": PAGE,
            "TILE": use.TILE,
            "WINDOW": self.window,
            "SPAN": self.chunk,
            "BACK": self.lookback,
            "KV_HEADS": KV_HEADS,
            "GROUP": self.shape.group,
            "H": self.shape.head_dim,
            "WIDTH": self.shape.width,
            "ROWS": use.ROWS,
            "SOFTCAP": self.softcap,
            "ROOT": self.root,
            "PRODUCT8": multiplies8(self.shape, self.dtype, use.TILE, chip),
            "NATIVE": chip.float8,
        }
        hot = self.dtype != torch.float32  # which does not use tensor cores
        return Launch(attend, signature, constants, num_warps=use.num_warps, num_stages=use.num_stages, hot=hot)

    def reduce(self, chip: Chip) -> Launch:
        """Return the launch that sums the pieces."""
        queries = f"*{TRITON_TYPES[self.dtype]}"
        signature = {
            **dict.fromkeys(("partial", "tops", "sums"), "*fp32"),
            "merges": "*i32",
            "out": queries,
            **({"sinks": queries} if self.sinks else {}),
        }
        constants = {**dict.fromkeys(set(reduce.arg_names) - set(signature)), **self._common()}
        constants |= {"HEADS": KV_HEADS * self.shape.group, "CHUNK": CHUNK}
        return Launch(reduce, signature, constants, num_stages=3)

    def _common(self) -> dict[str, int]:
        shape = self.shape
        return {"QUERY_LEN": shape.query_len, "V": shape.values, "V_WIDTH": padded(shape.values)}


def _specs() -> Iterator[DecodeAttentionArgs]:
    bf16 = torch.bfloat16
    fp16 = torch.float16
    fp32 = torch.float32
    fp8 = torch.float8_e4m3fn
    for cache in (bf16, fp8):
        for dim in (64, 128, 256):
            for group, query_len in ((4, 1), (4, 8), (8, 8)):
                yield DecodeAttentionArgs(DecodeShape(dim, group, query_len, cache))
    shapes = (64, 1), (64, 7), (96, 1), (128, 1), (128, 7), (128, 8), (128, 16), (256, 16), (80, 1), (512, 8)
    for dim, group in shapes:
        yield DecodeAttentionArgs(DecodeShape(dim, group, 1, bf16))
    yield DecodeAttentionArgs(DecodeShape(128, 16, 8, bf16))
    yield DecodeAttentionArgs(DecodeShape(80, 1, 1, fp8))
    for cache in (bf16, fp8):
        yield DecodeAttentionArgs(DecodeShape(128, 4, 1, cache), direct=True)
    yield DecodeAttentionArgs(DecodeShape(128, 4, 1, fp16), dtype=fp16)
    yield DecodeAttentionArgs(DecodeShape(128, 4, 1, fp8), dtype=fp16)
    yield DecodeAttentionArgs(DecodeShape(256, 2, 1, bf16), window=4096, softcap=50.0)
    yield DecodeAttentionArgs(DecodeShape(128, 5, 1, bf16), chunk=8192)
    yield DecodeAttentionArgs(DecodeShape(64, 8, 1, bf16), window=128, sinks=True)
    yield DecodeAttentionArgs(DecodeShape(64, 8, 1, bf16), window=128, sinks=True, direct=True)
    yield DecodeAttentionArgs(DecodeShape(128, 1, 1, bf16), slopes=True)
    yield DecodeAttentionArgs(DecodeShape(128, 12, 1, bf16), slopes=True, root=True)
    yield DecodeAttentionArgs(DecodeShape(128, 4, 1, bf16), chunk=16384, lookback=16384)
    for cache in (bf16, fp8):
        yield DecodeAttentionArgs(DecodeShape(192, 16, 1, cache, value_dim=128))
        yield DecodeAttentionArgs(DecodeShape(192, 8, 1, cache, value_dim=128), window=128, sinks=True)
        yield DecodeAttentionArgs(DecodeShape(192, 8, 1, cache, value_dim=128), window=128, sinks=True, direct=True)
    yield DecodeAttentionArgs(DecodeShape(64, 3, 1, fp32), dtype=fp32)
    yield DecodeAttentionArgs(DecodeShape(128, 4, 8, fp32), dtype=fp32)


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name; only block sizes depend on the chip."""
    by_name = {f"attend-{spec.name}": spec.attend(chip) for spec in _specs()}
    for spec in _specs():
        if not spec.direct and spec.shape.group == 8:
            by_name[f"reduce-{spec.name}"] = spec.reduce(chip)
    return by_name
