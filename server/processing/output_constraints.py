"""The form that a request's answers shall have: its grammar, and the thinking that may come before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Final

from pagoda.common.config.groups.structured_outputs import StructuredOutputsConfig
from pagoda.common.engine.structured_output.grammar import Grammar, Thinking, no_tokenizer, refused
from pagoda.common.engine.structured_output.guidance import guidance_text
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams, StructuredOutputsParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.parsers.parser import ReasoningFormat
from pagoda.server.parsers.registry import reasoning_format

# What a request asks of its answer's form, and what the server sets -> the engine's grammar.

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
        from pagoda.common.engine.structured_output.xgrammar import xgrammar_text

        text = xgrammar_text(asked)
    else:
        text = guidance_text(asked, special)
    if len(text) > MAX_CHARS:
        raise refused(f"the grammar has {len(text)} characters; at most {MAX_CHARS} are allowed")
    return Grammar(text, config.engine)


class AnswerForms:
    """Makes grammars and thinking for one model. Raises ConfigError for a reasoning parser that there is not."""

    def __init__(self, config: StructuredOutputsConfig, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._format: ReasoningFormat | None = (
            reasoning_format(config.reasoning_parser, config.reasoning_parser_plugin)
            if config.reasoning_parser
            else None
        )

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """What answers must spell; None: anything. Raises RequestError."""
        if params.structured_outputs is None:
            return None
        if self._tokenizer is None:
            raise no_tokenizer()
        return grammar_of(params.structured_outputs, self._config, self._special)

    def thinking(self, params: SamplingParams, text: str | None, token_ids: list[int]) -> Thinking | None:
        """The thinking that the engine must know of; None: none. `text`: the prompt's; None: only its ids are known.

        Raises RequestError for a budget that nothing keeps.
        """
        budget = params.thinking_token_budget
        if budget is not None and (self._format is None or self._tokenizer is None):
            raise RequestError(
                "thinking_token_budget", "thinking_token_budget needs a server with a --reasoning-parser"
            )
        if self._format is None or self._tokenizer is None or (budget is None and params.structured_outputs is None):
            return None
        prompt = text if text is not None else self._tokenizer.decode(token_ids, skip_special_tokens=False)
        is_open = self._format.thinks(prompt)
        ends = self._sequences(self._format.ends)
        if not ends or not (is_open or self._may_start(self._format, prompt)):
            return None
        return Thinking(
            ends=ends,
            open=is_open,
            starts=() if is_open else self._sequences(self._format.starts),
            budget=budget,
            in_grammar=self._config.is_on("enable_in_reasoning"),
        )

    def _may_start(self, format: ReasoningFormat, prompt: str) -> bool:
        """Whether thinking may still begin: the prompt has not ended it, and would think if it began it."""
        return not prompt.rstrip().endswith(format.ends) and any(format.thinks(prompt + each) for each in format.starts)

    def _sequences(self, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        assert self._tokenizer is not None
        found = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return tuple(sequence for sequence in found if sequence)

    @cached_property
    def _special(self) -> dict[str, int]:
        assert self._tokenizer is not None
        tokens = self._tokenizer.backend.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items() if token.special}
