"""Grammar rules: alternatives of sequences, from which those that no text completes are removed, in Lark's syntax."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.common.engine.structured_output.grammar import GrammarError

MAX_RULES: Final = 20_000


@dataclass(frozen=True, slots=True)
class RuleRef:
    """A reference to a rule."""

    number: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """A rule from `low` to `high` times in a row; None: any number of times."""

    rule: RuleRef
    low: int
    high: int | None


Symbol = str | RuleRef | Repeat
"""Text is an expression of terminals in Lark."""

Sequences = Sequence[tuple[Symbol, ...]]


class Rules:
    """The rules of one grammar, each made once by key."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, RuleRef] = {}
        self._bodies: list[Sequences] = []
        self._waiting: list[tuple[RuleRef, Callable[[], Sequences]]] = []

    def rule(self, key: Hashable, body: Callable[[], Sequences]) -> RuleRef:
        """Return the rule of a key. `body`: called later, once, for its alternatives."""
        if key not in self._numbers:
            if len(self._bodies) >= MAX_RULES:
                raise GrammarError(f"the JSON schema needs more than {MAX_RULES} grammar rules; make it simpler")
            self._numbers[key] = RuleRef(len(self._bodies))
            self._bodies.append(())
            self._waiting.append((self._numbers[key], body))
        return self._numbers[key]

    def text(self, start: RuleRef) -> str | None:
        """Return the grammar in Lark; None if no text matches it."""
        while self._waiting:
            rule, body = self._waiting.pop()
            self._bodies[rule.number] = body()
        productive = self._productive()
        if start.number not in productive:
            return None
        lines: list[str] = [f"start: r{start.number}"]
        reached = {start.number}
        waiting = [start.number]
        while waiting:
            number = waiting.pop()
            alternatives = []
            for sequence in self._bodies[number]:
                kept = [symbol for symbol in sequence if not _is_dropped(symbol, productive)]
                if all(_number_of(symbol) in productive for symbol in kept if not isinstance(symbol, str)):
                    alternatives.append(" ".join(map(_in_lark, kept)) or '""')
                    new = {_number_of(symbol) for symbol in kept if not isinstance(symbol, str)} - reached
                    reached |= new
                    waiting += sorted(new)
            lines.append(f"r{number}: " + " | ".join(dict.fromkeys(alternatives)))
        return "\n".join(lines)

    def _productive(self) -> set[int]:
        """Return the numbers of the rules that some text completes."""
        productive: set[int] = set()
        users: dict[int, set[int]] = {}
        for number, body in enumerate(self._bodies):
            for sequence in body:
                for symbol in sequence:
                    if not isinstance(symbol, str):
                        users.setdefault(_number_of(symbol), set()).add(number)
        waiting = list(range(len(self._bodies)))
        while waiting:
            number = waiting.pop()
            if number not in productive and any(
                all(isinstance(symbol, str) or _completes(symbol, productive) for symbol in sequence)
                for sequence in self._bodies[number]
            ):
                productive.add(number)
                waiting += users.get(number, ())
        return productive


def _number_of(symbol: RuleRef | Repeat) -> int:
    return symbol.number if isinstance(symbol, RuleRef) else symbol.rule.number


def _completes(symbol: RuleRef | Repeat, productive: set[int]) -> bool:
    return _number_of(symbol) in productive or (isinstance(symbol, Repeat) and not symbol.low)


def _is_dropped(symbol: Symbol, productive: set[int]) -> bool:
    """True for a repetition that can only be empty."""
    if not isinstance(symbol, Repeat):
        return False
    return symbol.high == 0 or (not symbol.low and symbol.rule.number not in productive)


def _in_lark(symbol: Symbol) -> str:
    if isinstance(symbol, str):
        return symbol
    if isinstance(symbol, RuleRef):
        return f"r{symbol.number}"
    name = f"r{symbol.rule.number}"
    if symbol.high is None:
        return f"{name}*" if not symbol.low else f"{name}{{{symbol.low},}}"
    return f"{name}{{{symbol.low},{symbol.high}}}"
