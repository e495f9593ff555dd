"""The n best of more answers than were asked for.

Knows outputs and their cumulative log-probabilities. Does not know the shape of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from pagoda.server.http.answer import Answer
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.protocol.usage import Usage


class BestOf:
    """An answer that keeps the `n` best of each whole output. Implements server.answer.Answer, but for streams.

    What is dropped is counted in `usage`: it was generated.
    """

    def __init__(self, answer: Answer, n: int, usage: Usage) -> None:
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
