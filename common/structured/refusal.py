"""Refusals of structured output, under the name of its field."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

from pagoda.common.engine.grammar import GrammarEngine
from pagoda.common.errors import RequestError

FIELD: Final = "structured_outputs"
"""The SamplingParams field that errors name; a request's own spelling of it is put in its place."""

_PACKAGES: Final[Mapping[GrammarEngine, tuple[str, str]]] = {
    "guidance": ("llguidance", "structured"),
    "xgrammar": ("xgrammar", "xgrammar"),
}
"""The package of each library, and the extra that brings it."""


def is_installed(engine: GrammarEngine) -> bool:
    """Whether a library can be imported; that is not tried, because it may take seconds."""
    return importlib.util.find_spec(_PACKAGES[engine][0]) is not None


def not_installed(engine: GrammarEngine) -> str:
    """The message for a library that is missing, with the command that installs it."""
    package, extra = _PACKAGES[engine]
    return f"{package} is not installed; pip install 'pagoda[{extra}]'"


def refused(message: object) -> RequestError:
    """An error whose text begins with the field."""
    return RequestError(FIELD, f"{FIELD}: {message}")


def no_tokenizer() -> RequestError:
    """The error of an engine that runs without the text of its tokens."""
    return RequestError(FIELD, "structured output needs a tokenizer, which is switched off (skip_tokenizer_init)")
