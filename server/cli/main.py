"""The `pagoda` command. A sub-command's module is imported when it is called, so that help and errors come at once."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from pagoda.common.config.fields import Status, did_you_mean
from pagoda.common.errors import ConfigError, PagodaError

if TYPE_CHECKING:
    from pagoda.common.config.defaults import Usage
    from pagoda.server.settings.flags import FlagParser

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130
_STACK_FLAG: Final = "--log-error-stack"


class CommandModule(Protocol):
    """What the module of a sub-command offers; one that builds an engine also a `check` (settings.explain.Check)."""

    def add_arguments(self, parser: FlagParser) -> None:
        """Add its flags."""
        ...

    def run(self, args: object) -> int:
        """Do it; the exit status."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: the module that does it, or more sub-commands.

    `refused`: why there is none, and what to do instead. `deprecated`: what to use instead. `usage`: which defaults its
    engine gets.
    """

    help: str
    module: str = ""
    commands: Mapping[str, Command] | None = None
    refused: str = ""
    deprecated: str = ""
    usage: Usage = "llm"

    @property
    def status(self) -> Status:
        """What becomes of it here."""
        inner = [each.status for each in (self.commands or {}).values()]
        return "refused" if self.refused or (inner and set(inner) == {"refused"}) else "implemented"


_NO_SWEEP: Final = (
    "a shell loop does it: for n in 1 4 16; do pagoda bench serve --max-concurrency $n --save-result; done"
)
_NO_PLOTS: Final = "plot the JSON files of `bench serve --save-result` with the tool of your choice"

SWEEP: Final = {
    "serve": Command("Measure a server over combinations of settings.", refused=_NO_SWEEP),
    "serve_sla": Command("Find the load that still meets a target.", refused=_NO_SWEEP),
    "plot": Command("Plot a sweep.", refused=_NO_PLOTS),
    "plot_pareto": Command("Plot the best trade-offs of a sweep.", refused=_NO_PLOTS),
}
BENCH: Final = {
    "latency": Command("Time batches of requests, end to end.", "pagoda.server.cli.bench.latency"),
    "serve": Command("Load a running server; measure throughput and latency.", "pagoda.server.cli.bench.serve"),
    "throughput": Command("Measure tokens per second over many requests.", "pagoda.server.cli.bench.throughput"),
    "startup": Command(
        "Time a server from its command to its first token.", "pagoda.server.cli.bench.startup", usage="server"
    ),
    "sweep": Command("Repeat `bench serve` over settings.", commands=SWEEP),
}
COMMANDS: Final = {
    "serve": Command("Start the OpenAI-compatible HTTP server for a model.", "pagoda.server.cli.serve", usage="server"),
    "chat": Command("Chat with a running server.", "pagoda.server.cli.chat"),
    "complete": Command("Complete text with a running server.", "pagoda.server.cli.complete"),
    "bench": Command("Measure an engine.", commands=BENCH),
    "run-batch": Command("Answer a file of requests.", "pagoda.server.cli.batch.run", usage="server"),
    "compile": Command(
        "Compile a model's programs for a TPU, here and without one; say what they cost and what fits.",
        "pagoda.server.cli.compile",
        usage="server",
    ),
    "convert": Command(
        "Lay a model's weights out as the TPU backend holds them, for --load-format sharded_state.",
        "pagoda.server.cli.convert",
    ),
    "doctor": Command("Check this machine, and say what to fix.", "pagoda.server.cli.doctor.run"),
    "collect-env": Command("Print what a bug report should say about this machine.", "pagoda.server.cli.collect_env"),
}
MODULES: Final = {
    "python -m vllm.entrypoints.openai.api_server": Command(
        "The server as a module; here python -m pagoda.server.api_server.",
        "pagoda.server.api_server",
        deprecated="pagoda serve MODEL",
    ),
    "vllm/entrypoints/api_server.py": Command(
        "A demonstration server with POST /generate.",
        refused="it speaks no standard API; use pagoda serve MODEL and POST /v1/completions",
    ),
}
"""Modules that elsewhere are started like commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status. An expected error is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch("pagoda", COMMANDS, words)
    except PagodaError as error:
        if _STACK_FLAG in (word.replace("_", "-") for word in words):
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
        hint = did_you_mean(words[0], commands) or f"; there are {', '.join(commands)}"
        print(f"{program}: error: no command {words[0]!r}{hint}", file=sys.stderr)
        return USAGE_ERROR
    name = f"{program} {words[0]}"
    if command.refused:
        print(f"{name}: error: not in this version: {command.refused}", file=sys.stderr)
        return USAGE_ERROR
    if command.commands is not None:
        return _dispatch(name, command.commands, words[1:])
    return _run(name, command, words[1:])


def _run(name: str, command: Command, words: list[str]) -> int:
    from pagoda.server.settings.flags import FlagParser

    module: CommandModule = import_module(command.module)
    parser = FlagParser(prog=name, description=command.help)
    module.add_arguments(parser)
    args: Any = parser.parse_args(words)
    if getattr(args, "explain_config", False):
        from pagoda.server.settings.explain import explain

        print(explain(args, parser.settings, command.usage, getattr(module, "check", None)))
        return 0
    return module.run(args)


def _help(program: str, commands: Mapping[str, Command]) -> str:
    width = max(map(len, commands))
    lines = [f"usage: {program} [-h] [-v] COMMAND ..."]
    for title, refused in (("", False), ("not in this version:", True)):
        found = [(name, each) for name, each in commands.items() if (each.status == "refused") == refused]
        rows = [
            f"  {name:<{width}}  {each.help}" + (f" ({each.refused})" if each.refused else "") for name, each in found
        ]
        lines += ["", *([title] if title else []), *rows] if rows else []
    return "\n".join([*lines, "", f"{program} COMMAND --help tells more about one of them."])


if __name__ == "__main__":
    sys.exit(main())
