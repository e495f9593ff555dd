"""What the programs of a generating engine need beside weights and KV cache, exactly: the largest of each kind are
compiled before the memory is divided.

Their temporaries, results and code do not depend on the number of KV blocks. They are kept beside the compiled
programs, so that later starts divide the memory in the same way without compiling first.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pagoda.backends.jax_tpu.execution.program_kind import ProgramKind
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.programs import ProgramSet, model_facts
from pagoda.backends.jax_tpu.memory.plan import STEPS_IN_FLIGHT, ProgramMemory, rounded_blocks
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.sizing import min_blocks, split_bytes

logger = logging.getLogger(__name__)


def largest_programs(program_set: ProgramSet[Any]) -> dict[object, ProgramKind]:
    """Return the largest program of each kind."""
    largest: dict[object, ProgramKind] = {}
    for key in program_set:
        largest[key.variant] = max(largest.get(key.variant, key), key, key=lambda program: program.sizes)
    return largest


@dataclass(frozen=True, slots=True)
class ProgramNeeds:
    """Bytes on one device."""

    temporaries: int
    results: int  # of all steps in flight
    code: int  # of all programs, each taken as that of the largest of its kind
    rows: int  # tokens and counts of all rows

    @classmethod
    def of(cls, program_set: StepProgramSet, memories: Mapping[object, ProgramMemory]) -> ProgramNeeds:
        """Return the needs of all programs. `memories`: of the largest of each kind."""
        return cls(
            temporaries=max(each.temporary for each in memories.values()),
            results=STEPS_IN_FLIGHT * max(each.result for each in memories.values()),
            code=sum(memories[key.variant].code for key in program_set),
            rows=program_set.state_bytes,
        )

    @property
    def total(self) -> int:
        """Return their sum."""
        return self.temporaries + self.results + self.code + self.rows


def exact_blocks(program_set: StepProgramSet, limits: Limits, room: int, needs: ProgramNeeds) -> tuple[int, ...]:
    """Return the KV blocks of each pool that fit into `room` bytes beside the programs, rounded down."""
    model = program_set.model
    blocks = split_bytes(model.layout, limits, model.block_bytes, room - needs.total)
    return tuple(map(max, map(rounded_blocks, blocks), min_blocks(model.layout)))


Measure: TypeAlias = Callable[[Sequence[ProgramKind]], Sequence[ProgramMemory]]


def recorded_needs(program_set: StepProgramSet, folder: Path | None, measure: Measure) -> ProgramNeeds:
    """Return the needs of a program set, from `folder` if they are recorded there, else measured and recorded.

    `measure`: compiles programs and returns the memory of each.
    """
    path = None if folder is None else folder / f"{_digest(program_set)}.memory.json"
    if path is not None and (needs := _read(path)) is not None:
        return needs
    largest = largest_programs(program_set)
    needs = ProgramNeeds.of(program_set, dict(zip(largest, measure(list(largest.values())))))
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(needs)) + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning("cannot record the memory of programs in %s: %s", path, error)
    return needs


def _digest(program_set: StepProgramSet) -> str:
    """Return a digest of all that the needs depend on, which the number of KV blocks is not."""
    facts = model_facts(program_set.model), program_set.mode, program_set.rows, list(map(repr, program_set))
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> ProgramNeeds | None:
    try:
        sizes = json.loads(path.read_text())
        return ProgramNeeds(
            temporaries=int(sizes["temporaries"]),
            results=int(sizes["results"]),
            code=int(sizes["code"]),
            rows=int(sizes["rows"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
