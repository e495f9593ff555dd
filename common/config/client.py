"""How `chat` and `complete` reach a running server."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.common.config.option import option
from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Which server and model to ask."""

    url: str = option("http://localhost:8000/v1", "Base address of the server.")
    model_name: str | None = option(None, "Model to ask; default: the first that the server lists.")
    api_key: str | None = option(None, "Key to present; default: the environment's OPENAI_API_KEY.")
    max_tokens: int | None = option(None, "Most tokens of an answer; default: the server's.")
    quick: str | None = option(None, "Send this one text, print the answer and exit.", aliases=("-q",))

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError("--max-tokens", f"{self.max_tokens} is not positive; use 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How a conversation begins."""

    system_prompt: str | None = option(None, "System message that begins the conversation.")
