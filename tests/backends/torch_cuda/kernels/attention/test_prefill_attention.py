"""PrefillAttention attention: the reference against the textbook, the interpreted kernel against the reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.compile_launches import programs
from torch import Tensor

from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import make_tiles, prefill_attention, query_tile
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention.kernel import candidates, multiplies8, tuned
from pagoda.backends.torch_cuda.kernels.attention.shared import padded
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS

NEW, OLD = CHIPS["sm_90"], CHIPS["sm_80"]
E4M3 = torch.float8_e4m3fn
ULP = 2**-10
WILD = 1 << 30
SINKS = torch.tensor([-1.0, 0.5, 3.0, 1.0])
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.7])
SCALES = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}


@dataclass
class Case:
    """Sequences of (new tokens, tokens before), the first `decodes` not to be computed, with three tokens of padding.

    What must not be read is NaN in the cache, and beyond the cache in the block tables.
    """

    seqs: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    values: int | None = None  # channels of a value head; None: dim
    page: int = 16
    tile: int = 5
    decodes: int = 0
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def lens(self) -> tuple[np.ndarray, np.ndarray]:
        """Query tokens and KV lengths."""
        new, before = np.array(self.seqs, np.int32).T
        return new, new + before

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        if (chunk := self.options.get("chunk")) is not None:
            return max(0, position - position % chunk - self.options.get("lookback", 0))
        return max(0, position - (self.options.get("window") or WILD) + 1)

    def arrays(self) -> tuple[Tensor, ...]:
        torch.manual_seed(sum(map(sum, self.seqs)))
        new, kv = self.lens
        stored = self.cache or self.dtype
        width = -(-int(kv.max()) // self.page) + 1
        pages = 1 + len(kv) * width
        dims = self.dim, self.values or self.dim
        caches = [torch.full((pages, self.kv_heads, self.page, dim), float("nan")).to(stored) for dim in dims]
        tables = torch.full((len(kv), width), WILD, dtype=torch.int32)
        free = (1 + torch.randperm(pages - 1)).tolist()
        for row in range(self.decodes, len(kv)):
            for position in range(self.first_seen(kv[row] - new[row]), kv[row]):
                at, slot = divmod(position, self.page)
                if tables[row, at] == WILD:
                    tables[row, at] = free.pop()
                for cache, dim in zip(caches, dims):
                    cache[tables[row, at], :, slot] = torch.randn(self.kv_heads, dim).to(stored)
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        q = torch.full((int(starts[-1]) + 3, self.heads, self.dim), float("nan"))
        q[starts[self.decodes] : -3] = torch.randn(int(starts[-1] - starts[self.decodes]), self.heads, self.dim)
        tiles = make_tiles(new, self.decodes, self.tile, kv)
        return q.to(self.dtype), *caches, tables, *map(torch.from_numpy, (starts, kv, tiles))

    def run(self, *, use_kernel: bool, chip=NEW) -> Tensor:
        """The computed rows; what is not computed is checked to be untouched."""
        q, *rest = self.arrays()
        out = torch.full((*q.shape[:2], self.values or self.dim), 7.0, dtype=q.dtype)
        more = {"scale": self.dim**-0.5, "out": out, "tile": self.tile, "chip": chip, **self.options}
        assert prefill_attention(q, *rest, use_kernel=use_kernel, **more) is out
        first = int(self.lens[0][: self.decodes].sum())
        assert bool((torch.cat([out[:first], out[-3:]]) == 7).all())
        return out[first:-3]


MIXED = [(1, 30), (1, 7), (6, 0), (1, 20), (13, 50), (7, 3)]
CASES = {
    "mixed": Case(MIXED, decodes=2),
    "one token": Case([(1, 0)]),
    "group of 7, head dim 80": Case([(20, 33)], heads=7, kv_heads=1, dim=80, tile=9),
    "no group, head dim 12": Case([(20, 13), (4, 0)], heads=2, kv_heads=2, dim=12, tile=16),
    "tiles of one token": Case([(3, 30)], heads=6, kv_heads=1, tile=1),
    "window within a pass": Case(MIXED, options={"window": 7}),
    "window over passes": Case([(20, 90), (9, 0)], options={"window": 50}),
    "window of one": Case([(12, 30)], options={"window": 1}),
    "window never reached": Case([(12, 30)], options={"window": 1000}),
    "chunks within a pass": Case(MIXED, options={"chunk": 7}),
    "chunks over passes, one begins within a tile": Case([(20, 90), (9, 0), (6, 48)], options={"chunk": 50}),
    "chunks of one": Case([(12, 30)], options={"chunk": 1}),
    "chunks and those before them": Case(MIXED, options={"chunk": 7, "lookback": 7}),
    "chunks and two before them, over passes, one begins within a tile": Case(
        [(20, 93), (9, 0), (6, 46)], options={"chunk": 24, "lookback": 48}
    ),
    "narrow values": Case(MIXED, decodes=2, dim=24, values=16, options={"window": 7}),
    "wide values, float8": Case([(20, 40)], dim=12, values=20, cache=E4M3, options=SCALES),
    "soft cap": Case([(20, 40)], options={"softcap": 2.0}),
    "sinks": Case([(20, 40), (3, 0)], options={"sinks": SINKS}),
    "slopes": Case([(20, 40), (3, 0)], options={"slopes": SLOPES}),
    "root of the distance": Case([(20, 40), (3, 0)], options={"slopes": SLOPES, "root": True}),
    "large pages": Case([(20, 120)], page=128),
    "small pages": Case([(9, 35)], page=4),
    "float8": Case([(20, 40)], cache=E4M3, options=SCALES),
    "everything": Case(
        MIXED, decodes=1, dim=24, page=8, cache=E4M3, options={"window": 40, "softcap": 5.0, "sinks": SINKS, **SCALES}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_the_reference(name: str):
    case = CASES[name]
    torch.testing.assert_close(case.run(use_kernel=True), case.run(use_kernel=False), rtol=0, atol=3e-6)


@pytest.mark.parametrize("chip", [NEW, OLD], ids=lambda chip: chip.name)
@pytest.mark.parametrize("cache", [None, E4M3], ids=str)
def test_half_precision_at_the_usual_tile(chip, cache: torch.dtype | None):
    """Tiles and passes as a GPU has them."""
    tile = query_tile(4, 64, torch.float16, chip)
    case = Case([(40, 170), (5, 0)], heads=4, kv_heads=1, dim=64, tile=tile, dtype=torch.float16, cache=cache)
    case.options = SCALES if cache else {}
    torch.testing.assert_close(
        case.run(use_kernel=True, chip=chip), case.run(use_kernel=False), rtol=2 * ULP, atol=2 * ULP
    )


@pytest.mark.parametrize("chip", [NEW, OLD], ids=lambda chip: chip.name)
def test_float8_products_keep_every_bit_of_bfloat16_queries(chip):
    """Against float64, in float16, which the interpreter can compute; the largest channel is 30 times the others."""
    case = Case([(40, 50)], dim=64, tile=8, dtype=torch.float16, cache=E4M3)
    assert multiplies8(64, torch.bfloat16, chip, float8=True) == (chip is NEW)
    q, *rest = case.arrays()
    q = q[:40]
    q[..., 5] *= 30
    q = q.bfloat16().half()
    more = {"scale": 0.1, "tile": 8, "chip": chip, **SCALES}
    expected = prefill_attention(q.double(), *rest, use_kernel=False, **more)
    out = prefill_attention(q, *rest, use_kernel=True, **more).double()
    assert (out - expected).norm() < 5e-4 * expected.norm(), "weights and values of 11 bits"


@pytest.mark.parametrize("seed", range(3))
def test_random_batches(seed: int):
    rng = np.random.default_rng(seed)
    seqs = [(int(rng.integers(1, 30)), int(rng.integers(0, 60))) for _ in range(4)]
    limit = [{}, {"window": int(rng.integers(1, 60))}, {"chunk": int(rng.integers(1, 60))}][seed % 3]
    case = Case(seqs, heads=3, kv_heads=1, tile=int(rng.integers(1, 12)), options=limit)
    torch.testing.assert_close(case.run(use_kernel=True), case.run(use_kernel=False), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "name",
    [
        *("mixed", "window over passes", "chunks within a pass", "soft cap", "sinks", "slopes", "everything"),
        *("chunks and those before them", "narrow values", "root of the distance"),
    ],
)
def test_reference_is_the_textbook(name: str):
    """One token and one head at a time, in float64."""
    case = replace(CASES[name], dtype=torch.float64, cache=CASES[name].cache or torch.float32)
    q, keys, values, tables, starts, kv, _ = case.arrays()
    options, out = case.options, case.run(use_kernel=False)
    cap, sinks = options.get("softcap"), options.get("sinks")
    slopes = options.get("slopes", torch.zeros(case.heads)).double()
    k_scale, v_scale = (float(options.get(name, 1.0)) for name in SCALES)
    row = 0
    for s in range(case.decodes, len(kv)):
        for position in range(int(kv[s] - (starts[s + 1] - starts[s])), int(kv[s])):
            slots = [divmod(at, case.page) for at in range(case.first_seen(position), position + 1)]
            for n in range(case.heads):
                place = [(int(tables[s, page]), n * case.kv_heads // case.heads, slot) for page, slot in slots]
                k, v = (torch.stack([cache[at] for at in place]).double() for cache in (keys, values))
                x = k @ q[starts[case.decodes] + row, n] * case.dim**-0.5 * k_scale
                x = x if cap is None else cap * torch.tanh(x / cap)
                distance = torch.arange(len(x) - 1, -1, -1).double()
                x = x - slopes[n] * (distance.sqrt() if options.get("root") else distance)
                total = x.exp().sum() + (0 if sinks is None else sinks[n].double().exp())
                expected = x.exp() @ v / total * v_scale
                torch.testing.assert_close(out[row, n], expected, rtol=0, atol=1e-12)
            row += 1


def test_tiles_cover_every_token_once_longest_first():
    rng = np.random.default_rng(0)
    new = rng.integers(1, 50, 20).astype(np.int32)
    kv = new + rng.integers(0, 500, 20).astype(np.int32)
    tiles = make_tiles(new, 3, 8, kv)
    assert tiles.dtype == np.int32
    covered = sorted((s, first + j) for s, first in tiles.tolist() for j in range(8) if first + j < new[s])
    assert covered == [(s, j) for s in range(3, 20) for j in range(new[s])]
    sees = kv[tiles[:, 0]] - new[tiles[:, 0]] + tiles[:, 1]
    assert (np.diff(sees) <= 0).all()
    assert make_tiles(new, 20, 8).shape == (0, 2)
    assert make_tiles(np.array([1, 9], np.int32), 1, 8).tolist() == [[1, 8], [1, 0]]


def test_no_prefill_tokens_give_empty_output():
    case = Case([(1, 3)], decodes=1)
    assert case.run(use_kernel=True).numel() == case.run(use_kernel=False).numel() == 0


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_settings(chip):
    """The cache's type changes no tile; what is in use is among what a benchmark would try, and fits."""
    for dim in (64, 80, 96, 112, 128, 192, 256):
        plain, float8 = (tuned(dim, torch.bfloat16, chip, float8=f) for f in (False, True))
        assert plain["BLOCK_M"] == float8["BLOCK_M"]
        assert plain in list(candidates(dim, torch.bfloat16, chip))
        assert float8 in list(candidates(dim, torch.bfloat16, chip, float8=True))
    for dim in range(8, 513, 8):  # none has the settings of what was never thought of, ten times slower
        settings = [tuned(dim, torch.float16, chip, float8=f) for f in (False, True)]
        assert all(each["BLOCK_M"] >= 32 and each["BLOCK_N"] >= 32 for each in settings)
        assert settings[0] in list(candidates(dim, torch.float16, chip)) or dim > 256
    for group in (1, 3, 4, 7, 8, 71, 200):
        tile = query_tile(group, 128, torch.bfloat16, chip)
        assert tile >= 1
        assert tile == 1 or padded(tile * group) == tuned(128, torch.bfloat16, chip)["BLOCK_M"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(3, 2, 8, 16)}, "differ"),
        ({"q": torch.zeros(1, 3, 16)}, "do not fit"),
        ({"q": torch.zeros(1, 4, 8)}, "do not fit"),
        ({"q": torch.zeros(1, 16, 4).mT}, "must be contiguous"),
        ({"q": torch.zeros(1, 4, 16, dtype=torch.float16)}, "float16"),
        ({"k_scale": torch.ones(1)}, "have no k_scale"),
        ({"keys": torch.zeros(3, 2, 16, 16).to(E4M3), "values": torch.zeros(3, 2, 16, 16).to(E4M3)}, "need k_scale"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], message: str):
    arrays = {
        "q": torch.zeros(1, 4, 16),
        "keys": torch.zeros(3, 2, 16, 16),
        "values": torch.zeros(3, 2, 16, 16),
        "tables": torch.zeros(1, 1, dtype=torch.int32),
        "query_start": torch.tensor([0, 1], dtype=torch.int32),
        "kv_lens": torch.ones(1, dtype=torch.int32),
        "tiles": torch.zeros(1, 2, dtype=torch.int32),
    }
    prefill_attention(**arrays, scale=1.0, use_kernel=False, chip=NEW)
    with pytest.raises(ValueError, match=message):
        prefill_attention(**{**arrays, **change}, scale=1.0, use_kernel=True, chip=NEW)


def test_pages_of_keys_and_values_may_alternate():
    """Views of one array [P, 2, K, B, H]."""
    q, keys, values, *rest = Case([(9, 40)]).arrays()
    both = torch.stack((keys, values), 1)
    more = {"scale": 0.25, "use_kernel": True, "chip": NEW, "tile": 5}
    out = [prefill_attention(q, k, v, *rest, **more)[:9] for k, v in ((keys, values), (both[:, 0], both[:, 1]))]
    torch.testing.assert_close(*out, rtol=0, atol=0)


LAUNCHES = """
import torch
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.backends.torch_cuda.kernels.attention.prefill_attention import prefill_attention

keys = torch.zeros(2, 1, 16, 16, dtype=torch.bfloat16)
for seqs, width, tiles, offset in ((16, 16, 16, 0), (1, 1, 1, 1), (3, 5, 7, 3)):
    q = torch.zeros(seqs, 1, 16, dtype=torch.bfloat16)
    tables = torch.zeros(seqs * width + offset, dtype=torch.int32)[offset:].view(seqs, width)
    starts, lens, list_ = (torch.zeros(n + offset, dtype=torch.int32)[offset:] for n in (seqs + 1, seqs, 2 * tiles))
    how = {"scale": 1.0, "use_kernel": True, "chip": CHIPS["sm_90"]}
    prefill_attention(q, keys, keys.clone(), tables, starts, lens, list_.view(-1, 2), **how)
"""


def test_what_varies_from_step_to_step_compiles_nothing():
    """Numbers of sequences, tiles and table columns, and where in a staging buffer the arrays begin."""
    assert programs(LAUNCHES) == 3 * [["prefill_attention", "prefill_attention 0"]]
