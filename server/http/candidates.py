"""Beam search over a server's engine: each step asks for one token of every live beam, whose prefix the cache holds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from pagoda.common.beam_search import Beam, BeamSearch, BeamSearchParams
from pagoda.common.errors import RequestError
from pagoda.server.http.answer import ResponseBuilder
from pagoda.server.http.fields.usage import Usage
from pagoda.server.http.generation import Generation
from pagoda.server.http.state import ServerState
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.processing.beams import BeamText, candidates_of, check_engine, check_prompts, step_params
from pagoda.server.processing.inputs import PromptType


class BeamGeneration:
    """The beam search of one HTTP request; runs as a Generation does, and ends in one output per prompt."""

    def __init__(
        self,
        state: ServerState,
        request_id: str,
        prompts: Sequence[PromptType],
        params: BeamSearchParams,
        text: BeamText,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        user: str | None = None,
    ) -> None:
        check_engine(state.llm().config.model, params, state.llm().info.vocab_size)
        check_prompts(prompts)
        self._state = state
        self._prompts = prompts
        self._params = params
        self._text = text
        self._salt = cache_salt
        self._priority = priority
        self._user = user
        self.request_id = request_id

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, its answers), all at the end. Leaving ends the search. Raises as Generation does."""
        first = await self._step(self._prompts)
        ids = [output.prompt_token_ids or [] for output in first]
        llm = self._state.llm()
        searches = [BeamSearch(self._params, llm.end_token_ids, llm.max_model_len - len(each)) for each in ids]
        for search, output in zip(searches, first):
            search.take([candidates_of(output)])
        while any(not search.finished for search in searches):
            owners = [index for index, search in enumerate(searches) if not search.finished for _ in search.live]
            beams = [beam for search in searches if not search.finished for beam in search.live]
            outputs = await self._step(
                [self._prompt(ids[owner], beam) for owner, beam in zip(owners, beams, strict=True)]
            )
            for index in dict.fromkeys(owners):
                searches[index].take([candidates_of(o) for o, owner in zip(outputs, owners) if owner == index])
        for index, (search, output) in enumerate(zip(searches, first)):
            output.outputs = self._text.completions(ids[index], search.best())
            yield index, output

    def _prompt(self, prompt_token_ids: list[int], beam: Beam) -> dict[str, Any]:
        return {"prompt_token_ids": [*prompt_token_ids, *beam.token_ids], "cache_salt": self._salt}

    async def _step(self, prompts: Sequence[PromptType]) -> list[RequestOutput]:
        generation = Generation(
            self._state,
            self.request_id,
            prompts,
            step_params(self._params),
            priority=self._priority,
            user=self._user,
        )
        found: dict[int, RequestOutput] = {}
        async with aclosing(generation.outputs()) as outputs:
            async for index, output in outputs:
                found[index] = output
        if any(output.outputs[0].finish_reason == "abort" for output in found.values()):
            raise RequestError("", "the search was aborted")
        return [found[index] for index in range(len(prompts))]


# The n best of more answers than were asked for.
#
# Knows outputs and their cumulative log-probabilities. Does not know the shape of an answer.


class BestOf:
    """An answer that keeps the `n` best of each whole output. Implements server.answer.Answer, but for streams.

    What is dropped is counted in `usage`: it was generated.
    """

    def __init__(self, answer: ResponseBuilder, n: int, usage: Usage) -> None:
        self._answer = answer
        self._n = n
        self._usage = usage

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[dict[str, Any]]:
        """Nothing is known to be best before the end."""
        raise NotImplementedError("best_of is not streamed")

    def usage_chunk(self) -> dict[str, Any] | None:
        """Of the answer itself."""
        return self._answer.usage_chunk()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take an output in that holds all answers."""
        ranked = sorted(output.outputs, key=_badness)
        kept, dropped = ranked[: self._n], ranked[self._n :]
        self._usage.count_dropped(sum(len(each.token_ids) for each in dropped))
        outputs = [replace(each, index=index) for index, each in enumerate(kept)]
        self._answer.add(prompt_index, replace(output, outputs=outputs))

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        return self._answer.whole()


def _badness(answer: CompletionOutput) -> float:
    return -(answer.cumulative_logprob or 0.0)
