"""vLLM's interface as data (tests/data/interface), and the status of each row in pagoda."""

from __future__ import annotations

import csv
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final

from pagoda import server
from pagoda.common.config.commands import COMMAND_SETTINGS
from pagoda.common.config.env import VARIABLES
from pagoda.common.config.settings import Setting
from pagoda.server.cli.main import COMMANDS, MODULES, Command, parser_of
from pagoda.server.http.body import RequestBody
from pagoda.server.settings.flags import FlagParser

ROWS: Final = Path(__file__).resolve().parents[1] / "tests" / "data" / "interface"
PARSER_ARGUMENTS: Final = {
    "model_tag": "`MODEL`: the model of `serve`, before or after the flags.",
    "--config": "YAML file of settings; see [configuration](../guides/configuration.md).",
    "--help": "Show help: `--help=listgroup`, `--help=GROUP`, `--help=FLAG` or `--help=WORD`.",
    "-v": "Show the version; for `pagoda` without a command.",
    "--explain-config": "Print the resolved value, source and reason of every setting, without starting the engine.",
}
"""Command-line arguments that are not settings."""


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of one table of vLLM's interface, such as `flags`, `env`, `commands` or `metrics`."""
    with (ROWS / f"{name}.tsv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def commands(table: Mapping[str, Command] = COMMANDS, prefix: str = "") -> Iterator[tuple[str, Command]]:
    """Yield all commands and sub-commands, such as `bench latency`; parents come first."""
    for name, command in table.items():
        yield prefix + name, command
        yield from commands(command.commands or {}, f"{prefix}{name} ")


@cache
def parsers() -> Mapping[str, FlagParser]:
    """Return command -> its argument parser, for all that have a module. Do not change them."""
    return {name: parser_of(name, command) for name, command in commands() if command.module}


def groups() -> dict[str, dict[str, Setting]]:
    """Return group -> its settings by name, of all commands."""
    by_group: dict[str, dict[str, Setting]] = {}
    for known in COMMAND_SETTINGS.values():
        for name, setting in known.items():
            by_group.setdefault(setting.group, {})[name] = setting
    return by_group


def flag_statuses() -> dict[str, str]:
    """Return vLLM's flag -> its status in pagoda."""
    statuses = {}
    for row in rows("flags"):
        if row["flag"] in PARSER_ARGUMENTS:
            statuses[row["flag"]] = "implemented"
        for command in row["commands"].split(","):
            setting = COMMAND_SETTINGS.get(command, {}).get(row["flag"][2:].replace("-", "_"))
            if setting is not None:
                statuses[row["flag"]] = setting.option.status
    return statuses


def variable_statuses() -> dict[str, str]:
    """Return vLLM's environment variable -> its status in pagoda."""
    known = {name: variable for variable in VARIABLES for name in (variable.name, *variable.aliases)}
    return {row["name"]: known[row["name"]].status for row in rows("env") if row["name"] in known}


def command_statuses() -> dict[str, str]:
    """Return vLLM's command -> its status in pagoda."""
    known = {"vllm": "implemented"} | {f"vllm {name}": command.status for name, command in commands()}
    known |= {name: command.status for name, command in MODULES.items()}
    names = [row["command"] for row in rows("commands")]
    return {name: known[name] for name in names if name in known}


SAME_BODY: Final[dict[str, str]] = {
    "EmbeddingBatchChatRequest": "EmbeddingChatRequest",
    "EmbeddingChatInputRequest": "EmbeddingChatRequest",
    "EmbeddingBatchChatInputRequest": "EmbeddingChatRequest",
    "ScoreDataRequest": "ScoreRequest",
    "ScoreQueriesDocumentsRequest": "ScoreRequest",
    "ScoreQueriesItemsRequest": "ScoreRequest",
    "ScoreTextRequest": "ScoreRequest",
}
"""vLLM's schema -> pagoda's body, if it has another name or covers several schemas."""

UNSUPPORTED_SCHEMAS: Final = {
    "IOProcessorRequest": "POST /pooling",
}
"""Unsupported schema -> its route, which refuses such bodies."""


APIS: Final = ("openai", "openai.batch", "openai.responses", "anthropic", "cohere", "pooling", "admin")
"""Packages of server/api that have request bodies."""


@cache
def bodies() -> dict[str, type[RequestBody]]:
    """Return all request body classes by name."""
    by_name: dict[str, type[RequestBody]] = {}
    for package in ("http", *(f"api.{name}" for name in APIS)):
        path = Path(server.__file__).parent.joinpath(*package.split("."))
        for module in pkgutil.iter_modules([str(path)]):
            for value in vars(import_module(f"{server.__name__}.{package}.{module.name}")).values():
                if isinstance(value, type) and issubclass(value, RequestBody):
                    by_name[value.__name__] = value
    return by_name


def body_of(schema: str) -> type[RequestBody] | None:
    """Return pagoda's body class for one of vLLM's schemas."""
    return bodies().get(SAME_BODY.get(schema, schema))
