"""Environment variables: names, descriptions and support status. All reading of variables starts here.

VLLM_X is an alias of PAGODA_X where it has a meaning. PAGODA_<SETTING> sets any setting: PAGODA_MAX_MODEL_LEN=4096.
Other modules read no variables: a variable becomes a setting, or its value is passed to them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.fields import Status
from pagoda.common.errors import ConfigError

OFF: Final = ("", "0", "false", "no", "off")
"""Values that switch a variable off, in lower case."""

_SECRET: Final = ("KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")


@dataclass(frozen=True, slots=True)
class EnvVar:
    """An environment variable, its aliases and its support status."""

    name: str
    help: str
    aliases: tuple[str, ...] = ()
    status: Status = "implemented"
    reason: str = ""  # Why it has no effect or is refused, with the remedy.
    accepts: tuple[str, ...] = OFF  # Values that are accepted although the variable is refused.
    shared: bool = False  # Other programs read it too, so no warning names it.
    maps_to: Callable[[str], Mapping[str, Any]] | None = None  # Maps its text to settings; raises ValueError.
    setting: str = ""  # The setting that it sets; it has an effect on the same backends.
    only: tuple[str, ...] = ()  # Backends on which it has an effect; empty: all.
    elsewhere: str = ""  # Why it has no effect on the others.

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)

    def read(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Return the value of the first name that is set and not empty."""
        source = os.environ if environ is None else environ
        name = self.spelling(source)
        return source[name] if name else None

    def is_on(self, environ: Mapping[str, str] | None = None) -> bool:
        """True if set to a value that is not in OFF."""
        return (self.read(environ) or "").strip().lower() not in OFF

    def spelling(self, environ: Mapping[str, str]) -> str:
        """Return the name under which it is set; empty if it is not set."""
        return next((name for name in self.names if environ.get(name)), "")

    def settings(self, environ: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the settings that the variable maps to. Raise ConfigError naming the variable."""
        text = self.read(environ)
        if text is None or self.maps_to is None:
            return {}
        try:
            return self.maps_to(text)
        except ValueError as error:
            raise ConfigError(self.spelling(environ), f"{shown(self.spelling(environ), text)}: {error}") from None

    def note(self, environ: Mapping[str, str]) -> str | None:
        """Return the warning to log if the variable is set without effect. Raise ConfigError if it is refused."""
        name = self.spelling(environ)
        if not name or self.status == "implemented":
            return None
        if self.status == "no effect":
            return None if self.shared else f"{name} has no effect: {self.reason}"
        if environ[name].strip().lower() in self.accepts:
            return None
        raise ConfigError(name, f"{shown(name, environ[name])} is not supported: {self.reason}")


def is_secret(name: str) -> bool:
    """True if values of this variable or setting must not be logged or printed."""
    return any(word.endswith(_SECRET) for word in name.upper().replace("-", "_").split("_"))


def shown(name: str, value: str) -> str:
    """Return a value for a message: quoted, or hidden if it is secret."""
    return "(hidden)" if is_secret(name) else repr(value)


_NO_BUILD: Final = "pagoda has no build step; kernels are compiled when they are first used"
_NO_USAGE_DATA: Final = "no usage data is collected or sent"
_OWN_ADDRESSES: Final = "processes of a machine use Unix sockets and free ports, Ray's ranks the node's address in Ray"
_NO_DP_RANKS: Final = "one server drives all --data-parallel-size replicas; there are no data-parallel ranks"
_ONE_ENGINE: Final = (
    "one server drives all data-parallel replicas; use --data-parallel-size, or start several servers behind a load "
    "balancer"
)
_OWN_KERNELS: Final = "quantised matrices are multiplied by pagoda's own Triton kernels, none of them Marlin's"
_NO_COMPILED_DAG: Final = "Ray only starts the ranks; it does not run the steps"
_ONE_ACTOR_PER_GPU: Final = "ranks under Ray are one actor with one GPU each"
_NO_OPENVINO: Final = "there is no OpenVINO backend; use --backend reference for CPUs"
_TEXT_ONLY: Final = "the supported models take text only"
_NO_SCALE_CONSTANTS: Final = "KV cache scales are calibrated by --calculate-kv-scales"
_NO_TENSORIZER: Final = "tensorizer checkpoints are not supported; use safetensors"


def _unused(name: str, help: str, reason: str, *, shared: bool = False) -> EnvVar:
    return EnvVar(name, help, status="no effect", reason=reason, shared=shared)


def _refused(name: str, help: str, reason: str, accepts: tuple[str, ...] = OFF) -> EnvVar:
    return EnvVar(name, help, status="refused", reason=reason, accepts=accepts)


_BUILD: Final = (
    _unused("VLLM_TARGET_DEVICE", "Target device of the build.", f"{_NO_BUILD}; use --backend at run time"),
    _unused("MAX_JOBS", "Maximum number of parallel compile jobs.", _NO_BUILD, shared=True),
    _unused("NVCC_THREADS", "Number of nvcc threads.", _NO_BUILD, shared=True),
    _unused("VLLM_USE_PRECOMPILED", "Use precompiled binaries for the build.", _NO_BUILD),
    _unused("VLLM_TEST_USE_PRECOMPILED_NIGHTLY_WHEEL", "Use precompiled nightly binaries.", _NO_BUILD),
    _unused("CMAKE_BUILD_TYPE", "CMake build type.", _NO_BUILD, shared=True),
    _unused("VERBOSE", "Verbose build output.", _NO_BUILD, shared=True),
    _unused("CUDA_HOME", "Directory of the CUDA toolkit.", _NO_BUILD, shared=True),
)
_PATHS: Final = (
    _unused("VLLM_CONFIG_ROOT", "Directory of configuration files.", "no default file is read; name one with --config"),
    _unused(
        "VLLM_CACHE_ROOT",
        "Root directory of caches.",
        "use --download-dir or HF_HOME, and --xla-cache-path for programs",
    ),
    _unused("VLLM_ASSETS_CACHE", "Directory of downloaded assets.", "no assets are downloaded"),
)
_DISTRIBUTED: Final = (
    _unused(
        "VLLM_HOST_IP",
        "IP address of this node for internal communication.",
        f"{_OWN_ADDRESSES}; for several TPU hosts use --master-addr",
    ),
    _unused(
        "VLLM_PORT",
        "Port for internal communication.",
        f"{_OWN_ADDRESSES}; for several TPU hosts use --master-port, for HTTP --port",
    ),
    _unused(
        "VLLM_RINGBUFFER_WARNING_INTERVAL", "Interval of warnings about a full ring buffer.", "there is no ring buffer"
    ),
    _unused(
        "VLLM_NCCL_SO_PATH", "Path of the NCCL library.", "torch_cuda uses PyTorch's NCCL; the other backends need none"
    ),
    _unused(
        "LD_LIBRARY_PATH",
        "Search path of shared libraries.",
        "it is read by the dynamic linker, not by pagoda",
        shared=True,
    ),
    _unused(
        "LOCAL_RANK", "Rank of a process on its node.", "the engine starts its ranks and numbers them", shared=True
    ),
    EnvVar(
        "CUDA_VISIBLE_DEVICES",
        "GPUs visible to the process; read by the CUDA libraries.",
        shared=True,
        only=("torch_cuda",),
        elsewhere="it uses no GPU",
    ),
    _unused("VLLM_PP_LAYER_PARTITION", "Layers per pipeline stage.", "there is no pipeline parallelism"),
    _unused("VLLM_SKIP_P2P_CHECK", "Skip the GPU peer-to-peer check.", "NCCL finds out which GPUs reach each other"),
    _unused("VLLM_CUDART_SO_PATH", "Path of the CUDA runtime library.", "torch_cuda uses PyTorch's"),
    _refused("VLLM_DP_RANK", "Data-parallel rank of this process.", _ONE_ENGINE, ("", "0")),
    _refused("VLLM_DP_SIZE", "Data-parallel size.", _ONE_ENGINE, ("", "1")),
    _unused("VLLM_DP_MASTER_IP", "IP address of the data-parallel master.", _NO_DP_RANKS),
    _unused("VLLM_DP_MASTER_PORT", "Port of the data-parallel master.", _NO_DP_RANKS),
    _unused("VLLM_USE_RAY_SPMD_WORKER", "Use Ray SPMD workers.", _NO_COMPILED_DAG),
    _unused("VLLM_USE_RAY_COMPILED_DAG", "Use Ray Compiled Graphs.", _NO_COMPILED_DAG),
    _unused("VLLM_USE_RAY_COMPILED_DAG_NCCL_CHANNEL", "Use NCCL in Ray Compiled Graphs.", _NO_COMPILED_DAG),
    _unused(
        "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM", "Overlap communication in Ray Compiled Graphs.", _NO_COMPILED_DAG
    ),
    _unused("VLLM_RAY_PER_WORKER_GPUS", "Number of GPUs per Ray worker.", _ONE_ACTOR_PER_GPU),
    _unused("VLLM_RAY_BUNDLE_INDICES", "Placement group bundle of each Ray worker.", _ONE_ACTOR_PER_GPU),
    _unused("VLLM_RAY_DP_PACK_STRATEGY", "Placement of data-parallel ranks by Ray.", _NO_DP_RANKS),
)
_MODEL: Final = (
    _refused(
        "VLLM_USE_MODELSCOPE",
        "Download models from ModelScope.",
        "models come from the Hugging Face Hub; download the model yourself and pass its directory",
    ),
    _unused("S3_ACCESS_KEY_ID", "S3 access key id, for tensorizer.", _NO_TENSORIZER, shared=True),
    _unused("S3_SECRET_ACCESS_KEY", "S3 secret access key, for tensorizer.", _NO_TENSORIZER, shared=True),
    _unused("S3_ENDPOINT_URL", "S3 endpoint URL, for tensorizer.", _NO_TENSORIZER, shared=True),
    _unused("VLLM_CI_USE_S3", "Download test models from S3.", "the tests generate their models"),
)
_USAGE: Final = (
    _unused("VLLM_USAGE_STATS_SERVER", "URL that usage data is sent to.", _NO_USAGE_DATA),
    _unused("VLLM_NO_USAGE_STATS", "Disable usage data collection.", _NO_USAGE_DATA),
    _unused("VLLM_DO_NOT_TRACK", "Disable usage data collection.", _NO_USAGE_DATA),
    _unused("VLLM_USAGE_SOURCE", "Source reported in usage data.", _NO_USAGE_DATA),
)
_LOGS: Final = (
    _unused("VLLM_TRACE_FUNCTION", "Trace function calls.", "use `python -m trace` or py-spy"),
    _unused(
        "VLLM_NO_DEPRECATION_WARNING",
        "Disable deprecation warnings.",
        "each deprecated flag is warned about once, at start-up; use the flag named in the warning",
    ),
)
_KERNELS: Final = (
    _unused(
        "VLLM_USE_TRITON_FLASH_ATTN",
        "Use Triton FlashAttention.",
        "torch_cuda's own kernel is a Triton kernel; --attention-backend chooses another",
    ),
    _unused(
        "VLLM_FLASH_ATTN_VERSION",
        "FlashAttention version.",
        "--attention-backend chooses it: FLASH_ATTN is version 3, TORCH_VARLEN version 2",
    ),
    _unused(
        "VLLM_FLASHINFER_FORCE_TENSOR_CORES",
        "Force tensor cores in FlashInfer.",
        "FlashInfer always uses tensor cores here, in decodes, too",
    ),
    _unused(
        "VLLM_MLA_DISABLE",
        "Disable multi-head latent attention (MLA).",
        "latent attention is always computed on the latent cache",
    ),
    _unused("VLLM_USE_FLASHINFER_SAMPLER", "Use the FlashInfer sampler.", "sampling is the same on every backend"),
    _unused("VLLM_TEST_DYNAMO_FULLGRAPH_CAPTURE", "Capture full graphs in Dynamo.", "torch.compile is not used"),
    _unused("VLLM_FUSED_MOE_CHUNK_SIZE", "Tokens per chunk of fused MoE.", "MoE layers are not chunked"),
    _unused(
        "VLLM_ENABLE_MOE_ALIGN_BLOCK_SIZE_TRITON",
        "Use Triton for MoE token alignment.",
        "tokens are always sorted by expert on the GPU",
    ),
    _unused("VLLM_TEST_FORCE_FP8_MARLIN", "Force Marlin kernels for FP8.", _OWN_KERNELS),
    _unused("VLLM_MARLIN_USE_ATOMIC_ADD", "Use atomic add in Marlin kernels.", _OWN_KERNELS),
    _unused("VLLM_USE_TRITON_AWQ", "Use Triton AWQ kernels.", "torch_cuda's kernels for AWQ are always Triton's"),
    _unused("VLLM_DISABLED_KERNELS", "Quantisation kernels to disable.", "each operation has one kernel per device"),
    _unused("VLLM_ROCM_FP8_PADDING", "Pad FP8 weights on ROCm.", "there is no ROCm backend"),
    _unused("Q_SCALE_CONSTANT", "Divisor of the query scale.", _NO_SCALE_CONSTANTS),
    _unused("K_SCALE_CONSTANT", "Divisor of the key scale.", _NO_SCALE_CONSTANTS),
    _unused("V_SCALE_CONSTANT", "Divisor of the value scale.", _NO_SCALE_CONSTANTS),
)
_PLATFORMS: Final = (
    _unused("VLLM_CPU_MOE_PREPACK", "Prepack MoE weights on CPUs.", "the CPU backend prepacks weights itself"),
    _unused("VLLM_OPENVINO_DEVICE", "OpenVINO device.", _NO_OPENVINO),
    _unused("VLLM_OPENVINO_KVCACHE_SPACE", "KV cache size of OpenVINO, in GiB.", _NO_OPENVINO),
    _unused("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", "KV cache data type of OpenVINO.", _NO_OPENVINO),
    _unused("VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS", "Compress weights in OpenVINO.", _NO_OPENVINO),
    _unused("VLLM_USE_HPU_CONTIGUOUS_CACHE_FETCH", "Contiguous KV cache fetch on Gaudi.", "there is no Gaudi backend"),
    _unused(
        "VLLM_TPU_DISABLE_TOPK_TOPP_OPTIMIZATION",
        "Disable approximate top-k and top-p on TPUs.",
        "top-k and top-p are always exact",
    ),
)
_ENGINE: Final = (
    _unused("VLLM_USE_V1", "Use the V1 engine.", "there is one engine, which follows V1"),
    _unused(
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "Run the engine of LLM in a separate process.",
        "LLM runs its engine in the caller's process, serve in a separate one (see --disable-frontend-multiprocessing)",
    ),
    _unused(
        "VLLM_WORKER_MULTIPROC_METHOD", "Start method of worker processes.", "processes are always started, not forked"
    ),
    _unused("VLLM_LOGITS_PROCESSOR_THREADS", "Threads of logits processors.", "logits processors run inside the step"),
    _unused(
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE",
        "Requests per output processing task.",
        "all outputs of a step are processed in one task",
    ),
    _unused("VLLM_V0_USE_OUTLINES_CACHE", "Use the outlines disk cache.", "outlines is not used"),
)
_MEDIA: Final = (
    _unused("VLLM_IMAGE_FETCH_TIMEOUT", "Timeout for fetching an image, in seconds.", _TEXT_ONLY),
    _unused("VLLM_VIDEO_FETCH_TIMEOUT", "Timeout for fetching a video, in seconds.", _TEXT_ONLY),
    _unused("VLLM_AUDIO_FETCH_TIMEOUT", "Timeout for fetching audio, in seconds.", _TEXT_ONLY),
    _unused("VLLM_MM_INPUT_CACHE_GIB", "Size of the multimodal input cache, in GiB.", _TEXT_ONLY),
)
_OWN: Final = (
    _unused("PAGODA_TEST_MODEL", "Checkpoint for pagoda's test suite.", "only the tests read it", shared=True),
)

_WITHOUT_EFFECT: Final = (
    *(*_BUILD, *_PATHS, *_DISTRIBUTED, *_MODEL, *_USAGE, *_LOGS),
    *(*_KERNELS, *_PLATFORMS, *_ENGINE, *_MEDIA, *_OWN),
)


PREFIXES: Final = ("PAGODA_", "VLLM_")

_SERVICE: Final = re.compile(r".*(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_LINK: Final = re.compile(r"(tcp|udp|sctp)://.*")


def _sets(setting: str) -> Callable[[str], Mapping[str, Any]]:
    return lambda text: {setting: text}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("not a number") from None


def _kv_cache(text: str) -> Mapping[str, Any]:
    gib = _number(text)
    if not 0 <= gib < 2**20:
        raise ValueError("not a size in GiB")
    return {"kv_cache_memory_bytes": int(gib * 2**30)} if gib else {}


def _interval(text: str) -> Mapping[str, Any]:
    return {"log_stats_interval": text} if _number(text) > 0 else {}


def _ours(name: str, help: str, setting: str = "", maps_to: Callable[[str], Mapping[str, Any]] | None = None) -> EnvVar:
    """Return PAGODA_<name> with the alias VLLM_<name>."""
    return EnvVar(f"PAGODA_{name}", help, (f"VLLM_{name}",), maps_to=maps_to or _sets(setting), setting=setting)


API_KEY: Final = _ours(
    "API_KEY", "API key that clients of `serve` must present.", maps_to=lambda text: {"api_key": (text,)}
)
CLUSTER_TOKEN: Final = EnvVar(
    "PAGODA_CLUSTER_TOKEN",
    "Secret that the nodes of a deployment prove to each other to know (--cluster-token-file).",
)
CLIENT_API_KEY: Final = EnvVar("OPENAI_API_KEY", "API key that `chat`, `complete` and `bench serve` send.", shared=True)
HF_TOKEN: Final = EnvVar(
    "HF_TOKEN",
    "Access token for gated Hugging Face Hub repositories.",
    ("HUGGING_FACE_HUB_TOKEN",),
    shared=True,
    maps_to=_sets("hf_token"),
)
HF_HUB_OFFLINE: Final = EnvVar("HF_HUB_OFFLINE", "1: use downloaded models only.", shared=True)
ALLOW_LONG_MAX_MODEL_LEN: Final = _ours(
    "ALLOW_LONG_MAX_MODEL_LEN",
    "1: allow --max-model-len to exceed the model's maximum; output quality may degrade beyond it.",
    "allow_long_max_model_len",
)
TEST_FORCE_LOAD_FORMAT: Final = _ours(
    "TEST_FORCE_LOAD_FORMAT", "Load format if --load-format is not given; for tests.", "load_format"
)
BATCH_INVARIANT: Final = _ours(
    "BATCH_INVARIANT", "1: compute each token's numbers independently of the batch.", "batch_invariant"
)
TORCH_PROFILER_DIR: Final = _ours(
    "TORCH_PROFILER_DIR",
    "Folder of traces; enables the profiler, as --profiler-config does.",
    maps_to=lambda text: {"profiler_config": {"profiler": "torch", "torch_profiler_dir": text}},
)
XLA_CACHE_PATH: Final = _ours(
    "XLA_CACHE_PATH", "Directory of jax_tpu's persistent compilation cache.", "xla_cache_path"
)
XLA_CHECK_RECOMPILATION: Final = _ours(
    "XLA_CHECK_RECOMPILATION",
    "1: raise an error if jax_tpu compiles a program after start-up.",
    "xla_check_recompilation",
)
TORCH_CUDA_DEVICE: Final = EnvVar(
    "PAGODA_TORCH_CUDA_DEVICE",
    "cpu: run --backend torch_cuda on a CPU, with the PyTorch reference of each kernel; for tests.",
    only=("torch_cuda",),
    elsewhere="it concerns torch_cuda",
)
ALLOCATOR: Final = EnvVar(
    "PYTORCH_ALLOC_CONF",
    "Settings of PyTorch's allocator of GPU memory; default: expandable_segments:True, except under WSL.",
    aliases=("PYTORCH_CUDA_ALLOC_CONF",),
    shared=True,
    only=("torch_cuda",),
    elsewhere="it uses no GPU",
)
TRANSFORMERS_DEVICE: Final = EnvVar(
    "PAGODA_TRANSFORMERS_DEVICE",
    "xla: --backend reference computes the layers of --model-impl transformers through torch-xla.",
    only=("reference",),
    elsewhere="the layers of --model-impl transformers run on the backend's own devices",
)
PLUGINS: Final = _ours("PLUGINS", "Comma-separated names of the plugins to load; default: all.", "plugins")
ATTENTION_BACKEND: Final = _ours("ATTENTION_BACKEND", "Attention kernel; see --attention-backend.", "attention_backend")
CPU_KVCACHE_SPACE: Final = _ours("CPU_KVCACHE_SPACE", "Size of the KV cache, in GiB; 0: default.", maps_to=_kv_cache)
CPU_OMP_THREADS_BIND: Final = _ours(
    "CPU_OMP_THREADS_BIND",
    "CPU cores that the CPU backend's threads are pinned to, such as 0-3,8.",
    "cpu_omp_threads_bind",
)
ALLOW_RUNTIME_LORA_UPDATING: Final = EnvVar(
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "1: allow POST /v1/load_lora_adapter and /v1/unload_lora_adapter, and resolvers of LoRA adapters.",
    aliases=("PAGODA_ALLOW_RUNTIME_LORA_UPDATING",),
)
LORA_RESOLVER_CACHE_DIR: Final = EnvVar(
    "VLLM_LORA_RESOLVER_CACHE_DIR",
    "Folder in which unknown model names are looked up as LoRA adapters, each in a folder of its name; "
    "/v1/load_lora_adapter then reads no others.",
    aliases=("PAGODA_LORA_RESOLVER_CACHE_DIR",),
)
OMP_NUM_THREADS: Final = EnvVar(
    "OMP_NUM_THREADS",
    "Number of compute threads of the CPU backend.",
    shared=True,
    only=("reference",),
    elsewhere="it computes on its devices",
)
CONFIGURE_LOGGING: Final = _ours("CONFIGURE_LOGGING", "0: do not configure Python logging.", "configure_logging")
LOGGING_CONFIG_PATH: Final = _ours("LOGGING_CONFIG_PATH", "JSON file for logging.config.dictConfig.", "log_config_file")
LOGGING_LEVEL: Final = _ours("LOGGING_LEVEL", "Log level: DEBUG, INFO, WARNING, ERROR or CRITICAL.", "log_level")
LOGGING_PREFIX: Final = _ours("LOGGING_PREFIX", "Prefix of each log line.", "log_prefix")
LOG_STATS_INTERVAL: Final = EnvVar(
    "PAGODA_LOG_STATS_INTERVAL",
    "Interval between engine statistics log lines (with batch sizes), in seconds.",
    ("VLLM_LOG_STATS_INTERVAL", "VLLM_LOG_BATCHSIZE_INTERVAL"),
    maps_to=_interval,
)
RPC_BASE_PATH: Final = _ours("RPC_BASE_PATH", "Directory of the engine's Unix sockets.", "rpc_base_path")
RPC_TIMEOUT: Final = _ours(
    "RPC_TIMEOUT", "Milliseconds without a heartbeat after which the engine is considered dead.", "rpc_timeout"
)
ENGINE_ITERATION_TIMEOUT_S: Final = _ours(
    "ENGINE_ITERATION_TIMEOUT_S", "Maximum duration of one step, in seconds.", "engine_iteration_timeout_s"
)
KEEP_ALIVE_ON_ENGINE_DEATH: Final = _ours(
    "KEEP_ALIVE_ON_ENGINE_DEATH",
    "1: keep the server running after the engine dies; requests then get HTTP 500, /health HTTP 503 with the cause.",
    "keep_alive_on_engine_death",
)
HTTP_TIMEOUT_KEEP_ALIVE: Final = _ours(
    "HTTP_TIMEOUT_KEEP_ALIVE", "Timeout of idle keep-alive connections, in seconds.", "timeout_keep_alive"
)
MAX_STOP_STRINGS: Final = _ours("MAX_STOP_STRINGS", "Maximum number of stop strings of a request.", "max_stop_strings")
SERVER_DEV_MODE: Final = _ours(
    "SERVER_DEV_MODE", "1: serve development endpoints such as /sleep, /pause and /server_info.", "server_dev_mode"
)

VARIABLES: Final = (
    CLUSTER_TOKEN,
    *(API_KEY, CLIENT_API_KEY, HF_TOKEN, HF_HUB_OFFLINE, ALLOW_LONG_MAX_MODEL_LEN, TEST_FORCE_LOAD_FORMAT, PLUGINS),
    *(BATCH_INVARIANT, XLA_CACHE_PATH, XLA_CHECK_RECOMPILATION, TORCH_CUDA_DEVICE, ALLOCATOR, TRANSFORMERS_DEVICE),
    *(ALLOW_RUNTIME_LORA_UPDATING, LORA_RESOLVER_CACHE_DIR),
    *(ATTENTION_BACKEND, CPU_KVCACHE_SPACE, CPU_OMP_THREADS_BIND, OMP_NUM_THREADS),
    *(CONFIGURE_LOGGING, LOGGING_CONFIG_PATH, LOGGING_LEVEL, LOGGING_PREFIX, LOG_STATS_INTERVAL),
    TORCH_PROFILER_DIR,
    *(RPC_BASE_PATH, RPC_TIMEOUT, ENGINE_ITERATION_TIMEOUT_S, KEEP_ALIVE_ON_ENGINE_DEATH, SERVER_DEV_MODE),
    HTTP_TIMEOUT_KEEP_ALIVE,
    MAX_STOP_STRINGS,
    *_WITHOUT_EFFECT,
)


def is_service_link(name: str, value: str) -> bool:
    """True for a variable that Kubernetes sets for a service named `pagoda` or `vllm`."""
    return bool(_SERVICE.fullmatch(name) or (name.endswith("_PORT") and _SERVICE_LINK.fullmatch(value)))


def notes(environ: Mapping[str, str] | None = None, settings: Iterable[str] = ()) -> tuple[str, ...]:
    """Return one warning per variable that is unknown or has no effect; values are omitted, as they may be secret.

    `settings`: names for which PAGODA_<SETTING> is known. Raise ConfigError for a refused variable.
    """
    source = os.environ if environ is None else environ
    prefixed = {name: value for name, value in source.items() if name.startswith(PREFIXES)}
    links = sorted(name for name, value in prefixed.items() if is_service_link(name, value))
    others = {name: value for name, value in source.items() if name not in links}
    lines = [note for variable in VARIABLES if (note := variable.note(others)) is not None]
    known_names = {name for variable in VARIABLES for name in variable.names} | {
        f"PAGODA_{name.upper()}" for name in settings
    }
    lines += [
        _unknown(name, known_names)
        for name in sorted(prefixed)
        if name in others and name not in known_names and prefixed[name]
    ]
    if links:
        lines.append(
            f"ignored Kubernetes service variables: {', '.join(links)}; "
            "set enableServiceLinks: false in the pod to remove them"
        )
    return tuple(lines)


def _unknown(name: str, known_names: Iterable[str]) -> str:
    stems = {
        variable.partition("_")[2]: variable
        for variable in sorted(known_names, reverse=True)
        if variable.startswith(PREFIXES)
    }
    near = difflib.get_close_matches(name.partition("_")[2], list(stems), n=1)
    return f"unknown environment variable {name}" + (f"; did you mean {stems[near[0]]}?" if near else "")
