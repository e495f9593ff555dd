"""Step times by FLOP and bytes, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.checkpoints.real_models import REAL
from support.engines.simulated_engines import read_spec

from pagoda.backends.simulated.hardware import CHIPS, EFFICIENCY, find_chip
from pagoda.backends.simulated.roofline import AttentionSeconds, ExpertSeconds, ServedModel, hardware_model
from pagoda.backends.simulated.step_time import StepLoad
from pagoda.common.errors import ConfigError
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.weights.quantization.on_the_fly import schemes_on_the_fly
from pagoda.kernels_pallas import chips as kernel_chips

LLAMA = read_spec("llama-3.1-8b")
LAYER_WEIGHTS = 32 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
HEAD_WEIGHTS = 128256 * 4096
H100, GPU = CHIPS["h100"], EFFICIENCY["gpu"]


def decode(rows: int, context: int) -> StepLoad:
    return StepLoad(np.ones(rows, np.int64), np.full(rows, context, np.int64), rows)


def prompt(tokens: int, before: int = 0) -> StepLoad:
    return StepLoad(np.array([tokens]), np.array([before + tokens]), 1)


def test_a_decode_step_of_one_sequence_reads_every_weight() -> None:
    seconds = hardware_model(ServedModel(LLAMA), H100).seconds(decode(1, 1))
    reading = 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS) / (H100.bandwidth * GPU.weights)
    gaps = GPU.step_seconds + 32 * GPU.layer_seconds
    assert seconds == pytest.approx(reading + gaps, rel=0.001)


def test_a_long_prompt_computes() -> None:
    tokens = 8192
    seconds = hardware_model(ServedModel(LLAMA), H100).seconds(prompt(tokens))
    products = 2 * LAYER_WEIGHTS * tokens / (H100.bfloat16 * GPU.products)
    pairs = tokens * (tokens + 1) / 2
    attention = 32 * 4 * 4096 * pairs / (H100.bfloat16 * GPU.attention_products)
    head = 2 * HEAD_WEIGHTS / (H100.bandwidth * GPU.weights)
    gaps = GPU.step_seconds + 32 * GPU.layer_seconds
    assert seconds == pytest.approx(products + attention + head + gaps, rel=0.001)


def test_decodes_read_the_cache() -> None:
    model = hardware_model(ServedModel(LLAMA), H100)
    added = model.seconds(decode(8, 5000)) - model.seconds(decode(8, 1000))
    assert added == pytest.approx(8 * 4000 * 32 * 2 * 1024 * 2 / (H100.bandwidth * GPU.attention_memory), rel=0.001)
    eight_bits = hardware_model(ServedModel(LLAMA, kv_dtype_bytes=1), H100)
    halved = eight_bits.seconds(decode(8, 5000)) - eight_bits.seconds(decode(8, 1000))
    assert halved == pytest.approx(added / 2, rel=0.001)


def test_devices_share_weights_and_cache_and_exchange_activations() -> None:
    one, four = ServedModel(LLAMA), ServedModel(LLAMA, tensor_parallel=4)
    norms = sum(param.size for param in params(LLAMA).values() if len(param.shape) == 1)
    assert four.weight_bytes == pytest.approx((one.weight_bytes - 2 * norms) / 4 + 2 * norms, abs=8)
    model = hardware_model(four, H100)
    alone = replace(model, exchanged=0.0, exchanged_row=0.0)
    exchanged = model.seconds(prompt(1000)) - alone.seconds(prompt(1000))
    sent = 65 * 1000 * 2 * 4096 * 2 * 3 / 4 + 4 * 128256 * 3 / 4
    assert exchanged == pytest.approx(sent / (H100.link * GPU.links), rel=0.001)
    assert model.seconds(decode(64, 4000)) < hardware_model(one, H100).seconds(decode(64, 4000)) / 2.5


def test_more_devices_than_kv_heads_hold_copies_of_the_cache() -> None:
    def read(ranks: int) -> float:
        (attention,) = hardware_model(ServedModel(LLAMA, tensor_parallel=ranks), CHIPS["v6e"]).attention
        return attention.read

    assert read(8) == pytest.approx(read(1) / 8)
    assert read(16) == read(8)


def test_a_size_that_does_not_divide_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: 3 does not divide the model's 32 query heads"):
        ServedModel(LLAMA, tensor_parallel=3)
    with pytest.raises(ConfigError, match=r"at most 8 of h100"):
        hardware_model(ServedModel(LLAMA, tensor_parallel=16), H100)


def test_quantised_matrices_are_read_as_stored_and_multiplied_by_8_bit_units() -> None:
    of_fp8, of_int4 = (ServedModel(LLAMA, schemes=schemes_on_the_fly(each, params(LLAMA))) for each in ("fp8", "int4"))
    dense, fp8, int4 = (hardware_model(each, H100) for each in (ServedModel(LLAMA), of_fp8, of_int4))
    assert fp8.weights == pytest.approx(dense.weights / 2, rel=0.001)
    assert int4.weights == pytest.approx(dense.weights * 4.125 / 16, rel=0.001)
    assert fp8.token == pytest.approx(dense.token * H100.bfloat16 / (H100.float8 or 0), rel=0.001)
    assert int4.token == dense.token
    without_units = CHIPS["a100"]
    assert hardware_model(of_fp8, without_units).token == hardware_model(ServedModel(LLAMA), without_units).token


def test_expected_experts() -> None:
    experts = ExpertSeconds(experts=64, chosen=8, all=1.0)
    rng = np.random.default_rng(0)
    drawn = [len({each for _ in range(12) for each in rng.permutation(64)[:8]}) for _ in range(300)]
    assert experts.reading(12) == pytest.approx(np.mean(drawn) / 64, rel=0.01)
    assert experts.reading(1) == pytest.approx(8 / 64)


def test_a_mixture_reads_the_experts_it_chooses() -> None:
    moe = read_spec(
        "qwen3-8b",
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        norm_topk_prob=True,
    )
    model = hardware_model(ServedModel(moe), H100)
    (experts,) = model.experts
    weights = 36 * 64 * 3 * 4096 * 512
    assert experts.all == pytest.approx(2 * weights / (H100.bandwidth * GPU.weights))
    assert experts.token == pytest.approx(2 * weights / 8 / (H100.bfloat16 * GPU.products))


def test_experts_that_return_their_input_are_not_read() -> None:
    """In LongCat-Flash 12 of 768 are chosen, of which 512 have matrices; a layer has five sums over devices."""
    spec = spec_from_config(REAL["LongCat-Flash-Chat"].config)[0]
    model = hardware_model(ServedModel(spec, tensor_parallel=8), H100)
    (experts,) = model.experts
    assert (experts.experts, experts.chosen) == (512, 8.0)
    weights = 28 * 512 * 3 * 6144 * 2048
    assert 8 * experts.token == pytest.approx(2 * weights * 8 / 512 / (H100.bfloat16 * GPU.products))
    sent = model.exchanged * H100.link * GPU.links
    assert sent == pytest.approx((28 * 5 + 1) * 2 * 6144 * 2 * 7 / 8, rel=0.01)


@pytest.mark.parametrize(("before", "query"), [(0, 10), (0, 3), (2, 9), (20, 6)])
def test_queries_see_a_span(before: int, query: int) -> None:
    span = 5
    pairs = sum(min(position + 1, span) for position in range(before, before + query))
    attention = AttentionSeconds(span, prefill_pair=1.0)
    assert attention.prefill(np.array([query]), np.array([before + query])) == pairs
    read = AttentionSeconds(span, read=1.0)
    assert read.prefill(np.array([query]), np.array([before + query])) == min(before + query, span + query)
    assert read.decode(np.array([3, 50])) == 3 + span


def test_a_drafter_takes_time_for_each_guess() -> None:
    from pagoda.common.models.drafters import LanguageDrafter

    small = read_spec("llama-3.1-8b", num_hidden_layers=4)
    model = hardware_model(ServedModel(LLAMA), H100, drafter=LanguageDrafter(small))
    load = decode(8, 1000)
    one, three = (model.seconds(replace(load, num_guesses=8 * guesses)) for guesses in (1, 3))
    plain = hardware_model(ServedModel(LLAMA), H100).seconds(load)
    drafter = hardware_model(ServedModel(small), H100).seconds(load) - GPU.step_seconds
    assert one == pytest.approx(plain + drafter)
    assert three == pytest.approx(plain + 3 * drafter)


def test_chips_agree_with_those_that_kernels_are_compiled_for() -> None:
    for name, info in kernel_chips.CHIPS.items():
        chip = CHIPS[name]
        assert chip.bandwidth == pytest.approx(info.hbm_bandwidth * info.cores, rel=0.13 if name == "v5p" else 0.01)
        assert chip.bfloat16 == pytest.approx(info.peak_flops * info.cores, rel=0.01)
        assert chip.memory == pytest.approx(info.hbm_bytes * info.cores, rel=0.01)


def test_an_unknown_chip_is_refused() -> None:
    with pytest.raises(ConfigError, match="--hardware: v9 is unknown; use one of a100, h100, h200, b200, l4, v5e"):
        find_chip("v9")
