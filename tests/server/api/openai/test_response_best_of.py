"""best_of returns the choices with the highest cumulative log-probability, best first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagoda.server.http.response import BestOf, Usage
from pagoda.server.outputs import CompletionOutput, RequestOutput


class Noted:
    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def usage_chunk(self) -> dict[str, Any] | None:
        return None

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self.seen += [(each.index, each.text) for each in output.outputs]

    def whole(self) -> dict[str, Any]:
        return {"seen": self.seen}


def test_best_choices_come_first_and_dropped_tokens_are_counted() -> None:
    usage, inner = Usage(details=False), Noted()
    sums = {"bad": -9.0, "best": -1.0, "worse": -5.0, "good": -2.0}
    outputs = [
        CompletionOutput(index, text, [1] * (index + 1), cumulative_logprob=value)
        for index, (text, value) in enumerate(sums.items())
    ]
    answer = BestOf(inner, 2, usage)
    answer.add(0, RequestOutput("r", "p", [1], outputs=outputs, finished=True))
    assert answer.whole() == {"seen": [(0, "best"), (1, "good")]}
    assert usage.as_dict()["completion_tokens"] == 1 + 3
