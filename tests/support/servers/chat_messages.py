"""The message of a chat completion, with the keys that are null unless the output has them."""

from typing import Any

NULL_KEYS = ("refusal", "annotations", "audio", "function_call", "reasoning")


def message(content: str | None, role: str | None = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **dict.fromkeys(NULL_KEYS), **more}
