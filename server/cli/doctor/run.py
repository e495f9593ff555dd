"""`pagoda doctor`: check this machine, and report what to fix before a server is started on it."""

from __future__ import annotations

import argparse
from typing import Final

from pagoda.common.config.commands import COMMAND_SETTINGS, DoctorConfig
from pagoda.common.config.settings import build
from pagoda.server.cli.doctor.checks import (
    Check,
    Finding,
    backends,
    devices,
    environment,
    folders,
    hub,
    limits,
    memory,
    model,
    packages,
    port,
    processor,
    python_version,
    spreading,
)
from pagoda.server.redact import Redactor
from pagoda.server.settings.args import resolve_settings
from pagoda.server.settings.flags import FlagParser, add_settings

CHECKS: Final[tuple[Check, ...]] = (
    *(python_version, packages, backends, devices, spreading, processor, memory, folders),
    *(port, hub, limits, environment, model),
)


SETTINGS: Final = COMMAND_SETTINGS["doctor"]


def add_arguments(parser: FlagParser) -> None:
    add_settings(parser, SETTINGS.values())


def run(args: argparse.Namespace) -> int:
    """Print a line per finding. Returns 1 if something would prevent the server from starting."""
    config: DoctorConfig = build(DoctorConfig, resolve_settings(args, SETTINGS).values, SETTINGS.values())
    redact = Redactor()
    findings: list[Finding] = []
    for check in CHECKS:
        for finding in check(config):
            findings.append(finding)
            print(f"{finding.level:<6}{finding.subject:<15}{redact(' '.join(finding.text.split()))}", flush=True)
    fails, warnings = (sum(each.level == level for each in findings) for level in ("fail", "warn"))
    print(f"{fails} errors, {warnings} warnings" if fails or warnings else "nothing to fix")
    return 1 if fails else 0
