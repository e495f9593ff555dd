"""The `pagoda` command. Modules of sub-commands are imported on use, so that help and errors are fast."""

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
    """The module of a sub-command; if it builds an engine it also has a `check` (settings.explain.ConfigCheck)."""

    def add_arguments(self, parser: FlagParser) -> None:
        """Add the command's flags."""
        ...

    def run(self, args: object) -> int:
        """Run the command and return the exit status."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: a module, or further sub-commands."""

    help: str
    module: str = ""
    commands: Mapping[str, Command] | None = None
    refused: str = ""  # why it is not supported, with the remedy
    deprecated: str = ""  # its replacement
    usage: Usage = "llm"  # selects the engine's defaults

    @property
    def status(self) -> Status:
        """Refused if the command or all its sub-commands are."""
        inner = [command.status for command in (self.commands or {}).values()]
        return "refused" if self.refused or (inner and set(inner) == {"refused"}) else "implemented"


SWEEP: Final = {
    "serve": Command("Benchmark a server over combinations of settings.", "pagoda.server.bench.sweep.serve"),
    "serve_sla": Command("Find the highest load that meets an SLA.", "pagoda.server.bench.sweep.serve_sla"),
    "startup": Command("Benchmark start-up over combinations of settings.", "pagoda.server.bench.sweep.startup"),
    "plot": Command("Plot the results of a sweep.", "pagoda.server.bench.sweep.plot"),
    "plot_pareto": Command("Plot the Pareto frontier of a sweep.", "pagoda.server.bench.sweep.plot_pareto"),
}
BENCH: Final = {
    "latency": Command("Benchmark the latency of one batch of requests.", "pagoda.server.bench.offline.latency"),
    "serve": Command("Benchmark throughput and latency of a running server.", "pagoda.server.bench.online.serve"),
    "throughput": Command("Benchmark offline throughput.", "pagoda.server.bench.offline.throughput"),
    "startup": Command(
        "Benchmark server start-up, from the command to the first token.",
        "pagoda.server.bench.offline.startup",
        usage="server",
    ),
    "sweep": Command("Run benchmarks over combinations of settings, and plot the results.", commands=SWEEP),
}
COMMANDS: Final = {
    "serve": Command("Start the OpenAI-compatible API server.", "pagoda.server.cli.serving.serve", usage="server"),
    "chat": Command("Chat with a running server.", "pagoda.server.cli.client.chat"),
    "complete": Command("Complete a prompt with a running server.", "pagoda.server.cli.client.complete"),
    "bench": Command("Run benchmarks.", commands=BENCH),
    "run-batch": Command("Run a file of batch requests.", "pagoda.server.cli.batch.run_batch", usage="server"),
    "compile": Command(
        "Compile a model's TPU programs ahead of time, without a TPU; report their cost and memory use.",
        "pagoda.server.cli.weights.compile",
        usage="server",
    ),
    "convert": Command(
        "Convert a model's weights: to the TPU backend's sharded format, for --load-format sharded_state, or with "
        "--quantization to int4, int8 or fp8 in the compressed-tensors format.",
        "pagoda.server.cli.weights.convert",
    ),
    "doctor": Command("Check this machine and suggest fixes.", "pagoda.server.cli.diagnosis.doctor"),
    "replay": Command(
        "Step the scheduler through an incident snapshot that a server wrote (--incident-dir).",
        "pagoda.server.cli.capacity.replay",
    ),
    "simulate": Command(
        "Serve a workload by the real scheduler on a simulated device: no weights, no device, no waiting.",
        "pagoda.server.cli.capacity.simulate",
        usage="server",
    ),
    "plan": Command(
        "Find the accelerators, replicas and limits that serve a workload within its latency targets.",
        "pagoda.server.cli.capacity.plan",
        usage="server",
    ),
    "calibrate": Command(
        "Measure a model's step times on this machine, for `simulate --calibration`.",
        "pagoda.server.cli.capacity.calibrate",
        usage="server",
    ),
    "collect-env": Command(
        "Print information about the environment, for bug reports.", "pagoda.server.cli.diagnosis.collect_env"
    ),
}
MODULES: Final = {
    "python -m vllm.entrypoints.openai.api_server": Command(
        "API server module; in pagoda: python -m pagoda.server.cli.api_server.",
        "pagoda.server.cli.api_server",
        deprecated="pagoda serve MODEL",
    ),
    "vllm/entrypoints/api_server.py": Command(
        "Demonstration server with POST /generate.",
        refused="it has no standard API; use pagoda serve MODEL and POST /v1/completions",
    ),
}
"""vLLM's modules that are run like commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status. A PagodaError is printed as one line on stderr."""
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
        hint = did_you_mean(words[0], commands) or f"; use one of {', '.join(commands)}"
        print(f"{program}: error: unknown command {words[0]!r}{hint}", file=sys.stderr)
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
        rows = [
            f"  {name:<{width}}  {command.help}" + (f" ({command.refused})" if command.refused else "")
            for name, command in commands.items()
            if (command.status == "refused") == refused
        ]
        lines += ["", *([title] if title else []), *rows] if rows else []
    return "\n".join([*lines, "", f"See {program} COMMAND --help for the flags of a command."])


if __name__ == "__main__":
    sys.exit(main())
