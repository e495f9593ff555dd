"""`pagoda bench sweep plot`: curves of one result of a sweep against another, as PNG figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.groups.bench.sweep import PlotConfig
from pagoda.common.config.settings import build
from pagoda.server.bench.report.plots import draw_series, figure, need_matplotlib, save
from pagoda.server.bench.sweep.report import write_report
from pagoda.server.bench.sweep.results import binned, figure_path, filtered, grouped, points, read_runs
from pagoda.server.settings.flags import resolve_flags

SETTINGS: Final = OWN_SETTINGS["bench sweep plot"]


def run(args: argparse.Namespace) -> int:
    """Write the figures and the report page. Returns 0."""
    config = build(PlotConfig, resolve_flags(args, SETTINGS))
    folder = Path(args.experiment_dir)
    runs = binned(filtered(read_runs(folder), config.filter_by), config.bin_by)
    if not config.dry_run:
        need_matplotlib("bench sweep plot")
    for group, rows in grouped(runs, config.fig_by).items():
        path = figure_path(folder / config.fig_dir, config.fig_name, group)
        curves = {name: len(curve) for name, curve in grouped(rows, config.curve_by).items()}
        print(f"{path}: {len(rows)} runs, {len(curves)} curves of {config.var_y} against {config.var_x}")
        if not config.dry_run:
            _draw(config, rows, path)
    if not config.dry_run:
        page = folder / config.fig_dir / "report.html"
        write_report(page, runs, f"Sweep {folder.name}")
        print(page)
    return 0


def _draw(config: PlotConfig, runs: list[dict[str, Any]], path: Path) -> None:
    rows = list(grouped(runs, config.row_by))
    columns = list(grouped(runs, config.col_by))
    drawn, all_axes = figure(len(rows), len(columns), config.fig_width, config.fig_height)
    for row, in_row in zip(rows, all_axes):
        for column, axes in zip(columns, in_row):
            chosen = [run for run in grouped(runs, config.row_by)[row] if run in grouped(runs, config.col_by)[column]]
            series = {
                name: points(curve, config.var_x, config.var_y, ("--var-x", "--var-y"))
                for name, curve in grouped(chosen, config.curve_by).items()
            }
            draw_series(axes, series, error_bars=not config.no_error_bars)
            axes.set(xlabel=config.var_x, ylabel=config.var_y, title=" | ".join(filter(None, (row, column))))
            for name, scale in (("x", config.scale_x), ("y", config.scale_y)):
                set_scale = axes.set_xscale if name == "x" else axes.set_yscale
                if scale == "sqrt":
                    set_scale("function", functions=(lambda value: abs(value) ** 0.5, lambda value: value**2))
                elif scale is not None:
                    set_scale(scale)
    save(drawn, path, config.fig_dpi)
