"""Facts about accelerators, and the share of their peaks that engines reach. Nothing here is measured by this project,
except where a comment says so.

A figure is that of one device, as an engine sees it: a v7x chip has two devices. Sources: data sheets of A100 80GB SXM,
H100 SXM, H200 SXM, L4 and HGX B200 (NVIDIA; dense rates, memory as nvidia-smi reports it); Google Cloud's system
architecture pages for TPU v5e, v5p, v6e and 7x; for the links of TPUs "How to Scale Your Model", chapter on TPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pagoda.common.errors import ConfigError

Kind = Literal["gpu", "tpu"]
Rate = Literal["bfloat16", "int8", "float8", "float32"]
"""What the matrix units multiply; float16 as bfloat16."""

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ChipSpec:
    """One kind of device."""

    name: str  # The value of --hardware.
    kind: Kind
    memory: int  # Memory in bytes.
    bandwidth: float  # Memory bandwidth in bytes/s.
    bfloat16: float  # Peak FLOP/s in bfloat16.
    int8: float | None  # None: int8 is multiplied as bfloat16.
    float8: float | None
    link: float  # Bytes/s that a device sends in a collective.
    largest: int  # Largest number of devices over which one engine can shard a model with these links.
    reserved: int  # Bytes that the driver, the runtime and compiled programs take.
    devices_per_chip: int = 1

    def peak(self, rate: Rate) -> float:
        """Return the FLOP/s of products of a type; of one that the chip lacks, those of bfloat16."""
        match rate:
            case "int8":
                return self.int8 or self.bfloat16
            case "float8":
                return self.float8 or self.bfloat16
            case "float32":  # Computed in TF32, or in six products of bfloat16.
                return self.bfloat16 / (2 if self.kind == "gpu" else 6)
            case _:
                return self.bfloat16


def _gpu(
    name: str,
    *,
    mebibytes: int,
    bandwidth: float,
    bfloat16: float,
    int8: float,
    float8: float | None,
    link: float,
) -> ChipSpec:
    return ChipSpec(
        name=name,
        kind="gpu",
        memory=mebibytes * MIB,
        bandwidth=bandwidth,
        bfloat16=bfloat16,
        int8=int8,
        float8=float8,
        link=link,
        largest=8,
        reserved=1200 * MIB,  # Memory of CUDA's context, of kernels and of the graphs of decode steps.
    )


def _tpu(
    name: str,
    *,
    gibibytes: int,
    bandwidth: float,
    bfloat16: float,
    int8: float | None,
    float8: float | None,
    link_one_way: float,
    largest: int = 64,
    devices_per_chip: int = 1,
) -> ChipSpec:
    """`link_one_way`: bytes/s of a ring along one axis of the torus, in one of its two directions."""
    return ChipSpec(
        name=name,
        kind="tpu",
        memory=gibibytes << 30,
        bandwidth=bandwidth,
        bfloat16=bfloat16,
        int8=int8,
        float8=float8,
        link=2 * link_one_way,
        largest=largest,
        reserved=768 * MIB,
        devices_per_chip=devices_per_chip,
    )


_CHIPS: Final = (
    _gpu("a100", mebibytes=81_920, bandwidth=2.039e12, bfloat16=3.12e14, int8=6.24e14, float8=None, link=3.0e11),
    _gpu("h100", mebibytes=81_559, bandwidth=3.35e12, bfloat16=9.89e14, int8=1.979e15, float8=1.979e15, link=4.5e11),
    _gpu("h200", mebibytes=143_771, bandwidth=4.8e12, bfloat16=9.89e14, int8=1.979e15, float8=1.979e15, link=4.5e11),
    _gpu("b200", mebibytes=183_359, bandwidth=8.0e12, bfloat16=2.25e15, int8=4.5e15, float8=4.5e15, link=9.0e11),
    # The link of an L4 is PCI Express.
    _gpu("l4", mebibytes=23_034, bandwidth=3.0e11, bfloat16=1.21e14, int8=2.42e14, float8=2.42e14, link=3.2e10),
    _tpu(
        "v5e",
        gibibytes=16,
        bandwidth=8.19e11,
        bfloat16=1.97e14,
        int8=3.94e14,
        float8=None,
        link_one_way=4.5e10,
        largest=8,
    ),
    _tpu("v5p", gibibytes=95, bandwidth=2.765e12, bfloat16=4.59e14, int8=9.18e14, float8=None, link_one_way=9e10),
    _tpu("v6e", gibibytes=32, bandwidth=1.638e12, bfloat16=9.18e14, int8=1.836e15, float8=None, link_one_way=9e10),
    _tpu(
        "v7x",
        gibibytes=96,
        bandwidth=3.69e12,
        bfloat16=1.1535e15,
        int8=None,
        float8=2.307e15,
        link_one_way=1e11,
        devices_per_chip=2,
    ),
)

CHIPS: Final[Mapping[str, ChipSpec]] = {chip.name: chip for chip in _CHIPS}
"""Chips by name."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of a chip's peaks that engines reach, one set for all chips of a kind.

    No share is fitted to the figures that docs/guides/capacity-planning.md compares predictions with.
    """

    products: float  # Share of the peak FLOP/s in linear layers of large steps, with element-wise operations.
    weights: float  # Share of the memory bandwidth in small steps.
    attention_memory: float  # Share of the memory bandwidth in attention of sequences with one token.
    attention_products: float  # Share of the peak FLOP/s in attention over prompts.
    links: float
    layer_seconds: float  # Seconds of the gaps between the kernels of a layer.
    step_seconds: float  # Seconds to start a step and to sample.
    hop_seconds: float  # Seconds of latency of a message to a neighbour.
    ring: bool  # Collectives go around a ring; otherwise devices reach each other through a switch.


EFFICIENCY: Final[Mapping[Kind, Efficiency]] = {
    # The figures are assumed. `products` lies between the 0.48 of the FP8 peak that TensorRT-LLM's whole engine reaches
    # (Llama 3.1 8B, H100, 2048/128: 58,700 tokens/s, performance overview v1.0), attention and gaps included, and the
    # 0.75 of FlashAttention 3 (arXiv 2407.08608), whose prefill is `attention_products` with its causal half masked.
    # The bandwidth is that of decode kernels of large batches (FlashInfer, arXiv 2501.01005, figures for H100: 0.7 to
    # 0.85). A CUDA graph has about ten kernels a layer, with a gap of a microsecond between two. An all-reduce of few
    # bytes over NVLink takes 8 us, which gives the hops.
    "gpu": Efficiency(
        products=0.62,
        weights=0.8,
        attention_memory=0.8,
        attention_products=0.6,
        links=0.8,
        layer_seconds=10e-6,
        step_seconds=400e-6,
        hop_seconds=4e-6,
        ring=False,
    ),
    # `products` and `weights` follow the TPU compiler's schedule of Llama 3 8B on v6e, without attention (this
    # project's benchmarks/results/tpu-roofline.json): 0.63 and 0.65 of the peak with 1,024 and 2,048 tokens, 0.82 of
    # the bandwidth with 8. Attention reaches 0.86 of the bandwidth in decode and 0.73 of the peak in prefill on v7x
    # ("Ragged Paged Attention", arXiv 2604.15464). Links and hops are those of benchmarks/tpu/roofline.py. The gaps are
    # assumed.
    "tpu": Efficiency(
        products=0.64,
        weights=0.82,
        attention_memory=0.86,
        attention_products=0.73,
        links=0.8,
        layer_seconds=4e-6,
        step_seconds=300e-6,
        hop_seconds=1e-6,
        ring=True,
    ),
}


def find_chip(name: str) -> ChipSpec:
    """Return a chip by its name, whatever its case. Raise ConfigError naming all that are known."""
    chip = CHIPS.get(name.lower())
    if chip is None:
        raise ConfigError("--hardware", f"{name} is unknown; use one of {', '.join(CHIPS)}")
    return chip
