"""Settings of `bench latency`, `throughput` and `startup`, which also take the engine's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.fields import comma_separated, need_not_negative, need_positive, option
from pagoda.common.config.groups.bench.serve import pairs
from pagoda.common.errors import ConfigError

PEERS: Final = ("vllm", "transformers", "llama.cpp")
"""Engines that `bench throughput` compares pagoda with."""

DEVICES: Final = ("auto", "reference", "torch_cuda", "jax_tpu")
"""Values of --backend that are pagoda on a device backend; `pagoda` is auto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """Workload of `bench latency`: one batch, repeated."""

    input_len: int = option(32, "Prompt length, in tokens.")
    output_len: int = option(128, "Output length, in tokens.")
    batch_size: int = option(8, "Number of prompts per batch.")
    n: int = option(1, "Number of sequences generated per prompt; with --use-beam-search the beam width.")
    num_iters_warmup: int = option(10, "Number of warm-up batches.")
    num_iters: int = option(30, "Number of measured batches.")
    disable_detokenize: bool = option(False, "Disable detokenisation.")
    output_json: str | None = option(None, "Output file for the results, as JSON.")
    use_beam_search: bool = option(False, "Use beam search, with --n beams per prompt.")
    profile: bool = option(
        False, "Write a trace of one batch after the warm-up, as set by --profiler-config, instead of measuring."
    )

    def __post_init__(self) -> None:
        need_positive(self, "input_len", "output_len", "batch_size", "n", "num_iters")
        need_not_negative(self, "num_iters_warmup")
        if self.use_beam_search and self.disable_detokenize:
            raise ConfigError("--disable-detokenize", "beam search detokenises its answers; drop one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """Engines and measurement of `bench throughput`: all requests submitted at once."""

    backend: tuple[str, ...] = option(
        ("pagoda",),
        "Engines to measure, separated by commas: pagoda, or one of its device backends (auto, reference, torch_cuda, "
        "jax_tpu), and beside it vllm, transformers and llama.cpp where they are installed. Several engines run in "
        "turns, round by round, and pagoda's ratio to each is printed.",
        parse=comma_separated,
    )
    n: int = option(1, "Number of sequences generated per prompt.")
    num_warmups: int = option(0, "Number of requests that run before the measurement.")
    disable_detokenize: bool = option(False, "Disable detokenisation.")
    output_json: str | None = option(None, "Output file for the results, as JSON.")
    profile: bool = option(False, "Write a trace of the measured requests, as set by --profiler-config.")
    prefix_len: int = option(0, "Length of a prefix shared by all random prompts, in tokens: --random-prefix-len.")
    lora_path: str | None = option(None, "Folder of an adapter for all requests, with --enable-lora.")
    lora_assignment: Literal["random", "round-robin"] = option(
        "random", "How --max-loras copies of the adapter are assigned to requests."
    )
    prequeue_requests: bool = option(
        False, "Queue all requests before the first step.", no_effect="requests are always queued before the first step"
    )
    async_engine: bool = option(
        False,
        "Use AsyncLLM, which runs the engine in a process of its own, or one engine process for each replica of "
        "--data-parallel-size.",
    )
    rounds: int = option(3, "Number of measurements per engine if several engines are compared.")
    peer_python: tuple[str, ...] = option(
        (), "ENGINE=PYTHON pairs: the interpreter of an environment that has the engine, such as vllm=venv/bin/python."
    )
    peer_model: tuple[str, ...] = option(
        (),
        "ENGINE=MODEL pairs for engines that need another file, such as llama.cpp=model.gguf. Choose files with the "
        "same number of bits per weight.",
    )
    peer_args: tuple[str, ...] = option(
        (),
        'ENGINE=JSON pairs: extra arguments of an engine\'s constructor, such as vllm={"gpu_memory_utilization": 0.4}.',
    )
    hf_max_batch_size: int = option(64, "Maximum number of requests per batch of transformers.")
    hf_enable_torch_compile: bool = option(False, "Run the model of transformers with torch.compile.")

    def __post_init__(self) -> None:
        need_positive(self, "n", "rounds", "hf_max_batch_size")
        need_not_negative(self, "num_warmups", "prefix_len")
        names = self.engines
        for name in names:
            if name not in ("pagoda", *PEERS):
                backends = ", ".join(("pagoda", *DEVICES, *PEERS))
                raise ConfigError("--backend", f"{name} is not an engine; use {backends}, separated by commas")
        if len(set(names)) != len(names):
            raise ConfigError("--backend", f"{', '.join(self.backend)} names an engine twice; drop one")
        for flag, words in self._peer_flags.items():
            for name in pairs(flag, words):
                if name not in names:
                    raise ConfigError(flag, f"{name} is not measured; add it to --backend")
        _ = self.arguments
        self._check_peers(names)

    def _check_peers(self, names: tuple[str, ...]) -> None:
        if len(names) > 1 or names != ("pagoda",):
            for name in ("profile", "lora_path", "async_engine"):
                if getattr(self, name):
                    raise ConfigError("--" + name.replace("_", "-"), "measures pagoda alone; use --backend pagoda")
            if self.n > 1:
                raise ConfigError("--n", "engines are compared with one sequence per prompt; use --n 1")
        elif self.rounds != 3:
            raise ConfigError("--rounds", "is for several engines; name them in --backend, or drop it")
        if "transformers" not in names and (self.hf_max_batch_size != 64 or self.hf_enable_torch_compile):
            flag = "--hf-enable-torch-compile" if self.hf_enable_torch_compile else "--hf-max-batch-size"
            raise ConfigError(flag, "is for transformers; add it to --backend")

    @property
    def _peer_flags(self) -> dict[str, tuple[str, ...]]:
        return {"--peer-python": self.peer_python, "--peer-model": self.peer_model, "--peer-args": self.peer_args}

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines to measure; device backends are pagoda, vLLM's name `hf` is transformers."""
        same = {**dict.fromkeys(DEVICES, "pagoda"), "hf": "transformers", "llama": "llama.cpp"}
        return tuple(same.get(name, name) for name in self.backend)

    @property
    def device(self) -> str:
        """pagoda's device backend."""
        return next((name for name in self.backend if name in DEVICES), "auto")

    @property
    def arguments(self) -> dict[str, Mapping[str, Any]]:
        """--peer-args by engine. Raises ConfigError."""
        options: dict[str, Mapping[str, Any]] = {}
        for name, text in pairs("--peer-args", self.peer_args).items():
            try:
                value = json.loads(text)
            except ValueError as error:
                raise ConfigError("--peer-args", f"{name}: invalid JSON: {error}") from None
            if not isinstance(value, dict):
                raise ConfigError("--peer-args", f"{name}: {text} is not a JSON object")
            options[name] = value
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """Workload of `bench startup`: starts of a server, with empty and with filled caches of compiled programs."""

    num_iters_cold: int = option(0, "Number of measured starts with an empty cache of compiled programs.")
    num_iters_warmup: int = option(1, "Number of warm-up starts, which fill the disk cache.")
    num_iters_warm: int | None = option(None, "Number of measured starts after the warm-up; default: --num-iters.")
    num_iters: int = option(3, "Number of measured starts after the warm-up.")
    input_len: int = option(
        8, "Prompt length, in tokens. A start is measured up to the first output token of this prompt."
    )
    output_json: str | None = option(None, "Output file for the results, as JSON.")

    def __post_init__(self) -> None:
        need_positive(self, "num_iters", "input_len")
        need_not_negative(self, "num_iters_warmup", "num_iters_cold", "num_iters_warm")
        if not self.warm_starts and not self.num_iters_cold:
            raise ConfigError("--num-iters-warm", "is 0 and so is --num-iters-cold; raise one of them")

    @property
    def warm_starts(self) -> int:
        """Number of measured starts after the warm-up."""
        return self.num_iters if self.num_iters_warm is None else self.num_iters_warm
