"""The one table of environment variables.

Besides these, PAGODA_<SETTING> sets the setting of that name: PAGODA_MAX_MODEL_LEN=4096.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.option import Status


@dataclass(frozen=True, slots=True)
class EnvVar:
    """A variable, the older names it also answers to, what it means, and what becomes of it.

    `becomes`: its text -> the settings it stands for, of which flags and files are stronger.
    """

    name: str
    help: str
    aliases: tuple[str, ...] = ()
    status: Status = "implemented"
    why: str = ""
    becomes: Callable[[str], Mapping[str, Any]] | None = None

    def read(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Its value, under the first name that is set and not empty."""
        source = os.environ if environ is None else environ
        name = self.spelling(source)
        return source[name] if name else None

    def spelling(self, environ: Mapping[str, str]) -> str:
        """The name it is set under; empty when it is not."""
        return next((name for name in (self.name, *self.aliases) if environ.get(name)), "")

    def settings(self, text: str) -> Mapping[str, Any]:
        """The settings that its text stands for."""
        return {} if self.becomes is None else self.becomes(text)


API_KEY: Final = EnvVar(
    "PAGODA_API_KEY",
    "Key that clients of `serve` must present.",
    ("VLLM_API_KEY",),
    becomes=lambda text: {"api_key": (text,)},
)
CLIENT_API_KEY: Final = EnvVar("OPENAI_API_KEY", "Key that `chat` and `complete` present.")
LOG_LEVEL: Final = EnvVar("PAGODA_LOGGING_LEVEL", "How much is logged: DEBUG to ERROR.", ("VLLM_LOGGING_LEVEL",))

VARIABLES: Final = (API_KEY, CLIENT_API_KEY, LOG_LEVEL)
