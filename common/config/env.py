"""The one table of environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class EnvVar:
    """A variable, the older names it also answers to, and what it means."""

    name: str
    help: str
    aliases: tuple[str, ...] = ()

    def read(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Its value, under the first name that is set and not empty."""
        source = os.environ if environ is None else environ
        return next((source[name] for name in (self.name, *self.aliases) if source.get(name)), None)


API_KEY: Final = EnvVar("PAGODA_API_KEY", "Key that clients of `serve` must present.", ("VLLM_API_KEY",))
CLIENT_API_KEY: Final = EnvVar("OPENAI_API_KEY", "Key that `chat` and `complete` present.")
LOG_LEVEL: Final = EnvVar("PAGODA_LOGGING_LEVEL", "How much is logged: DEBUG to ERROR.", ("VLLM_LOGGING_LEVEL",))

VARIABLES: Final = (API_KEY, CLIENT_API_KEY, LOG_LEVEL)
