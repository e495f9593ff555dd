"""`pagoda bench sweep startup`: measure start-up with every combination of flags."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.groups.bench.sweep import SweepConfig, SweepStartupConfig
from pagoda.common.config.settings import build
from pagoda.server.bench.sweep.params import read_params
from pagoda.server.bench.sweep.runs import Experiment, run_command
from pagoda.server.settings.flags import resolve_flags

SETTINGS: Final = OWN_SETTINGS["bench sweep startup"]


def run(args: argparse.Namespace) -> int:
    """Measure what has no results yet. Returns 0. Raises PagodaError if a run failed."""
    values = resolve_flags(args, SETTINGS)
    config = build(SweepConfig, values)
    startup = build(SweepStartupConfig, values)
    server_params = read_params(config.serve_params, "--serve-params")
    startup_params = read_params(startup.startup_params, "--startup-params")
    experiment = Experiment.of(config)
    results: list[dict[str, Any]] = []
    for server_flags in server_params:
        for startup_flags in startup_params:
            command = startup_flags.applied(server_flags.applied(shlex.split(startup.startup_cmd)))
            folder = experiment.path(serve=server_flags, startup=startup_flags)
            if config.dry_run:
                print(f"{config.num_runs} x {shlex.join(command)}\n  results: {folder}")
                continue
            print(f"{server_flags.as_text()}; {startup_flags.as_text()}", flush=True)
            output = None if config.show_stdout else subprocess.DEVNULL

            def measure(path: Path, command: list[str] = command, output: int | None = output) -> None:
                run_command([*command, "--output-json", str(path)], output)

            results += experiment.runs(folder, {**server_flags.values, **startup_flags.values}, measure)
    if not config.dry_run:
        experiment.finish(results, f"Start-up sweep {experiment.folder.name}")
    return 0
