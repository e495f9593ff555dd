"""Programs of jax_tpu that the backends of one test file share, so that each is traced and compiled once."""

from __future__ import annotations

from typing import Any

from pagoda.backends.jax_tpu.backend import JaxBackend
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.programs import model_facts


class SharedPrograms:
    """The compiled programs of every model and cache that a backend had. Weights are arguments of programs."""

    def __init__(self) -> None:
        self._compiled: dict[str, dict[Any, Any]] = {}

    def join(self, backend: object) -> None:
        """Let a backend that has its caches, but no programs yet, use what others compiled and keep what it compiles.

        Backends other than jax_tpu have no programs.
        """
        if not isinstance(backend, JaxBackend):
            return
        programs = backend._serving.programs
        programs._compiled = self._compiled.setdefault(_depends_on(programs.program_set), programs._compiled)

    def clear(self) -> None:
        """Forget all programs, at the end of the file."""
        self._compiled.clear()


def _depends_on(programs: StepProgramSet) -> str:
    """What decides over all programs besides their keys: as `CompileCache` has it, and with the drafter."""
    largest = next(iter(programs))
    facts = model_facts(programs.model) | dict(programs.facts)
    return repr([sorted(facts.items()), programs.shapes, programs.rows, programs.drafter, programs.signature(largest)])
