"""The `pagoda` command. A sub-command's module is imported when it is called, so that help and errors come at once."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Protocol

from pagoda.common.errors import ConfigError, PagodaError
from pagoda.server.flags import FlagParser

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130


class CommandModule(Protocol):
    """What the module of a sub-command offers."""

    def add_arguments(self, parser: FlagParser) -> None:
        """Add its flags."""
        ...

    def run(self, args: object) -> int:
        """Do it; the exit status."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: the module that does it, or more sub-commands."""

    help: str
    module: str = ""
    commands: Mapping[str, Command] | None = None


BENCH: Final = {
    "latency": Command("Time batches of requests, end to end.", "pagoda.server.bench_latency"),
    "throughput": Command("Measure tokens per second over many requests.", "pagoda.server.bench_throughput"),
}
COMMANDS: Final = {
    "serve": Command("Start the OpenAI-compatible HTTP server for a model.", "pagoda.server.serve"),
    "chat": Command("Chat with a running server.", "pagoda.server.chat"),
    "complete": Command("Complete text with a running server.", "pagoda.server.complete"),
    "bench": Command("Measure an engine.", commands=BENCH),
    "collect-env": Command("Print what a bug report should say about this machine.", "pagoda.server.collect_env"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status. An expected error is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch("pagoda", COMMANDS, words)
    except PagodaError as error:
        if "--log-error-stack" in words:
            traceback.print_exc()
        print(f"pagoda: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _dispatch(program: str, commands: Mapping[str, Command], words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help(program, commands))
        return 0 if words else USAGE_ERROR
    if words[0] in ("-v", "--version"):
        import pagoda

        print(pagoda.__version__)
        return 0
    command = commands.get(words[0])
    if command is None:
        near = difflib.get_close_matches(words[0], list(commands), n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(commands)}"
        print(f"{program}: error: no command {words[0]!r}{hint}", file=sys.stderr)
        return USAGE_ERROR
    name = f"{program} {words[0]}"
    if command.commands is not None:
        return _dispatch(name, command.commands, words[1:])
    module: CommandModule = import_module(command.module)
    parser = FlagParser(prog=name, description=command.help)
    module.add_arguments(parser)
    return module.run(parser.parse_args(words[1:]))


def _help(program: str, commands: Mapping[str, Command]) -> str:
    width = max(map(len, commands))
    lines = [f"usage: {program} [-h] [-v] COMMAND ...", ""]
    lines += [f"  {name:<{width}}  {command.help}" for name, command in commands.items()]
    return "\n".join([*lines, "", f"{program} COMMAND --help tells more about one of them."])


if __name__ == "__main__":
    sys.exit(main())
