"""Fake pooling engines: the vector of a text counts its token ids modulo 8.

Models: "embed": these vectors, with Matryoshka dimensions, also per token; "plain": without Matryoshka dimensions;
"classify": labels by the first three elements; "cross": scores a pair by the number of tokens of the second text that
are in the first; "slow": embeds slowly; "crash": fails in its second step; "tokens": vectors per token only; "whole":
labels for whole texts only.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
from support.checkpoints.byte_text import EOS

from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.pooling.scheduler import pooling_core
from pagoda.common.engine.pooling.values import PoolingRules, PoolPlan, PoolResult
from pagoda.server.core_client.ipc_messages import PoolingInfo

SIZE = 8

requests: list[EngineRequest] = []
"""Requests to all engines in this process, latest last."""

INFOS = {
    "embed": PoolingInfo(
        tasks=("embed", "token_embed"),
        embedding_size=SIZE,
        is_matryoshka=True,
        prompts={"query": "query: ", "document": ""},
    ),
    "plain": PoolingInfo(tasks=("embed",), embedding_size=SIZE, default_dimensions=None),
    "classify": PoolingInfo(tasks=("classify", "token_classify"), labels=("bad", "so so", "good")),
    "cross": PoolingInfo(tasks=("classify", "score", "token_classify"), labels=("suits",), is_cross_encoder=True),
    "whole": PoolingInfo(tasks=("classify",), labels=("bad", "so so", "good")),
    "slow": PoolingInfo(tasks=("embed",), embedding_size=SIZE),
    "crash": PoolingInfo(tasks=("embed",), embedding_size=SIZE),
    "tokens": PoolingInfo(tasks=("token_embed",), embedding_size=SIZE),
}


def fake_pooling_core(kind: str, limits: Limits) -> EngineCore:
    """Return a core that pools four prompts a step (one for "slow") and appends its requests to `requests`."""
    seqs = 1 if kind == "slow" else 4
    limits = replace(limits, max_num_seqs=seqs, max_num_batched_tokens=1 << 20, async_scheduling=False)
    core = pooling_core(FakePoolingBackend(kind), limits, INFOS[kind].tasks)
    add = core.add_request

    def add_request(request: EngineRequest) -> None:
        requests.append(request)
        add(request)

    core.add_request = add_request
    return core


class FakePoolingBackend:
    """What an engine needs of a loaded PoolingBackend."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._steps = 0

    def execute(self, plan: PoolPlan) -> Future[PoolResult]:
        self._steps += 1
        if self._kind == "crash" and self._steps == 2:
            raise RuntimeError("out of order")
        if self._kind == "slow":
            time.sleep(0.01)
        prompts = np.split(plan.token_ids, plan.query_start[1:-1])
        pending: Future[PoolResult] = Future()
        pending.set_result(PoolResult(tuple(numbers(rules, ids) for rules, ids in zip(plan.rules, prompts))))
        return pending


def numbers(rules: PoolingRules, ids: np.ndarray) -> np.ndarray:
    each = np.eye(SIZE, dtype=np.float32)[ids % SIZE]
    if rules.task == "score":
        begin = rules.second_text or 0
        first, second = set(ids[:begin].tolist()), ids[begin:].tolist()
        shared = np.array([sum(token in first for token in second)], np.float32)
        return 1 / (1 + np.exp(-shared)) if rules.use_activation else shared
    rows = each if rules.task.startswith("token") else each.sum(0, keepdims=True)
    if rules.task.endswith("embed"):
        rows = rows[:, : rules.dimensions]
        if rules.use_activation:
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    else:
        rows = rows[:, :3]
        if rules.use_activation:
            rows = np.exp(rows) / np.exp(rows).sum(1, keepdims=True)
    return rows if rules.task.startswith("token") else rows[0]


def vector(text: str, *, special: bool = True, normal: bool = True) -> list[float]:
    """What "embed" makes of a text of single bytes, with the one special token behind it or without."""
    counts = np.bincount(np.frombuffer(text.encode(), np.uint8) % SIZE, minlength=SIZE).astype(np.float32)
    counts[EOS % SIZE] += special
    return (counts / np.linalg.norm(counts) if normal else counts).tolist()
