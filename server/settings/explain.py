"""`--explain-config`: a table of every setting's resolved value, source and reason."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from pagoda.common.config.defaults import ResolvedRow
from pagoda.common.config.deprecated import DeprecatedConfig
from pagoda.common.config.settings import ResolvedSettings, Setting
from pagoda.server.settings.help import status_text
from pagoda.server.settings.resolve import Resolved

_MAX_WIDTH: Final = 36
"""Maximum width of an aligned column, in characters."""


ConfigCheck = Callable[[argparse.Namespace], tuple[ResolvedSettings, Resolved]]
"""Runs a command's checks that precede loading the model; returns what it resolved, raises what the command would."""


def explain(args: argparse.Namespace, table: Mapping[str, Setting], check: ConfigCheck) -> str:
    """Return the table for a command line. Raise the error that keeps the command from starting."""
    settings, resolved = check(args)
    return table_text(_rows(resolved, settings, table), table)


def _rows(resolved: Resolved, settings: ResolvedSettings, table: Mapping[str, Setting]) -> Iterator[ResolvedRow]:
    """Yield the engine's rows, then the command's other settings; deprecated ones only if given."""
    engine_rows = {row.name: row for row in resolved.rows}
    yield from engine_rows.values()
    derived = {row.name: row for row in resolved.derived}
    for name, setting in table.items():
        is_set = name in settings.sources
        if name not in engine_rows and (is_set or setting.config is not DeprecatedConfig):
            default = ResolvedRow(name, settings.values[name], settings.sources.get(name, "default"))
            yield derived.get(name, default)


def table_text(rows: Iterable[ResolvedRow], table: Mapping[str, Setting]) -> str:
    """Format rows in four columns (name, value, source, reason) by group. Secrets are hidden."""
    groups: dict[str, list[tuple[str, str, str, str]]] = {}
    for row in rows:
        setting = table.get(row.name)
        cells = (row.name, _shown(setting, row.value), row.source, row.reason or _reason(setting, row.source))
        groups.setdefault(setting.group if setting else "Resolved", []).append(cells)
    all_cells = [cells for group in groups.values() for cells in group]
    widths = [min(max(len(cells[column]) for cells in all_cells), _MAX_WIDTH) for column in range(3)]
    lines = []
    for name, group in groups.items():
        lines += ["", name]
        lines += ["  " + "  ".join([*map(str.ljust, cells[:3], widths), cells[3]]).rstrip() for cells in group]
    return "\n".join(lines[1:])


def _reason(setting: Setting | None, source: str) -> str:
    """Return the status of a setting that is set and not implemented."""
    if setting is None or source == "default" or status_text(setting) == "implemented":
        return ""
    return status_text(setting)


def _shown(setting: Setting | None, value: Any) -> str:
    return str(value) if setting is None else setting.shown(value)
