"""What reasoning_effort means to a chat template: which of its variables say how much to think, and whether at all."""

from __future__ import annotations

from typing import Any, Final

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables with which templates switch thinking on and off."""


def effort_variables(effort: str | None, known: frozenset[str]) -> dict[str, Any]:
    """Return the variables that express an effort to a template that reads `known`; none if it has no switch."""
    if effort is None:
        return {}
    variables: dict[str, Any] = {"reasoning_effort": effort} if "reasoning_effort" in known else {}
    return variables | {name: effort != "none" for name in _SWITCHES if name in known}


def is_effort_ignored(effort: str | None, known: frozenset[str], *, thinks: bool) -> bool:
    """Return whether an effort changes nothing. `thinks`: whether the server's model thinks, so that "none" asks for
    something."""
    return effort is not None and (thinks or effort != "none") and not effort_variables(effort, known)
