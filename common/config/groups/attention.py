"""How attention is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.fields import did_you_mean, json_object, option
from pagoda.common.errors import ConfigError

AUTO: Final = "AUTO"
"""A backend's own kernel."""

_OF_A_CPU: Final = ("TORCH_SDPA", "CPU_ATTN")
KERNELS: Final[Mapping[str, tuple[str, ...]]] = {
    "torch_cuda": ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "TORCH_VARLEN"),
    "reference": _OF_A_CPU,
    "jax_tpu": _OF_A_CPU,
    "simulated": _OF_A_CPU,
}
"""Backend -> what else it may be asked for, by the names that vLLM has. Only torch_cuda has more than its own."""

_ELSEWHERE: Final = (
    *("FLEX_ATTENTION", "TREE_ATTN", "PALLAS", "CUSTOM", "NO_ATTENTION", "FLASH_ATTN_DIFFKV"),
    *("TRITON_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA", "FLASHMLA", "FLASHMLA_SPARSE"),
    *("ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "IPEX"),
)
"""Names that vLLM has and no backend here."""

_FLAG: Final = "--attention-backend"


def kernel_name(text: str) -> str:
    """A kernel's name in capitals. ValueError for one that no backend has."""
    name = text.upper()
    every = (AUTO, *dict.fromkeys(name for names in KERNELS.values() for name in names))
    if name in _ELSEWHERE:
        raise ValueError(f"not in this version; use one of {', '.join(every)}, or drop the flag")
    if name not in every:
        raise ValueError(f"unknown{did_you_mean(name, every)}; use one of {', '.join(every)}, or drop the flag")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention kernel."""

    attention_backend: str | None = option(
        None,
        "Attention kernel of prefill and mixed steps: auto; with --backend torch_cuda also TRITON_ATTN (its own), "
        "FLASH_ATTN (FlashAttention 3, of the package flash_attn_interface), FLASHINFER (of the package flashinfer) or "
        "TORCH_VARLEN (torch's FlashAttention 2, with --block-size 256). Elsewhere TORCH_SDPA and CPU_ATTN mean "
        "auto.",
        parse=kernel_name,
    )
    attention_config: Mapping[str, Any] = option(
        {},
        'Attention settings as JSON: {"backend": NAME}, which is --attention-backend.',
        aliases=("-ac",),
        parse=json_object,
    )

    def __post_init__(self) -> None:
        for key in self.attention_config:
            if key != "backend":
                raise ConfigError("--attention-config", f"{key} is not supported, only backend is; drop it")
        stated = self.attention_config.get("backend")
        if stated is None:
            return
        if self.attention_backend is not None:
            raise ConfigError("--attention-config", f"names a backend, and so does {_FLAG}; drop one of both")
        try:
            kernel_name(str(stated))
        except ValueError as error:
            raise ConfigError("--attention-config", f"{stated}: {error}") from None

    def kernel(self, backend: str) -> str:
        """The kernel in capitals, AUTO for the backend's own. Raises ConfigError for one that it does not have."""
        stated = self.attention_config.get("backend")
        flag = _FLAG if stated is None else "--attention-config"
        name = kernel_name(str(stated or self.attention_backend or AUTO))
        if name != AUTO and name not in KERNELS[backend]:
            known = ", ".join((AUTO.lower(), *KERNELS[backend]))
            raise ConfigError(flag, f"{backend} has no {name}; use one of {known}, or drop the flag")
        return name if backend == "torch_cuda" else AUTO
