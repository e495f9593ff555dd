"""Answers whose grammar does not enforce all of their JSON schema: they are held against it once they have ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.structured_output.grammar import Grammar, ResolvedGrammar, Thinking
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.processing.inputs import PreparedRequest


def with_grammar(prepared: PreparedRequest, resolved: ResolvedGrammar) -> PreparedRequest:
    """Return a request whose sequences have a resolved grammar."""
    return replace(prepared, children=[_child(child, resolved) for child in prepared.children])


def _child(child: EngineRequest, resolved: ResolvedGrammar) -> EngineRequest:
    assert child.grammar is not None, "it was resolved"
    return replace(child, grammar=Grammar(resolved.text, child.grammar.engine))


def ended_answers(
    prepared: PreparedRequest, grammar: ResolvedGrammar, tokenizer: Tokenizer, end_token_ids: Collection[int]
) -> EndedAnswers:
    """Return what collects the answers of a request. `end_token_ids`: of the model."""
    params = prepared.params
    assert isinstance(params, SamplingParams), "it has a grammar"
    return EndedAnswers(
        grammar,
        tokenizer,
        thinking=prepared.children[0].thinking,
        yields_deltas=params.yields_deltas,
        end_token_ids=end_token_ids,
    )


class EndedAnswers:
    """Collects the tokens of a request's sequences, and returns the answers of those that ended by themselves."""

    def __init__(
        self,
        grammar: ResolvedGrammar,
        tokenizer: Tokenizer,
        *,
        thinking: Thinking | None,
        yields_deltas: bool,
        end_token_ids: Collection[int] = (),
    ) -> None:
        """`end_token_ids`: tokens with which the model ends answers; they are no part of an answer."""
        self.grammar = grammar
        self._end_token_ids = frozenset(end_token_ids)
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._yields_deltas = yields_deltas
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, output: RequestOutput) -> Iterator[tuple[CompletionOutput, str]]:
        """Yield each completion that ends with this output and neither at a limit nor at a stop string, and its text
        without the reasoning."""
        for completion in output.outputs:
            if not self._yields_deltas:
                self._tokens.pop(completion.index, None)
            tokens = self._tokens[completion.index]
            tokens += completion.token_ids
            if completion.finish_reason == "stop" and self._ended_by_itself(completion.stop_reason):
                answer = tokens if self._thinking is None else _after_reasoning(tokens, self._thinking)
                whole = answer[:-1] if answer and answer[-1] in self._end_token_ids else answer
                yield completion, self._tokenizer.decode(whole)

    def _ended_by_itself(self, stop_reason: int | str | None) -> bool:
        """Whether the model ended the answer: by its end token (None) or another one that its configuration names."""
        return stop_reason is None or stop_reason in self._end_token_ids


def _after_reasoning(tokens: list[int], thinking: Thinking) -> list[int]:
    """Return the tokens that the grammar constrained."""
    starts = thinking.open or any(tuple(tokens[: len(start)]) == start for start in thinking.starts)
    if not starts or thinking.in_grammar:
        return tokens
    for index in range(len(tokens)):
        for end in thinking.ends:
            if tuple(tokens[index : index + len(end)]) == end:
                return tokens[index + len(end) :]
    return tokens
