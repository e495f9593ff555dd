"""Settings of the model, its weights, LoRA adapters and multimodal inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.fields import human_readable_int_or_auto, json_object, need_positive, option
from pagoda.common.errors import ConfigError

DType = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]

RUNTIME_QUANTIZATIONS: Final = (
    *("fp8", "fp8_per_channel", "ptpc_fp8", "fp8_per_tensor", "fp8_per_block"),
    *("int8", "int8_per_channel_weight_only", "tpu_int8", "experts_int8", "int4", "bitsandbytes"),
    *("mxfp8", "mxfp4"),
)
"""--quantization methods that quantise an unquantised checkpoint while loading: those of
`common.weights.quantization.on_the_fly`."""

PRE_QUANTIZED: Final = (
    *("auto-round", "awq", "awq_marlin", "bitnet", "compressed-tensors", "cpu_awq", "fbgemm_fp8", "gptq"),
    *(
        "gptq_marlin",
        "hqq",
        "inc",
        "marlin",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mixed",
        "modelopt_mxfp8",
        "moe_wna16",
    ),
    *("petit_nvfp4", "quark", "torchao"),
)
"""--quantization methods of checkpoints that were quantised before, besides gguf; fp8, mxfp4, mxfp8, bitsandbytes are
some, too. Those that choose a kernel of vLLM are other names of the checkpoint's method."""

UNREAD_QUANTIZATIONS: Final = (
    *("aqlm", "bitblas", "deepspeedfp", "fp_quant", "gptq_bitblas", "gptq_marlin_24", "ipex", "neuron_quant"),
    *("qqq", "quip", "squeezellm"),
)
"""--quantization methods of vLLM's, now or before, whose checkpoints are not read."""

_UNREAD: Final = (
    "its checkpoints are not read; serve a GGUF file or the unquantised weights of the model, those with fp8, int8 or "
    "int4 to quantise them while loading"
)

_OTHER_QUANTIZATIONS: Final = {
    "humming": "it chooses a kernel of vLLM; drop it, the checkpoint's method is detected",
    "nvfp4_per_token": "no backend rounds activations to NVFP4; use mxfp4 or int4",
    "online": "it means the methods of --quantization-config, which is not supported; name one, such as fp8 or int4",
}
"""Other values of vLLM's that are refused -> why, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its tokenizer and data types."""

    model: str = option(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Model: a local directory, a .gguf file, a Hugging Face Hub id, or id:QUANT for a GGUF repository.",
    )
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto",
        "Model runner: generate or pooling; auto: from the architecture and the model's files.",
        refused_values={"draft": "draft models belong to speculative decoding; name it in --speculative-config.model"},
    )
    convert: Literal["auto", "none", "embed", "classify", "reward"] = option(
        "auto",
        "Convert a generation model to a pooling model of this kind. auto: with --runner pooling, the kind that suits"
        " the architecture; otherwise none.",
    )
    tokenizer: str | None = option(None, "Tokenizer: a directory, file or Hub id; default: the model's.")
    tokenizer_mode: str = option(
        "auto",
        "Tokenizer mode.",
        refused="only tokenizer.json and GGUF tokenizers are supported; use auto",
        accepts=("hf",),
    )
    trust_remote_code: bool = option(
        False,
        "Execute Python code from the model's folder; it is used with --model-impl transformers only.",
    )
    dtype: DType = option(
        "auto",
        "Data type of weights and activations. auto: the checkpoint's data type if it is a 16-bit one; otherwise "
        "bfloat16, for pooling models float16.",
    )
    seed: int = option(0, "Random seed of requests that do not set one.")
    hf_config_path: str | None = option(None, "Directory or Hub id of the config.json to use instead of the model's.")
    revision: str | None = option(None, "Model revision on the Hub: branch, tag or commit.")
    code_revision: str | None = option(
        None,
        "Revision of the model code on the Hub: branch, tag or commit.",
        no_effect="the code is that of --revision, as the weights are",
    )
    tokenizer_revision: str | None = option(None, "Tokenizer revision on the Hub: branch, tag or commit.")
    max_model_len: int | None = option(
        None,
        "Maximum context length (prompt and output), in tokens (suffixes: 1k = 1000, 1K = 1024). auto or unset: the "
        "model's maximum, or less if the KV cache is too small for it.",
        parse=human_readable_int_or_auto,
    )
    allow_long_max_model_len: bool = option(
        False, "Allow --max-model-len to exceed the model's maximum; output quality may degrade beyond it."
    )
    quantization: str | None = option(
        None,
        "Quantization method. A quantised checkpoint's own is detected. To quantise the matrices of a dense model's "
        f"layers while loading: {', '.join(RUNTIME_QUANTIZATIONS)}.",
        aliases=("-q",),
        choices=("gguf", *PRE_QUANTIZED, *RUNTIME_QUANTIZATIONS),
        refused_values={**dict.fromkeys(UNREAD_QUANTIZATIONS, _UNREAD), **_OTHER_QUANTIZATIONS},
        same_values={
            "auto_awq": "awq",
            "auto_gptq": "gptq",
            "gpt_oss_mxfp4": "mxfp4",
            "deepseek_v4_fp8": "fp8",
        },
    )
    quantization_config: Mapping[str, Any] = option(
        {},
        "Quantisation while loading, per kind of layer, as JSON.",
        parse=json_object,
        refused="all matrices of layers, or those of experts, have one method; use --quantization, whose experts_int8 "
        "is that of experts only",
    )
    max_logprobs: int = option(20, "Maximum number of logprobs per token in a request; -1: the vocabulary size.")
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = option(
        "raw_logprobs",
        "What logprobs contain: log-probabilities or logits, taken before (raw) or after (processed) penalties, masks"
        " and temperature.",
    )
    disable_sliding_window: bool = option(
        False, "Disable sliding-window attention and cap the context length at the window size."
    )
    disable_cascade_attn: bool = option(
        False, "Disable cascade attention.", no_effect="cascade attention is never used"
    )
    skip_tokenizer_init: bool = option(
        False, "Load no tokenizer; prompts must be token ids, and outputs are token ids."
    )
    special_tokens_in_messages: Literal["text", "parse"] = option(
        "text",
        "How the text of special tokens is read in documents and in chat messages of users and tools. text: as "
        "ordinary text; parse: as control tokens, as in vLLM. Messages of other roles are always parsed.",
    )
    enable_prompt_embeds: bool = option(
        False, "Accept prompt embeddings: prompt_embeds in completion requests and in prompts of LLM."
    )
    served_model_name: tuple[str, ...] = option(
        (), "Model names accepted by the API; the first is used in responses. Default: the value of --model."
    )
    config_format: str = option(
        "auto",
        "Format of the model configuration.",
        refused="only config.json is supported; use hf or auto",
        accepts=("hf",),
    )
    hf_token: str | None = option(
        None,
        "Access token for gated Hub repositories; without a value: the token stored by `hf auth login`.",
        optional_value="stored",
    )
    hf_overrides: Mapping[str, Any] = option(
        {}, "Overrides of config.json as JSON; nested objects are merged.", parse=json_object
    )
    pooler_config: Mapping[str, Any] = option(
        {},
        "Overrides of the model's pooling settings as JSON: pooling_type, use_activation, dimensions.",
        parse=json_object,
    )
    logits_processor_pattern: str | None = option(
        None,
        "Regular expression of the logits processors that requests may name.",
        refused="requests cannot name logits processors; drop it",
    )
    generation_config: str = option(
        "auto", "Directory of generation_config.json; auto: the model's; vllm: none, use the engine's defaults."
    )
    override_generation_config: Mapping[str, Any] = option(
        {},
        "Overrides of generation_config.json as JSON. With --generation-config vllm they are the only sampling "
        "defaults.",
        parse=json_object,
    )
    batch_invariant: bool = option(
        False,
        "Make a prompt's output independent of the other requests in the batch, of chunked prefill and of cached "
        "prefixes, at some cost in speed. For models with softmax attention.",
    )
    enable_sleep_mode: bool = option(
        False, "Enable sleep mode, which releases GPU memory: LLM.sleep, or POST /sleep with --server-dev-mode."
    )
    model_impl: Literal["auto", "pagoda", "vllm", "transformers"] = option(
        "auto",
        "Model implementation. pagoda or vllm: pagoda's own. transformers: the transformers library's code with "
        "pagoda's KV cache (on jax_tpu traced by torchax). auto: transformers only for architectures that pagoda does"
        " not implement.",
        refused_values={"terratorch": "models of the library terratorch are not served; use auto"},
    )
    override_attention_dtype: str | None = option(
        None, "Data type of attention.", refused="attention computes in the model's data type; set --dtype"
    )
    logits_processors: tuple[str, ...] = option(
        (), "Logits processors applied to every request, as package.module.Class or entry point names."
    )
    io_processor_plugin: str | None = option(
        None, "IO processor plugin.", refused="IO processor plugins are not in this version; drop it"
    )
    backend: str = option(
        "auto", "Device backend: reference (CPU), torch_cuda or jax_tpu; auto: the first that can run on this machine."
    )

    def __post_init__(self) -> None:
        if self.max_logprobs < -1:
            raise ConfigError("--max-logprobs", f"{self.max_logprobs} is below -1; use -1 for the vocabulary size")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError("--max-model-len", f"{self.max_model_len} is not a positive number of tokens")

    @property
    def runtime_quantization(self) -> str | None:
        """The method that quantises dense weights while loading; None: the checkpoint's are used as they are."""
        return self.quantization if self.quantization in RUNTIME_QUANTIZATIONS else None

    @property
    def names(self) -> tuple[str, ...]:
        """The model names accepted by the API."""
        return self.served_model_name or (self.model,)


LOAD_FORMATS: Final = ("auto", "safetensors", "pt", "gguf", "sharded_state", "dummy")
_SAME_FORMATS: Final = {
    **{"hf": "auto", "bitsandbytes": "auto", "npcache": "pt"},
    **dict.fromkeys(("runai_streamer", "fastsafetensors", "instanttensor"), "safetensors"),
}
"""vLLM's other readers of a format -> the format. Files are always read ahead in parallel, or mapped."""

_UNSUPPORTED_FORMATS: Final = {
    "tensorizer": "tensorizer files are not read; use the safetensors files that they were made from",
    "runai_streamer_sharded": "vLLM's sharded files are not read; use safetensors with the original model",
    "mistral": "files in Mistral's own format are not read; use auto with the repository's Hugging Face files",
    "ipc_cache": "weights are not shared between engines; use auto",
    "modelexpress": "weights are not fetched from other engines; use auto",
}
"""Formats of vLLM -> why they are not supported and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Downloading and loading of model weights."""

    load_format: str = option(
        "auto",
        "Format of the model weights. auto: detected; sharded_state: the output of `pagoda convert`; dummy: random "
        "weights. hf and bitsandbytes mean auto, npcache means pt, and runai_streamer, fastsafetensors and "
        "instanttensor mean safetensors.",
        choices=LOAD_FORMATS,
        refused_values=_UNSUPPORTED_FORMATS,
        same_values=_SAME_FORMATS,
    )
    download_dir: str | None = option(None, "Directory for Hub downloads; default: the Hub client's cache.")
    safetensors_load_strategy: Literal["lazy", "eager"] = option(
        "lazy", "lazy: memory-map safetensors files; eager: read each file into memory, faster on network file systems."
    )
    ignore_patterns: tuple[str, ...] = option(
        ("original/**/*",), "Glob patterns of Hub repository files that are not downloaded."
    )
    model_loader_extra_config: Mapping[str, Any] = option(
        {},
        "Extra settings of the model loader as JSON.",
        parse=json_object,
        refused="no loader takes extra settings; drop it",
    )
    use_tqdm_on_load: bool = option(True, "Show a progress bar while loading weights (on a terminal only).")
    pt_load_map_location: str = option(
        "cpu",
        "Device onto which PyTorch .bin files are loaded.",
        no_effect=".bin files are always read into host memory, without unpickling",
    )


LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank. An adapter's rank is padded to the next of them."""


SAVED_MODULES: Final[Mapping[str, str]] = {"embed_tokens": "embed", "lm_head": "head"}
"""Values of --lora-modules-to-save -> the parameter that an adapter may replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters."""

    enable_lora: bool = option(False, "Enable LoRA adapters. The flags below apply only with it.")
    max_loras: int = option(
        1, "Maximum number of different LoRA adapters in one batch; each has a slot in device memory."
    )
    max_lora_rank: int = option(
        16, f"Maximum rank of a LoRA adapter: one of {', '.join(map(str, LORA_RANKS))}. Sizes the slots."
    )
    lora_dtype: Literal["auto", "bfloat16", "float16"] = option(
        "auto", "Data type to which LoRA weights are rounded; auto: the model's."
    )
    max_cpu_loras: int | None = option(
        None, "Maximum number of LoRA adapters cached in host memory, at least --max-loras; default: --max-loras."
    )
    lora_modules_to_save: tuple[str, ...] = option(
        (),
        "Modules of which a LoRA adapter may bring a whole copy (modules_to_save of PEFT): embed_tokens, lm_head or "
        "both. Each slot has room for a copy of each.",
    )
    fully_sharded_loras: bool = option(False, "Shard all LoRA computation over the tensor-parallel devices.")
    default_mm_loras: Mapping[str, Any] = option(
        {},
        "Default LoRA adapter per modality, as JSON.",
        parse=json_object,
        refused="requests have no images, audio or video; drop it",
    )

    def __post_init__(self) -> None:
        need_positive(self, "max_loras")
        if self.max_lora_rank not in LORA_RANKS:
            ranks = ", ".join(map(str, LORA_RANKS))
            raise ConfigError("--max-lora-rank", f"{self.max_lora_rank} is not one of {ranks}")
        if unknown := [name for name in self.lora_modules_to_save if name not in SAVED_MODULES]:
            known = ", ".join(SAVED_MODULES)
            raise ConfigError("--lora-modules-to-save", f"{unknown[0]} cannot be replaced per request; use {known}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                "--max-cpu-loras", f"{self.max_cpu_loras} is below --max-loras {self.max_loras}; use at least that"
            )

    @property
    def copied_parameters(self) -> tuple[str, ...]:
        """The parameters that an adapter may replace, in the order of `SAVED_MODULES`."""
        return tuple(parameter for name, parameter in SAVED_MODULES.items() if name in self.lora_modules_to_save)

    @property
    def slots(self) -> int:
        """Slots for adapters in device memory; 0 without --enable-lora."""
        return self.max_loras if self.enable_lora else 0


_TEXT_ONLY: Final = "the supported models take text only"


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalConfig:
    """Multimodal inputs: images, audio and video."""

    language_model_only: bool = option(
        False,
        "Serve only the text model of a multimodal checkpoint. This happens in any case; the flag switches the "
        "warning off.",
    )
    allowed_local_media_path: str = option(
        "", "Directory from which requests may read local media files.", no_effect=_TEXT_ONLY
    )
    allowed_media_domains: tuple[str, ...] = option(
        (), "Domains from which media URLs may be fetched.", no_effect=_TEXT_ONLY
    )
    limit_per_prompt: Mapping[str, Any] = option(
        {},
        "Maximum number of items per modality and prompt, as JSON.",
        flag="limit-mm-per-prompt",
        parse=json_object,
        no_effect=_TEXT_ONLY,
    )
    enable_mm_embeds: bool = option(False, "Accept multimodal embeddings as input.", refused=f"{_TEXT_ONLY}; drop it")
    media_io_kwargs: Mapping[str, Any] = option(
        {}, "Arguments of the media loaders per modality, as JSON.", parse=json_object, no_effect=_TEXT_ONLY
    )
    mm_processor_kwargs: Mapping[str, Any] = option(
        {}, "Arguments of the multimodal processor, as JSON.", parse=json_object, no_effect=_TEXT_ONLY
    )
    mm_processor_cache_gb: float = option(4.0, "Size of the multimodal processor cache, in GiB.", no_effect=_TEXT_ONLY)
    mm_processor_cache_type: Literal["lru", "shm"] = option(
        "lru", "Type of the multimodal processor cache.", no_effect=_TEXT_ONLY
    )
    mm_shm_cache_max_object_size_mb: int = option(
        128, "Maximum object size in the shared-memory processor cache, in MiB.", no_effect=_TEXT_ONLY
    )
    mm_encoder_tp_mode: Literal["data", "weights"] = option(
        "weights", "Parallelise multimodal encoders over devices by batch (data) or by weights.", no_effect=_TEXT_ONLY
    )
    mm_encoder_attn_backend: str | None = option(
        None, "Attention backend of multimodal encoders.", no_effect=_TEXT_ONLY
    )
    interleave_mm_strings: bool = option(
        False, "Interleave text and media in the order of the message content.", no_effect=_TEXT_ONLY
    )
    skip_mm_profiling: bool = option(False, "Skip multimodal encoders in memory profiling.", no_effect=_TEXT_ONLY)
    video_pruning_rate: float | None = option(None, "Fraction of video tokens to prune.", no_effect=_TEXT_ONLY)
    disable_chunked_mm_input: bool = option(
        False, "Schedule a multimodal item in one step, without chunking.", no_effect=_TEXT_ONLY
    )
