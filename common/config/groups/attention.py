"""Attention settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagoda.common.config.fields import did_you_mean, json_object, option
from pagoda.common.errors import ConfigError

AUTO: Final = "AUTO"
"""The backend's own kernel."""

_CPU_KERNELS: Final = ("TORCH_SDPA", "CPU_ATTN")
KERNELS: Final[Mapping[str, tuple[str, ...]]] = {
    "torch_cuda": (
        *("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "TORCH_VARLEN"),
        *("TRITON_MLA", "FLASHMLA", "FLASHINFER_MLA"),
    ),
    "reference": _CPU_KERNELS,
    "jax_tpu": _CPU_KERNELS,
    "simulated": _CPU_KERNELS,
}
"""Backend -> kernel names accepted besides AUTO (vLLM's names). Only torch_cuda has a choice of kernels."""

_UNSUPPORTED: Final = (
    *("FLEX_ATTENTION", "TREE_ATTN", "PALLAS", "CUSTOM", "NO_ATTENTION", "FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"),
    *("FLASH_ATTN_MLA", "CUTLASS_MLA", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "TOKENSPEED_MLA"),
    *("ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "IPEX"),
    *("XFORMERS", "ROCM_FLASH", "HPU_ATTN", "OPENVINO", "BLOCKSPARSE_FLASH_ATTN", "DUAL_CHUNK_FLASH_ATTN"),
)
"""vLLM's kernel names, of this or of older releases, that no backend here supports."""

_OLD_SUFFIX: Final = "_VLLM_V1"
"""Of the names of vLLM 0.8 to 0.10, such as FLASH_ATTN_VLLM_V1."""

_FLAG: Final = "--attention-backend"


def kernel_name(text: str) -> str:
    """Return the kernel name in capitals. Raise ValueError if no backend supports it."""
    name = text.upper().removesuffix(_OLD_SUFFIX)
    kernels = (AUTO, *dict.fromkeys(name for names in KERNELS.values() for name in names))
    if name in _UNSUPPORTED:
        raise ValueError(f"no backend has this kernel; use one of {', '.join(kernels)}, or drop it")
    if name not in kernels:
        raise ValueError(f"unknown{did_you_mean(name, kernels)}; use one of {', '.join(kernels)}, or drop it")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Attention kernels."""

    attention_backend: str | None = option(
        None,
        "Attention kernel. torch_cuda: AUTO (default; the fastest of those measured on the "
        "chip, else TRITON_ATTN), TRITON_ATTN, FLASH_ATTN "
        "(FlashAttention 3; needs the package flash_attn_interface), FLASHINFER (needs the package flashinfer; decodes "
        "with speculative decoding by TRITON_ATTN) or TORCH_VARLEN (FlashAttention 2 in PyTorch, for prefill and mixed "
        "steps; needs --block-size 256). Decode steps of latent attention (MLA): "
        "TRITON_MLA (default), FLASHMLA (Hopper; needs the package flash_mla and --block-size 64) or FLASHINFER_MLA "
        "(Blackwell; needs the package flashinfer and --block-size 64). Other backends have one kernel: AUTO, "
        "TORCH_SDPA or CPU_ATTN.",
        parse=kernel_name,
    )
    attention_config: Mapping[str, Any] = option(
        {},
        'Attention settings as JSON; {"backend": NAME} is the same as --attention-backend NAME.',
        aliases=("-ac",),
        parse=json_object,
    )

    def __post_init__(self) -> None:
        for key in self.attention_config:
            if key != "backend":
                raise ConfigError("--attention-config", f"{key} is not supported; drop it (the only key is backend)")
        name = self.attention_config.get("backend")
        if name is None:
            return
        if self.attention_backend is not None:
            raise ConfigError("--attention-config", f"backend is also set by {_FLAG}; drop one of them")
        try:
            kernel_name(str(name))
        except ValueError as error:
            raise ConfigError("--attention-config", f"{name}: {error}") from None

    def kernel(self, backend: str) -> str:
        """Return the kernel name in capitals; AUTO is the backend's own. Raise ConfigError if unsupported by it."""
        json_name = self.attention_config.get("backend")
        flag = _FLAG if json_name is None else "--attention-config"
        name = kernel_name(str(json_name or self.attention_backend or AUTO))
        if name != AUTO and name not in KERNELS[backend]:
            kernels = ", ".join((AUTO.lower(), *KERNELS[backend]))
            raise ConfigError(flag, f"{backend} has no {name}; use one of {kernels}, or drop the flag")
        return name if backend == "torch_cuda" else AUTO
