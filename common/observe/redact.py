"""Redaction of text that leaves the machine: API keys, passwords, user names and home directories."""

from __future__ import annotations

import dataclasses
import getpass
import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.env import is_secret

HIDDEN: Final = "***"

_CREDENTIALS: Final = re.compile(r"(?<=://)[^/\s@]+@")
_QUERY: Final = re.compile(r"(\w+://[^\s?#]*)[?#]\S+")
_TOKEN: Final = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[a-z]-|AKIA)[\w-]{6,}")
_HOME: Final = re.compile(r"/(home|Users)/[^/\s:,;'\"]+")
_GENERIC_USERS: Final = frozenset({"root", "user", "nobody", "daemon", "ubuntu", "pagoda", "vllm"})
_MIN_SECRET_LENGTH: Final = 6


class Redactor:
    """Replaces secrets in text: known token formats, and the values of secret environment variables."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        source = os.environ if environ is None else environ
        secrets = {value for name, value in source.items() if is_secret(name) and len(value) >= _MIN_SECRET_LENGTH}
        self._secrets = sorted(secrets, key=len, reverse=True)
        names = {source.get("USER", ""), source.get("LOGNAME", ""), _user()} - _GENERIC_USERS
        self._names = [re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])") for name in sorted(names) if len(name) > 2]
        self._home = source.get("HOME", "").rstrip("/")

    def __call__(self, text: str) -> str:
        """Return the redacted text."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        text = _QUERY.sub(rf"\1?{HIDDEN}", _CREDENTIALS.sub(f"{HIDDEN}@", text))
        text = _TOKEN.sub(HIDDEN, text)
        if Path(self._home).is_absolute():
            text = re.sub(rf"{re.escape(self._home)}(?=/|\b|$)", "~", text)
        text = _HOME.sub(rf"/\1/{HIDDEN}", text)
        for name in self._names:
            text = name.sub(HIDDEN, text)
        return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""


def without_secrets(name: str, value: Any) -> Any:
    """Return a setting, or a configuration, as JSON types. Secrets, and strings that look like secrets, are masked."""
    if is_secret(name) and value:
        return HIDDEN
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: without_secrets(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): without_secrets(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [without_secrets("", item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float):
        return value
    return Redactor()(str(value))
