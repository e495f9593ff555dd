"""Run an engine until it is idle, checking its accounting at every step."""

from __future__ import annotations

from pagoda.common.engine.core import EngineCore
from pagoda.common.engine.messages import EngineOutput


def drain(core: EngineCore) -> dict[str, list[EngineOutput]]:
    """Return the outputs of each request."""
    outputs: dict[str, list[EngineOutput]] = {}
    while core.has_work:
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        core.check_integrity()
    return outputs


def new_tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def drained_tokens(core: EngineCore) -> dict[str, list[int]]:
    """Return the generated tokens of each request."""
    return {name: new_tokens(outputs) for name, outputs in drain(core).items()}
