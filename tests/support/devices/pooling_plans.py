"""Pooling steps of engine requests, for tests that drive a pooling backend without an engine."""

from __future__ import annotations

from collections.abc import Iterable

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.pooling.scheduler import make_plan
from pagoda.common.engine.pooling.values import PoolPlan
from pagoda.common.engine.scheduling.request import Request


def plan_of(requests: Iterable[EngineRequest]) -> PoolPlan:
    batch = [Request.of(each, limit=0, rank=()) for each in requests]
    return make_plan(batch, [each.pooling for each in batch])
