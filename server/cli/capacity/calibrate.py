"""`pagoda calibrate`: measure how long a model's steps take on this machine, for `pagoda simulate --calibration`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from tqdm import tqdm

from pagoda.backends.registry import load_simulator
from pagoda.common.config.commands import COMMAND_SETTINGS, CalibrateConfig
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.settings import ResolvedSettings, build
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import EngineArgs, resolve_settings
from pagoda.server.settings.resolve import SIMULATED, Resolved
from pagoda.server.startup.engine import build_for_calibration, check_engine

SETTINGS: Final = COMMAND_SETTINGS["calibrate"]


def check(args: argparse.Namespace) -> tuple[ResolvedSettings, Resolved]:
    settings = resolve_settings(args, SETTINGS)
    return settings, check_engine(_engine_config(settings), "server", settings.sources)


def run(args: argparse.Namespace) -> int:
    """Measure, write the file and print how well it fits. Returns 0. Raises ConfigError."""
    settings = resolve_settings(args, SETTINGS)
    calibrate = build(CalibrateConfig, settings.values)
    config = _engine_config(settings)
    path = Path(calibrate.output or f"{Path(config.model.model).stem}.calibration.json")
    _check_writable(path)
    target = build_for_calibration(config, settings.sources)
    try:
        with tqdm(desc="Measuring steps", unit="step", disable=not sys.stderr.isatty()) as bar:

            def done(number: int, total: int) -> None:
                bar.total = total
                bar.update(number - bar.n)

            calibration = load_simulator().calibrate(target, calibrate.repeats, calibrate.max_seconds, done)
    finally:
        target.backend.close()
    try:
        path.write_bytes(calibration.as_json())
    except OSError as error:
        raise ConfigError("--output", f"{path}: {error.strerror}") from None
    print(calibration.report())
    print(f"Written to {path}; use it with: pagoda simulate {config.model.model} --calibration {path}")
    return 0


def _engine_config(settings: ResolvedSettings) -> EngineConfig:
    """Return the engine's configuration. Raises ConfigError for the backend that is simulated itself."""
    config = EngineArgs.from_resolved(settings).create_engine_config()
    if config.model.backend == SIMULATED:
        raise ConfigError("--backend", f"{SIMULATED} has no steps to measure; name a real one, or drop it")
    return config


def _check_writable(path: Path) -> None:
    """Raise ConfigError if the file could not be written, before minutes of measurements."""
    if not path.parent.is_dir():
        raise ConfigError("--output", f"{path.parent} is no folder; name a file in one that exists")
