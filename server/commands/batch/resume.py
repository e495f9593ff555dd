"""Where a batch that was cut off goes on: behind the answers that are there already.

Answers stand in the order of the requests, so those that are there answer the first lines. Knows lines, not engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO

from pagoda.server.commands.batch.lines import line_id, read_answer
from pagoda.server.commands.batch.places import Output


@dataclass(frozen=True, slots=True)
class Line:
    """A request as it came. `id`: what its answer is called."""

    number: int
    raw: bytes
    id: str


@dataclass(frozen=True, slots=True)
class Batch:
    """What is left to do. `answered`: lines that were answered by an earlier run, `failed` of them not well."""

    lines: Iterator[Line]
    answered: int
    failed: int


def resumed(source: IO[bytes], model: str, output: Output) -> Batch:
    """The lines of `source` that `output` has no answers to. What is not a whole answer is cut off there.

    Raises ConfigError when the answers are those of another batch.
    """
    lines = (Line(number, raw, line_id(model, number, raw)) for number, raw in enumerate(source, 1) if raw.strip())
    answered = failed = end = 0
    left: Iterator[Line] = lines
    for raw in output.answers():
        line = next(lines, None)
        if line is None:
            break
        if (answer := read_answer(raw)) is None or answer[0] != line.id:
            left = chain([line], lines)
            break
        answered, failed, end = answered + 1, failed + (not answer[1]), end + len(raw)
    output.keep(answered, end)
    return Batch(left, answered, failed)
