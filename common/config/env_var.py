"""One environment variable = one row: its names, what it means, and what becomes of it here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.option import Status
from pagoda.common.errors import ConfigError

OFF: Final = ("", "0", "false", "no", "off")
"""Texts that switch a variable off, in small letters."""

_SECRET: Final = ("KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")


@dataclass(frozen=True, slots=True)
class EnvVar:
    """A variable and the other names it answers to.

    `becomes`: its text -> the settings it stands for, of which flags and files are stronger; ValueError when it cannot
    be read. `why`: why it has no effect or is refused, and what to do instead. `accepts`: values of a refused variable
    that ask for nothing. `shared`: other programs read it as well, so that nobody is told when it has no effect here.
    """

    name: str
    help: str
    aliases: tuple[str, ...] = ()
    status: Status = "implemented"
    why: str = ""
    accepts: tuple[str, ...] = OFF
    shared: bool = False
    becomes: Callable[[str], Mapping[str, Any]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling, its own first."""
        return (self.name, *self.aliases)

    def read(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Its value, under the first name that is set and not empty."""
        source = os.environ if environ is None else environ
        name = self.spelling(source)
        return source[name] if name else None

    def is_on(self, environ: Mapping[str, str] | None = None) -> bool:
        """True when it is set to anything but OFF."""
        return (self.read(environ) or "").strip().lower() not in OFF

    def spelling(self, environ: Mapping[str, str]) -> str:
        """The name it is set under; empty when it is not."""
        return next((name for name in self.names if environ.get(name)), "")

    def settings(self, environ: Mapping[str, str]) -> Mapping[str, Any]:
        """The settings that it stands for as it is set. Raises ConfigError naming the variable."""
        text = self.read(environ)
        if text is None or self.becomes is None:
            return {}
        try:
            return self.becomes(text)
        except ValueError as error:
            raise ConfigError(self.spelling(environ), f"{shown(self.spelling(environ), text)}: {error}") from None

    def note(self, environ: Mapping[str, str]) -> str | None:
        """What the user should hear about it as it is set, or None. Raises ConfigError when it is refused."""
        name = self.spelling(environ)
        if not name or self.status == "implemented":
            return None
        if self.status == "no effect":
            return None if self.shared else f"{name} has no effect: {self.why}"
        if environ[name].strip().lower() in self.accepts:
            return None
        raise ConfigError(name, f"{shown(name, environ[name])} is not supported: {self.why}")


def is_secret(name: str) -> bool:
    """True for a variable or setting whose value nobody should see."""
    return any(word.endswith(_SECRET) for word in name.upper().replace("-", "_").split("_"))


def shown(name: str, value: str) -> str:
    """A value for a message: quoted, or hidden when it is secret."""
    return "(hidden)" if is_secret(name) else repr(value)
