"""Attention by kernels of others: stand-ins check what these are documented to take, and compute the textbook."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from support.devices.torch_cuda_model import TorchCudaModel
from support.engines.reference_driver import random_weights, tiny_spec
from support.kernels.paged_attention import paged
from torch import Tensor

from pagoda.backends.torch_cuda import backend
from pagoda.backends.torch_cuda.attention_backends import (
    flash_attn,
    flashinfer,
    flashinfer_mla,
    flashmla,
    torch_varlen,
)
from pagoda.backends.torch_cuda.attention_backends.protocol import (
    AttentionRequirements,
    LatentDecode,
    PrefillAttention,
    heads_key,
    load_table,
)
from pagoda.backends.torch_cuda.attention_backends.triton import TritonAttn, TritonMla
from pagoda.backends.torch_cuda.backend import LATENT_MODULES, PREFILL_MODULES, load_kernels
from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.common.config.groups.attention import AUTO, KERNELS
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import Indexer, LatentAttention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope

SPEC = tiny_spec()
TOKENS = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 11, 4, 50, 61, 72, 1, 90, 6, 13, 15, 44, 27]
"""Their first half ends with a page."""
H200 = Device(torch.device("cuda", 0), CHIPS["sm_90"], "NVIDIA H200")
B200 = replace(H200, chip=CHIPS["sm_100"], name="B200")
NEEDS = AttentionRequirements(SPEC.mixers, (), torch.bfloat16, torch.bfloat16, 256, H200)


def check(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lens: Tensor, table: Tensor) -> None:
    """What both libraries are documented to want of a paged cache."""
    heads, dim = q.shape[1:]
    assert k.shape == v.shape
    assert heads % k.shape[2] == 0
    assert k.shape[3] == dim
    assert k.stride(-1) == v.stride(-1) == q.stride(-1) == 1
    assert starts.shape == (len(lens) + 1,)
    assert table.shape[0] == len(lens)
    assert {x.dtype for x in (starts, lens, table)} == {torch.int32}
    assert starts[0] == 0


def varlen() -> ModuleType:
    """Return torch's kernels for sequences of several lengths: importing them takes a second."""
    return importlib.import_module("torch.nn.attention.varlen")


def stand_in_varlen(*args: Any, **more: Any) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn, which has no kernel for a CPU."""
    bound = inspect.signature(varlen().varlen_attn).bind(*args, **more)
    a = bound.arguments
    check(a["query"], a["key"], a["value"], a["cu_seq_q"], a["seqused_k"], a["block_table"])
    assert a["cu_seq_k"].tolist() == [0, *a["seqused_k"].cumsum(0).tolist()]
    assert a["cu_seq_k"].dtype == torch.int32
    assert a["max_q"] >= a["cu_seq_q"].diff().max()
    assert a["max_k"] >= a["seqused_k"].max()
    assert (a["window_size"], a["num_splits"]) == ((-1, 0), 1)
    assert a["enable_gqa"] == (a["query"].shape[1] != a["key"].shape[2])
    return paged(*(a[name] for name in ("query", "key", "value", "cu_seq_q", "seqused_k", "block_table")), a["scale"])


def stand_in_flash(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
) -> Tensor:
    """flash_attn_interface.flash_attn_with_kvcache, by the names of its arguments that are used."""
    check(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table)
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert (causal, window_size, num_splits) == (True, (-1, 0), 1)
    return paged(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, softcap)


def stand_in_flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
) -> Tensor:
    """The same function for sequences of as many tokens each: q [S, Q, N, H]."""
    seqs, length = q.shape[:2]
    starts = torch.arange(0, seqs * length + 1, length, dtype=torch.int32)
    check(q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, page_table)
    assert (causal, window_size, num_splits) == (True, (-1, 0), 0)
    assert cache_seqlens.min() > 0
    flat = paged(q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, page_table, softmax_scale, softcap)
    return flat.unflatten(0, (seqs, length))


class StandInFlashInfer:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper for pages [K, B, H]: `plan` once a step, `run` for each layer."""

    planned = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        starts = paged_kv_indptr.tolist()
        assert causal
        assert starts[0] == 0
        assert starts[-1] == len(paged_kv_indices)
        pages = paged_kv_indptr.diff()
        lens = (pages - 1).clamp_min(0) * page_size + paged_kv_last_page_len
        table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for s, (begin, end) in enumerate(pairwise(starts)):
            table[s, : end - begin] = paged_kv_indices[begin:end]
        self.shapes = (num_qo_heads, head_dim_qk), (num_kv_heads, page_size, head_dim_qk), q_data_type, kv_data_type
        self.arrays, self.rules = (qo_indptr, lens.int(), table), (sm_scale, logits_soft_cap or 0.0)
        StandInFlashInfer.planned += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert self.shapes == (q.shape[1:], keys.shape[1:], q.dtype, keys.dtype)
        assert keys.shape == values.shape
        assert len(q) == self.arrays[0][-1]
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        check(q, k, v, *self.arrays)
        return paged(q, k, v, *self.arrays, *self.rules)


class StandInFlashMla:
    """Package flash_mla: a schedule per step, filled by its first call and good for the same lengths alone."""

    def __init__(self) -> None:
        self.schedules = 0

    def get_mla_metadata(self) -> tuple[dict[str, list[int]], None]:
        self.schedules += 1
        return {}, None

    @staticmethod
    def flash_mla_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: dict[str, list[int]],
        *,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        assert k_cache.shape[2] == 1
        assert tile_scheduler_metadata.setdefault("lens", cache_seqlens.tolist()) == cache_seqlens.tolist()
        assert causal
        out = latents_of(q, k_cache[:, :, 0], block_table, cache_seqlens, head_dim_v, softmax_scale)
        return out, out.new_empty(0)


def stand_in_trtllm(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float,
) -> Tensor:
    """flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla, by the names of its arguments that are used."""
    assert kv_cache.shape[1] == 1
    assert query.shape[3] == kv_cache.shape[3] == kv_lora_rank + qk_rope_head_dim
    assert qk_nope_head_dim == MLA[0].nope_dim
    assert workspace_buffer.dtype == torch.uint8
    assert block_tables.shape[1] * kv_cache.shape[2] % 128 == 0
    assert max_seq_len == block_tables.shape[1] * kv_cache.shape[2] >= seq_lens.max()
    return latents_of(query, kv_cache[:, 0], block_tables, seq_lens, kv_lora_rank, bmm1_scale)


def latents_of(q: Tensor, cache: Tensor, tables: Tensor, lens: Tensor, rank: int, scale: float) -> Tensor:
    """Causal attention [S, Q, N, R] of q [S, Q, N, R+D], aligned to the last key, over pages [P, B, R+D]."""
    assert len(q) == len(tables) == len(lens)
    assert tables.dtype == lens.dtype == torch.int32
    assert lens.min() > 0
    out = torch.full_like(q[..., :rank], float("nan"))
    for s, length in enumerate(lens.tolist()):
        keys = torch.stack([cache[tables[s, at // cache.shape[1]], at % cache.shape[1]] for at in range(length)])
        for j in range(q.shape[1]):
            seen = keys[: length - (q.shape[1] - 1 - j)]
            out[s, j] = (q[s, j] @ seen.T * scale).softmax(-1) @ seen[:, :rank]
    return out


KINDS: dict[str, PrefillAttention] = {
    "TORCH_VARLEN": torch_varlen.TorchVarlen(stand_in_varlen),
    "FLASH_ATTN": flash_attn.FlashAttn(stand_in_flash),
    "FLASHINFER": flashinfer.FlashInfer(StandInFlashInfer),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_decoder_computes_the_same(name: str) -> None:
    """Two sequences, prefilled in chunks beside decodes of one of them, scattered pages, padding, unused memory NaN."""
    spec = SPEC if name == "TORCH_VARLEN" else tiny_spec(softcap=0.05)
    own, other = (TorchCudaModel(spec, random_weights(spec), 32) for _ in range(2))
    calls = []
    for layer in other.decoder.stack.layers:
        layer.mixers[0].prefill = lambda *args: (calls.append(args[1].num_decodes), KINDS[name](*args))
    torch.testing.assert_close(other.logits(TOKENS), own.logits(TOKENS), atol=2e-5, rtol=0)
    assert {0, 1} <= set(calls), "with decodes before it and without"
    if name == "FLASHINFER":
        assert StandInFlashInfer.planned == len(calls) / len(spec.layers), "once a step"


def test_decodes_by_flash_attention_compute_the_same() -> None:
    """Those of pure and mixed steps; padding reads the null block, whose memory is not NaN in an engine."""
    spec = tiny_spec(softcap=0.05)
    own, other = (TorchCudaModel(spec, random_weights(spec), 32) for _ in range(2))
    flash, steps = flash_attn.FlashAttn(stand_in_flash_decode), []
    for layer in other.decoder.stack.layers:
        layer.mixers[0].decode = lambda *args: (steps.append(args[1]), flash.decode(*args))[1]
    torch.testing.assert_close(other.logits(TOKENS), own.logits(TOKENS), atol=2e-5, rtol=0)
    assert {0, 1} == {int(step.tiles is None) for step in steps}, "with prefills beside them and without"


MLA = (LatentAttention(4, None, 20, 10, 6, 0.3, Rope(1e4, 8, interleaved=True), Norm(1e-5)),)
DEEPSEEK = tuple(replace(mixer, latent_dim=512, nope_dim=128, rope=replace(mixer.rope, dim=64)) for mixer in MLA)


@pytest.mark.parametrize("name", ["FLASHMLA", "FLASHINFER_MLA"])
def test_latent_decodes_compute_the_same(name: str) -> None:
    """As above, of a model with latent attention: the decodes of pure and mixed steps."""
    layer = replace(SPEC.layers[0], mixers=MLA)
    spec = replace(SPEC, layers=(layer, layer))
    package, workspace = StandInFlashMla(), torch.zeros(1, dtype=torch.uint8)
    shared: LatentDecode = (
        flashmla.FlashMla(package) if name == "FLASHMLA" else flashinfer_mla.FlashInferMla(stand_in_trtllm, workspace)
    )
    own, other = (TorchCudaModel(spec, random_weights(spec), 32) for _ in range(2))
    steps = []
    for layer in other.decoder.stack.layers:
        layer.mixers[0].decode = lambda *args: (steps.append(args[2]), shared(*args))[1]
    torch.testing.assert_close(other.logits(TOKENS), own.logits(TOKENS), atol=2e-5, rtol=0)
    assert {0, 1} == {int(step.tiles is None) for step in steps}, "with prefills beside them and without"
    if name == "FLASHMLA":
        assert package.schedules == len({id(step) for step in steps}) == len(steps) / len(spec.layers), "once a step"


def test_installed_packages_of_latent_attention_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = replace(NEEDS, mixers=(), latents=DEEPSEEK, page=64)
    package = ModuleType("flash_mla")
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    kernels = load_kernels("FLASHMLA", needs)
    assert kernels.latent_decode.package is package
    assert isinstance(kernels.prefill, TritonAttn)
    for module in ("flashinfer", "flashinfer.mla"):
        monkeypatch.setitem(sys.modules, module, package)
    package.trtllm_batch_decode_with_kv_cache_mla = stand_in_trtllm
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: (size, dtype, device))
    kernel = load_kernels("FLASHINFER_MLA", replace(needs, device=B200)).latent_decode
    assert (kernel.decode, kernel.workspace) == (stand_in_trtllm, (128 << 20, torch.uint8, H200.torch))


def test_every_name_of_the_flag_has_a_kernel() -> None:
    assert {*PREFILL_MODULES, *LATENT_MODULES} == {*KERNELS["torch_cuda"]}
    for name, latents in ((AUTO, ()), ("TRITON_ATTN", ()), (AUTO, MLA), ("TRITON_MLA", MLA)):
        kernels = load_kernels(name, replace(NEEDS, latents=latents, device=CPU, dtype=torch.float32))
        assert isinstance(kernels.prefill, TritonAttn)
        assert isinstance(kernels.latent_decode, TritonMla)


def test_installed_packages_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernels("TORCH_VARLEN", NEEDS).prefill.varlen_attn is varlen().varlen_attn
    package = ModuleType("flash_attn_interface")
    package.flash_attn_with_kvcache = stand_in_flash
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    kernels = load_kernels("FLASH_ATTN", NEEDS)
    assert kernels.prefill.with_kvcache is stand_in_flash
    assert kernels.decode == kernels.prefill.decode
    assert load_kernels("TORCH_VARLEN", NEEDS).decode is None
    wrappers = []
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = lambda *args: wrappers.append(args)
    package.BatchDecodeWithPagedKVCacheWrapper = stand_in_flash
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: (size, dtype, device))
    kernels = load_kernels("FLASHINFER", replace(NEEDS, mixers=DIM_64))
    kernels.prefill.make_wrapper()
    workspace = 128 << 20, torch.uint8, H200.torch
    assert wrappers == [(workspace, "HND")]
    assert kernels.planned is kernels.decode is kernels.prefill.decode
    assert (kernels.decode.make_wrapper, kernels.decode.workspace) == (stand_in_flash, workspace)
    assert load_kernels("FLASHINFER", replace(NEEDS, mixers=DIM_64, drafts=True)).decode is None


DIM_64 = tuple(replace(mixer, head_dim=64) for mixer in NEEDS.mixers)
SOFT = tuple({layer.attention for layer in tiny_spec(softcap=2.0).layers})
WINDOW = tuple({layer.attention for layer in tiny_spec(window=6).layers})
SINKS = tuple(replace(mixer, sinks=True) for mixer in NEEDS.mixers)
SLOPES = tuple(replace(mixer, alibi_slopes=(0.5,) * mixer.heads) for mixer in NEEDS.mixers)
CHUNKS = tuple(replace(mixer, chunk=6) for mixer in NEEDS.mixers)
NARROW = tuple(replace(mixer, nope_dim=192) for mixer in DEEPSEEK)
SELECTING = tuple(replace(mixer, query_rank=8, indexer=Indexer(2, 16, 4, mixer.rope, mixer.norm)) for mixer in DEEPSEEK)
WIDE = tuple(replace(mixer, head_dim=512) for mixer in NEEDS.mixers)


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("TORCH_VARLEN", {"device": CPU}, "--attention-backend: TORCH_VARLEN needs a GPU; use auto, or drop the flag"),
        ("FLASH_ATTN", {"device": CPU}, "--attention-backend: FLASH_ATTN needs a GPU; use auto, or drop the flag"),
        ("TORCH_VARLEN", {"dtype": torch.float32}, "not in float32"),
        (
            "FLASH_ATTN",
            {"kv_dtype": torch.float8_e4m3fn},
            r"does not support a float8_e4m3fn cache \(--kv-cache-dtype\)",
        ),
        ("TORCH_VARLEN", {"mixers": SOFT}, "does not support the logit soft cap"),
        ("FLASH_ATTN", {"mixers": WINDOW}, "sliding windows of this model"),
        ("TORCH_VARLEN", {"mixers": WINDOW}, "sliding windows of this model"),
        ("FLASH_ATTN", {"mixers": CHUNKS}, "does not attend in chunks"),
        ("FLASHINFER", {"mixers": CHUNKS}, "does not attend in chunks"),
        ("FLASH_ATTN", {"mixers": SINKS}, "attention sinks of this model"),
        ("FLASHINFER", {"mixers": SINKS}, "attention sinks of this model"),
        ("TORCH_VARLEN", {"mixers": SLOPES}, "ALiBi slopes of this model"),
        ("TORCH_VARLEN", {"mixers": WIDE}, "heads of up to 256 channels, this model's have 512"),
        ("TORCH_VARLEN", {"page": 16}, "--block-size: TORCH_VARLEN reads pages of 256 tokens, not 16; use --block-"),
        ("FLASH_ATTN", {"device": B200}, "Hopper GPUs, this is B200"),
        ("FLASHINFER", {"device": CPU}, "--attention-backend: FLASHINFER needs a GPU; use auto, or drop the flag"),
        ("FLASHINFER", {}, "heads of 64, 128, 256 channels, this model's have "),
        ("FLASHINFER", {"mixers": DIM_64}, "needs the package flashinfer: pip install flashinfer-python"),
        ("FLASH_ATTN", {}, "needs the package flash_attn_interface: build it"),
        ("FLASH_ATTN", {"latents": DEEPSEEK}, "FLASH_ATTN cannot compute latent attention; use auto, or drop the flag"),
        ("TRITON_MLA", {}, "TRITON_MLA computes latent attention, which this model does not have; use auto"),
        ("FLASHMLA", {}, "FLASHMLA computes latent attention, which this model does not have; use auto"),
        ("FLASHMLA", {"latents": DEEPSEEK, "device": CPU}, "FLASHMLA needs a GPU"),
        ("FLASHMLA", {"latents": DEEPSEEK, "dtype": torch.float32}, "bfloat16 and float16, not in float32"),
        ("FLASHMLA", {"latents": MLA}, r"latents of 512 \+ 64 channels, this model's have 20 \+ 8"),
        ("FLASHMLA", {"latents": SELECTING}, "the tokens that this model's indexer selects"),
        (
            "FLASHMLA",
            {"latents": DEEPSEEK},
            "--block-size: FLASHMLA reads pages of 64 tokens, not 256; use --block-size 64",
        ),
        ("FLASHMLA", {"latents": DEEPSEEK, "page": 64, "device": B200}, "Hopper GPUs, this is B200"),
        ("FLASHMLA", {"latents": DEEPSEEK, "page": 64}, "needs the package flash_mla: build it from"),
        ("FLASHINFER_MLA", {"latents": DEEPSEEK}, "pages of 32 or 64 tokens, not 256; use --block-size 64"),
        ("FLASHINFER_MLA", {"latents": DEEPSEEK, "page": 32}, "Blackwell GPUs, this is NVIDIA H200"),
        (
            "FLASHINFER_MLA",
            {"latents": DEEPSEEK, "page": 32, "device": B200, "dtype": torch.float16},
            "computes in bfloat16, not in float16",
        ),
        (
            "FLASHINFER_MLA",
            {"latents": NARROW, "page": 32, "device": B200},
            "keys of 128 channels without RoPE, this model's have 192",
        ),
        ("FLASHINFER_MLA", {"latents": DEEPSEEK, "page": 32, "device": B200}, "needs the package flashinfer"),
    ],
)
def test_unsupported_needs_are_refused(name: str, change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as error:
        load_kernels(name, replace(NEEDS, **change))
    assert "\n" not in str(error.value)


def test_a_torch_without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen(), "varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: query)
    with pytest.raises(ConfigError, match=r"TORCH_VARLEN needs torch 2.12 or later, this is "):
        load_kernels("TORCH_VARLEN", NEEDS)


MEASURED = {"sm_90": {heads_key(SPEC.mixers[0].head_dim, 2, torch.bfloat16): {"decode": "FLASH_ATTN"}}}


@pytest.mark.setting("--attention-backend")
def test_auto_takes_what_was_measured_on_the_chip_for_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "load_table", lambda: MEASURED)
    package = ModuleType("flash_attn_interface")
    package.flash_attn_with_kvcache = stand_in_flash
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    kernels = load_kernels(AUTO, NEEDS)
    assert isinstance(kernels.prefill, TritonAttn)
    assert kernels.decode.__self__.with_kvcache is stand_in_flash
    others = (
        replace(NEEDS, device=B200),
        replace(NEEDS, kv_dtype=torch.float8_e4m3fn),
        replace(NEEDS, dtype=torch.float16, kv_dtype=torch.float16),
        replace(NEEDS, mixers=(*NEEDS.mixers, replace(NEEDS.mixers[0], head_dim=64))),
    )
    assert [load_kernels(AUTO, other).decode for other in others] == [None] * 4
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    assert load_kernels(AUTO, NEEDS).decode is None, "not installed"


@pytest.mark.parametrize("drafts", [False, True])
def test_auto_takes_flashinfer_for_decodes_without_drafts(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = replace(NEEDS, mixers=DIM_64, drafts=drafts)
    heads = heads_key(64, 2, torch.bfloat16)
    table = {"sm_90": {heads: {"decode": "FLASHINFER", "prefill": "FLASHINFER"}}}
    monkeypatch.setattr(backend, "load_table", lambda: table)
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = package.BatchDecodeWithPagedKVCacheWrapper = stand_in_flash
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: (size, dtype, device))
    kernels = load_kernels(AUTO, needs)
    assert isinstance(kernels.prefill, flashinfer.FlashInfer)
    assert kernels.planned is kernels.decode is kernels.prefill.decode, "one workspace"
    assert (kernels.decode is None) == drafts


def test_the_table_names_backends() -> None:
    names = {name for heads in load_table().values() for kinds in heads.values() for name in kinds.values()}
    assert names <= PREFILL_MODULES.keys()
