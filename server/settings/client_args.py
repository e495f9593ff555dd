"""Settings of commands that talk to a running server: their flags alone.

The environment speaks about a server on this machine. Its key above all is not for the server that a flag names.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

from pagoda.common.config.sources import Sourced, settle
from pagoda.common.config.table import Setting
from pagoda.server.settings.flags import given

logger = logging.getLogger(__name__)


def settle_flags(args: argparse.Namespace, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Every setting's value. Raises ConfigError."""
    flags = {name: Sourced(value, "flag") for name, value in given(args, settings.values()).items()}
    settled = settle(settings, flags)
    for note in settled.notes:
        logger.warning("%s", note)
    return settled.values
