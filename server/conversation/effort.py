"""What reasoning_effort means to a chat template: which of its variables say how much to think, and whether at all."""

from __future__ import annotations

from typing import Any, Final

from pagoda.common.errors import RequestError

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables with which templates switch thinking on and off."""


def effort_variables(effort: str | None, known: frozenset[str], *, thinks: bool) -> dict[str, Any]:
    """Variables for a template that reads those of `known`. `thinks`: whether the server's model is one that thinks.

    Raises RequestError where the template would not heed the effort.
    """
    if effort is None:
        return {}
    switches: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in known}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort} | switches
    if not switches and (thinks or effort != "none"):
        raise RequestError(
            "reasoning_effort",
            f"the model's chat template does not know reasoning_effort, so {effort!r} would change nothing; "
            "leave it out, or use chat_template_kwargs",
        )
    return switches
