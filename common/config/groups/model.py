"""Which model, in which numbers, under which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.fields import human_readable_int_or_auto, json_object, option
from pagoda.common.errors import ConfigError

DType = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]

QUANTIZED_HERE: Final = ("fp8", "fp8_per_channel", "int8", "tpu_int8", "int8_per_channel_weight_only", "int4")
"""Ways of --quantization that need nothing of the checkpoint: scales are found at start-up, one per output channel, of
int4 one per 128 inputs of a channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model: its files, its numbers, its names."""

    model: str = option(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "A local folder, a .gguf file, a hub id, or hub id:QUANT for GGUF.",
    )
    runner: Literal["auto", "generate", "pooling", "draft"] = option(
        "auto", "What the model is for; auto: as its architecture and its folder say."
    )
    convert: Literal["auto", "none", "embed", "classify", "reward"] = option(
        "auto", "Make a pooling model of it; auto: where --runner says so, of the kind that its architecture says."
    )
    tokenizer: str | None = option(None, "Folder, file or hub id of the tokenizer, when it is not the model's own.")
    tokenizer_mode: str = option(
        "auto",
        "Kind of tokenizer.",
        refused="tokenizer.json and the tokenizers in GGUF files are read; use auto",
        accepts=("hf",),
    )
    trust_remote_code: bool = option(
        False,
        "Run code that comes with a model.",
        no_effect="no code of a repository is ever run; models are data here",
    )
    dtype: DType = option("auto", "Numbers of weights and activations; auto takes the checkpoint's.")
    seed: int = option(0, "Seed of requests that bring none.")
    hf_config_path: str | None = option(None, "Folder or hub id whose config.json is read instead of the model's.")
    revision: str | None = option(None, "Branch, tag or commit of the hub repository.")
    code_revision: str | None = option(
        None, "Branch, tag or commit of the repository's code.", no_effect="no code of a repository is ever run"
    )
    tokenizer_revision: str | None = option(None, "Branch, tag or commit of the tokenizer's hub repository.")
    max_model_len: int | None = option(
        None,
        "Longest prompt plus answer, in tokens (1k = 1000, 1K = 1024); auto or nothing: what model and memory allow.",
        parse=human_readable_int_or_auto,
    )
    allow_long_max_model_len: bool = option(
        False, "Let --max-model-len exceed the model's positions; answers beyond them may be poor."
    )
    quantization: str | None = option(
        None,
        "How the weights are quantised.",
        aliases=("-q",),
        refused="weights are quantised at start-up, by torch_cuda or jax_tpu, or read as they are, which may be from a "
        "GGUF file; use fp8, int8 or int4, serve a GGUF file of the model, or unquantised weights",
        accepts=("gguf", *QUANTIZED_HERE),
    )
    max_logprobs: int = option(20, "Most logprobs a request may ask for; -1: the whole vocabulary.")
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = option(
        "raw_logprobs", "What logprobs hold: logprobs or logits, before or after penalties, masks and temperature."
    )
    disable_sliding_window: bool = option(
        False, "No sliding windows: the longest sequence is cut to the window, and every layer attends to all of it."
    )
    disable_cascade_attn: bool = option(False, "No cascade attention.", no_effect="there is no cascade attention")
    skip_tokenizer_init: bool = option(False, "Serve token ids only; load no tokenizer.")
    enable_prompt_embeds: bool = option(
        False, "Take embeddings as prompts: prompt_embeds in completions, and in prompts of LLM."
    )
    served_model_name: tuple[str, ...] = option((), "Names the API answers to; the first is echoed.")
    config_format: str = option(
        "auto", "Format of the model's configuration.", refused="config.json is read; use hf or auto", accepts=("hf",)
    )
    hf_token: str | None = option(
        None,
        "Token for gated hub repositories; without a word: the one that is stored.",
        optional_value="stored",
    )
    hf_overrides: Mapping[str, Any] = option(
        {}, "JSON whose keys replace those of config.json; nested objects are merged.", parse=json_object
    )
    pooler_config: Mapping[str, Any] = option(
        {},
        "How a pooling model pools, over what its files say: pooling_type, use_activation, dimensions.",
        parse=json_object,
    )
    logits_processor_pattern: str | None = option(
        None, "Names of logits processors that requests may use.", refused="requests cannot bring code; drop it"
    )
    generation_config: str = option("auto", "Folder of generation_config.json; auto: the model's; vllm: none.")
    override_generation_config: Mapping[str, Any] = option(
        {}, "JSON over the generation config (auto, or a folder), or in place of it (vllm).", parse=json_object
    )
    enable_sleep_mode: bool = option(
        False,
        "Let the engine give its GPU memory back and wake up again: LLM.sleep, POST /sleep with --server-dev-mode.",
    )
    model_impl: str = option(
        "auto",
        "Whose model code.",
        refused="models are specs of pagoda's own; use auto",
        accepts=("vllm", "pagoda"),
    )
    override_attention_dtype: str | None = option(
        None, "Numbers of attention.", refused="attention computes in the activations' numbers; set --dtype"
    )
    logits_processors: tuple[str, ...] = option(
        (), "Logits processors by qualified name, package.module.Class, or by entry point, run on every request."
    )
    io_processor_plugin: str | None = option(
        None,
        "Plugin that turns requests and answers.",
        refused="no code of other projects reads requests; drop it",
    )
    backend: str = option("auto", "Device backend: reference, torch_cuda, jax_tpu; auto picks by platform.")

    def __post_init__(self) -> None:
        if self.runner == "draft":
            raise ConfigError("--runner", "draft models are part of speculation, which is not in this version; drop it")
        if self.max_logprobs < -1:
            raise ConfigError("--max-logprobs", f"{self.max_logprobs} is below -1; use -1 for the whole vocabulary")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError("--max-model-len", f"{self.max_model_len} is not a positive number of tokens")

    @property
    def quantized_here(self) -> str | None:
        """How the weights are quantised at start-up, None when they are taken as they are."""
        return self.quantization if self.quantization in QUANTIZED_HERE else None

    @property
    def names(self) -> tuple[str, ...]:
        """The names the API answers to."""
        return self.served_model_name or (self.model,)


# Where the weights come from and how they are read.

LOAD_FORMATS: Final = ("auto", "safetensors", "pt", "gguf", "sharded_state", "dummy")
_FOREIGN_FORMATS: Final = {
    "npcache": "weights are mapped straight from their files, so a numpy copy beside them gains nothing; use pt",
    "tensorizer": "its files are not read; use the safetensors files they were made from",
    "runai_streamer": "files are read ahead by threads of the engine's own; use safetensors",
    "runai_streamer_sharded": "one device reads a whole checkpoint; use safetensors",
    "fastsafetensors": "files are read ahead by threads of the engine's own; use safetensors",
    "bitsandbytes": "weights are not quantised while they load; serve a GGUF file of the model",
    "mistral": "config.json and the weights beside it are read; use auto with the repository's Hugging Face files",
}
"""Formats that exist elsewhere, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How a checkpoint is found, fetched and read."""

    load_format: str = option(
        "auto",
        "Format of the weights: auto looks at the files, sharded_state is of convert, dummy makes random ones.",
        choices=(*LOAD_FORMATS, *_FOREIGN_FORMATS),
    )
    download_dir: str | None = option(None, "Where hub downloads are kept; default: the hub's own cache.")
    safetensors_load_strategy: Literal["lazy", "eager"] = option(
        "lazy", "lazy maps files into memory; eager reads each whole, which network file systems like better."
    )
    ignore_patterns: tuple[str, ...] = option(
        ("original/**/*",), "Names or patterns of files in a hub repository that are not fetched."
    )
    model_loader_extra_config: Mapping[str, Any] = option(
        {},
        "Settings for the loader of the load format.",
        parse=json_object,
        refused="none of the loaders here takes extra settings; drop it",
    )
    use_tqdm_on_load: bool = option(True, "Show a progress bar while weights load (on a terminal only).")
    pt_load_map_location: str = option(
        "cpu",
        "Device that torch .bin files are unpickled onto.",
        no_effect="torch .bin files are read without unpickling, straight into host memory",
    )

    def __post_init__(self) -> None:
        if self.load_format in _FOREIGN_FORMATS:
            raise ConfigError(
                "--load-format", f"{self.load_format} is not supported: {_FOREIGN_FORMATS[self.load_format]}"
            )


# LoRA adapters.

_NO_LORA: Final = "LoRA adapters are not in this version; merge the adapter into the weights and serve those"
_LORA_ONLY: Final = "it matters with --enable-lora only"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapters over a base model."""

    enable_lora: bool = option(False, "Serve LoRA adapters.", refused=_NO_LORA)
    max_loras: int = option(1, "Adapters in one step.", no_effect=_LORA_ONLY)
    max_lora_rank: int = option(16, "Largest rank.", no_effect=_LORA_ONLY)
    lora_dtype: Literal["auto", "bfloat16", "float16"] = option("auto", "Numbers of adapters.", no_effect=_LORA_ONLY)
    max_cpu_loras: int | None = option(None, "Adapters kept in host memory.", no_effect=_LORA_ONLY)
    fully_sharded_loras: bool = option(False, "Spread adapters fully.", no_effect=_LORA_ONLY)
    default_mm_loras: Mapping[str, Any] = option({}, "Adapter per kind of media.", parse=json_object, refused=_NO_LORA)


# Images, audio and video. The models served here read text; the settings are accepted and change nothing.

_TEXT_ONLY: Final = "the models served here read text only"


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalConfig:
    """How media in requests are read."""

    allowed_local_media_path: str = option("", "Folder that requests may read media from.", no_effect=_TEXT_ONLY)
    allowed_media_domains: tuple[str, ...] = option((), "Domains that media may come from.", no_effect=_TEXT_ONLY)
    limit_per_prompt: Mapping[str, Any] = option(
        {}, "Most items of each kind in a prompt.", flag="limit-mm-per-prompt", parse=json_object, no_effect=_TEXT_ONLY
    )
    enable_mm_embeds: bool = option(
        False, "Take embeddings of media as input.", refused="the models served here read text only; drop it"
    )
    media_io_kwargs: Mapping[str, Any] = option({}, "How media are read.", parse=json_object, no_effect=_TEXT_ONLY)
    mm_processor_kwargs: Mapping[str, Any] = option(
        {}, "Settings of the model's processor.", parse=json_object, no_effect=_TEXT_ONLY
    )
    mm_processor_cache_gb: float = option(4.0, "GiB of processed media kept.", no_effect=_TEXT_ONLY)
    mm_processor_cache_type: Literal["lru", "shm"] = option("lru", "Kind of that cache.", no_effect=_TEXT_ONLY)
    mm_shm_cache_max_object_size_mb: int = option(128, "Largest object in that cache.", no_effect=_TEXT_ONLY)
    mm_encoder_tp_mode: Literal["data", "weights"] = option("weights", "How encoders spread.", no_effect=_TEXT_ONLY)
    mm_encoder_attn_backend: str | None = option(None, "Attention of the encoders.", no_effect=_TEXT_ONLY)
    interleave_mm_strings: bool = option(False, "Keep text and media in order.", no_effect=_TEXT_ONLY)
    skip_mm_profiling: bool = option(False, "Leave encoders out of the memory profile.", no_effect=_TEXT_ONLY)
    video_pruning_rate: float | None = option(None, "Share of video tokens dropped.", no_effect=_TEXT_ONLY)
    disable_chunked_mm_input: bool = option(False, "Never split an item over steps.", no_effect=_TEXT_ONLY)
