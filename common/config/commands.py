"""The settings of each sub-command, read by the parsers, the help and the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pagoda.common.config.fields import check_port, need_not_negative, need_positive, option
from pagoda.common.config.groups.bench.dataset import DatasetConfig, OtherDatasetsConfig
from pagoda.common.config.groups.bench.offline import LatencyConfig, StartupConfig, ThroughputConfig
from pagoda.common.config.groups.bench.serve import ResultFileConfig, ServeLoadConfig
from pagoda.common.config.groups.bench.sweep import (
    ParetoConfig,
    PlotConfig,
    SlaConfig,
    SweepConfig,
    SweepServeConfig,
    SweepStartupConfig,
)
from pagoda.common.config.groups.bench.traffic import ReportConfig, TrafficConfig
from pagoda.common.config.settings import ENGINE_SETTINGS, SERVER_SETTINGS, Setting, table
from pagoda.common.errors import ConfigError

BATCH_SERVER_SETTINGS: Final = (
    "port",  # Port of --enable-metrics.
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
"""Server settings that `run-batch` takes too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Input, output and metrics of `run-batch`."""

    input_file: str | None = option(
        None, "Input file of requests in OpenAI's batch format (JSON Lines): a path or an HTTP(S) URL.", aliases=("-i",)
    )
    output_file: str | None = option(
        None,
        "Output file: a path, or an HTTP(S) URL for a PUT request. Running the same command again resumes an "
        "interrupted run.",
        aliases=("-o",),
    )
    output_tmp_dir: str | None = option(
        None,
        "Directory in which the output is written until it is complete; default: the directory of the output file, or"
        " the temporary directory if that is a URL.",
    )
    enable_metrics: bool = option(False, "Serve GET /metrics while the batch runs.")
    url: str = option("0.0.0.0", "Address that --enable-metrics listens on.")

    def __post_init__(self) -> None:
        if not self.input_file:
            raise ConfigError("--input-file", "is required; name the file of requests with -i FILE")
        if not self.output_file:
            raise ConfigError("--output-file", "is required; name the output file with -o FILE")
        if self.input_file == self.output_file:
            raise ConfigError("--output-file", "is the input file; name another")

    @property
    def source(self) -> str:
        """--input-file as a str."""
        return self.input_file or ""

    @property
    def target(self) -> str:
        """--output-file as a str."""
        return self.output_file or ""


def is_address(path: str) -> bool:
    """True for an HTTP(S) URL."""
    return path.startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Server and model that `chat` and `complete` connect to."""

    url: str = option("http://localhost:8000/v1", "Base URL of the server.")
    model_name: str | None = option(None, "Model name; default: the first model that the server lists.")
    api_key: str | None = option(None, "API key; default: the environment variable OPENAI_API_KEY.")
    max_tokens: int | None = option(None, "Maximum number of output tokens; default: the server's.")
    quick: str | None = option(None, "Send one prompt, print the output and exit.", aliases=("-q",))

    def __post_init__(self) -> None:
        need_positive(self, "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """The conversation of `chat`."""

    system_prompt: str | None = option(None, "System message of the conversation.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """Target devices and outputs of `compile`; the devices need not be present."""

    topology: str | None = option(
        None, "Devices to compile for, such as v6e:2x4 or v5p:2x2x1; cpu: this machine's processor."
    )
    config_only: bool = option(
        False, "Compile from config.json (a file or its directory) alone; no weights are needed."
    )
    tensor_parallel_size: int | None = option(
        None,
        "Tensor-parallel size: number of devices each layer is sharded across; default: all devices of the topology.",
        aliases=("-tp",),
    )
    budget_only: bool = option(
        False,
        "Compile only the largest program of each kind, which is enough for the memory budget but not for --output.",
    )
    output: str | None = option(
        None,
        "Directory for the compiled programs, for serve --compiled-bundle; loading it executes code from it.",
        aliases=("-o",),
    )
    output_json: str | None = option(None, "Output file for the table of programs, as JSON.")

    def __post_init__(self) -> None:
        need_positive(self, "tensor_parallel_size")
        if self.budget_only and self.output is not None:
            raise ConfigError("--budget-only", "does not compile all programs, which --output needs; drop one of them")


CONVERT_ENGINE_SETTINGS: Final = (
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
"""Engine settings that `convert` takes: those of its source model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """What `convert` writes: arrays for TPUs, which need not be present, or with --quantization a quantised model."""

    tensor_parallel_size: int = option(
        1,
        "Tensor-parallel size to shard the weights for. They can be loaded on any number of devices, fastest on this "
        "one.",
        aliases=("-tp",),
    )
    quantization: Literal["int4", "int8", "fp8"] | None = option(
        None,
        "Write a quantised model in the compressed-tensors format, which every backend, vLLM and transformers read, "
        "instead of arrays for the TPU backend. The matrices of layers become int4 (in groups of up to 128 inputs), "
        "or int8 or fp8 with activations rounded per token; all other weights keep --dtype.",
        aliases=("-q",),
    )

    def __post_init__(self) -> None:
        need_positive(self, "tensor_parallel_size")
        if self.quantization is not None and self.tensor_parallel_size > 1:
            raise ConfigError("--tensor-parallel-size", "a quantised folder is not sharded for devices; drop it")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """Server settings that `doctor` checks this machine for."""

    model: str | None = option(None, "Model to check: a local directory, a .gguf file or a Hub id.")
    backend: str = option(
        "auto", "Device backend: reference (CPU), torch_cuda or jax_tpu; auto: the first that can run on this machine."
    )
    tensor_parallel_size: int = option(
        1, "Tensor-parallel size: number of devices each layer is sharded across.", aliases=("-tp",)
    )
    data_parallel_size: int = option(1, "Data-parallel size: number of model replicas.", aliases=("-dp",))
    host: str | None = option(None, "Address that the server listens on; default: 127.0.0.1.")
    port: int = option(8000, "Port that the server listens on; 0: any free port.")
    download_dir: str | None = option(None, "Directory for Hub downloads; default: the Hub client's cache.")
    rpc_base_path: str | None = option(
        None, "Directory of the engine's Unix sockets; default: the system's temporary directory."
    )

    def __post_init__(self) -> None:
        check_port(self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """What `replay` prints, and how far it goes."""

    steps: int = option(
        0, "Number of steps to run after the recorded ones; sequences then generate up to their maximum lengths."
    )
    verbose: bool = option(False, "Print every call of the scheduler; by default only the last ones are printed.")

    def __post_init__(self) -> None:
        need_not_negative(self, "steps", remedy="use 0 for the recorded steps only")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """The requests of `simulate` and where its results go; the load is described as that of `bench serve`."""

    trace: str | None = option(
        None,
        "File of requests to simulate, one JSON object per line; see docs/guides/capacity-planning.md. Default: "
        "requests are drawn from the dataset.",
    )
    output_json: str | None = option(None, "Output file for the results, as JSON.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """Where `calibrate` writes step times, and how long it measures."""

    output: str | None = option(
        None, "File to write the step times to, for --calibration; default: MODEL.calibration.json.", aliases=("-o",)
    )
    repeats: int = option(5, "Minimum number of times that each step is measured; the mean is used.")
    max_seconds: float = option(
        300.0, "Maximum duration of the measurements, in seconds; if it is too short, the largest steps are left out."
    )

    def __post_init__(self) -> None:
        need_positive(self, "repeats")
        if self.max_seconds <= 0:
            raise ConfigError("--max-seconds", f"{self.max_seconds} is not positive; use 60 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The load that `plan` finds hardware for, and the latencies that it should have."""

    workload: str = option(
        "random:1024/256",
        "Requests to plan for. random:INPUT/OUTPUT: lengths in tokens, optionally followed by range=RATIO, "
        "prefix=TOKENS and prefixes=NUMBER, separated by commas. sharegpt: lengths like those of chats. trace:FILE: a"
        " trace as of `simulate`.",
    )
    slo: str | None = option(
        None,
        "Latency objectives that --slo-percentile of the requests must meet, such as ttft=500ms,tpot=40ms; e2el is "
        "possible too. Without --slo and --request-rate, all requests arrive at once and the throughput is reported.",
    )
    slo_percentile: float = option(95.0, "Percentile of the requests that must meet --slo.")
    request_rate: float | None = option(
        None,
        "Requests per second that the planned replicas must serve together; default: the rate that one replica can "
        "serve is reported.",
    )
    num_prompts: int = option(600, "Number of requests to simulate.")
    price: str | None = option(None, 'JSON file of prices per chip and hour, such as {"h100": 2.5}.')
    output_json: str | None = option(None, "Output file for the plan, as JSON.")

    def __post_init__(self) -> None:
        need_positive(self, "num_prompts")
        if self.request_rate is not None and self.request_rate <= 0:
            raise ConfigError("--request-rate", f"{self.request_rate} is not positive; use requests per second")
        if not 0 < self.slo_percentile <= 100:
            raise ConfigError("--slo-percentile", f"{self.slo_percentile} is not in (0, 100]; use 95")


_ALL_COMMANDS: Final = {"log_error_stack": SERVER_SETTINGS["log_error_stack"]}

OWN_SETTINGS: Final[Mapping[str, Mapping[str, Setting]]] = {
    "serve": SERVER_SETTINGS,
    "run-batch": {**table(BatchConfig), **{name: SERVER_SETTINGS[name] for name in BATCH_SERVER_SETTINGS}},
    "bench latency": table(LatencyConfig) | _ALL_COMMANDS,
    "bench throughput": table(ThroughputConfig, DatasetConfig, OtherDatasetsConfig) | _ALL_COMMANDS,
    "bench startup": table(StartupConfig) | _ALL_COMMANDS,
    "bench serve": {
        **table(ServeLoadConfig, DatasetConfig, OtherDatasetsConfig, TrafficConfig, ReportConfig, ResultFileConfig),
        **_ALL_COMMANDS,
    },
    "bench sweep serve": table(SweepServeConfig, SweepConfig) | _ALL_COMMANDS,
    "bench sweep serve_sla": table(SlaConfig, SweepServeConfig, SweepConfig) | _ALL_COMMANDS,
    "bench sweep startup": table(SweepStartupConfig, SweepConfig) | _ALL_COMMANDS,
    "bench sweep plot": table(PlotConfig) | _ALL_COMMANDS,
    "bench sweep plot_pareto": table(ParetoConfig) | _ALL_COMMANDS,
    "compile": table(CompileConfig) | _ALL_COMMANDS,
    "convert": {
        **{name: ENGINE_SETTINGS[name] for name in CONVERT_ENGINE_SETTINGS},
        **table(ConvertConfig),
        **_ALL_COMMANDS,
    },
    "chat": table(ClientConfig, ChatConfig) | _ALL_COMMANDS,
    "complete": table(ClientConfig) | _ALL_COMMANDS,
    "doctor": table(DoctorConfig) | _ALL_COMMANDS,
    "replay": table(ReplayConfig) | _ALL_COMMANDS,
    "simulate": table(SimulateConfig, DatasetConfig, TrafficConfig, ReportConfig) | _ALL_COMMANDS,
    "calibrate": table(CalibrateConfig) | _ALL_COMMANDS,
    "plan": table(PlanConfig) | _ALL_COMMANDS,
}
"""Command -> its settings by name, without the engine's."""

WITH_ENGINE: Final = (
    *("serve", "run-batch", "bench latency", "bench throughput", "bench startup", "compile", "simulate", "calibrate"),
    "plan",
)
"""Commands that start or compile an engine; they read its settings from flags, --config and the environment."""

COMMAND_SETTINGS: Final[Mapping[str, Mapping[str, Setting]]] = {
    name: {**ENGINE_SETTINGS, **settings} if name in WITH_ENGINE else settings
    for name, settings in OWN_SETTINGS.items()
}
"""Command -> all its settings by name. Commands without an engine read flags only: the environment's settings, above
all the API key, are for a server on this machine, not for the one that they connect to."""
