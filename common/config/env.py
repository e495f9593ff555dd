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
from typing import Any, Final

from pagoda.common.config.env_unused import UNUSED
from pagoda.common.config.env_var import EnvVar

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
