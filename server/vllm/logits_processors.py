"""Logits processors with vLLM's interface: one object edits the logits of all sequences of a step at once.

A processor keeps state per sequence, by its index in a batch that lasts over steps. `LogitsBatch`, the engine's
`BatchProcessor`, keeps that batch and tells the processors what changed. A sequence that sits out a step is removed and
added again, with all its tokens.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from pagoda.common.engine.sampling.processors import BatchProcessor, ProcessedSequence, failure_of
from pagoda.common.engine.sampling.rules import SamplingRules

StateT = TypeVar("StateT")
RequestLogitsProcessor = Callable[..., Any]
"""Called with (output ids, logits [V]) or (prompt ids, output ids, logits [V]); returns the logits."""


class MoveDirectionality(Enum):
    """Whether two sequences of the batch change places, or one takes the other's."""

    UNIDIRECTIONAL = 1
    SWAP = 2


@dataclass(frozen=True)
class BatchUpdate:
    """What changed in the batch, to be applied in the order removed, added, moved.

    An added sequence may take the index of another, which is not among the removed ones then.
    """

    batch_size: int
    removed: Sequence[int]
    # An entry is (index, params, prompt token ids, output token ids); the last list grows with the output.
    added: Sequence[tuple[int, Any, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class BatchLogitsProcessor(ABC):
    """The base class of processors. An exception in one fails the requests of the step that use it."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for params that the processor cannot work with; called before the request runs."""
        return

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """Return the edited logits [batch size, V], which may be the same tensor."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return True if the best token always stays the best: then it gets logits divided by temperature."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Note a change of the batch, None if there is none. Called before each step."""


class AdapterLogitsProcessor(BatchLogitsProcessor):
    """A processor made of one function per request: `new_req_logits_processor` returns it, or None for no edit."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.req_info: dict[int, RequestLogitsProcessor] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        """Return the function that edits one request's logits."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: Any) -> Any:
        for index, edit in self.req_info.items():
            row = logits[index]
            edited = edit(row)
            if edited is not row:
                logits[index] = edited
        return logits

    def _bound(self, params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> RequestLogitsProcessor | None:
        edit = self.new_req_logits_processor(params)
        if edit is None:
            return None
        takes_prompt = len(inspect.signature(edit).parameters) == 3
        return partial(edit, prompt_ids, output_ids) if takes_prompt else partial(edit, output_ids)


def process_dict_updates(
    req_entries: dict[int, StateT],
    batch_update: BatchUpdate | None,
    new_state: Callable[[Any, list[int] | None, list[int]], StateT | None],
) -> bool:
    """Apply a change of the batch to a dictionary of state by index; `new_state` makes that of an added sequence.

    Returns True if the dictionary changed.
    """
    if batch_update is None:
        return False
    before = dict(req_entries)
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt_ids, output_ids in batch_update.added:
        req_entries.pop(index, None)
        if (state := new_state(params, prompt_ids, output_ids)) is not None:
            req_entries[index] = state
    for source, target, direction in batch_update.moved:
        moved = req_entries.pop(source, None)
        replaced = req_entries.pop(target, None)
        if moved is not None:
            req_entries[target] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return before != req_entries


@dataclass(slots=True)
class _Member:
    state: ProcessedSequence
    output_ids: list[int]


class LogitsBatch(BatchProcessor):
    """The sequences of the latest step, in the order in which the processors know them."""

    def __init__(
        self,
        makers: Mapping[str, Callable[[], BatchLogitsProcessor]],
        params_of: Callable[[SamplingRules], Any],
    ) -> None:
        """`makers`: by name, what makes each processor. `params_of`: returns the SamplingParams of rules."""
        self._makers = makers
        self._params_of = params_of
        self._members: list[_Member] = []
        self._order: list[int] = []  # each member's index among the sequences of the latest step
        self._has_failed = False  # whether it failed in the latest step
        self._make_processors()

    @property
    def edits_scaled(self) -> bool:
        """Whether a processor edits logits over temperature, so that `apply_scaled` is needed."""
        return bool(self._keeping)

    def apply(
        self, logits: Any, sequences: Sequence[tuple[ProcessedSequence, Sequence[int]]]
    ) -> tuple[Any, dict[int, str]]:
        """Edit logits [n, V] of n sequences, each with all its tokens, by the processors that may change which token
        is the best. All of them are told what changed in the batch.

        Returns the logits, and for sequences whose processor failed the reason, by index.
        """
        update, self._order = self._update(sequences)
        reason = ""
        for name, processor in (self._changing | self._keeping).items():
            try:
                processor.update_state(update)
            except Exception as error:
                reason = reason or failure_of(name, error)
        edited, later = self._run(self._changing, logits, lambda processor, rows: processor.apply(rows))
        return self._outcome(logits, edited, reason or later)

    def apply_scaled(self, logits: Any, temperatures: Any) -> tuple[Any, dict[int, str]]:
        """Edit the logits [n, V] of the same sequences, after penalties, by the processors that keep the best token.

        They get logits over temperature; temperatures [n, 1] have 1 for greedy sequences. Nothing is done if a
        processor has failed in `apply`: they know no sequence then. Returns as `apply`.
        """
        if self._has_failed:
            return logits, {}
        scale = temperatures if self._in_order else temperatures[self._order]
        edited, reason = self._run(self._keeping, logits, lambda processor, rows: processor.apply(rows / scale) * scale)
        return self._outcome(logits, edited, reason)

    @property
    def _in_order(self) -> bool:
        return self._order == list(range(len(self._order)))

    def _run(
        self,
        processors: Mapping[str, BatchLogitsProcessor],
        logits: Any,
        run: Callable[[BatchLogitsProcessor, Any], Any],
    ) -> tuple[Any, str]:
        """Run processors on the logits in the batch's order. Return them in that of the sequences, and why one failed,
        the first one; "" if none did.
        """
        if not processors:
            return logits, ""
        gathered = logits if self._in_order else logits[self._order]
        reason = ""
        for name, processor in processors.items():
            try:
                gathered = run(processor, gathered)
            except Exception as error:
                reason = reason or failure_of(name, error)
        if self._in_order:
            return gathered, reason
        edited = logits.clone()
        edited[self._order] = gathered
        return edited, reason

    def _outcome(self, logits: Any, edited: Any, reason: str) -> tuple[Any, dict[int, str]]:
        """Return the edited logits, or after a failure the given ones, with its reason for the sequences concerned."""
        self._has_failed = bool(reason)
        if not reason:
            return edited, {}
        failed = dict.fromkeys(self._users(self._order), reason)
        self._start_again()
        return logits, failed

    def _users(self, order: Sequence[int]) -> list[int]:
        """Return the sequences with extra_args, which are those that processors edit; all if none has any."""
        users = [index for index, member in zip(order, self._members) if member.state.rules.extra_args]
        return users or list(order)

    def _start_again(self) -> None:
        """Replace the processors by new ones, to which every sequence is added again in the next step."""
        self._members = []
        self._make_processors()

    def _make_processors(self) -> None:
        made = {name: make() for name, make in self._makers.items()}
        self._keeping = {name: processor for name, processor in made.items() if processor.is_argmax_invariant()}
        self._changing = {name: processor for name, processor in made.items() if name not in self._keeping}

    def _update(
        self, sequences: Sequence[tuple[ProcessedSequence, Sequence[int]]]
    ) -> tuple[BatchUpdate | None, list[int]]:
        """Return what changed, None if nothing, and for each member of the batch its index in `sequences`."""
        members = self._members
        indices = {id(state): index for index, (state, _) in enumerate(sequences)}
        holes = deque(index for index, member in enumerate(members) if id(member.state) not in indices)
        added: list[tuple[int, Any, list[int] | None, list[int]]] = []
        present = {id(member.state): member for member in members}
        for state, tokens in sequences:
            num_prompt = len(state.prompt)
            if (member := present.get(id(state))) is not None:
                member.output_ids.extend(tokens[num_prompt + len(member.output_ids) :])
                continue
            member = _Member(state, list(tokens[num_prompt:]))
            index = holes.popleft() if holes else len(members)
            members[index : index + 1] = [member]
            added.append((index, self._params_of(state.rules), list(tokens[:num_prompt]), member.output_ids))
        removed = list(holes)
        moved = []
        while holes:
            last = len(members) - 1
            if last == holes[-1]:
                holes.pop()
                members.pop()
                continue
            hole = holes.popleft()
            members[hole] = members.pop()
            moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
        changed = bool(removed or added or moved)
        update = BatchUpdate(len(members), removed, added, moved) if changed else None
        return update, [indices[id(member.state)] for member in members]
