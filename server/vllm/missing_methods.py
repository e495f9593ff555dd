"""Methods of vLLM's classes whose feature does not exist, with the reason: an AttributeError names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NoReturn

_TRANSFER: Final = "weights cannot be replaced from another process; use sleep(level=2) and wake_up() after new files"
_WEIGHTS: Final = dict.fromkeys(
    (
        *("finish_weight_update", "get_weight_version", "init_weight_transfer_engine", "set_weight_version"),
        *("shutdown_weight_transfer_engine", "start_draft_weight_update", "start_weight_update"),
        *("update_weight_version", "update_weights", "compute_weight_checksums"),
    ),
    _TRANSFER,
)
_KV_MEMORY: Final = {"release_kv_cache_memory": "use sleep(), which frees the KV cache and the weights"}
_RANKS: Final = "one engine object drives all data-parallel replicas, which need no vote of ranks"

MISSING_METHODS: Final[Mapping[str, Mapping[str, str]]] = {
    "LLM": {**_WEIGHTS, **_KV_MEMORY},
    "LLMEngine": {**_WEIGHTS, **_KV_MEMORY, "has_unfinished_requests_dp": _RANKS},
    "AsyncLLM": {
        **_WEIGHTS,
        **_KV_MEMORY,
        **dict.fromkeys(("checkpoint_prepare", "checkpoint_restore"), "processes cannot be checkpointed"),
        "get_num_queued_tokens": "the queue is counted in requests: get_num_unfinished_requests()",
        "get_kv_event_sources": "KV cache events are not published",
        "handle_fault": "a failed engine is started again, by the supervisor of the server",
        "notify_kv_transfer_request_rejected": "KV caches are not transferred between engines",
        "scale_elastic_ep": "the number of devices is fixed at start; start another server",
    },
}
"""Class -> method -> reason."""


class ExplainsMissingMethods:
    """A class whose missing methods of vLLM raise an AttributeError that has the reason."""

    if not TYPE_CHECKING:  # With this method the checker would accept any attribute.

        def __getattr__(self, name: str) -> NoReturn:
            for kind in type(self).__mro__:
                if why := MISSING_METHODS.get(kind.__name__, {}).get(name):
                    raise AttributeError(f"{kind.__name__} has no {name}: {why}", name=name, obj=self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
