"""All checks that `doctor` makes, in their order."""

from __future__ import annotations

from typing import Final

from pagoda.server.commands.checks.backends import backends, spreading
from pagoda.server.commands.checks.finding import Check
from pagoda.server.commands.checks.folders import folders
from pagoda.server.commands.checks.hardware import devices, limits, memory, processor
from pagoda.server.commands.checks.model import model
from pagoda.server.commands.checks.network import hub, port
from pagoda.server.commands.checks.software import environment, packages, python_version

CHECKS: Final[tuple[Check, ...]] = (
    *(python_version, packages, backends, devices, spreading, processor, memory, folders),
    *(port, hub, limits, environment, model),
)
