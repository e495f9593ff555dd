"""Specialisations compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from pagoda.backends.torch_cuda.kernels.decode_attention.blocks import DecodeBlockSizes, DecodeShape, blocks
from pagoda.backends.torch_cuda.kernels.decode_attention.kernel import CHUNK, attend, reduce
from pagoda.backends.torch_cuda.kernels.launch import Chip, Launch

TRITON_TYPES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}
KV_HEADS: Final = 8
PAGE: Final = 16


@dataclass(frozen=True, slots=True)
class DecodeAttentionArgs:
    """The specialisation for one model. Sinks have the type of the queries."""

    shape: DecodeShape
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    direct: bool = False  # one split

    @property
    def name(self) -> str:
        """E.g. h128-g4-q1-bf16-fp8e4nv-direct."""
        shape, traits = self.shape, (("window", self.window), ("softcap", self.softcap), ("sinks", self.sinks))
        parts = [f"h{shape.head_dim}-g{shape.group}-q{shape.query_len}", TRITON_TYPES[self.dtype]]
        parts += [TRITON_TYPES[shape.cache]] if shape.cache != self.dtype else []
        return "-".join([*parts, *(name for name, on in (*traits, ("direct", self.direct)) if on)])

    def attend(self, chip: Chip) -> Launch:
        """Return the launch over the splits."""
        use, cached = blocks(self.shape, chip), TRITON_TYPES[self.shape.cache]
        quantised = self.shape.cache.itemsize == 1
        if quantised and not chip.float8:
            cached = "i8"
        queries = f"*{TRITON_TYPES[self.dtype]}"
        scratch = {} if self.direct else {"tops": "*fp32", "sums": "*fp32"}
        scales = {"k_scale": "*fp32", "v_scale": "*fp32"} if quantised else {}
        sinks = {"sinks": queries} if self.sinks and self.direct else {}
        signature = {
            "q": queries,
            "keys": f"*{cached}",
            "values": f"*{cached}",
            "tables": "*i32",
            "kv_lens": "*i32",
            "out": queries if self.direct else "*fp32",
            **scratch,
            **sinks,
            **scales,
            "scale": "fp32",
            "page_stride": "i32:16",
            "table_stride": "i32",
        }
        constants = {
            **dict.fromkeys(set(attend.arg_names) - set(signature)),
            **self._common(use),
            "KV_HEADS": KV_HEADS,
            "GROUP": self.shape.group,
            "ROWS": use.ROWS,
            "SOFTCAP": self.softcap,
        }
        hot = self.dtype != torch.float32  # which does not use tensor cores
        return Launch(attend, signature, constants, num_warps=use.num_warps, num_stages=use.num_stages, hot=hot)

    def reduce(self, chip: Chip) -> Launch:
        """Return the launch that sums the splits."""
        queries = f"*{TRITON_TYPES[self.dtype]}"
        signature = {
            **dict.fromkeys(("partial", "tops", "sums"), "*fp32"),
            "kv_lens": "*i32",
            "out": queries,
            "splits": "i32",
            **({"sinks": queries} if self.sinks else {}),
        }
        constants = {**({} if self.sinks else {"sinks": None}), **self._common(blocks(self.shape, chip))}
        constants |= {"HEADS": KV_HEADS * self.shape.group, "CHUNK": CHUNK}
        return Launch(reduce, signature, constants, num_stages=3)

    def _common(self, use: DecodeBlockSizes) -> dict[str, int]:
        shape = self.shape
        common = {"QUERY_LEN": shape.query_len, "H": shape.head_dim, "WIDTH": shape.width, "PAGE": PAGE}
        return {**common, "TILE": use.TILE, "WINDOW": self.window}


def _specs() -> Iterator[DecodeAttentionArgs]:
    bf16, fp16, fp32, fp8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
    for cache in (bf16, fp8):
        for dim in (64, 128, 256):
            for group, query_len in ((4, 1), (4, 8), (8, 8)):
                yield DecodeAttentionArgs(DecodeShape(dim, group, query_len, cache))
    for dim, group in ((64, 1), (64, 7), (96, 1), (128, 1), (128, 7), (128, 8), (128, 16), (256, 16), (80, 1)):
        yield DecodeAttentionArgs(DecodeShape(dim, group, 1, bf16))
    yield DecodeAttentionArgs(DecodeShape(128, 16, 8, bf16))
    yield DecodeAttentionArgs(DecodeShape(80, 1, 1, fp8))
    for cache in (bf16, fp8):
        yield DecodeAttentionArgs(DecodeShape(128, 4, 1, cache), direct=True)
    yield DecodeAttentionArgs(DecodeShape(128, 4, 1, fp16), dtype=fp16)
    yield DecodeAttentionArgs(DecodeShape(128, 4, 1, fp8), dtype=fp16)
    yield DecodeAttentionArgs(DecodeShape(256, 2, 1, bf16), window=4096, softcap=50.0)
    yield DecodeAttentionArgs(DecodeShape(64, 8, 1, bf16), window=128, sinks=True)
    yield DecodeAttentionArgs(DecodeShape(64, 8, 1, bf16), window=128, sinks=True, direct=True)
    yield DecodeAttentionArgs(DecodeShape(64, 3, 1, fp32), dtype=fp32)
    yield DecodeAttentionArgs(DecodeShape(128, 4, 8, fp32), dtype=fp32)


def launches(chip: Chip) -> dict[str, Launch]:
    """Return the launches by name; only block sizes depend on the chip."""
    by_name = {f"attend-{spec.name}": spec.attend(chip) for spec in _specs()}
    for spec in _specs():
        if not spec.direct and spec.shape.group == 8:
            by_name[f"reduce-{spec.name}"] = spec.reduce(chip)
    return by_name
