"""`pagoda bench sweep serve`: benchmark a server with every combination of server and benchmark flags."""

from __future__ import annotations

import argparse
from typing import Any, Final

from pagoda.common.config.commands import OWN_SETTINGS
from pagoda.common.config.groups.bench.sweep import SweepConfig, SweepServeConfig
from pagoda.common.config.settings import build
from pagoda.common.errors import PagodaError
from pagoda.server.bench.sweep.params import read_params
from pagoda.server.bench.sweep.runs import Experiment, is_measured, measure_combination, pairs_to_run, swept_server
from pagoda.server.settings.flags import resolve_flags

SETTINGS: Final = OWN_SETTINGS["bench sweep serve"]


def run(args: argparse.Namespace) -> int:
    """Measure what has no results yet. Returns 0. Raises PagodaError if a run failed."""
    values = resolve_flags(args, SETTINGS)
    config = build(SweepConfig, values)
    serve = build(SweepServeConfig, values)
    server_params = read_params(config.serve_params, "--serve-params")
    bench_params = read_params(serve.bench_params, "--bench-params")
    experiment = Experiment.of(config)
    results: list[dict[str, Any]] = []
    for server_flags in server_params:
        chosen = pairs_to_run(server_flags, bench_params, serve)
        folders = [experiment.path(serve=server_flags, bench=bench_flags) for bench_flags in chosen]
        needed = not all(is_measured(experiment, folder) for folder in folders)
        try:
            with swept_server(config, serve, server_flags, needed=needed) as server:
                for bench_flags, folder in zip(chosen, folders):
                    results += measure_combination(experiment, serve, server, folder, (server_flags, bench_flags))
        except PagodaError as error:
            if not serve.continue_on_error:
                raise
            print(f"failed: {server_flags.as_text()}: {error}")
    if not config.dry_run:
        experiment.finish(results, f"Sweep {experiment.folder.name}")
    return 0
