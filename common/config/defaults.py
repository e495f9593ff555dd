"""Defaults that depend on platform, use and model, and the limits that follow; each with the reason to show for it."""

from __future__ import annotations

import logging
import os
import platform as system
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.errors import ConfigError

# The device an engine runs on, as far as defaults depend on it, and what each backend prefers.
#
# Detection reads what the system says (/proc, /sys, nvidia-smi) and imports no framework.

Kind = Literal["cpu", "cuda", "tpu"]

KINDS: Final[dict[str, Kind]] = {"jax_tpu": "tpu", "torch_cuda": "cuda", "reference": "cpu", "simulated": "cpu"}
"""Backend -> what it runs on."""

BLOCK_SIZES: Final = {"jax_tpu": 128, "torch_cuda": 16, "reference": 32, "simulated": 16}
"""Backend -> tokens per KV block that suit its kernels."""

TPU_TABLE_ENTRIES: Final = 128 << 10
"""Blocks that the tables of one step may name on a TPU: they lie in its scalar memory."""

_TPU_CHIPS: Final = {"0x0062": "V5P", "0x0063": "V5E", "0x006f": "V6E"}  # PCI device ids
_TPU_BYTES: Final = {"V5P": 95 << 30, "V5E": 16 << 30, "V6E": 32 << 30}  # HBM of one chip
_GOOGLE: Final = "0x1ae0"  # PCI vendor id
_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_QUERY_SECONDS: Final = 10


@dataclass(frozen=True, slots=True)
class Platform:
    """`memory_bytes`: of one device, 0 when unknown. `world_size`: devices that share one model.

    `device_name`: of a GPU as its driver calls it, of a TPU V5E, V5P or V6E, of a CPU its architecture; may be empty.
    """

    kind: Kind
    memory_bytes: int = 0
    device_name: str = ""
    world_size: int = 1


def detect(kind: Kind, world_size: int = 1, *, pci: Path = Path("/sys/bus/pci/devices")) -> Platform:
    """This machine's platform. What cannot be found out stays 0 or empty. `pci`: where the kernel lists devices."""
    try:
        memory, name = _tpu(pci) if kind == "tpu" else _gpu() if kind == "cuda" else _cpu()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.debug("the %s does not say what it is (%s); defaults are those of any device", kind, error)
        memory, name = 0, ""
    return Platform(kind, memory, name, world_size)


def _cpu() -> tuple[int, str]:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), system.machine()


def _gpu() -> tuple[int, str]:
    """Name and memory of the first GPU."""
    text = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
    name, mebibytes = text.splitlines()[0].rsplit(",", 1) if text.strip() else ("", "0")
    return int(mebibytes) << 20, name.strip()


def _tpu(pci: Path) -> tuple[int, str]:
    """The first TPU chip on the PCI bus."""
    for vendor in sorted(pci.glob("*/vendor")):
        if vendor.read_text().strip() == _GOOGLE:
            name = _TPU_CHIPS.get(vendor.with_name("device").read_text().strip(), "")
            return _TPU_BYTES.get(name, 0), name
    return 0, ""


Usage = Literal["llm", "server"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """Default max_num_batched_tokens and max_num_seqs."""

    tokens: int
    seqs: int


ByUsage = Mapping[Usage, BatchDefaults]

LARGE_GPU_BYTES: Final = 70 << 30
LARGE_GPU: Final[Mapping[Usage, BatchDefaults]] = {
    "llm": BatchDefaults(16384, 1024),
    "server": BatchDefaults(8192, 1024),
}
ANY_DEVICE: Final[Mapping[Usage, BatchDefaults]] = {"llm": BatchDefaults(8192, 256), "server": BatchDefaults(2048, 256)}
CPU: Final[Mapping[Usage, BatchDefaults]] = {"llm": BatchDefaults(4096, 256), "server": BatchDefaults(2048, 128)}
"""Per device that shares the model."""
TPU_TOKENS: Final[Mapping[str, Mapping[Usage, int]]] = {
    "V6E": {"llm": 2048, "server": 1024},
    "V5E": {"llm": 1024, "server": 512},
    "V5P": {"llm": 512, "server": 256},
}
PLAIN_ARCHITECTURES: Final = ("ppc", "s390x", "riscv")
"""Beginnings of CPU architectures that run without chunked prefill and prefix caching."""

_MECHANISMS: Final = ("enable_chunked_prefill", "enable_prefix_caching")
_IF_CACHED: Final = ", if the KV cache holds as many"
_POOLS: Final = "pooling reads prompts whole"
_USES: Final[Mapping[Usage, str]] = {"llm": "the LLM class", "server": "an API server"}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model allows. `max_len`: tokens, and `why` so many, as in "it exceeds WHY".

    `extensible`: a longer sequence can be computed, if not well (false for tables of learned positions).
    `pools`: it reads each prompt whole, in a step of its own where the budget does not hold it, and caches nothing.
    """

    max_len: int
    why: str = "the model's positions"
    extensible: bool = True
    chunked_prefill: bool = True
    prefix_caching: bool = True
    pools: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedRow:
    """A setting's value, where it came from and, in a few words, why it is that."""

    name: str
    value: Any
    source: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class ResolvedLimits:
    """Limits, and a row for each that nobody stated."""

    limits: Limits
    rows: tuple[ResolvedRow, ...]


def batch_defaults(platform: Platform, usage: Usage) -> BatchDefaults:
    """The platform's row of the tables above."""
    large = platform.memory_bytes >= LARGE_GPU_BYTES and "a100" not in platform.device_name.lower()
    found = (LARGE_GPU if large else ANY_DEVICE)[usage]
    match platform.kind:
        case "tpu":
            tokens = TPU_TOKENS.get(platform.device_name, {}).get(usage, found.tokens)
            return BatchDefaults(tokens, found.seqs)
        case "cpu":
            return BatchDefaults(CPU[usage].tokens * platform.world_size, CPU[usage].seqs * platform.world_size)
        case _:
            return found


def resolve_limits(
    config: EngineConfig, *, platform: Platform, usage: Usage, block_size: int, model: ModelLimits
) -> ResolvedLimits:
    """Fill every None of the configuration; what was stated stays. `block_size`: the backend's preference, in tokens.

    Raises ConfigError naming the flag and a value that works.
    """
    scheduler, cache = config.scheduler, config.cache
    max_len = _max_len(config, model)
    if model.pools:
        chunked, caching = (ResolvedRow(name, False, "model", _POOLS) for name in _MECHANISMS)
    else:
        stated = scheduler.enable_chunked_prefill, cache.enable_prefix_caching
        able = model.chunked_prefill, model.prefix_caching
        chunked, caching = (_mechanism(*each, platform) for each in zip(_MECHANISMS, stated, able))
    splits = chunked.value or model.pools  # or the budget need not hold the longest prompt
    tokens, tokens_why = _tokens(config, batch_defaults(platform, usage), max_len, splits)
    seqs, seqs_why = _seqs(config, batch_defaults(platform, usage), tokens)
    _check_budget(tokens, seqs, max_len, splits)
    block_size, block_why = _block_size(config, block_size, platform, max_len, seqs)
    use = f"for {_USES[usage]} on {_named(platform)}"
    rows = (
        ResolvedRow("max_model_len", max_len, "model", model.why + ("" if model.pools else _IF_CACHED)),
        ResolvedRow("max_num_batched_tokens", tokens, "platform default", tokens_why or use),
        ResolvedRow("max_num_seqs", seqs, "platform default", seqs_why or use),
        ResolvedRow("block_size", block_size, "platform default", block_why),
        chunked,
        caching,
    )
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
    )
    return ResolvedLimits(limits, rows)


def _max_len(config: EngineConfig, model: ModelLimits) -> int:
    stated = config.model.max_model_len
    if stated is None or stated <= model.max_len:
        return stated or model.max_len
    if not model.extensible or not config.model.allow_long_max_model_len:
        beyond = ", or set PAGODA_ALLOW_LONG_MAX_MODEL_LEN=1 to go beyond" if model.extensible else ""
        raise ConfigError(
            "--max-model-len", f"{stated} exceeds {model.why}, {model.max_len}; use {model.max_len} or less{beyond}"
        )
    logger.warning("--max-model-len: %d exceeds %s, %d; answers may be poor beyond", stated, model.why, model.max_len)
    return stated


def _block_size(config: EngineConfig, preferred: int, platform: Platform, max_len: int, seqs: int) -> tuple[int, str]:
    """What the kernels prefer; larger on a TPU where the tables of so many long sequences would be too long."""
    stated, size = config.cache.block_size, preferred
    if stated is not None:
        return stated, ""
    while platform.kind == "tpu" and seqs * -(-max_len // size) > TPU_TABLE_ENTRIES:
        size *= 2
    why = "suits the backend's kernels" if size == preferred else f"{preferred} would make block tables too long"
    return size, why


def _mechanism(name: str, stated: bool | None, supported: bool, platform: Platform) -> ResolvedRow:
    """Chunked prefill or prefix caching: on where the model can, off on the plain architectures."""
    if platform.kind == "cpu" and platform.device_name.lower().startswith(PLAIN_ARCHITECTURES):
        if stated:
            logger.warning("--%s: off, because this CPU is a %s", name.replace("_", "-"), platform.device_name)
        return ResolvedRow(name, False, "platform default", f"off on {platform.device_name}")
    if stated is None:
        return ResolvedRow(name, supported, "model", "the model supports it" if supported else "the model does not")
    return ResolvedRow(name, stated, "")


def _tokens(config: EngineConfig, table: BatchDefaults, max_len: int, chunked: bool) -> tuple[int, str]:
    stated, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs or table.seqs
    if stated is not None:
        return stated, ""
    tokens, why = table.tokens, ""
    if not chunked and max_len > tokens:
        tokens, why = max_len, f"max_model_len, above the default {table.tokens}, as prompts are not split"
    if seqs * max_len < tokens:
        tokens, why = seqs * max_len, f"max_num_seqs * max_model_len, below the default {tokens}"
    return tokens, why


def _seqs(config: EngineConfig, table: BatchDefaults, tokens: int) -> tuple[int, str]:
    stated = config.scheduler.max_num_seqs
    if stated is not None:
        return stated, ""
    if tokens < table.seqs:
        return tokens, f"max_num_batched_tokens, below the default {table.seqs}"
    return table.seqs, ""


def _check_budget(tokens: int, seqs: int, max_len: int, chunked: bool) -> None:
    if not chunked and tokens < max_len:
        raise ConfigError(
            "--max-num-batched-tokens",
            f"{tokens} cannot hold a prompt of {max_len} tokens without chunked prefill; "
            f"raise it to {max_len}, lower --max-model-len, or drop --no-enable-chunked-prefill",
        )
    if tokens < seqs:
        raise ConfigError("--max-num-batched-tokens", f"{tokens} is below --max-num-seqs {seqs}; raise it to {seqs}")


def _named(platform: Platform) -> str:
    """The device in words."""
    kind = {"cpu": "CPU", "cuda": "GPU", "tpu": "TPU"}[platform.kind]
    words = [f"a {kind}", f"({platform.device_name})" if platform.device_name else ""]
    if platform.kind != "cpu" and platform.memory_bytes:
        words.append(f"with {platform.memory_bytes >> 30} GiB")
    if platform.kind == "cpu" and platform.world_size > 1:
        words.append(f"times {platform.world_size} devices")
    return " ".join(filter(None, words))
