"""The engine's load in an answer's head, for load balancers: Open Request Cost Aggregation, ORCA.

Knows the header's two forms and what vLLM says in it. Asked for by `endpoint-load-metrics-format: TEXT | JSON`.
"""

from __future__ import annotations

import json
from typing import Final

from pagoda.common.engine.messages import EngineStats

ASKED: Final = "endpoint-load-metrics-format"
TOLD: Final = "endpoint-load-metrics"


def load_report(form: str | None, stats: EngineStats) -> dict[str, str]:
    """The header with the load, none where no known form is asked for: a balancer's wish never fails a request."""
    named = {"kv_cache_usage_perc": stats.kv_usage, "num_requests_waiting": float(stats.waiting)}
    match (form or "").upper():
        case "TEXT":
            return {TOLD: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())}
        case "JSON":
            return {TOLD: "JSON " + json.dumps({"named_metrics": named})}
        case _:
            return {}
