"""Requests that generate more candidates than they return: beam search and best_of."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from pagoda.common.beam_search import Beam, BeamSearch, BeamSearchParams
from pagoda.common.errors import RequestError
from pagoda.server.http.generation import Generation
from pagoda.server.http.response import ResponseBuilder, Usage
from pagoda.server.http.state import ServerState
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.processing.beams import BeamText, candidates_of, check_engine, check_prompts, step_params
from pagoda.server.processing.inputs import Prompt, PromptType


class BeamGeneration:
    """The beam search of one HTTP request, an OutputSource with one final output per prompt.

    Each step generates one token for every live beam, whose prefix is in the prefix cache.
    """

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
        """Yield (prompt index, output with all beams) at the end. Raises as Generation.outputs does."""
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

    def _prompt(self, prompt_token_ids: list[int], beam: Beam) -> Prompt:
        return Prompt(None, [*prompt_token_ids, *beam.token_ids], self._salt)

    async def _step(self, prompts: Sequence[PromptType]) -> list[RequestOutput]:
        generation = Generation(
            self._state,
            self.request_id,
            prompts,
            step_params(self._params),
            priority=self._priority,
            user=self._user,
        )
        results: dict[int, RequestOutput] = {}
        async with aclosing(generation.outputs()) as outputs:
            async for index, output in outputs:
                results[index] = output
        if any(output.outputs[0].finish_reason == "abort" for output in results.values()):
            raise RequestError("", "the beam search was aborted")
        return [results[index] for index in range(len(prompts))]


class BestOf:
    """A ResponseBuilder that keeps the `n` choices with the highest cumulative log-probability. Not for streams."""

    def __init__(self, builder: ResponseBuilder, n: int, usage: Usage) -> None:
        self._builder = builder
        self._n = n
        self._usage = usage  # counts the dropped choices, too

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[dict[str, Any]]:
        """Raise: the best are only known at the end."""
        raise NotImplementedError("best_of is not streamed")

    def usage_chunk(self) -> dict[str, Any] | None:
        """Return the wrapped builder's."""
        return self._builder.usage_chunk()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Add the best choices of a final output."""
        ranked = sorted(output.outputs, key=_negative_logprob)
        kept, dropped = ranked[: self._n], ranked[self._n :]
        self._usage.count_dropped(sum(len(each.token_ids) for each in dropped))
        outputs = [replace(each, index=index) for index, each in enumerate(kept)]
        self._builder.add(prompt_index, replace(output, outputs=outputs))

    def whole(self) -> dict[str, Any]:
        """Return the whole response."""
        return self._builder.whole()


def _negative_logprob(choice: CompletionOutput) -> float:
    return -(choice.cumulative_logprob or 0.0)
