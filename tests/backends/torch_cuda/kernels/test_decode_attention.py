"""Decode attention: the reference against torch's own attention, the interpreted kernel against the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.chips import CHIPS
from pagoda.backends.torch_cuda.kernels.decode_attention import choose_splits, decode_attention

NATIVE, OLD = CHIPS["sm_90"], CHIPS["sm_80"]
E4M3 = torch.float8_e4m3fn
ULP = 2**-10


@dataclass
class Case:
    """Random sequences in a cache in which everything that no token may see is NaN, and every such table entry wild."""

    lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page: int = 16
    query_len: int = 1
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(len(self.lens) + sum(self.lens))
        width, cached = -(-max(self.lens) // self.page) + 2, self.cache or self.dtype
        pages = 1 + len(self.lens) * width
        caches = torch.full((2, pages, self.kv_heads, self.page, self.dim), float("nan")).to(cached)
        tables = torch.full((len(self.lens), width), 1 << 30, dtype=torch.int32)
        free = (1 + torch.randperm(pages - 1)).tolist()
        for row, length in enumerate(self.lens):
            window = self.options.get("window")
            first = 0 if window is None else max(0, length - self.query_len - window + 1)
            for position in range(first, length):
                at, slot = divmod(position, self.page)
                if tables[row, at] == 1 << 30:
                    tables[row, at] = free.pop()
                caches[:, tables[row, at], :, slot] = torch.randn(2, self.kv_heads, self.dim).to(cached)
        q = torch.randn(len(self.lens) * self.query_len, self.heads, self.dim).to(self.dtype)
        return q, caches[0], caches[1], tables, torch.tensor(self.lens, dtype=torch.int32)

    def run(self, *, use_kernel: bool, splits: int = 1, chip=NATIVE) -> Tensor:
        more = {"scale": self.dim**-0.5, "query_len": self.query_len, **self.options}
        return decode_attention(*self.arrays(), splits=splits, use_kernel=use_kernel, chip=chip, **more)


@pytest.fixture(autouse=True)
def dirty_scratch(monkeypatch: pytest.MonkeyPatch):
    """Memory that a kernel allocates holds NaN."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: _filled(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: _filled(empty_like(*a, **k)))


def _filled(x: Tensor) -> Tensor:
    return x.fill_(float("nan")) if x.is_floating_point() else x


SCALES = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
SINKS = torch.tensor([-1.0, 0.5, 3.0, 1.0])
CASES = {
    "ragged": Case([1, 0, 37, 16, 70]),
    "one token": Case([1]),
    "group of 7, head dim 80": Case([5, 40], heads=7, kv_heads=1, dim=80),
    "no group, head dim 12": Case([33, 20], heads=2, kv_heads=2, dim=12),
    "drafts": Case([9, 64, 0, 3], query_len=3),
    "more rows than a program has": Case([50], heads=6, kv_heads=1, query_len=8),
    "window": Case([100, 7, 40], options={"window": 20}),
    "window of drafts": Case([90, 21, 30], query_len=4, options={"window": 5}),
    "window of one": Case([90, 1], options={"window": 1}),
    "soft cap": Case([40, 9], options={"softcap": 2.0}),
    "sinks": Case([40, 9, 0], options={"sinks": SINKS}),
    "large pages": Case([100, 129], page=128),
    "small pages": Case([35, 8], page=4),
    "scaled": Case([40, 9], options=SCALES),
    "everything": Case(
        [100, 9], query_len=2, dim=24, page=8, options={"window": 40, "softcap": 5.0, "sinks": SINKS, **SCALES}
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("splits", [1, 3])
def test_kernel_is_the_reference(name: str, splits: int):
    case = CASES[name]
    torch.testing.assert_close(case.run(use_kernel=True, splits=splits), case.run(use_kernel=False), rtol=0, atol=3e-6)
