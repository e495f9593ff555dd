"""What a request asks of its answer's form, and what the server sets -> the engine's grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pagoda.common.config.structured_outputs import StructuredOutputsConfig
from pagoda.common.engine.grammar import Grammar
from pagoda.common.structured.guidance_text import guidance_text
from pagoda.common.structured.refusal import refused
from pagoda.common.structured_outputs import StructuredOutputsParams

MAX_CHARS: Final = 1 << 20
"""Of a grammar's text."""


def grammar_of(asked: StructuredOutputsParams, config: StructuredOutputsConfig, special: Mapping[str, int]) -> Grammar:
    """`special`: text of each special token -> its id. Raises RequestError."""
    asked = replace(
        asked,
        disable_any_whitespace=asked.disable_any_whitespace or config.is_on("disable_any_whitespace"),
        disable_additional_properties=(
            asked.disable_additional_properties or config.is_on("disable_additional_properties")
        ),
    )
    if config.engine == "xgrammar":
        from pagoda.common.structured.xgrammar_text import xgrammar_text

        text = xgrammar_text(asked)
    else:
        text = guidance_text(asked, special)
    if len(text) > MAX_CHARS:
        raise refused(f"the grammar has {len(text)} characters; at most {MAX_CHARS} are allowed")
    return Grammar(text, config.engine)
