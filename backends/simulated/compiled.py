"""Step times from the TPU compiler's cycles: the programs of `pagoda compile --output-json` in place of a roofline.

A step runs the smallest program that holds it, padding included. The compiler has no estimate for the attention kernel
nor for exchanges between devices: they are those of the roofline, for the step's own contexts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagoda.backends.simulated.roofline import RooflineModel
from pagoda.backends.simulated.step_time import StepLoad
from pagoda.common.errors import ConfigError

FLAG: Final = "--compile-report"


@dataclass(frozen=True, slots=True)
class StepProgram:
    """A compiled forward pass."""

    tokens: int
    seqs: int
    context: int  # Tokens of the longest sequence that the block tables hold.
    decode_only: bool
    seconds: float  # Time of all operations that the compiler estimates.


@dataclass(frozen=True, slots=True)
class ReportedPrograms:
    """The programs of one report, the fastest first."""

    source: Path
    steps: tuple[StepProgram, ...]
    sampling: tuple[tuple[int, float], ...]  # (Sequences, seconds), ascending.

    def step(self, load: StepLoad) -> StepProgram:
        """Return the fastest program that holds a step. Raise ConfigError naming the step if none does."""
        tokens = load.num_tokens
        seqs = len(load.query_lens)
        context = int(load.context_lens.max())
        for program in self.steps:
            if program.decode_only and tokens > seqs:
                continue
            if tokens <= program.tokens and seqs <= program.seqs and context <= program.context:
                return program
        raise ConfigError(
            FLAG,
            f"{self.source} has no program for a step of {tokens} tokens of {seqs} sequences up to {context} tokens; "
            "compile with the same --max-num-seqs, --max-num-batched-tokens and --max-model-len",
        )

    def sample_seconds(self, seqs: int) -> float:
        """Return the time to sample for `seqs` sequences; that of the most where none holds them."""
        return next((seconds for rows, seconds in self.sampling if rows >= seqs), self.sampling[-1][1])


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """A StepTimeModel by the cycles of compiled programs."""

    roofline: RooflineModel
    programs: ReportedPrograms
    step_seconds: float  # Seconds to start a step.

    def seconds(self, load: StepLoad) -> float:
        """Return the time of a step."""
        program = self.programs.step(load)
        total = self.step_seconds + program.seconds + self.roofline.attention_seconds(load)
        total += self.programs.sample_seconds(max(1, load.num_sampled))
        return total + self.roofline.exchange_seconds(program.tokens, load.num_sampled)


def read_programs(path: Path, tensor_parallel: int) -> ReportedPrograms:
    """Return the programs of a report. Raise ConfigError naming what it lacks, or that it is of other devices."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        compiled_for = report["tensor_parallel_size"]
        clock = report["clock_hz"]
        rows = report["programs"]
        steps = [_step(row, clock) for row in rows if row.get("shape") is not None and row["cycles"] is not None]
        sampling = sorted((row["sampled_rows"], row["cycles"] / clock) for row in rows if row.get("sampled_rows"))
    except OSError as error:
        raise ConfigError(FLAG, f"{path}: {error.strerror}; write it with pagoda compile --output-json") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(FLAG, f"{path} is not a report of pagoda compile --output-json; write it again") from None
    if compiled_for != tensor_parallel:
        raise ConfigError(FLAG, f"{path} is for {compiled_for} devices, not {tensor_parallel}; compile it for these")
    if not steps or not sampling:
        raise ConfigError(FLAG, f"{path} has no cycles of steps: it was compiled for a CPU; use a topology of TPUs")
    return ReportedPrograms(path, tuple(sorted(steps, key=lambda program: program.seconds)), tuple(sampling))


def _step(row: Mapping[str, Any], clock: float) -> StepProgram:
    shape = row["shape"]
    return StepProgram(shape["tokens"], shape["seqs"], shape["context"], shape["decode_only"], row["cycles"] / clock)
