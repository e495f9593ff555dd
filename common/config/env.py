"""The one table of environment variables, and the one place where they are read.

PAGODA_X is ours; VLLM_X answers as well where it means something here. Besides these, PAGODA_<SETTING> sets the setting
of that name: PAGODA_MAX_MODEL_LEN=4096. Nothing reads a variable deeper inside: it becomes a setting, or its value is
handed down.
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

# One environment variable = one row: its names, what it means, and what becomes of it here.

OFF: Final = ("", "0", "false", "no", "off")
"""Texts that switch a variable off, in small letters."""

_SECRET: Final = ("KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")


@dataclass(frozen=True, slots=True)
class EnvVar:
    """A variable and the other names it answers to.

    `becomes`: its text -> the settings it stands for, of which flags and files are stronger; ValueError when it cannot
    be read. `why`: why it has no effect or is refused, and what to do instead. `accepts`: values of a refused variable
    that ask for nothing. `shared`: other programs read it as well, so that nobody is told when it has no effect here.
    """

    name: str
    help: str
    aliases: tuple[str, ...] = ()
    status: Status = "implemented"
    why: str = ""
    accepts: tuple[str, ...] = OFF
    shared: bool = False
    becomes: Callable[[str], Mapping[str, Any]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling, its own first."""
        return (self.name, *self.aliases)

    def read(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Its value, under the first name that is set and not empty."""
        source = os.environ if environ is None else environ
        name = self.spelling(source)
        return source[name] if name else None

    def is_on(self, environ: Mapping[str, str] | None = None) -> bool:
        """True when it is set to anything but OFF."""
        return (self.read(environ) or "").strip().lower() not in OFF

    def spelling(self, environ: Mapping[str, str]) -> str:
        """The name it is set under; empty when it is not."""
        return next((name for name in self.names if environ.get(name)), "")

    def settings(self, environ: Mapping[str, str]) -> Mapping[str, Any]:
        """The settings that it stands for as it is set. Raises ConfigError naming the variable."""
        text = self.read(environ)
        if text is None or self.becomes is None:
            return {}
        try:
            return self.becomes(text)
        except ValueError as error:
            raise ConfigError(self.spelling(environ), f"{shown(self.spelling(environ), text)}: {error}") from None

    def note(self, environ: Mapping[str, str]) -> str | None:
        """What the user should hear about it as it is set, or None. Raises ConfigError when it is refused."""
        name = self.spelling(environ)
        if not name or self.status == "implemented":
            return None
        if self.status == "no effect":
            return None if self.shared else f"{name} has no effect: {self.why}"
        if environ[name].strip().lower() in self.accepts:
            return None
        raise ConfigError(name, f"{shown(name, environ[name])} is not supported: {self.why}")


def is_secret(name: str) -> bool:
    """True for a variable or setting whose value nobody should see."""
    return any(word.endswith(_SECRET) for word in name.upper().replace("-", "_").split("_"))


def shown(name: str, value: str) -> str:
    """A value for a message: quoted, or hidden when it is secret."""
    return "(hidden)" if is_secret(name) else repr(value)


# Variables of vLLM and its surroundings that mean nothing here or cannot be had, each with its reason.

_NOTHING_TO_BUILD: Final = "pagoda is plain Python; nothing is compiled when it is installed"
_NOTHING_SENT: Final = "no usage data is ever collected or sent"
_ONE_NODE: Final = "this version runs on one node, and its processes talk over Unix sockets"
_NO_RANKS: Final = "one process drives all devices of a host, by XLA; there are no ranks and no NCCL"
_ONE_KERNEL: Final = "--attention-backend alone names the attention kernel"
_NO_GPU: Final = "no backend of this version runs on a GPU"
_NO_RAY: Final = "there are no Ray workers"
_NO_OPENVINO: Final = "there is no OpenVINO backend; the CPU backend is called reference"
_TEXT_ONLY: Final = "prompts are text or token ids; no media are fetched"
_NO_KV_SCALES: Final = "there is no float8 KV cache to scale"
_NO_TENSORIZER: Final = "tensorizer checkpoints are not read; use safetensors"
_ONE_ENGINE: Final = "one engine drives every copy of the model; use --data-parallel-size"


def _unused(name: str, help: str, why: str, *, shared: bool = False) -> EnvVar:
    return EnvVar(name, help, status="no effect", why=why, shared=shared)


def _refused(name: str, help: str, why: str, accepts: tuple[str, ...] = OFF) -> EnvVar:
    return EnvVar(name, help, status="refused", why=why, accepts=accepts)


_BUILD: Final = (
    _unused("VLLM_TARGET_DEVICE", "Device to build for.", f"{_NOTHING_TO_BUILD}; --backend names the device"),
    _unused("MAX_JOBS", "Compile jobs at once.", _NOTHING_TO_BUILD, shared=True),
    _unused("NVCC_THREADS", "Threads of nvcc.", _NOTHING_TO_BUILD, shared=True),
    _unused("VLLM_USE_PRECOMPILED", "Install prebuilt binaries.", _NOTHING_TO_BUILD),
    _unused("VLLM_TEST_USE_PRECOMPILED_NIGHTLY_WHEEL", "Install the nightly binaries.", _NOTHING_TO_BUILD),
    _unused("CMAKE_BUILD_TYPE", "Kind of build.", _NOTHING_TO_BUILD, shared=True),
    _unused("VERBOSE", "A noisier installation.", _NOTHING_TO_BUILD, shared=True),
    _unused("CUDA_HOME", "Folder of the CUDA toolkit.", _NOTHING_TO_BUILD, shared=True),
)
_PATHS: Final = (
    _unused("VLLM_CONFIG_ROOT", "Folder of configuration files.", "no file is looked for; name one with --config"),
    _unused("VLLM_CACHE_ROOT", "Folder of caches.", "only downloads are kept; --download-dir or HF_HOME says where"),
    _unused("VLLM_ASSETS_CACHE", "Folder of downloaded assets.", "no assets are downloaded"),
    _unused("VLLM_TORCH_PROFILER_DIR", "Folder of profiles.", "there is no built-in profiler; use py-spy"),
)
_DISTRIBUTED: Final = (
    _unused("VLLM_HOST_IP", "This node's internal address.", f"{_ONE_NODE}; --host is the server's address"),
    _unused("VLLM_PORT", "Port of internal traffic.", f"{_ONE_NODE}; --port is the server's port"),
    _unused("VLLM_RINGBUFFER_WARNING_INTERVAL", "How often a full ring buffer is told.", "there is no ring buffer"),
    _unused("VLLM_NCCL_SO_PATH", "Library of NCCL.", _NO_RANKS),
    _unused(
        "LD_LIBRARY_PATH",
        "Where libraries are.",
        "the system's loader reads it, pagoda does not",
        shared=True,
    ),
    _unused("LOCAL_RANK", "Rank of a process on its node.", _NO_RANKS, shared=True),
    _unused("CUDA_VISIBLE_DEVICES", "GPUs that a process may use.", _NO_GPU, shared=True),
    _unused("VLLM_PP_LAYER_PARTITION", "Layers of each pipeline stage.", "this version has no pipeline stages"),
    _unused("VLLM_SKIP_P2P_CHECK", "Trust that GPUs reach each other.", _NO_RANKS),
    _unused("VLLM_CUDART_SO_PATH", "Library of the CUDA runtime.", _NO_GPU),
    _refused("VLLM_DP_RANK", "Data-parallel rank of this process.", _ONE_ENGINE, ("", "0")),
    _refused("VLLM_DP_SIZE", "Data-parallel ranks.", _ONE_ENGINE, ("", "1")),
    _unused("VLLM_DP_MASTER_IP", "Address of the first data-parallel rank.", _NO_RANKS),
    _unused("VLLM_DP_MASTER_PORT", "Port of the first data-parallel rank.", _NO_RANKS),
    _unused("VLLM_USE_RAY_SPMD_WORKER", "Run Ray workers in lockstep.", _NO_RAY),
    _unused("VLLM_USE_RAY_COMPILED_DAG", "Use Ray's compiled graph.", _NO_RAY),
    _unused("VLLM_USE_RAY_COMPILED_DAG_NCCL_CHANNEL", "NCCL in Ray's compiled graph.", _NO_RAY),
    _unused("VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM", "Overlap in Ray's compiled graph.", _NO_RAY),
    _unused("VLLM_RAY_PER_WORKER_GPUS", "GPUs of each Ray worker.", _NO_RAY),
    _unused("VLLM_RAY_BUNDLE_INDICES", "Ray bundle of each worker.", _NO_RAY),
    _unused("VLLM_RAY_DP_PACK_STRATEGY", "How Ray places data-parallel ranks.", _NO_RAY),
)
_MODEL: Final = (
    _refused(
        "VLLM_USE_MODELSCOPE",
        "Fetch models from ModelScope.",
        "models come from the Hugging Face hub; download the model yourself and give its folder",
    ),
    _unused("S3_ACCESS_KEY_ID", "Key of an S3 store.", _NO_TENSORIZER, shared=True),
    _unused("S3_SECRET_ACCESS_KEY", "Secret of an S3 store.", _NO_TENSORIZER, shared=True),
    _unused("S3_ENDPOINT_URL", "Address of an S3 store.", _NO_TENSORIZER, shared=True),
    _unused("VLLM_CI_USE_S3", "Fetch the models of tests from S3.", "the tests make their models themselves"),
    _unused("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "Change adapters while serving.", "adapters are not in this version"),
)
_USAGE: Final = (
    _unused("VLLM_USAGE_STATS_SERVER", "Where usage data goes.", _NOTHING_SENT),
    _unused("VLLM_NO_USAGE_STATS", "Send no usage data.", _NOTHING_SENT),
    _unused("VLLM_DO_NOT_TRACK", "Send no usage data.", _NOTHING_SENT),
    _unused("VLLM_USAGE_SOURCE", "Who uses it.", _NOTHING_SENT),
)
_LOGS: Final = (
    _unused("VLLM_TRACE_FUNCTION", "Log every function call.", "run python -m trace, or py-spy, for that"),
    _unused(
        "VLLM_NO_DEPRECATION_WARNING",
        "Do not speak of deprecated flags.",
        "each deprecated flag is named once, at start; use the flag that its line names",
    ),
)
_KERNELS: Final = (
    _unused("VLLM_USE_TRITON_FLASH_ATTN", "Attention in Triton.", _ONE_KERNEL),
    _unused("VLLM_FLASH_ATTN_VERSION", "Version of flash attention.", _ONE_KERNEL),
    _unused("VLLM_FLASHINFER_FORCE_TENSOR_CORES", "Tensor cores in FlashInfer.", _ONE_KERNEL),
    _unused("VLLM_MLA_DISABLE", "No latent attention.", "no model served here has latent attention"),
    _unused("VLLM_USE_FLASHINFER_SAMPLER", "Sample with FlashInfer.", "sampling has one definition on every backend"),
    _unused("VLLM_TEST_DYNAMO_FULLGRAPH_CAPTURE", "Whole graphs in Dynamo.", "nothing is compiled by Dynamo"),
    _unused("VLLM_FUSED_MOE_CHUNK_SIZE", "Tokens per pass of fused experts.", "experts take a whole step at once"),
    _unused("VLLM_ENABLE_MOE_ALIGN_BLOCK_SIZE_TRITON", "Sort tokens by expert in Triton.", _NO_GPU),
    _unused("VLLM_TEST_FORCE_FP8_MARLIN", "FP8 with Marlin.", "no Marlin kernels are used"),
    _unused("VLLM_MARLIN_USE_ATOMIC_ADD", "Atomic sums in Marlin.", "no Marlin kernels are used"),
    _unused("VLLM_USE_TRITON_AWQ", "AWQ in Triton.", "AWQ checkpoints are not read; serve a GGUF file of the model"),
    _unused("VLLM_DISABLED_KERNELS", "Kernels to leave out.", "there is one kernel for each job"),
    _unused("VLLM_ROCM_FP8_PADDING", "Padded FP8 weights on ROCm.", "there is no ROCm backend"),
    _unused("Q_SCALE_CONSTANT", "Divisor for scales of queries.", _NO_KV_SCALES),
    _unused("K_SCALE_CONSTANT", "Divisor for scales of keys.", _NO_KV_SCALES),
    _unused("V_SCALE_CONSTANT", "Divisor for scales of values.", _NO_KV_SCALES),
)
_PLATFORMS: Final = (
    _unused("VLLM_CPU_MOE_PREPACK", "Pack the experts' weights.", "the CPU backend always packs what it gains from"),
    _unused("VLLM_OPENVINO_DEVICE", "OpenVINO's device.", _NO_OPENVINO),
    _unused("VLLM_OPENVINO_KVCACHE_SPACE", "GiB of OpenVINO's KV cache.", _NO_OPENVINO),
    _unused("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", "Numbers of OpenVINO's KV cache.", _NO_OPENVINO),
    _unused("VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS", "Compressed weights in OpenVINO.", _NO_OPENVINO),
    _unused("VLLM_USE_HPU_CONTIGUOUS_CACHE_FETCH", "Read Gaudi's cache in one piece.", "there is no Gaudi backend"),
    _unused("VLLM_TPU_DISABLE_TOPK_TOPP_OPTIMIZATION", "Plain top-k and top-p on TPUs.", "they are exact in any case"),
)
_ENGINE: Final = (
    _unused("VLLM_USE_V1", "Choose the V1 engine.", "there is one engine, and it works like V1"),
    _unused(
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "Run the engine of LLM in a process of its own.",
        "LLM runs its engine in the caller's process, serve in a process of its own; "
        "--disable-frontend-multiprocessing changes the latter",
    ),
    _unused("VLLM_WORKER_MULTIPROC_METHOD", "How workers start.", "the engine is a new process, never a fork"),
    _unused("VLLM_LOGITS_PROCESSOR_THREADS", "Threads of logits processors.", "they run within the step"),
    _unused("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "Requests per task of output.", "a step's outputs are handled in one go"),
    _unused("VLLM_V0_USE_OUTLINES_CACHE", "Keep outlines' cache on disk.", "outlines is not used"),
)
_MEDIA: Final = (
    _unused("VLLM_IMAGE_FETCH_TIMEOUT", "Seconds that fetching an image may take.", _TEXT_ONLY),
    _unused("VLLM_VIDEO_FETCH_TIMEOUT", "Seconds that fetching a video may take.", _TEXT_ONLY),
    _unused("VLLM_AUDIO_FETCH_TIMEOUT", "Seconds that fetching a sound may take.", _TEXT_ONLY),
    _unused("VLLM_MM_INPUT_CACHE_GIB", "GiB of processed media kept.", _TEXT_ONLY),
)
_OWN: Final = (
    _unused("PAGODA_TEST_MODEL", "Checkpoint for the project's tests.", "only those tests read it", shared=True),
)

UNUSED: Final = (
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
        raise ValueError("not a number of GiB")
    return {"kv_cache_memory_bytes": int(gib * 2**30)} if gib else {}


def _interval(text: str) -> Mapping[str, Any]:
    return {"log_stats_interval": text} if _number(text) > 0 else {}


def _ours(name: str, help: str, setting: str = "", becomes: Callable[[str], Mapping[str, Any]] | None = None) -> EnvVar:
    """PAGODA_<name>, VLLM_<name> as its alias."""
    return EnvVar(f"PAGODA_{name}", help, (f"VLLM_{name}",), becomes=becomes or _sets(setting))


API_KEY: Final = _ours(
    "API_KEY", "Key that clients of `serve` must present.", becomes=lambda text: {"api_key": (text,)}
)
CLIENT_API_KEY: Final = EnvVar("OPENAI_API_KEY", "Key that `chat` and `complete` present.", shared=True)
HF_TOKEN: Final = EnvVar(
    "HF_TOKEN",
    "Token for gated hub repositories.",
    ("HUGGING_FACE_HUB_TOKEN",),
    shared=True,
    becomes=_sets("hf_token"),
)
HF_HUB_OFFLINE: Final = EnvVar("HF_HUB_OFFLINE", "1: models come from earlier downloads only.", shared=True)
ALLOW_LONG_MAX_MODEL_LEN: Final = _ours(
    "ALLOW_LONG_MAX_MODEL_LEN", "1: --max-model-len may exceed the model's positions.", "allow_long_max_model_len"
)
TEST_FORCE_LOAD_FORMAT: Final = _ours("TEST_FORCE_LOAD_FORMAT", "Load format where none is named.", "load_format")
XLA_CACHE_PATH: Final = _ours("XLA_CACHE_PATH", "Folder of compiled XLA programs.", "xla_cache_path")
XLA_CHECK_RECOMPILATION: Final = _ours(
    "XLA_CHECK_RECOMPILATION", "1: a program that is compiled while serving is an error.", "xla_check_recompilation"
)
TORCH_CUDA_DEVICE: Final = EnvVar(
    "PAGODA_TORCH_CUDA_DEVICE", "cpu: --backend torch_cuda runs on a CPU, with each kernel's definition; for tests."
)
PLUGINS: Final = _ours("PLUGINS", "Names of plugins to load, between commas; default: all.", "plugins")
ATTENTION_BACKEND: Final = _ours("ATTENTION_BACKEND", "Attention kernel.", "attention_backend")
CPU_KVCACHE_SPACE: Final = _ours("CPU_KVCACHE_SPACE", "GiB of KV cache; 0: the default.", becomes=_kv_cache)
CPU_OMP_THREADS_BIND: Final = _ours(
    "CPU_OMP_THREADS_BIND", "Cores that the CPU backend's threads are pinned to: 0-3,8.", "cpu_omp_threads_bind"
)
OMP_NUM_THREADS: Final = EnvVar("OMP_NUM_THREADS", "Threads that the CPU backend computes with.", shared=True)
CONFIGURE_LOGGING: Final = _ours("CONFIGURE_LOGGING", "0: leave logging to the program around.", "configure_logging")
LOGGING_CONFIG_PATH: Final = _ours("LOGGING_CONFIG_PATH", "JSON file for logging.config.dictConfig.", "log_config_file")
LOGGING_LEVEL: Final = _ours("LOGGING_LEVEL", "How much is logged: DEBUG to CRITICAL.", "log_level")
LOGGING_PREFIX: Final = _ours("LOGGING_PREFIX", "Text in front of each log line.", "log_prefix")
LOG_STATS_INTERVAL: Final = EnvVar(
    "PAGODA_LOG_STATS_INTERVAL",
    "Seconds between two lines of statistics, which tell batch sizes too.",
    ("VLLM_LOG_STATS_INTERVAL", "VLLM_LOG_BATCHSIZE_INTERVAL"),
    becomes=_interval,
)
RPC_BASE_PATH: Final = _ours("RPC_BASE_PATH", "Folder of the engine's sockets.", "rpc_base_path")
RPC_TIMEOUT: Final = _ours("RPC_TIMEOUT", "Milliseconds that the engine may be silent.", "rpc_timeout")
ENGINE_ITERATION_TIMEOUT_S: Final = _ours(
    "ENGINE_ITERATION_TIMEOUT_S", "Seconds that one step may take.", "engine_iteration_timeout_s"
)
KEEP_ALIVE_ON_ENGINE_DEATH: Final = _ours(
    "KEEP_ALIVE_ON_ENGINE_DEATH", "1: `serve` stays up when its engine dies.", "keep_alive_on_engine_death"
)
HTTP_TIMEOUT_KEEP_ALIVE: Final = _ours(
    "HTTP_TIMEOUT_KEEP_ALIVE",
    "Seconds that a connection of `serve` stays open without a request.",
    "timeout_keep_alive",
)
SERVER_DEV_MODE: Final = _ours(
    "SERVER_DEV_MODE", "1: answer /sleep, /pause, /server_info and their like.", "server_dev_mode"
)

VARIABLES: Final = (
    *(API_KEY, CLIENT_API_KEY, HF_TOKEN, HF_HUB_OFFLINE, ALLOW_LONG_MAX_MODEL_LEN, TEST_FORCE_LOAD_FORMAT, PLUGINS),
    *(XLA_CACHE_PATH, XLA_CHECK_RECOMPILATION, TORCH_CUDA_DEVICE),
    *(ATTENTION_BACKEND, CPU_KVCACHE_SPACE, CPU_OMP_THREADS_BIND, OMP_NUM_THREADS),
    *(CONFIGURE_LOGGING, LOGGING_CONFIG_PATH, LOGGING_LEVEL, LOGGING_PREFIX, LOG_STATS_INTERVAL),
    *(RPC_BASE_PATH, RPC_TIMEOUT, ENGINE_ITERATION_TIMEOUT_S, KEEP_ALIVE_ON_ENGINE_DEATH, SERVER_DEV_MODE),
    HTTP_TIMEOUT_KEEP_ALIVE,
    *UNUSED,
)


def is_service_link(name: str, value: str) -> bool:
    """True for what Kubernetes puts into the environment about a service that happens to have our name."""
    return bool(_SERVICE.fullmatch(name) or (name.endswith("_PORT") and _SERVICE_LINK.fullmatch(value)))


def notes(environ: Mapping[str, str] | None = None, settings: Iterable[str] = ()) -> tuple[str, ...]:
    """A line for each variable that has no effect, or that nobody knows. `settings`: names of PAGODA_<SETTING>.

    Raises ConfigError for a variable that is refused. Values are not told: they may be secret.
    """
    source = os.environ if environ is None else environ
    ours = {name: value for name, value in source.items() if name.startswith(PREFIXES)}
    links = sorted(name for name, value in ours.items() if is_service_link(name, value))
    rest = {name: value for name, value in source.items() if name not in links}
    found = [note for variable in VARIABLES if (note := variable.note(rest)) is not None]
    known = {name for variable in VARIABLES for name in variable.names} | {
        f"PAGODA_{name.upper()}" for name in settings
    }
    found += [_unknown(name, known) for name in sorted(ours) if name in rest and name not in known and ours[name]]
    if links:
        found.append(
            f"not read, because Kubernetes says it about services: {', '.join(links)}; "
            "enableServiceLinks: false in the pod keeps it out"
        )
    return tuple(found)


def _unknown(name: str, known: Iterable[str]) -> str:
    stems = {each.partition("_")[2]: each for each in sorted(known, reverse=True) if each.startswith(PREFIXES)}
    near = difflib.get_close_matches(name.partition("_")[2], list(stems), n=1)
    return f"{name} is no variable that pagoda reads" + (f"; did you mean {stems[near[0]]}?" if near else "")
