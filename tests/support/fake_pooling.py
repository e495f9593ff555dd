"""Fake pooling engines: the vector of a text counts its token ids modulo 8.

Models: "embed": these vectors, with Matryoshka dimensions, also per token; "plain": without Matryoshka dimensions;
"classify": labels by the first three elements; "cross": scores a pair by the number of tokens of the second text that
are in the first; "slow": embeds slowly; "crash": fails in its second step; "tokens": vectors per token only; "whole":
labels for whole texts only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from support.byte_text import EOS

from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, StepOutputs
from pagoda.common.engine.pooling import Pooled
from pagoda.server.ipc_messages import PoolingInfo

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


class FakePoolingCore:
    """Processes four requests per step."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._waiting: dict[str, EngineRequest] = {}
        self.steps = 0

    def add_request(self, request: EngineRequest) -> None:
        assert request.pooling is not None
        requests.append(request)
        self._waiting[request.request_id] = request

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> StepOutputs:
        self.steps += 1
        if self._kind == "crash" and self.steps == 2:
            raise RuntimeError("out of order")
        if self._kind == "slow":
            time.sleep(0.01)
        batch = [self._waiting.pop(each) for each in list(self._waiting)[: 1 if self._kind == "slow" else 4]]
        return StepOutputs(outputs=[answer(each) for each in batch], stats=self.stats)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(waiting=len(self._waiting), steps=self.steps)

    def reset_prefix_cache(self) -> bool:
        return True


def answer(request: EngineRequest) -> EngineOutput:
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason="stop",
        scheduled=time.monotonic(),
        pooled=Pooled.of(numbers(request)),
    )


def numbers(request: EngineRequest) -> np.ndarray:
    rules, ids = request.pooling, request.prompt_token_ids
    assert rules is not None
    each = np.eye(SIZE, dtype=np.float32)[np.array(ids) % SIZE]
    if rules.task == "score":
        begin = rules.second_text or 0
        first, second = set(ids[:begin]), ids[begin:]
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
