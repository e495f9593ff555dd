"""The grammar that constrains a request's output, and the reasoning that may precede it."""

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

MAX_CHARS: Final = 1 << 20
"""Maximum characters of a grammar."""


def grammar_of(params: StructuredOutputsParams, config: StructuredOutputsConfig, special: Mapping[str, int]) -> Grammar:
    """Return the engine's grammar. `special`: text of each special token -> its id. Raises RequestError."""
    params = replace(
        params,
        disable_any_whitespace=params.disable_any_whitespace or config.is_on("disable_any_whitespace"),
        disable_additional_properties=(
            params.disable_additional_properties or config.is_on("disable_additional_properties")
        ),
    )
    if config.engine == "xgrammar":
        from pagoda.common.engine.structured_output.xgrammar import xgrammar_text

        text = xgrammar_text(params)
    else:
        text = guidance_text(params, special)
    if len(text) > MAX_CHARS:
        raise refused(f"the grammar has {len(text)} characters; at most {MAX_CHARS} are allowed")
    return Grammar(text, config.engine)


class OutputConstraints:
    """Builds grammars and reasoning constraints for one model. Raises ConfigError for an unknown reasoning parser."""

    def __init__(self, config: StructuredOutputsConfig, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._format: ReasoningFormat | None = (
            reasoning_format(config.reasoning_parser, config.reasoning_parser_plugin)
            if config.reasoning_parser
            else None
        )

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of the output; None: unconstrained. Raises RequestError."""
        if params.structured_outputs is None:
            return None
        if self._tokenizer is None:
            raise no_tokenizer()
        return grammar_of(params.structured_outputs, self._config, self._special)

    def thinking(self, params: SamplingParams, text: str | None, token_ids: list[int]) -> Thinking | None:
        """Return the reasoning that the engine must track, if any. `text`: the prompt's; None: only its ids are known.

        Raises RequestError for a budget without a reasoning parser.
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
        """Return True if reasoning may still start: the prompt has not ended it."""
        return not prompt.rstrip().endswith(format.ends) and any(format.thinks(prompt + each) for each in format.starts)

    def _sequences(self, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        assert self._tokenizer is not None
        sequences = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return tuple(sequence for sequence in sequences if sequence)

    @cached_property
    def _special(self) -> dict[str, int]:
        assert self._tokenizer is not None
        tokens = self._tokenizer.backend.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items() if token.special}
