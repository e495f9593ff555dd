"""Defaults that depend on platform, use and model, and the limits resolved from them, each with its reason."""

from __future__ import annotations

import logging
import platform as system
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.config.groups.cache import StateSnapshots
from pagoda.common.config.memory import total_bytes
from pagoda.common.config.tpu_host import PCI, tpu_chips
from pagoda.common.errors import ConfigError

Kind = Literal["cpu", "cuda", "tpu"]
Usage = Literal["llm", "server"]

KINDS: Final[dict[str, Kind]] = {"jax_tpu": "tpu", "torch_cuda": "cuda", "reference": "cpu", "simulated": "cpu"}
"""Backend -> kind of device."""

BLOCK_SIZES: Final = {"jax_tpu": 128, "torch_cuda": 16, "reference": 32, "simulated": 16}
"""Backend -> preferred tokens per KV block."""

TPU_TABLE_ENTRIES: Final = 128 << 10
"""Maximum block table entries of a step on a TPU, where they are in scalar memory."""

_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_QUERY_SECONDS: Final = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Platform:
    """The devices that an engine runs on."""

    kind: Kind
    memory_bytes: int = 0  # Bytes of one device; 0: unknown.
    device_name: str = ""  # GPU: name by the driver; TPU: V5E, V5P, V6E or V7X; CPU: architecture; empty: unknown.
    world_size: int = 1  # Number of devices that one model is sharded over.


def detect(kind: Kind, world_size: int = 1, *, pci: Path = PCI) -> Platform:
    """Return this machine's platform, from /proc, /sys and nvidia-smi; no framework is imported.

    `pci`: directory of PCI devices.
    """
    try:
        memory, name = _tpu(pci) if kind == "tpu" else _gpu() if kind == "cuda" else _cpu()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.debug("detection of the %s failed (%s); using generic defaults", kind, error)
        memory = 0
        name = ""
    return Platform(kind, memory, name, world_size)


def _cpu() -> tuple[int, str]:
    return total_bytes(), system.machine()


def _gpu() -> tuple[int, str]:
    """Return memory in bytes and name of the first GPU."""
    text = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
    name, mebibytes = text.splitlines()[0].rsplit(",", 1) if text.strip() else ("", "0")
    return int(mebibytes) << 20, name.strip()


def _tpu(pci: Path) -> tuple[int, str]:
    """Return memory in bytes and name of the first TPU chip."""
    chips = tpu_chips(pci)
    return (chips[0].memory_bytes, chips[0].name) if chips and chips[0].supported else (0, "")


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """Default max_num_batched_tokens and max_num_seqs."""

    tokens: int
    seqs: int


ByUsage = Mapping[Usage, BatchDefaults]

LARGE_GPU_BYTES: Final = 70 << 30
LARGE_GPU: Final[ByUsage] = {"llm": BatchDefaults(16384, 1024), "server": BatchDefaults(8192, 1024)}
ANY_DEVICE: Final[ByUsage] = {"llm": BatchDefaults(8192, 256), "server": BatchDefaults(2048, 256)}
CPU: Final[ByUsage] = {"llm": BatchDefaults(4096, 256), "server": BatchDefaults(256, 128)}
"""Per device of the world size. Steps of a server are short, since sequences that generate wait for prompts of others:
`benchmarks/cpu/prompt_steps.py` measures what short steps cost."""
TPU_TOKENS: Final[Mapping[str, Mapping[Usage, int]]] = {
    "V6E": {"llm": 2048, "server": 1024},
    "V5E": {"llm": 1024, "server": 512},
    "V5P": {"llm": 512, "server": 256},
    "V7X": {"llm": 2048, "server": 1024},  # The same as on a V6E, whose ratio of FLOP to bytes is nearest.
}
TPU_INVARIANT_TOKENS: Final = 256
"""With --batch-invariant, where each step is computed as if it were full: more would slow down decodes."""

PLAIN_ARCHITECTURES: Final = ("ppc", "s390x", "riscv")
"""Prefixes of CPU architectures without chunked prefill and prefix caching."""

_CHUNKED_PREFILL: Final = "enable_chunked_prefill"
_PREFIX_CACHING: Final = "enable_prefix_caching"
_IF_CACHED: Final = ", if the KV cache is large enough"
_POOLS: Final = "pooling models process whole prompts"
_USES: Final[Mapping[Usage, str]] = {"llm": "the LLM class", "server": "an API server"}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model supports."""

    max_len: int  # Maximum length of a sequence in tokens.
    max_len_source: str = "the model's maximum context length"  # The source that an error names: "exceeds SOURCE".
    extensible: bool = True  # Longer sequences can be computed; False for learned position embeddings.
    chunked_prefill: bool = True
    prefix_caching: bool = True
    default_seqs: int | None = None  # Default number of sequences at a time, if fewer than the platform's.
    pools: bool = False  # Prompts are processed whole and without a KV cache, one over the budget in its own step.
    has_states: bool = False  # A layer has recurrent state.


@dataclass(frozen=True, slots=True)
class ResolvedRow:
    """A setting's resolved value, its source and a short reason."""

    name: str
    value: Any
    source: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedLimits:
    """Limits, and a row for each limit that the user may leave unset."""

    limits: Limits
    rows: tuple[ResolvedRow, ...]


def batch_defaults(platform: Platform, usage: Usage) -> BatchDefaults:
    """Return the default batch limits of a platform."""
    is_large = platform.memory_bytes >= LARGE_GPU_BYTES and "a100" not in platform.device_name.lower()
    defaults = (LARGE_GPU if is_large else ANY_DEVICE)[usage]
    match platform.kind:
        case "tpu":
            tokens = TPU_TOKENS.get(platform.device_name, {}).get(usage, defaults.tokens)
            return BatchDefaults(tokens, defaults.seqs)
        case "cpu":
            return BatchDefaults(CPU[usage].tokens * platform.world_size, CPU[usage].seqs * platform.world_size)
        case _:
            return defaults


def resolve_limits(
    config: EngineConfig, *, platform: Platform, usage: Usage, block_size: int, model: ModelLimits
) -> ResolvedLimits:
    """Resolve every limit that the configuration leaves unset. `block_size`: the backend's preference, in tokens.

    Raise ConfigError naming the flag and a value that works.
    """
    scheduler = config.scheduler
    cache = config.cache
    max_len = _max_len(config, model)
    if model.pools:
        chunked, caching = (ResolvedRow(name, False, "model", _POOLS) for name in (_CHUNKED_PREFILL, _PREFIX_CACHING))
    else:
        chunked = _feature(_CHUNKED_PREFILL, scheduler.enable_chunked_prefill, model.chunked_prefill, platform)
        caching = _feature(_PREFIX_CACHING, cache.enable_prefix_caching, model.prefix_caching, platform)
        if model.has_states and cache.mamba_cache_mode == "none":
            caching = ResolvedRow(_PREFIX_CACHING, False, "model", "--mamba-cache-mode none keeps no recurrent state")
    may_exceed_budget = chunked.value or model.pools
    defaults = batch_defaults(platform, usage)
    if platform.kind == "tpu" and config.model.batch_invariant:
        defaults = replace(defaults, tokens=max(TPU_INVARIANT_TOKENS, config.scheduler.max_num_seqs or 0))
    if model.default_seqs is not None:
        defaults = replace(defaults, seqs=min(defaults.seqs, model.default_seqs))
    tokens, tokens_reason = _tokens(config, defaults, max_len, may_exceed_budget)
    seqs, seqs_reason = _seqs(config, defaults, tokens)
    _check_budget(tokens, seqs, max_len, may_exceed_budget)
    block_size, block_reason = _block_size(config, block_size, platform, max_len, seqs)
    snapshots = cache.snapshots(block_size)
    use = f"for {_USES[usage]} on {_describe(platform)}"
    rows = (
        ResolvedRow("max_model_len", max_len, "model", model.max_len_source + ("" if model.pools else _IF_CACHED)),
        ResolvedRow("max_num_batched_tokens", tokens, "platform default", tokens_reason or use),
        ResolvedRow("max_num_seqs", seqs, "platform default", seqs_reason or use),
        ResolvedRow("block_size", block_size, "platform default", block_reason),
        chunked,
        caching,
        *_snapshot_rows(snapshots, model),
    )
    speculative = config.extension.speculative
    limits = Limits(
        max_model_len=max_len,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        block_size=block_size,
        chunked_prefill=chunked.value,
        prefix_caching=caching.value,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        policy=scheduler.policy,
        async_scheduling=scheduler.async_scheduling,
        max_drafts=0 if speculative is None else speculative.num_speculative_tokens or 0,
        max_draft_len=None if speculative is None else speculative.max_model_len,
        max_loras=config.lora.slots,
        media_rows=tokens + 2 * block_size if config.model.enable_prompt_embeds else 0,
        snapshots=snapshots,
    )
    if limits.max_drafts:
        limits.check()
    return ResolvedLimits(limits, rows)


def _max_len(config: EngineConfig, model: ModelLimits) -> int:
    length = config.model.max_model_len
    source = model.max_len_source
    if length is None or length <= model.max_len:
        return length or model.max_len
    if not model.extensible or not config.model.allow_long_max_model_len:
        override = ", or set PAGODA_ALLOW_LONG_MAX_MODEL_LEN=1 to exceed it" if model.extensible else ""
        raise ConfigError(
            "--max-model-len", f"{length} exceeds {source}, {model.max_len}; use {model.max_len} or less{override}"
        )
    logger.warning("--max-model-len: %d exceeds %s, %d; output quality may degrade", length, source, model.max_len)
    return length


def _block_size(config: EngineConfig, preferred: int, platform: Platform, max_len: int, seqs: int) -> tuple[int, str]:
    """Return the configured or preferred block size; doubled on a TPU until the block tables fit its scalar memory."""
    if config.cache.block_size is not None:
        return config.cache.block_size, ""
    size = preferred
    while platform.kind == "tpu" and seqs * -(-max_len // size) > TPU_TABLE_ENTRIES:
        size *= 2
    reason = "preferred by the backend's kernels" if size == preferred else f"{preferred} makes block tables too large"
    return size, reason


def _feature(name: str, configured: bool | None, supported: bool, platform: Platform) -> ResolvedRow:
    """Resolve chunked prefill or prefix caching: by default on if the model and the CPU architecture support it."""
    if platform.kind == "cpu" and platform.device_name.lower().startswith(PLAIN_ARCHITECTURES):
        if configured:
            logger.warning("--%s: disabled, not supported on %s CPUs", name.replace("_", "-"), platform.device_name)
        return ResolvedRow(name, False, "platform default", f"not supported on {platform.device_name}")
    if configured is None:
        return ResolvedRow(name, supported, "model", "supported" if supported else "not supported by the model")
    return ResolvedRow(name, configured, "")


def _snapshot_rows(snapshots: StateSnapshots, model: ModelLimits) -> Iterator[ResolvedRow]:
    """Yield the rows of --mamba-cache-mode and --mamba-block-size, for a model with recurrent state."""
    if model.has_states and not model.pools:
        yield ResolvedRow("mamba_cache_mode", snapshots.mode, "model", "the model has recurrent state")
        yield ResolvedRow("mamba_block_size", snapshots.unit, "platform default", "the block size")


def _tokens(config: EngineConfig, defaults: BatchDefaults, max_len: int, may_exceed_budget: bool) -> tuple[int, str]:
    configured = config.scheduler.max_num_batched_tokens
    seqs = config.scheduler.max_num_seqs or defaults.seqs
    if configured is not None:
        return configured, ""
    tokens = defaults.tokens
    reason = ""
    if not may_exceed_budget and max_len > tokens:
        tokens = max_len
        reason = f"max_model_len, above the default {defaults.tokens}, without chunked prefill"
    if seqs * max_len < tokens:
        tokens, reason = seqs * max_len, f"max_num_seqs * max_model_len, below the default {tokens}"
    return tokens, reason


def _seqs(config: EngineConfig, defaults: BatchDefaults, tokens: int) -> tuple[int, str]:
    configured = config.scheduler.max_num_seqs
    if configured is not None:
        return configured, ""
    if tokens < defaults.seqs:
        return tokens, f"max_num_batched_tokens, below the default {defaults.seqs}"
    return defaults.seqs, ""


def _check_budget(tokens: int, seqs: int, max_len: int, may_exceed_budget: bool) -> None:
    if not may_exceed_budget and tokens < max_len:
        raise ConfigError(
            "--max-num-batched-tokens",
            f"{tokens} is too small for a prompt of {max_len} tokens without chunked prefill; "
            f"raise it to {max_len}, lower --max-model-len, or drop --no-enable-chunked-prefill",
        )
    if tokens < seqs:
        raise ConfigError("--max-num-batched-tokens", f"{tokens} is below --max-num-seqs {seqs}; raise it to {seqs}")


def _describe(platform: Platform) -> str:
    kind = {"cpu": "CPU", "cuda": "GPU", "tpu": "TPU"}[platform.kind]
    words = [f"a {kind}", f"({platform.device_name})" if platform.device_name else ""]
    if platform.kind != "cpu" and platform.memory_bytes:
        words.append(f"with {platform.memory_bytes >> 30} GiB")
    if platform.kind == "cpu" and platform.world_size > 1:
        words.append(f"times {platform.world_size} devices")
    return " ".join(filter(None, words))
