"""Messages of a role that a template does not know: what OpenAI calls "developer" is told as the system's.

Knows messages as templates see them. Knows no jinja.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_DEVELOPER: Final = "developer"
_BETWEEN: Final = "\n\n"
"""Between what several messages of the system say."""


def with_known_roles(template: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, a developer's as the system's where `template` never mentions developers.

    Then all that the system says is one message, the first: many templates refuse it elsewhere.
    """
    told = any(message["role"] == _DEVELOPER for message in messages)
    if not told or f"'{_DEVELOPER}'" in template or f'"{_DEVELOPER}"' in template:
        return list(messages)
    above = [message for message in messages if message["role"] in (_DEVELOPER, "system")]
    rest = [message for message in messages if message["role"] not in (_DEVELOPER, "system")]
    return [{**above[0], "role": "system", "content": _joined([message["content"] for message in above])}, *rest]


def _joined(contents: Sequence[str | list[dict[str, str]]]) -> str | list[dict[str, str]]:
    """Contents as one: texts with a blank line between, or parts in a row."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return _BETWEEN.join(text for text in texts if text)
    return [part for content in contents for part in content if isinstance(part, dict)]
