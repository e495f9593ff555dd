"""vLLM's interface as data (tests/data/interface), and what becomes of each row in pagoda's own tables."""

from __future__ import annotations

import csv
import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

from pagoda import server
from pagoda.common.config.env import VARIABLES
from pagoda.common.config.groups.commands import COMMAND_SETTINGS
from pagoda.common.config.settings import Setting
from pagoda.server.cli.main import COMMANDS, MODULES, Command
from pagoda.server.http.body import RequestBody
from pagoda.server.settings.flags import FlagParser

ROWS: Final = Path(__file__).resolve().parents[1] / "tests" / "data" / "interface"
BY_THE_PARSER: Final = {
    "model_tag": "`MODEL`: the model of `serve`, in front of or behind the flags.",
    "--config": "YAML file of settings; see [configuration](../guides/configuration.md).",
    "--help": "Help: `--help=listgroup`, a group, a flag, or a word to look for.",
    "-v": "The version, of `pagoda` itself.",
    "--explain-config": "Every value, where it came from and why; nothing is started.",
}
"""What the command line takes besides settings."""


def rows(name: str) -> list[dict[str, str]]:
    """vLLM's `flags`, `env`, `commands` or `metrics`, a row each."""
    with (ROWS / f"{name}.tsv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def commands(table: Mapping[str, Command] = COMMANDS, prefix: str = "") -> Iterator[tuple[str, Command]]:
    """`bench latency` and its like, with what stands behind them; parents come first."""
    for name, command in table.items():
        yield prefix + name, command
        yield from commands(command.commands or {}, f"{prefix}{name} ")


def parser_of(command: Command) -> FlagParser:
    """The parser of a command that has a module."""
    parser = FlagParser(prog="pagoda")
    import_module(command.module).add_arguments(parser)
    return parser


def groups() -> dict[str, dict[str, Setting]]:
    """Group -> its settings by name, of every command."""
    found: dict[str, dict[str, Setting]] = {}
    for known in COMMAND_SETTINGS.values():
        for name, setting in known.items():
            found.setdefault(setting.group, {})[name] = setting
    return found


def flag_statuses() -> dict[str, str]:
    """vLLM's flag -> what becomes of it here."""
    found = {}
    for row in rows("flags"):
        if row["flag"] in BY_THE_PARSER:
            found[row["flag"]] = "implemented"
        for command in row["commands"].split(","):
            setting = COMMAND_SETTINGS.get(command, {}).get(row["flag"][2:].replace("-", "_"))
            if setting is not None:
                found[row["flag"]] = setting.option.status
    return found


def variable_statuses() -> dict[str, str]:
    """vLLM's variable -> what becomes of it here."""
    known = {name: variable for variable in VARIABLES for name in (variable.name, *variable.aliases)}
    return {row["name"]: known[row["name"]].status for row in rows("env") if row["name"] in known}


def command_statuses() -> dict[str, str]:
    """vLLM's command -> what becomes of it here."""
    known = {"vllm": "implemented"} | {f"vllm {name}": command.status for name, command in commands()}
    known |= {name: command.status for name, command in MODULES.items()}
    names = [row["command"] for row in rows("commands")]
    return {name: known[name] for name in names if name in known}


# --- request bodies ---

SAME_BODY: Final[dict[str, str]] = {
    "EmbeddingBatchChatRequest": "EmbeddingChatRequest",
    "EmbeddingChatInputRequest": "EmbeddingChatRequest",
    "EmbeddingBatchChatInputRequest": "EmbeddingChatRequest",
    "ScoreDataRequest": "ScoreRequest",
    "ScoreQueriesDocumentsRequest": "ScoreRequest",
    "ScoreQueriesItemsRequest": "ScoreRequest",
    "ScoreTextRequest": "ScoreRequest",
}
"""vLLM's schema -> our body, where it has another name or several of theirs are one of ours."""

ABSENT: Final = {
    "IOProcessorRequest": "POST /pooling",
}
"""Schemas of things that are not served -> where they would be posted; what is posted there is refused by name."""


def bodies() -> dict[str, type[RequestBody]]:
    """Every request body there is, by the name of its class."""
    found: dict[str, type[RequestBody]] = {}
    for package in ("http.fields", "openai", "openai.responses", "anthropic", "cohere", "pooling", "admin"):
        path = Path(server.__file__).parent.joinpath(*package.split("."))
        for module in pkgutil.iter_modules([str(path)]):
            for value in vars(import_module(f"{server.__name__}.{package}.{module.name}")).values():
                if isinstance(value, type) and issubclass(value, RequestBody):
                    found[value.__name__] = value
    return found


def body_of(schema: str) -> type[RequestBody] | None:
    """Our body for one of vLLM's schemas."""
    return bodies().get(SAME_BODY.get(schema, schema))
