"""Which settings each command takes. The parsers, the help and the documentation of commands read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pagoda.common.config.fields import option
from pagoda.common.config.groups.bench import LatencyConfig, ServeLoadConfig, StartupConfig, ThroughputConfig
from pagoda.common.config.settings import ENGINE_SETTINGS, SERVER_SETTINGS, Setting, table
from pagoda.common.errors import ConfigError

# What `run-batch` reads and writes. Its other settings are the engine's, and the server's where they shape answers.

ANSWER_SETTINGS: Final = (
    "port",
    "response_role",
    "chat_template",
    "default_chat_template_kwargs",
    "chat_template_content_format",
    "trust_request_chat_template",
    "enable_prompt_tokens_details",
    "return_tokens_as_token_ids",
    "max_log_len",
    "max_body_bytes",
    "disable_frontend_multiprocessing",
    "log_error_stack",
)
"""The server's settings that `run-batch` takes as well; `port` is where --enable-metrics listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """What a batch reads, what it writes, and who may watch."""

    input_file: str | None = option(
        None, "Requests in OpenAI's batch format, one per line: a file, or an http(s) address.", aliases=("-i",)
    )
    output_file: str | None = option(
        None,
        "Where the answers go: a file, or an http(s) address that takes a PUT. "
        "The same command goes on with a run that was cut off.",
        aliases=("-o",),
    )
    output_tmp_dir: str | None = option(
        None,
        "Folder in which answers gather until all are there; default: the output file's own, or the system's temporary "
        "one for an address.",
    )
    enable_metrics: bool = option(False, "Answer GET /metrics while the batch runs.")
    url: str = option("0.0.0.0", "Address on which --enable-metrics listens.")

    def __post_init__(self) -> None:
        if not self.input_file:
            raise ConfigError("--input-file", "is missing; name the file of requests with -i FILE")
        if not self.output_file:
            raise ConfigError("--output-file", "is missing; name the file for the answers with -o FILE")
        if self.input_file == self.output_file:
            raise ConfigError("--output-file", "is the input file as well; name another")

    @property
    def source(self) -> str:
        """The input, which is always there."""
        return self.input_file or ""

    @property
    def target(self) -> str:
        """The output, which is always there."""
        return self.output_file or ""


def is_address(path: str) -> bool:
    """True for http:// and https://."""
    return path.startswith(("http://", "https://"))


# How `chat` and `complete` reach a running server.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Which server and model to ask."""

    url: str = option("http://localhost:8000/v1", "Base address of the server.")
    model_name: str | None = option(None, "Model to ask; default: the first that the server lists.")
    api_key: str | None = option(None, "Key to present; default: the environment's OPENAI_API_KEY.")
    max_tokens: int | None = option(None, "Most tokens of an answer; default: the server's.")
    quick: str | None = option(None, "Send this one text, print the answer and exit.", aliases=("-q",))

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError("--max-tokens", f"{self.max_tokens} is not positive; use 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How a conversation begins."""

    system_prompt: str | None = option(None, "System message that begins the conversation.")


# What `compile` compiles for, and where it puts that.


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """The chips of `compile`; no chip is needed to compile for them."""

    topology: str | None = option(
        None, "Chips to compile for, such as v6e:2x4 or v5p:2x2x1; cpu: this machine's processor."
    )
    config_only: bool = option(False, "Read config.json alone, the file or its folder: no weights are needed.")
    tensor_parallel_size: int | None = option(
        None,
        "Devices that share each layer; default: as many as the topology has for it.",
        aliases=("-tp",),
    )
    budget_only: bool = option(
        False, "Compile only the largest program of each kind: enough to tell what fits, and not for a bundle."
    )
    output: str | None = option(
        None,
        "Folder for the compiled programs, for serve --compiled-bundle; whoever loads it runs what is in it.",
        aliases=("-o",),
    )
    output_json: str | None = option(None, "File for the table as JSON.")

    def __post_init__(self) -> None:
        if self.tensor_parallel_size is not None and self.tensor_parallel_size < 1:
            raise ConfigError("--tensor-parallel-size", f"{self.tensor_parallel_size} is not positive; use 1 or more")
        if self.budget_only and self.output is not None:
            raise ConfigError("--budget-only", "compiles too few programs for --output; drop one of them")


# What `convert` lays a model out for. Where the model comes from is said by the engine's own settings.

SOURCE_SETTINGS: Final = (
    "tokenizer",
    "tokenizer_revision",
    "skip_tokenizer_init",
    "dtype",
    "seed",
    "hf_config_path",
    "hf_overrides",
    "hf_token",
    "revision",
    "load_format",
    "download_dir",
    "ignore_patterns",
    "safetensors_load_strategy",
    "use_tqdm_on_load",
)
"""The engine's settings that say what is converted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """The devices that `convert` lays a model out for; they need not be there."""

    tensor_parallel_size: int = option(
        1, "Devices that share each layer; the result loads on any number, quickest on this.", aliases=("-tp",)
    )

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ConfigError("--tensor-parallel-size", f"{self.tensor_parallel_size} is not positive; use 1 or more")


# What `doctor` looks at.


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """The server that this machine is checked for."""

    model: str | None = option(None, "Check that this model can be served: a folder, a .gguf file or a hub id.")
    backend: str = option("auto", "Device backend: reference, torch_cuda, jax_tpu; auto picks by platform.")
    tensor_parallel_size: int = option(1, "Devices that the server would share the model between.", aliases=("-tp",))
    data_parallel_size: int = option(1, "Copies of the model that the server would hold.", aliases=("-dp",))
    host: str | None = option(None, "Address that the server would listen on; default: 127.0.0.1.")
    port: int = option(8000, "Port that the server would listen on; 0: any free one.")
    download_dir: str | None = option(None, "Where hub downloads are kept; default: the hub's own cache.")
    rpc_base_path: str | None = option(
        None, "Folder in which the engine's sockets are made; default: the system's folder for temporary files."
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("--port", f"{self.port} is not a port; use 1 to 65535, or 0 for any free one")


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
