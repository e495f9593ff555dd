"""Refusals of structured output, under the name of its field."""

from __future__ import annotations

from typing import Final

from pagoda.common.errors import RequestError

FIELD: Final = "structured_outputs"
"""The SamplingParams field that errors name; a request's own spelling of it is put in its place."""


def refused(message: object) -> RequestError:
    """An error whose text begins with the field."""
    return RequestError(FIELD, f"{FIELD}: {message}")


def no_tokenizer() -> RequestError:
    """The error of an engine that runs without the text of its tokens."""
    return RequestError(FIELD, "structured output needs a tokenizer, which is switched off (skip_tokenizer_init)")
