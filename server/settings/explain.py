"""`--explain-config`: what every setting comes to, where that came from, and why."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from pagoda.common.config.defaults import Usage
from pagoda.common.config.deprecated import DeprecatedConfig
from pagoda.common.config.settings import ENGINE_GROUPS, Setting, Settled, build
from pagoda.server.settings.args import EngineArgs, settle_all
from pagoda.server.settings.help import status_text
from pagoda.server.settings.resolve import Resolved, ResolvedRow, resolve

_WIDEST: Final = 36
"""Characters of a value beyond which the columns after it give up on being straight."""


Check = Callable[[argparse.Namespace], tuple[Settled, Resolved]]
"""Runs every check that a command makes before it loads a model. Returns the settings and what they resolve to; raises
what the command would."""


def explain(args: argparse.Namespace, table: Mapping[str, Setting], usage: Usage, check: Check | None = None) -> str:
    """The table for one command line. Raises what keeps the command from starting.

    `check`: the command's own; without one, settings and model are read and nothing else is tried.
    """
    settled, resolved = _read(args, table, usage) if check is None else check(args)
    return table_text(_rows(resolved, settled, table), table)


def _read(args: argparse.Namespace, table: Mapping[str, Setting], usage: Usage) -> tuple[Settled, Resolved]:
    settled = settle_all(args, table)
    engine = EngineArgs.from_settled(settled).create_engine_config()
    for config in {setting.config for setting in table.values()} - {*ENGINE_GROUPS.values()}:
        build(config, settled.values, table.values())  # checks the values
    return settled, resolve(engine, usage, settled.sources)


def _rows(resolved: Resolved, settled: Settled, table: Mapping[str, Setting]) -> Iterator[ResolvedRow]:
    """The engine's rows, then one for every other setting of the command; old names only where they were said."""
    found = {row.name: row for row in resolved.rows}
    yield from found.values()
    for name, setting in table.items():
        said = name in settled.sources
        if name not in found and (said or setting.config is not DeprecatedConfig):
            yield ResolvedRow(name, settled.values[name], settled.sources.get(name, "default"), "")


def table_text(rows: Iterable[ResolvedRow], table: Mapping[str, Setting]) -> str:
    """Rows in four columns, a heading for each group. Secrets are not shown."""
    groups: dict[str, list[tuple[str, str, str, str]]] = {}
    for row in rows:
        setting = table.get(row.name)
        cells = (row.name, _shown(setting, row.value), row.source, row.why or _why(setting, row.source))
        groups.setdefault(setting.group if setting else "Resolved", []).append(cells)
    every = [cells for group in groups.values() for cells in group]
    widths = [min(max(len(cells[column]) for cells in every), _WIDEST) for column in range(3)]
    lines = []
    for name, group in groups.items():
        lines += ["", name]
        lines += ["  " + "  ".join([*map(str.ljust, cells[:3], widths), cells[3]]).rstrip() for cells in group]
    return "\n".join(lines[1:])


def _why(setting: Setting | None, source: str) -> str:
    """What becomes of a setting that was said and is not simply implemented."""
    if setting is None or source == "default" or status_text(setting) == "implemented":
        return ""
    return status_text(setting)


def _shown(setting: Setting | None, value: Any) -> str:
    return str(value) if setting is None else setting.shown(value)
