"""Results of an experiment: its runs, conditions on them, and groups of equal parameters."""

from __future__ import annotations

import json
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pagoda.common.errors import ConfigError
from pagoda.server.bench.sweep.params import file_name

Run = Mapping[str, Any]

SUMMARIES: Final = "summary.json"

_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION: Final = re.compile(r"([\w.-]+?)\s*(<=|>=|==|!=|<|>)\s*(.+)")
_BIN: Final = re.compile(r"([\w.-]+)%([0-9.]+)")


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Return all runs of an experiment. Raises ConfigError if there are none."""
    runs = [run for path in sorted(folder.rglob(SUMMARIES)) for run in json.loads(path.read_text(encoding="utf-8"))]
    if not runs:
        raise ConfigError("EXPERIMENT_DIR", f"{folder} has no results of a sweep; name its folder")
    return runs


def filtered(runs: Iterable[dict[str, Any]], conditions: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs that meet all conditions, such as max_concurrency<=64. Raises ConfigError."""
    kept = list(runs)
    for condition in conditions:
        match = _CONDITION.fullmatch(condition.strip())
        if match is None:
            raise ConfigError("--filter-by", f"{condition} is not a condition; use one such as max_concurrency<=64")
        name = match[1]
        sign = match[2]
        bound = _value(match[3])
        kept = [run for run in kept if name in run and _holds(run[name], sign, bound)]
    if not kept:
        raise ConfigError("--filter-by", f"no run meets {', '.join(conditions)}")
    return kept


def binned(runs: Iterable[dict[str, Any]], bins: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs with variables rounded down to multiples, such as request_rate%2. Raises ConfigError."""
    rows = [dict(run) for run in runs]
    for text in bins:
        match = _BIN.fullmatch(text.strip())
        if match is None or not float(match[2]):
            raise ConfigError("--bin-by", f"{text} is not NAME%SIZE, such as request_rate%2")
        name = match[1]
        size = float(match[2])
        for row in rows:
            if isinstance(row.get(name), int | float):
                least = row[name] // size * size
                row[name] = int(least) if isinstance(row[name], int) and size.is_integer() else least
    return rows


def grouped(runs: Iterable[dict[str, Any]], names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs by the values of some variables, in order: `name=value` texts -> runs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: [_order(run.get(name)) for name in names]):
        groups.setdefault(", ".join(f"{name}={run.get(name)}" for name in names), []).append(run)
    return groups


def points(runs: Sequence[Run], x: str, y: str, flags: tuple[str, str]) -> list[tuple[float, float, float]]:
    """Return (x, mean of y, standard deviation of y) for each value of x, or each combination of repeated runs.

    `flags`: those that name x and y. Raises ConfigError if a run lacks one.
    """
    for name, flag in zip((x, y), flags):
        for run in runs:
            if not isinstance(run.get(name), int | float):
                numbers = ", ".join(sorted(key for key, value in run.items() if isinstance(value, int | float)))
                raise ConfigError(flag, f"a run has no number {name}; use one of {numbers}")
    by_parameters: dict[str, list[Run]] = {}
    for run in runs:
        by_parameters.setdefault(_parameters(run, x), []).append(run)
    result = []
    for repeated in by_parameters.values():
        values = [float(run[y]) for run in repeated]
        result.append(
            (statistics.mean(float(run[x]) for run in repeated), statistics.mean(values), statistics.pstdev(values))
        )
    return sorted(result)


def figure_path(folder: Path, name: str, group: str) -> Path:
    """Return the path of a figure, named after its group."""
    return folder / file_name(f"{name}-{group}.png" if group else f"{name}.png")


_MEASURED: Final = re.compile(
    r"(mean|median|std|p[0-9.]+)_.*|.*throughput|.*goodput|duration|date|completed|failed|run_number|total_.*|max_output.*|"
    r"max_concurrent_requests|probe_.*|spec_decode.*|machine"
)


def parameter_names(runs: Sequence[Run]) -> list[str]:
    """Return the variables that are settings, not measurements, and differ between runs."""
    names = dict.fromkeys(key for run in runs for key in run if not _MEASURED.fullmatch(key))
    return [name for name in names if len({json.dumps(run.get(name), default=str) for run in runs}) > 1]


def _parameters(run: Run, x: str) -> str:
    """Return what repeated runs have in common: their settings, and x if it is one."""
    settings = {
        key: value for key, value in run.items() if not _MEASURED.fullmatch(key) and not isinstance(value, list)
    }
    return json.dumps({**settings, **({} if _MEASURED.fullmatch(x) else {x: run[x]})}, sort_keys=True, default=str)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def _holds(value: Any, sign: str, bound: Any) -> bool:
    try:
        return bool(_OPERATORS[sign](value, bound))
    except TypeError:
        return False


def _order(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))
