"""Tiny random models and hand-made step plans for backend tests."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from support.engines.backend_options import make_options

from pagoda.backends.registry import load_backend
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.lora.adapter import NO_ADAPTER
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS, RowStart, StepPlan, TokenLogprobs
from pagoda.common.models.mixers import Attention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, Mlp, ModelSpec, Moe, Norms, Router

USUAL_CACHE = CacheConfig()


def tiny_spec(window: int | None = None, softcap: float | None = None, moe: bool = False) -> ModelSpec:
    """Two layers (the second windowed when asked), grouped heads, untied head."""
    norm = Norm(1e-5)
    ffn = Moe(4, Mlp(24, "silu", True), Router(2, True)) if moe else Mlp(48, "silu", True, bias=True)

    def layer(window: int | None) -> Layer:
        attention = Attention(4, 2, 16, 0.25, Rope(1e4, 12), window, softcap, qk_norm=norm, qkv_bias=True)
        return Layer((attention,), ffn, Norms(norm, None, norm, norm))

    return ModelSpec(
        vocab=96, width=32, layers=(layer(None), layer(window)), final_norm=norm, tied=False, max_positions=256
    )


def random_weights(spec: ModelSpec, seed: int = 0):
    rng = np.random.default_rng(seed)
    for param in params(spec).values():
        yield param.name, (rng.standard_normal(param.shape) * 0.25).astype(np.float32)


def by_token(logprobs: TokenLogprobs, vocab: int = 96) -> npt.NDArray[np.float32]:
    """Return logprobs [n, V] of all tokens in the order of the vocabulary."""
    out = np.full((len(logprobs.ranks), vocab), np.nan, np.float32)
    np.put_along_axis(out, logprobs.token_ids[:, 1:], logprobs.logprobs[:, 1:], 1)
    return out


class Driver:
    """Feeds a backend with plans, one block table per row and group, blocks chosen by `order`.

    `weights`: in place of `random_weights`. `make`: more options of the backend; `device` of torch_cuda.
    """

    def __init__(
        self,
        spec: ModelSpec,
        order: str = "consecutive",
        rows: int = 8,
        block_size: int = 4,
        dtype="float32",
        backend: str = "reference",
        cache: CacheConfig = USUAL_CACHE,
        weights=None,
        max_drafts: int = 0,
        max_len: int = 128,
        step_tokens: int = 256,
        **make,
    ):
        limits = Limits(
            max_model_len=max_len,
            max_num_batched_tokens=step_tokens,
            max_num_seqs=rows,
            block_size=block_size,
            max_drafts=max_drafts,
            max_loras=make["lora"].slots if "lora" in make else 0,
        )
        self.layout = kv_layout(spec, block_size)
        module = load_backend(backend)
        device = {"device": make.pop("device")} if "device" in make else {}
        options = make_options(spec, limits=limits, layout=self.layout, cache=cache, dtype=dtype, **make)
        self.backend = module.create(options, **device)
        self.backend.load(random_weights(spec) if weights is None else weights)
        pages = max_len // block_size
        count = rows * pages * len(self.layout.groups)
        self.backend.init_cache((1 + count,) * len(self.layout.pools))
        blocks = 1 + np.arange(count, dtype=np.int32)
        if order == "scattered":
            blocks = np.random.default_rng(1).permutation(blocks)
        self.tables = blocks.reshape(len(self.layout.groups), rows, pages)
        self.context = dict.fromkeys(range(rows), 0)
        self.steps = itertools.count()

    def start(self, row: int, tokens: list[int], rules: SamplingRules | None = None) -> RowStart:
        self.context[row] = 0
        return RowStart(row, np.array(tokens, np.int32), len(tokens), rules or SamplingRules())

    def step(self, pieces: dict[int, list[int]], starts=(), samples: dict[int, bool] | None = None, adapters=None):
        """One step: row -> its next tokens. Rows with one token go first. `adapters`: row -> slot of its adapter."""
        rows = sorted(pieces, key=lambda row: (len(pieces[row]) != 1, row))
        lengths = [len(pieces[row]) for row in rows]
        plan = StepPlan(
            step=next(self.steps),
            starts=tuple(starts),
            rows=np.array(rows, np.int32),
            query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            context=np.array([self.context[row] for row in rows], np.int32),
            token_ids=np.array([t for row in rows for t in pieces[row]], np.int32),
            block_tables=tuple(table[rows].copy() for table in self.tables),
            samples=np.array([(samples or {}).get(row, True) for row in rows]),
            adapter_slots=None
            if adapters is None
            else np.array([adapters.get(row, NO_ADAPTER) for row in rows], np.int32),
        )
        for row, length in zip(rows, lengths):
            self.context[row] += length
        return rows, self.backend.execute(plan).result()

    def generate(self, prompt: list[int], count: int, rules: SamplingRules | None = None, row: int = 0) -> list[int]:
        _, result = self.step({row: prompt}, [self.start(row, prompt, rules)])
        tokens = [int(result.token_ids[0])]
        for _ in range(count - 1):
            _, result = self.step({row: [PREVIOUS]})
            tokens.append(int(result.token_ids[0]))
        return tokens
