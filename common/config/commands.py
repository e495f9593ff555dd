"""Which settings each command takes. The parsers, the help and the documentation of commands read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pagoda.common.config.batch import ANSWER_SETTINGS, BatchConfig
from pagoda.common.config.bench import LatencyConfig, ServeLoadConfig, StartupConfig, ThroughputConfig
from pagoda.common.config.client import ChatConfig, ClientConfig
from pagoda.common.config.compile import CompileConfig
from pagoda.common.config.convert import SOURCE_SETTINGS, ConvertConfig
from pagoda.common.config.doctor import DoctorConfig
from pagoda.common.config.table import ENGINE_SETTINGS, SERVER_SETTINGS, Setting, table

_EVERYWHERE: Final = {"log_error_stack": SERVER_SETTINGS["log_error_stack"]}

OWN_SETTINGS: Final[Mapping[str, Mapping[str, Setting]]] = {
    "serve": SERVER_SETTINGS,
    "run-batch": {**table(BatchConfig), **{name: SERVER_SETTINGS[name] for name in ANSWER_SETTINGS}},
    "bench latency": table(LatencyConfig) | _EVERYWHERE,
    "bench throughput": table(ThroughputConfig) | _EVERYWHERE,
    "bench startup": table(StartupConfig) | _EVERYWHERE,
    "bench serve": table(ServeLoadConfig) | _EVERYWHERE,
    "compile": table(CompileConfig) | _EVERYWHERE,
    "convert": {**{name: ENGINE_SETTINGS[name] for name in SOURCE_SETTINGS}, **table(ConvertConfig), **_EVERYWHERE},
    "chat": table(ClientConfig, ChatConfig) | _EVERYWHERE,
    "complete": table(ClientConfig) | _EVERYWHERE,
    "doctor": table(DoctorConfig) | _EVERYWHERE,
}
"""Command -> its settings by name, besides the engine's."""

WITH_ENGINE: Final = ("serve", "run-batch", "bench latency", "bench throughput", "bench startup", "compile")
"""Commands that start or compile an engine, and take its settings from flags, --config and the environment."""

COMMAND_SETTINGS: Final[Mapping[str, Mapping[str, Setting]]] = {
    name: {**ENGINE_SETTINGS, **own} if name in WITH_ENGINE else own for name, own in OWN_SETTINGS.items()
}
"""Command -> all its settings by name. Those without an engine read flags alone: what the environment says about a
server here, its key above all, is not for the server that they talk to."""
