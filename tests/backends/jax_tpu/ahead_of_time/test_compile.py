"""Step programs compiled ahead of time for TPUs: memory, cycles and roofline."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from operator import mul

import pytest

pytest.importorskip("flax")

import support.devices.jax_devices  # noqa: F401
from jax.experimental import topologies
from support.checkpoints.real_models import REAL
from support.engines.reference_driver import tiny_spec
from support.servers.hub_configs import GENERATORS

from pagoda.backends.jax_tpu.ahead_of_time.compile import compile_programs, find_target, model_for
from pagoda.backends.jax_tpu.ahead_of_time.report import CompiledProgram, Report, legend, times_of
from pagoda.backends.jax_tpu.ahead_of_time.schedule import Awaited, Begun, Exchange, exposed_seconds, read_schedule
from pagoda.backends.jax_tpu.ahead_of_time.topology import Target
from pagoda.backends.jax_tpu.execution.logit_programs import AdjustLogits, MaskLogits, PenaliseLogits, Sample
from pagoda.backends.jax_tpu.execution.program_sets import StepProgramSet
from pagoda.backends.jax_tpu.execution.shapes import check_tables, step_shapes
from pagoda.backends.jax_tpu.execution.step_programs import Forward, WriteAdapter
from pagoda.backends.jax_tpu.memory.plan import GIB, Budget, activation_bytes, plan_blocks, weight_bytes, with_devices
from pagoda.backends.jax_tpu.model.mixers.ops import BatchLoad
from pagoda.backends.jax_tpu.model.model import Model
from pagoda.backends.jax_tpu.model.parameters import LoraForm
from pagoda.backends.jax_tpu.model.roofline import full_step
from pagoda.common.config.engine import Limits
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.shapes import StepShape, StepShapes
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import GatedDelta
from pagoda.common.models.primitives import Norm
from pagoda.common.models.registry import spec_from_config
from pagoda.kernels_pallas.chips import CHIPS
from pagoda.kernels_pallas.ragged_paged_attention import plan

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu has the compiler")

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN_32B = {
    **LLAMA_8B,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "attention_bias": False,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
"""Shaped like DeepSeek-V3: latents, a dense layer, experts in groups."""
LIMITS = Limits(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=256, block_size=128)
BLOCKS = 600  # per device that shares the model: 10 GiB of cache on each
DECODE, MIXED = StepShape(8, 8, 8, 1, True), StepShape(128, 8, 8, 1, False)


def model_on(target: Target, config: dict, tensor: int) -> Model:
    spec, _ = spec_from_config(config)
    return model_for(target, spec, LIMITS, kv_layout(spec, 128), "bfloat16", tensor)


@cache
def compiled(topology: str, tensor: int, shape: StepShape) -> tuple[Target, StepProgramSet, CompiledProgram]:
    target = find_target(topology)
    model = model_on(target, LLAMA_8B, tensor)
    program_set = StepProgramSet(model, StepShapes.of(LIMITS, 1), (BLOCKS * tensor,), LIMITS.max_num_seqs)
    return target, program_set, compile_programs(program_set, [Forward(shape)])[0]


SHORT = [
    ("v6e:1x1", 1, DECODE),
    ("v5e:2x2", 4, DECODE),
    pytest.param("v7x:2x2x1", 1, DECODE, marks=pytest.mark.slow_matrix),
    pytest.param("v5p:2x2x1", 1, DECODE, marks=pytest.mark.slow_matrix),
]
MATRIX = [
    (name, tensor, shape)
    for name, tensor in (
        ("v6e:1x1", 1),
        ("v6e:2x4", 8),
        ("v5e:2x2", 4),
        ("v5p:2x2x1", 1),
        ("v5p:2x2x1", 4),
        ("v7x:2x2x1", 8),
    )
    for shape in (DECODE, MIXED, StepShape(64, 64, 8, 1, True), StepShape(2048, 256, 64, 1, False))
]


def check_step(topology: str, tensor: int, shape: StepShape) -> None:
    target, program_set, program = compiled(topology, tensor, shape)
    (cache_bytes,) = map(mul, program_set.num_blocks, program_set.model.block_bytes)
    layers = len(program_set.model.spec.layers)
    memory = program.executable.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert program.memory.temporary < cache_bytes / layers
    assert program.schedule is not None
    assert target.chip is not None
    assert 0 < program.schedule.vmem <= target.chip.vmem_bytes
    assert program.schedule.kernels == Counter(
        {f"ragged_paged_attention_{kind}": 32 for kind in (("decode",) if shape.decode_only else ("decode", "mixed"))}
    )
    assert not program.schedule.unknown
    assert bool(program.schedule.exchanges) == (tensor > 1)


@needs_libtpu
@pytest.mark.parametrize(("topology", "tensor", "shape"), SHORT)
def test_a_step_updates_the_cache_in_place(topology: str, tensor: int, shape: StepShape) -> None:
    check_step(topology, tensor, shape)


@needs_libtpu
def test_weights_arrive_at_four_fifths_of_the_bandwidth() -> None:
    target, _, program = compiled("v6e:1x1", 1, DECODE)
    assert target.chip is not None
    assert program.schedule is not None
    assert program.cost.bytes / target.chip.hbm_bandwidth > 0.8 * program.schedule.cycles / target.chip.clock_hz


@needs_libtpu
@pytest.mark.tpu_matrix
@pytest.mark.parametrize(("topology", "tensor", "shape"), MATRIX)
def test_every_step_updates_the_cache_in_place(topology: str, tensor: int, shape: StepShape) -> None:
    check_step(topology, tensor, shape)


@needs_libtpu
@pytest.mark.tpu_matrix
@pytest.mark.parametrize(("topology", "tensor"), [("v6e:1x1", 1), ("v5e:2x2", 4)])
def test_adapters_of_experts_and_latents_are_not_copied(topology: str, tensor: int) -> None:
    """The slots of all experts, of several layers, are read where they lie, whole or fully sharded."""
    spec, _ = spec_from_config(LATENT)
    lora = LoraForm(8, 16, "bfloat16", fully_sharded=tensor > 1)
    model = model_for(find_target(topology), spec, LIMITS, kv_layout(spec, 128), "bfloat16", tensor, lora=lora)
    groups, blocks = len(model.layout.groups), (BLOCKS * tensor,) * len(model.layout.pools)
    shapes = StepShapes.of(replace(LIMITS, max_loras=8), groups)
    program_set = StepProgramSet(model, shapes, blocks, LIMITS.max_num_seqs)
    keys = [Forward(replace(DECODE, groups=groups, adapted=True)), WriteAdapter()]
    step, write = compile_programs(program_set, keys)
    assert step.memory.temporary < model.adapter_bytes / 2
    assert write.executable.memory_analysis().alias_size_in_bytes >= model.adapter_bytes
    assert step.schedule is not None
    assert step.schedule.kernels["grouped_matmul"] >= 2 + 5, "the experts' two products, and those of their adapters"


def check_latents(topology: str, tensor: int, decode_only: bool) -> None:
    """All arrays of the cache are updated in place, by kernels, and no step holds a copy of one."""
    model = model_on(find_target(topology), LATENT, tensor)
    groups, blocks = len(model.layout.groups), (BLOCKS * tensor,) * len(model.layout.pools)
    shape = replace(DECODE if decode_only else StepShape(256, 8, 8, 1, False), groups=groups)
    program_set = StepProgramSet(model, StepShapes.of(LIMITS, groups), blocks, LIMITS.max_num_seqs)
    (program,) = compile_programs(program_set, [Forward(shape)])
    memory, schedule = program.executable.memory_analysis(), program.schedule
    assert memory.alias_size_in_bytes >= sum(map(mul, blocks, model.block_bytes))
    assert program.memory.temporary < min(map(mul, model.block_bytes, blocks)) // max(model.cache_index.depths)
    assert schedule is not None
    kernels = {"ragged_paged_attention_decode", "grouped_matmul", "latent_partners"}
    if not decode_only:
        kernels |= {"ragged_paged_attention_mixed", "latent_write"}
    assert set(schedule.kernels) >= kernels


@needs_libtpu
def test_latents_are_updated_in_place() -> None:
    check_latents("v6e:2x4", 8, decode_only=True)


@needs_libtpu
@pytest.mark.tpu_matrix
@pytest.mark.parametrize("decode_only", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize(("topology", "tensor"), [("v6e:2x4", 8), ("v5e:2x4", 8), ("v5p:2x2x1", 4), ("v6e:1x1", 1)])
def test_latents_are_updated_in_place_on_every_chip(topology: str, tensor: int, decode_only: bool) -> None:
    check_latents(topology, tensor, decode_only)


@needs_libtpu
def test_recurrent_state_and_the_inputs_of_drafts_are_updated_in_place() -> None:
    """However many blocks there are, XLA copies none of the arrays, to change its layout."""
    delta = GatedDelta(key_heads=2, value_heads=4, key_dim=128, value_dim=128, taps=4, norm=Norm(1e-6))
    layer = replace(tiny_spec().layers[0], mixers=(delta,))
    spec = replace(tiny_spec(), width=256, layers=(layer, layer))
    limits = replace(LIMITS, max_model_len=1024, max_num_batched_tokens=128, max_num_seqs=8, max_drafts=3)
    model = model_for(find_target("v6e:1x1"), spec, limits, kv_layout(spec, 128, drafts=3), "bfloat16", 1)
    shapes = step_shapes(model, limits, factor=2)
    program_set = StepProgramSet(model, shapes, (6001,), limits.max_num_seqs)
    key = next(Forward(shape) for shape in shapes if shape.width > 1)
    (program,) = compile_programs(program_set, [key])
    assert program.executable.memory_analysis().alias_size_in_bytes >= 6001 * model.block_bytes[0]
    assert len(model.cache_blocks) == 3
    assert program.memory.temporary < 6001 * min(4 * block.size for block in model.cache_blocks)
    assert program.schedule is not None
    assert program.schedule.kernels["gated_delta_mixed"] == 2 * 2, "in each layer also for the drafts"


@needs_libtpu
@pytest.mark.parametrize(
    ("config", "topology", "tensor", "gib"),
    [(LLAMA_8B, "v6e:1x1", 1, 14.96), (LLAMA_70B, "v6e:2x4", 8, 16.43), (QWEN_32B, "v5p:2x2x1", 4, 15.26)],
)
def test_models_that_fit(config: dict, topology: str, tensor: int, gib: float) -> None:
    target = find_target(topology)
    model = model_on(target, config, tensor)
    assert weight_bytes(model) / GIB == pytest.approx(gib, abs=0.02)
    blocks = plan_blocks(model, target, LIMITS, CacheConfig(), stated=True)
    assert weight_bytes(model) + sum(map(mul, blocks, model.block_bytes)) < 0.99 * target.hbm_bytes


@needs_libtpu
def test_blocks_that_no_running_request_needs_cache_prefixes() -> None:
    target = find_target("v6e:1x1")
    model, few = model_on(target, LLAMA_8B, 1), replace(LIMITS, max_num_seqs=1)
    blocks = plan_blocks(model, target, few, CacheConfig(), stated=True)
    assert blocks >= plan_blocks(model, target, LIMITS, CacheConfig(), stated=True)
    assert blocks[0] > 1 + few.max_model_len // few.block_size


def test_a_cpu_has_no_more_blocks_than_requests_need() -> None:
    target, few = find_target("cpu:1"), replace(LIMITS, max_num_seqs=2)
    model = model_on(target, LLAMA_8B | {"num_hidden_layers": 1}, 1)
    needed = 1 + 2 * -(-few.max_model_len // few.block_size)
    assert plan_blocks(model, target, few, CacheConfig(), stated=True) == (needed,)


@needs_libtpu
def test_a_model_that_does_not_fit_names_remedies() -> None:
    target = find_target("v6e:2x2")
    with pytest.raises(ConfigError, match=r"lacks [\d.]+ GiB per device: .* use --tensor-parallel-size 8 and a"):
        plan_blocks(model_on(target, LLAMA_70B, 4), target, LIMITS, CacheConfig(), stated=True)
    target = find_target("v6e:1x1")
    long = replace(LIMITS, max_model_len=131072)
    with pytest.raises(ConfigError, match=r"use --max-model-len \d+ or --tensor-parallel-size 2") as error:
        plan_blocks(model_on(target, LLAMA_8B, 1), target, long, CacheConfig(), stated=True)
    fits = int(str(error.value).split("--max-model-len ")[1].split()[0])
    shorter = replace(long, max_model_len=fits)
    assert plan_blocks(model_on(target, LLAMA_8B, 1), target, shorter, CacheConfig(), stated=True) > (fits // 128,)


def test_block_tables_beyond_scalar_memory() -> None:
    long = replace(LIMITS, max_model_len=131072)
    with pytest.raises(ConfigError, match=r"--block-size: with 128 .* use --block-size 256, or --max-num-seqs 128"):
        check_tables(long)
    check_tables(replace(long, block_size=256))
    check_tables(replace(long, max_num_seqs=128))


@needs_libtpu
def test_a_topology_that_libtpu_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"libtpu does not know v6e:3x3 .*; use one of v5e:1x1") as error:
        find_target("v6e:3x3")
    assert "\n" not in str(error.value)
    assert find_target("v5e:1x1").hbm_bytes == int(15.75 * GIB)


@needs_libtpu
@pytest.mark.parametrize("name", ["v5e:1x1", "v6e:1x1", "v5p:1x1x1", "v7x:1x1x1"])
def test_one_chip_is_a_separate_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The libtpu that jax 0.10 names divides any layout into hosts of 2x2 chips by default; newer ones do not."""
    bounds: list[object] = []
    describe = topologies.get_topology_desc

    def watched(**options: object) -> object:
        bounds.append(options.get("chips_per_host_bounds"))
        return describe(**options)

    monkeypatch.setattr(topologies, "get_topology_desc", watched)
    assert len({device.process_index for device in find_target(name).devices}) == 1
    assert bounds == [(1, 1, 1)]


def test_roofline_cost_of_a_step() -> None:
    model = model_on(find_target("cpu"), LLAMA_8B, 1)
    shape = StepShape(64, 64, 8, 1, True)
    needed = Forward(shape).cost(model, BatchLoad(64 * 1024, 64 * 1024))
    chip = CHIPS["v6e"]
    layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    assert needed.flops == pytest.approx(2 * 64 * (layers + 128256 * 4096), rel=1e-3)
    assert needed.bytes == pytest.approx(2 * (layers + 128256 * 4096), rel=0.01)
    assert needed.kernel_bytes == pytest.approx(64 * 1025 * 131072, rel=0.01)
    assert needed.kernel_flops == 4 * 64 * 1024 * 4096 * 32
    assert needed.seconds(chip) == needed.memory_seconds(chip) == pytest.approx(0.0144, rel=0.02)
    half = Forward(shape).cost(with_devices(model, 2), BatchLoad(64 * 1024, 64 * 1024))
    assert half.kernel_bytes == needed.kernel_bytes // 2
    assert half.bytes == pytest.approx(needed.bytes / 2, rel=0.01)


def test_roofline_cost_of_experts() -> None:
    """Of the routed experts a token reads its chosen ones; of the shared one, the router and the gate all."""
    model = model_on(find_target("cpu"), GENERATORS["Qwen1.5-MoE-A2.7B"], 1)
    needed = Forward(StepShape(1, 1, 8, 1, True)).cost(model, BatchLoad(1, 1))
    layer = 4 * 2048 * 2048 + 3 * 2048 * (4 * 1408 + 5632) + 61 * 2048
    assert needed.flops == pytest.approx(2 * (2 * layer + 151936 * 2048), rel=1e-3)
    assert needed.bytes == pytest.approx(2 * (2 * layer + 151936 * 2048), rel=1e-3)


def test_roofline_cost_of_layers_of_two_halves() -> None:
    """A token runs through 8 of 12 chosen experts: a third of all return their input."""
    config = {**REAL["LongCat-Flash-Chat"].config, "num_layers": 2}
    needed = Forward(StepShape(1, 1, 8, 1, True)).cost(model_on(find_target("cpu"), config, 1), BatchLoad(1, 1))
    queries = 1536 * (6144 + 64 * 192)
    attention = queries + 6144 * 576 + 512 * 64 * 256 + 6144 * 64 * 128
    layer = 2 * (attention + 3 * 6144 * 12288) + 768 * 6144 + 8 * 3 * 6144 * 2048
    assert needed.flops == pytest.approx(2 * (2 * layer + 131072 * 6144), rel=1e-3)
    assert needed.bytes == pytest.approx(2 * (2 * layer + 131072 * 6144), rel=1e-3)


def test_activations_count_the_shared_expert() -> None:
    config = GENERATORS["Qwen1.5-MoE-A2.7B"]
    limits = Limits(max_model_len=64, max_num_batched_tokens=100, max_num_seqs=1, block_size=16)
    least, more = (
        activation_bytes(model_on(find_target("cpu"), {**config, "shared_expert_intermediate_size": width}, 1), limits)
        for width in (64, 5632)
    )
    assert more - least == 100 * 2 * (6 * 5632 - 8 * 2048)


def test_a_shared_block_is_stored_once_and_read_by_every_layer() -> None:
    config = {**GENERATORS["Zamba2-1.2B"], "num_hidden_layers": 3}
    once, twice = (
        model_on(find_target("cpu"), {**config, "layers_block_type": kinds}, 1)
        for kinds in (["mamba", "mamba", "hybrid"], ["mamba", "hybrid", "hybrid"])
    )
    block = 3 * 4096 * 4096 + 4096 * 2048 + 3 * 2048 * 8192
    own = 3 * 128 * 2 * 4096 + 128 * (2048 + 2 * 8192) + 2048 * 2048
    assert weight_bytes(twice) - weight_bytes(once) == 2 * own
    step, load = Forward(StepShape(1, 1, 8, 1, True)), BatchLoad(1, 1)
    more = step.cost(twice, load).bytes - step.cost(once, load).bytes
    assert more == pytest.approx(2 * (block + own), rel=1e-3)
    limits = Limits(max_model_len=64, max_num_batched_tokens=100, max_num_seqs=1, block_size=16)
    wide = model_on(find_target("cpu"), {**config, "layers_block_type": ["mamba"] * 2 + ["hybrid"]}, 1)
    narrow = model_on(find_target("cpu"), {**config, "layers_block_type": ["mamba"] * 3}, 1)
    assert activation_bytes(wide, limits) - activation_bytes(narrow, limits) == 100 * 2 * (6 * 8192 - 8 * 2048)


def test_a_full_batch_fills_its_shape() -> None:
    assert full_step(StepShape(8, 8, 4, 1, True), 16, 1000) == BatchLoad(512, 512)
    assert full_step(StepShape(8, 8, 4, 1, True), 16, 10) == BatchLoad(160, 160)
    assert full_step(StepShape(100, 8, 4, 1, False), 16, 1000) == BatchLoad(100, 64 * 65 // 2 + 36 * 37 // 2)


@needs_libtpu
def test_untuned_heads_of_attention_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    target = find_target("v6e:2x2")
    tuned = {"v6e/decode/bfloat16/2x4x128": {"tokens": 256}, "v6e/mixed/bfloat16/w128": {"heads": 8}}
    monkeypatch.setattr(plan, "_table", lambda: tuned)
    model = model_on(target, LLAMA_8B, 4)
    mixed = "v6e/mixed/bfloat16/2x4x128 (tuned for other heads of the same width)"
    assert model.untuned_attention == (mixed,)
    tuned["v6e/mixed/bfloat16/2x4x128"] = {}
    assert model.untuned_attention == ()
    assert model_on(target, LLAMA_8B, 2).untuned_attention[0] == "v6e/decode/bfloat16/4x4x128 (formula)"
    assert model_on(find_target("cpu"), LLAMA_8B, 1).untuned_attention == ()
    program_set = StepProgramSet(model, StepShapes.of(LIMITS, 1), (BLOCKS,), LIMITS.max_num_seqs)
    report = partial(Report, target, program_set, LIMITS, (), seconds=0, budget=None)
    assert not any("tpu-tune" in line for line in legend(report()))
    del tuned["v6e/mixed/bfloat16/2x4x128"]
    (line,) = [line for line in legend(report()) if "tpu-tune" in line]
    assert mixed in line


def test_budget_limits() -> None:
    sizes = {"history": 0, "temporaries": 20, "results": 0, "code": 10, "block": 10, "block_size": 16, "longest": 4096}
    budget = Budget(total=1000, usable=900, weights=500, kv_cache=200, page=20, state=0, **sizes)
    assert (budget.used, budget.spare, budget.max_blocks) == (730, 170, 37)
    assert budget.max_model_len == 18 * 16
    assert budget.max_num_seqs(64) == 360 // (20 * 4)
    with_state = replace(budget, state=30)
    assert with_state.max_model_len == 330 // 20 * 16
    assert with_state.max_num_seqs(64) == 360 // (30 + 20 * 4)
    states_only = replace(budget, page=0, state=30)
    assert (states_only.max_model_len, states_only.max_num_seqs(64)) == (4096, 360 // 30)


HLO = """HloModule jit_step, is_scheduled=true

%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %fusion.1 = f32[8] fusion(%p), calls=%f, backend_config={"estimated_cycles":"100"}
  %attend.7 = f32[8] custom-call(%fusion.1), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"cost_estimate":{"flops":"2000","transcendentals":"0","bytes_accessed":"64"}},\
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}]}
  %psum.3 = bf16[64,8192]{1,0:T(8,128)(2,1)S(1)} all-reduce(%attend.7), replica_groups={{0,1,2,3},{4,5,6,7}}
}

%condition.1 (p: (s32[], f32[8])) -> pred[] {
  %constant.5 = s32[]{:T(128)} constant(32)
  ROOT %lt = pred[] compare(%i, %constant.5), direction=LT
}

%body.2 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %row = f32[1,1024]{1,0:T(1,128)S(1)} fusion(%p), calls=%h, backend_config={"estimated_cycles":"10"}
  %dynamic-update-slice.8 = f32[256,1024]{1,0:T(8,128)} dynamic-update-slice(%p, %row, %i, %zero)
}

%condition.2 (p: (s32[], f32[8])) -> pred[] {
  %constant.6 = s32[]{:T(128)} constant(7)
  ROOT %lt.2 = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main.2 (x: f32[8]) -> f32[8] {
  %fusion.2 = f32[8] fusion(%x), calls=%g, backend_config={"estimated_cycles":"1000"}
  %start = (f32[8,64]{1,0}, f32[32,64]{1,0}) all-gather-start(%fusion.2), replica_groups=[2,4]<=[8], dimensions={0}
  %fusion.3 = f32[8] fusion(%x), calls=%g, backend_config={"estimated_cycles":"50"}
  %done = f32[32,64]{1,0} all-gather-done(%start)
  %while.1 = (s32[], f32[8]) while(%t), condition=%condition.1, body=%body.1
  %while.2 = (s32[], f32[8]) while(%t), condition=%condition.2, body=%body.2
  %gather_fusion = bf16[16,256]{1,0:T(8,128)(2,1)} fusion(%x, %ids), kind=kCustom, calls=%k
  %gather_fusion.1 = s32[40]{0:T(128)} fusion(%x, %ids), kind=kCustom, calls=%k
  ROOT %odd = f32[8] fusion(%w), calls=%l, backend_config={"estimated_cycles":"9223372036854775807"}
}
"""


def test_loops_count_as_often_as_they_run() -> None:
    schedule = read_schedule(HLO, data_trips=5)
    assert schedule.cycles == 1000 + 50 + 32 * 100 + 5 * 10
    assert schedule.kernels == {"attend": 32}
    assert (schedule.data_loops, schedule.unknown, schedule.vmem) == (1, 1, 4096)


def test_exchanges_kernels_and_moves_are_charged() -> None:
    schedule, chip = read_schedule(HLO, data_trips=5), CHIPS["v6e"]
    reduced, gathered = Exchange("all-reduce", 64 * 8192 * 2, 4), Exchange("all-gather", 32 * 64 * 4, 4)
    assert schedule.exchanges == {reduced: 32, gathered: 1}
    assert reduced.seconds(chip) == pytest.approx(0.75 * 2**20 / 9e10 + 6e-6)
    assert gathered.seconds(chip) == pytest.approx(0.75 * 8192 / 1.8e11 + 3e-6)
    exposed = 32 * reduced.seconds(chip) + gathered.seconds(chip) - 50 / chip.clock_hz
    assert schedule.exchange_seconds(chip) == pytest.approx(exposed)
    (call,) = schedule.kernel_calls
    assert (call.flops, call.bytes) == (2000, 64)
    assert (schedule.pieces, schedule.scalars) == (16 * 2 + 5 * 8, 40)


CHAINED = """HloModule jit_step, is_scheduled=true

%called (p: bf16[8,128,64]) -> bf16[1,128,64] {
  ROOT %rs = bf16[1,128,64]{2,1,0} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

%on_sparse_core (p: bf16[8,128,64]) -> bf16[1,128,64] {
  ROOT %r = bf16[1,128,64]{2,1,0} call(%p), to_apply=%called
}

%first (p: bf16[128,64]) -> bf16[1024,64] {
  %ag.1 = bf16[1024,64]{1,0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, frontend_attributes={chain_id="4"}
  ROOT %cc.1 = (bf16[128,64]) custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}

%between (p: bf16[128,64]) -> bf16[1024,64] {
  %ag.2 = bf16[1024,64]{1,0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, frontend_attributes={chain_id="4"}
  ROOT %product = bf16[8,8] convolution(%p, %ag.2)
}

%last (p: bf16[128,64]) -> bf16[1024,64] {
  %ag.3 = bf16[1024,64]{1,0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, frontend_attributes={chain_id="4"}
  ROOT %cc.2 = bf16[1024,64] custom-call(%ag.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main.1 (x: f32[8]) -> f32[8] {
  %sum = ((bf16[8,128,64]), bf16[1,128,64]) async-start(%x), async_execution_thread="sparsecore", calls=%on_sparse_core
  %start = (bf16[128,64]) fusion(%x), kind=kCustom, calls=%first
  %conv = (bf16[8,8], bf16[128,64]) fusion(%start), kind=kOutput, calls=%between, \
backend_config={"estimated_cycles":"20000"}
  %done = bf16[1024,64] fusion(%conv), kind=kCustom, calls=%last
  %summed = bf16[1,128,64] async-done(%sum)
  %alone = (bf16[8,8], bf16[128,64]) fusion(%x), kind=kOutput, calls=%lonely, backend_config={"estimated_cycles":"7"}
}
"""


def test_exchanges_hide_behind_what_is_computed_between_start_and_end() -> None:
    """A sum on the sparse core and a chain of fusions share the links: the chain ends after both."""
    chip = CHIPS["v6e"]
    schedule = read_schedule(CHAINED)
    summed, chain = Exchange("reduce-scatter", 1024 * 64 * 2, 8), Exchange("all-gather", 1024 * 64 * 2, 8)
    assert schedule.exchanges == {summed: 1, chain: 1}
    both = summed.seconds(chip) + chain.seconds(chip)
    assert both > 20000 / chip.clock_hz
    assert schedule.exchange_seconds(chip) == pytest.approx(both - 20000 / chip.clock_hz)


def test_what_computes_before_or_after_an_exchange_hides_nothing() -> None:
    chip, exchange = CHIPS["v6e"], Exchange("all-gather", 1 << 20, 8)
    whole = exchange.seconds(chip)
    assert exposed_seconds((Begun(10**9, exchange), Awaited(0, 0)), chip) == pytest.approx(whole)
    assert exposed_seconds((Begun(0, exchange), Awaited(10**9, 0)), chip) == 0
    one_after_the_other = (Begun(0, exchange), Begun(0, exchange), Awaited(0, 0), Awaited(10, 1))
    assert exposed_seconds(one_after_the_other, chip) == pytest.approx(2 * whole - 10 / chip.clock_hz)


@needs_libtpu
@pytest.mark.tpu_matrix
def test_products_hide_exchanges_of_pieces() -> None:
    target, _, program = compiled("v6e:2x4", 8, StepShape(2048, 8, 8, 1, False))
    schedule, chip = program.schedule, target.chip
    assert schedule is not None
    assert chip is not None
    all_of_them = sum(count * each.seconds(chip) for each, count in schedule.exchanges.items())
    assert {each.kind for each in schedule.exchanges} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert schedule.exchange_seconds(chip) < 0.75 * all_of_them


MOE = {**GENERATORS["Qwen1.5-MoE-A2.7B"], "num_hidden_layers": 2}


@needs_libtpu
@pytest.mark.tpu_matrix
@pytest.mark.parametrize("topology", ["v6e:1x1", "v5e:1x1"])
def test_no_step_is_faster_than_its_roofline(topology: str) -> None:
    """Of experts, of 256 rows with filters, and of penalties, which take half a millisecond at most."""
    target = find_target(topology)
    assert target.chip is not None
    for config, keys in (
        (MOE, [Forward(StepShape(64, 64, 8, 1, True))]),
        (LLAMA_8B, [Sample(256, "filtered"), PenaliseLogits(256)]),
    ):
        model = model_on(target, config, 1)
        program_set = StepProgramSet(model, StepShapes.of(LIMITS, 1), (BLOCKS,), LIMITS.max_num_seqs)
        for program in compile_programs(program_set, keys):
            times = times_of(program, target.chip)
            assert times is not None
            assert times.total >= program.cost.seconds(target.chip), program.key


@needs_libtpu
@pytest.mark.tpu_matrix
def test_penalties_of_256_rows_take_half_a_millisecond() -> None:
    """And masks of 256 rows, in place: no copy of the logits or of the counts."""
    target = find_target("v6e:1x1")
    assert target.chip is not None
    program_set = StepProgramSet(model_on(target, LLAMA_8B, 1), StepShapes.of(LIMITS, 1), (BLOCKS,), 256)
    logits = 256 * 128256 * 4
    for key in (PenaliseLogits(256), MaskLogits(256, rows=256), AdjustLogits(256)):
        (program,) = compile_programs(program_set, [key])
        times = times_of(program, target.chip)
        assert times is not None
        assert times.total <= 0.5e-3
        assert program.executable.memory_analysis().alias_size_in_bytes >= logits
        assert program.memory.temporary < logits / 16
