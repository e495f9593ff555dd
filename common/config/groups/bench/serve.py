"""Settings of `bench serve`: the server under load, the requests and the files of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pagoda.common.config.fields import comma_separated, json_object, need_not_negative, need_positive, option
from pagoda.common.errors import ConfigError

PATHS: Final[Mapping[str, str]] = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "openai-embeddings": "/v1/embeddings",
    "openai-embeddings-chat": "/v1/embeddings",
    "vllm-pooling": "/pooling",
    "vllm-rerank": "/v1/rerank",
}
"""--backend -> the API's usual path."""

POOLING: Final = ("openai-embeddings", "openai-embeddings-chat", "vllm-pooling", "vllm-rerank")
"""Values of --backend whose answers are vectors or scores, and are not streamed."""

_MEDIA: Final = "requests are text only; use openai-embeddings"
_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def pairs(flag: str, words: tuple[str, ...]) -> dict[str, str]:
    """Return KEY=VALUE words as a mapping. Raises ConfigError."""
    for word in words:
        if not word.partition("=")[1]:
            raise ConfigError(flag, f"{word} is not KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in (word.partition("=") for word in words)}


def _thresholds(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in comma_separated(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoadConfig:
    """The server under load and the requests that it gets."""

    backend: str = option(
        "openai",
        "API to benchmark: completions (openai, vllm), chat completions (openai-chat), responses (openai-responses), "
        "embeddings of texts or of messages (openai-embeddings, openai-embeddings-chat), pooling (vllm-pooling) or "
        "rerank (vllm-rerank).",
        choices=tuple(PATHS),
        refused_values={
            "openai-audio": "requests are text only; use openai-chat",
            **dict.fromkeys(
                ("openai-embeddings-clip", "openai-embeddings-vlm2vec", "infinity-embeddings-clip"), _MEDIA
            ),
            "infinity-embeddings": "it is the API of openai-embeddings; use that, with --endpoint /embeddings",
        },
    )
    base_url: str | None = option(
        None, "Base URL of the server, such as http://host:8000; overrides --host and --port."
    )
    host: str = option("127.0.0.1", "Server host.")
    port: int = option(8000, "Server port.")
    endpoint: str | None = option(None, "API path; default: the path of --backend.")
    insecure: bool = option(False, "Do not verify the server's TLS certificate.")
    header: tuple[str, ...] = option((), "KEY=VALUE pairs: headers of each request; they override the API key's.")
    model: str | None = option(None, "Model name; default: the first model that the server lists.")
    served_model_name: str | None = option(None, "Model name in requests, if it differs from --model.")
    lora_modules: tuple[str, ...] = option((), "Names of adapters on the server; each request names one of them.")
    lora_assignment: Literal["random", "round-robin"] = option("random", "How --lora-modules are assigned to requests.")
    tokenizer: str | None = option(
        None, "Tokenizer for generating prompts; default: that of --model, or of the served model."
    )
    tokenizer_mode: str = option(
        "auto",
        "Tokenizer mode.",
        refused="only tokenizer.json and GGUF tokenizers are supported; use auto",
        accepts=("hf",),
    )
    trust_remote_code: bool = option(
        False, "Execute Python code of the tokenizer's folder.", no_effect="tokenizers are read from their files only"
    )
    skip_tokenizer_init: bool = option(
        False,
        "Load no tokenizer; prompts must then be text (custom with --skip-chat-template), and tokens are counted by "
        "the server.",
    )
    prompt_token_ids: bool = option(
        False,
        "Send prompts to the completions API as token ids instead of text, so that lengths are exact and the server "
        "does not tokenise. The server must accept token ids.",
    )
    seed: int = option(0, "Random seed for prompts, lengths, adapters and arrival times.")
    ignore_eos: bool = option(
        False,
        "Ignore end-of-sequence tokens, so that the full output length is generated. Always on for generation with "
        "random, multi_turn and timed_trace.",
    )
    temperature: float | None = option(None, "Sampling temperature; default: the server's.")
    top_p: float | None = option(None, "Top-p.")
    top_k: int | None = option(None, "Top-k.")
    min_p: float | None = option(None, "Min-p.")
    frequency_penalty: float | None = option(None, "Frequency penalty.")
    presence_penalty: float | None = option(None, "Presence penalty.")
    repetition_penalty: float | None = option(None, "Repetition penalty.")
    logprobs: int | None = option(None, "Number of logprobs per output token.")
    extra_body: Mapping[str, Any] = option({}, "Extra fields of each request's body, as JSON.", parse=json_object)
    use_beam_search: bool = option(
        False, "Use beam search.", refused="its answers are not streamed; use `bench latency --use-beam-search`"
    )
    request_id_prefix: str | None = option(
        None, "Prefix of the header x-request-id of each request; default: bench- and a random number."
    )
    num_warmups: int = option(1, "Number of warm-up requests, at most --max-concurrency at once.")
    ready_check_timeout_sec: int = option(
        0, "Seconds to wait for a first successful request before the benchmark starts; 0: do not wait."
    )
    probe_request_rate: float = option(
        0.0,
        "Rate of probe requests, per second. Probes generate one token each, are sent in addition to the load, do not"
        " count towards --max-concurrency, and their latency is reported separately.",
    )
    profile: bool = option(
        False,
        "Have the server trace the load through POST /start_profile and /stop_profile; the server needs "
        "--profiler-config.",
    )

    def __post_init__(self) -> None:
        need_not_negative(self, "num_warmups", "ready_check_timeout_sec", "probe_request_rate")
        need_not_negative(self, "logprobs", remedy="use 0 or more")
        need_positive(self, "port")
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            message = f"{self.base_url} is not an HTTP URL; use one such as http://localhost:8000"
            raise ConfigError("--base-url", message)
        _ = self.headers
        if self.is_pooling:
            for name in (*_SAMPLING, "logprobs"):
                if getattr(self, name) is not None:
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError(flag, f"{self.backend} does not generate; drop it, or use --backend openai")
        if self.prompt_token_ids and self.path != PATHS["openai"] and not self.endpoint:
            raise ConfigError("--prompt-token-ids", f"{self.backend} takes text; drop it, or use --backend openai")
        if self.lora_modules and len(set(self.lora_modules)) != len(self.lora_modules):
            raise ConfigError("--lora-modules", "names an adapter twice; drop one")

    @property
    def address(self) -> str:
        """The server's URL: --base-url without a trailing slash, or `http://host:port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def path(self) -> str:
        """The API path of the requests."""
        return self.endpoint or PATHS[self.backend]

    @property
    def is_pooling(self) -> bool:
        """True if answers are vectors or scores."""
        return self.backend in POOLING

    @property
    def headers(self) -> dict[str, str]:
        """--header by name. Raises ConfigError."""
        return pairs("--header", self.header)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that are set."""
        return {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFileConfig:
    """Files and displays of `bench serve`."""

    disable_tqdm: bool = option(False, "Disable the progress bar.")
    save_result: bool = option(False, "Save the results to a JSON file.")
    append_result: bool = option(False, "Append the results to the JSON file, one object per line.")
    save_detailed: bool = option(False, "Save per-request results too; needs --save-result or --append-result.")
    result_dir: str | None = option(None, "Directory of the result file; default: the current directory.")
    result_filename: str | None = option(
        None, "Name of the result file; default: composed of label, request rate, model and time."
    )
    label: str | None = option(None, "Label of the results; default: --backend.")
    metadata: tuple[str, ...] = option((), "KEY=VALUE pairs to add to the result file.")
    plot_timeline: bool = option(
        False, "Write a page of the requests over time beside the result file: FILE.timeline.html."
    )
    timeline_itl_thresholds: tuple[float, ...] = option(
        (25.0, 50.0),
        "Two inter-token latencies in milliseconds, separated by a comma. The timeline shows tokens faster than the "
        "first in green, slower than the second in red, and the others in orange.",
        parse=_thresholds,
    )
    plot_dataset_stats: bool = option(
        False, "Plot the distributions of prompt and output lengths beside the result file: FILE.dataset_stats.png."
    )

    def __post_init__(self) -> None:
        _ = self.facts
        if len(self.timeline_itl_thresholds) != 2 or self.timeline_itl_thresholds[0] > self.timeline_itl_thresholds[1]:
            raise ConfigError("--timeline-itl-thresholds", "needs two numbers, the smaller first, such as 25,50")
        saves = self.save_result or self.append_result
        if not saves and (self.save_detailed or self.metadata):
            raise ConfigError("--save-result", "is required by the other result flags; add it")
        names_result = self.result_dir is not None or self.result_filename is not None
        if names_result and not (saves or self.plot_timeline or self.plot_dataset_stats):
            raise ConfigError("--save-result", "is required by the other result flags; add it")

    @property
    def facts(self) -> dict[str, str]:
        """--metadata by key. Raises ConfigError."""
        return pairs("--metadata", self.metadata)
