"""The `pagoda` command. Modules of sub-commands are imported on use, so that help and errors are fast."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from pagoda.common.config.fields import Status, did_you_mean
from pagoda.common.errors import ConfigError, PagodaError

if TYPE_CHECKING:
    from pagoda.server.settings.explain import ConfigCheck
    from pagoda.server.settings.flags import FlagParser

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130
_STACK_FLAG: Final = "--log-error-stack"


class CommandModule(Protocol):
    """The module of a sub-command. It may have `VALUES`, which the help lists: setting -> its values."""

    def run(self, args: object) -> int:
        """Run the command and return the exit status."""
        ...


class CheckedModule(CommandModule, Protocol):
    """The module of a command that has --explain-config."""

    check: ConfigCheck


@dataclass(frozen=True, slots=True)
class Positional:
    """An argument without a flag."""

    name: str
    help: str
    metavar: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: a module, or further sub-commands."""

    help: str
    module: str = ""
    commands: Mapping[str, Command] | None = None
    positionals: tuple[Positional, ...] = ()
    refused: str = ""  # Why it is not supported, with the remedy.
    deprecated: str = ""  # The command that replaces it.

    @property
    def status(self) -> Status:
        """Refused if the command or all its sub-commands are."""
        inner = [command.status for command in (self.commands or {}).values()]
        return "refused" if self.refused or (inner and set(inner) == {"refused"}) else "implemented"


_MODEL: Final = Positional("model_tag", "A local folder, a .gguf file, or a hub id.", "MODEL", optional=True)
_MODEL_CONFIG: Final = Positional("model_tag", "A local folder, a config.json, or a hub id.", "MODEL", optional=True)
_EXPERIMENT: Final = Positional("experiment_dir", "Folder of a sweep's results.", "EXPERIMENT_DIR")

SWEEP: Final = {
    "serve": Command("Benchmark a server over combinations of settings.", "pagoda.server.bench.sweep.serve"),
    "serve_sla": Command("Find the highest load that meets an SLA.", "pagoda.server.bench.sweep.serve_sla"),
    "startup": Command("Benchmark start-up over combinations of settings.", "pagoda.server.bench.sweep.startup"),
    "plot": Command("Plot the results of a sweep.", "pagoda.server.bench.sweep.plot", positionals=(_EXPERIMENT,)),
    "plot_pareto": Command(
        "Plot the Pareto frontier of a sweep.", "pagoda.server.bench.sweep.plot_pareto", positionals=(_EXPERIMENT,)
    ),
}
BENCH: Final = {
    "latency": Command("Benchmark the latency of one batch of requests.", "pagoda.server.bench.offline.latency"),
    "serve": Command("Benchmark throughput and latency of a running server.", "pagoda.server.bench.online.serve"),
    "throughput": Command("Benchmark offline throughput.", "pagoda.server.bench.offline.throughput"),
    "startup": Command(
        "Benchmark server start-up, from the command to the first token.", "pagoda.server.bench.offline.startup"
    ),
    "sweep": Command("Run benchmarks over combinations of settings, and plot the results.", commands=SWEEP),
}
COMMANDS: Final = {
    "serve": Command(
        "Start the OpenAI-compatible API server.", "pagoda.server.cli.serving.serve", positionals=(_MODEL,)
    ),
    "chat": Command("Chat with a running server.", "pagoda.server.cli.client.chat"),
    "complete": Command("Complete a prompt with a running server.", "pagoda.server.cli.client.complete"),
    "bench": Command("Run benchmarks.", commands=BENCH),
    "run-batch": Command("Run a file of batch requests.", "pagoda.server.cli.batch.run_batch"),
    "compile": Command(
        "Compile a model's TPU programs ahead of time, without a TPU; report their cost and memory use.",
        "pagoda.server.cli.weights.compile",
        positionals=(_MODEL_CONFIG,),
    ),
    "convert": Command(
        "Convert a model's weights: to the TPU backend's sharded format, for --load-format sharded_state, or with "
        "--quantization to int4, int8 or fp8 in the compressed-tensors format.",
        "pagoda.server.cli.weights.convert",
        positionals=(
            replace(_MODEL, optional=False),
            Positional("out", "Output folder; it must be empty if it exists.", "OUT"),
        ),
    ),
    "doctor": Command("Check this machine and suggest fixes.", "pagoda.server.cli.diagnosis.doctor"),
    "replay": Command(
        "Step the scheduler through an incident snapshot that a server wrote (--incident-dir).",
        "pagoda.server.cli.capacity.replay",
        positionals=(Positional("file", "An incident snapshot.", "FILE"),),
    ),
    "simulate": Command(
        "Serve a workload by the real scheduler on a simulated device: no weights, no device, no waiting.",
        "pagoda.server.cli.capacity.simulate",
        positionals=(_MODEL_CONFIG,),
    ),
    "plan": Command(
        "Find the accelerators, replicas and limits that serve a workload within its latency targets.",
        "pagoda.server.cli.capacity.plan",
        positionals=(_MODEL_CONFIG,),
    ),
    "calibrate": Command(
        "Measure a model's step times on this machine, for `simulate --calibration`.",
        "pagoda.server.cli.capacity.calibrate",
        positionals=(_MODEL,),
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
        return _dispatch("", COMMANDS, words)
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


def _dispatch(parent: str, commands: Mapping[str, Command], words: list[str]) -> int:
    """Run one of the commands. `parent`: that of which they are sub-commands."""
    program = f"pagoda {parent}".strip()
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
    name = f"{parent} {words[0]}".strip()
    if command.refused:
        print(f"pagoda {name}: error: not in this version: {command.refused}", file=sys.stderr)
        return USAGE_ERROR
    if command.commands is not None:
        return _dispatch(name, command.commands, words[1:])
    return _run(name, command, words[1:])


def _run(name: str, command: Command, words: list[str]) -> int:
    module: CommandModule = import_module(command.module)
    parser = parser_of(name, command)
    args: Any = parser.parse_args(words)
    if getattr(args, "explain_config", False):
        from pagoda.server.settings.explain import explain

        print(explain(args, parser.settings, cast(CheckedModule, module).check))
        return 0
    return module.run(args)


def parser_of(name: str, command: Command) -> FlagParser:
    """Return the argument parser of a command that has a module. `name`: as in OWN_SETTINGS, such as `bench serve`."""
    from pagoda.common.config.commands import OWN_SETTINGS, WITH_ENGINE
    from pagoda.common.config.settings import ENGINE_SETTINGS
    from pagoda.server.settings.flags import FlagParser, add_config_file, add_explain_config, add_settings

    module = import_module(command.module)
    own_settings = OWN_SETTINGS.get(name, {})
    parser = FlagParser(prog=f"pagoda {name}", description=command.help)
    for positional in command.positionals:
        nargs = "?" if positional.optional else None
        parser.add_argument(positional.name, nargs=nargs, metavar=positional.metavar, help=positional.help)
    add_settings(parser, own_settings.values())
    if name in WITH_ENGINE:
        add_settings(parser, ENGINE_SETTINGS.values(), skip=own_settings)
        add_config_file(parser)
    if hasattr(module, "check"):
        add_explain_config(parser)
    parser.values = getattr(module, "VALUES", parser.values)
    return parser


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
