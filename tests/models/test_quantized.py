"""Quantised checkpoints in every implementation: the logits of the same values in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.cases import quantized_fixtures, tiny
from models.oracles.implementations import IMPLEMENTATIONS, Implementation
from safetensors.torch import load_file, save_file
from support.checkpoints.quantized_folder import MXFP4, compressed_tensors, fp8, write_mxfp4, write_quantized
from support.checkpoints.tiny_folder import write_model
from support.checkpoints.torchao_tiles import write_tiles
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda.backends.registry import load_schemes
from pagoda.common.backend import Weight
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.config.groups.model import RUNTIME_QUANTIZATIONS
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.quantization.config import parameter_schemes
from pagoda.common.weights.quantization.on_the_fly import METHODS, quantize_on_the_fly, scheme_of
from pagoda.common.weights.quantization.read import join_scales, read_quantization, without_quantization
from pagoda.common.weights.quantization.schemes import Float8, Int4, Scheme
from pagoda.common.weights.quantization.tensors import QuantizedTensor
from pagoda.common.weights.rules import apply_rules, sources
from pagoda.common.weights.sharded import read_manifest
from pagoda.server.cli import main
from pagoda.server.llm import LLM
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import resolve

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """How a model is quantised. `kept`: pattern of matrices that stay dense."""

    config: dict[str, Any]
    group: str
    model: tiny.Tiny = tiny.Tiny("llama", "LlamaForCausalLM")
    kept: str = "lm_head"


MIXTRAL = tiny.Tiny("mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2})
GPT_OSS = replace(tiny.GPT_OSS, extra={**tiny.GPT_OSS.extra, "intermediate_size": 64})
PHI3 = tiny.Tiny("phi3", "Phi3ForCausalLM", {"pad_token_id": 0})
IGNORED = ["lm_head", r"re:.*layers\.0\.self_attn\.[qo]_proj", "model.layers.1.mlp.down_proj"]
CASES = {
    "channel": Case(compressed_tensors(), "channel"),
    "tensor": Case(compressed_tensors(strategy="tensor"), "tensor"),
    "int8": Case(compressed_tensors("int"), "channel"),
    "head": Case(compressed_tensors(ignore=[]), "channel", kept="nothing"),
    "ignored": Case(
        compressed_tensors(ignore=IGNORED), "channel", kept=r"lm_head|0\.self_attn\.[qo]_proj|1\.mlp\.down"
    ),
    "fused": Case(compressed_tensors(), "channel", PHI3),
    "fused-block": Case(fp8(True), "block", PHI3),
    "fp8": Case(fp8(), "tensor"),
    "fp8-block": Case(fp8(True), "block"),
    "experts": Case(compressed_tensors(ignore=["lm_head", "re:.*gate$"]), "channel", MIXTRAL),
    "experts-block": Case(fp8(True), "block", MIXTRAL),
    "experts-mxfp4": Case(MXFP4, "block", GPT_OSS),
}


@dataclass
class Saved:
    """A quantised folder and the dense one of the same values."""

    folder: Path
    twin: Path

    def spec(self) -> ModelSpec:
        return spec_from_config(without_quantization(open_checkpoint(self.folder).config()))[0]

    def weights(self) -> Iterator[Weight]:
        checkpoint = open_checkpoint(self.folder)
        config = read_quantization(checkpoint.config())
        assert config is not None
        spec, family = spec_from_config(without_quantization(checkpoint.config()))
        tensors = join_scales(checkpoint.tensors(), config, stored=checkpoint.names)
        return apply_rules(family.rules, params(spec), tensors, family.ignored)

    def schemes(self) -> dict[str, Scheme]:
        checkpoint = open_checkpoint(self.folder)
        config = checkpoint.config()
        read = read_quantization(config)
        assert read is not None
        spec, family = spec_from_config(without_quantization(config))
        return parameter_schemes(read, params(spec), sources(family.rules, params(spec)), checkpoint.names)

    def expected(self, ids: list[int]) -> torch.Tensor:
        """The logits of transformers with the twin's weights."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.twin, dtype=torch.float32).eval()
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
        return logits


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("quantised")
    case.model.save(folder / "dense")
    if case.config is MXFP4:
        return Saved(*write_mxfp4(folder / "dense", folder / "quantised"))
    return Saved(*write_quantized(folder / "dense", folder / "quantised", case.config, case.group, case.kept))


@pytest.mark.parametrize("implementation", [IMPLEMENTATIONS["naive"], IMPLEMENTATIONS["paged"]], ids=["naive", "paged"])
def test_reference_gives_the_logits_of_the_dequantised_model(saved: Saved, implementation: Implementation) -> None:
    ids = tiny.tokens()
    assert sum(isinstance(value, QuantizedTensor) for _, value in saved.weights()) > 6
    logits = implementation(saved.spec(), saved.weights(), 64)(ids)
    torch.testing.assert_close(logits, saved.expected(ids), atol=TOLERANCE, rtol=TOLERANCE)


QKV_OUT_INNER_DOWN = 2 * 4  # matrices of two layers
KEPT = {
    **dict.fromkeys(("fp8-block", "fused-block", "experts-block"), 0),
    "ignored": QKV_OUT_INNER_DOWN - 3,
    "experts-mxfp4": 2 * 3,  # the experts of three layers
}
"""Matrices that torch_cuda keeps packed, if not all."""


@pytest.mark.skipif("torch_cuda" not in IMPLEMENTATIONS, reason="needs triton")
@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_cuda_keeps_what_its_kernels_multiply(
    saved: Saved, ranks: int, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    from support.devices.thread_ranks import on_ranks
    from support.devices.torch_cuda_model import Comm, TorchCudaModel

    from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix

    ids, weights, case = tiny.tokens(), list(saved.weights()), request.node.callspec.params["saved"]
    kept: list[int] = []

    def logits(comm: Comm) -> torch.Tensor:
        model = TorchCudaModel(saved.spec(), weights, 64, comm, schemes=saved.schemes())
        kept.append(sum(isinstance(matrix, PackedMatrix) for matrix in model.loader.params.by_name.values()))
        return model.logits(ids)

    with caplog.at_level("INFO"):
        for actual in on_ranks(ranks, logits):
            torch.testing.assert_close(actual, saved.expected(ids), atol=TOLERANCE, rtol=TOLERANCE)
    assert kept == [KEPT.get(case, QKV_OUT_INNER_DOWN)] * ranks
    dequantised = any("torch_cuda: dequantised " in message for message in caplog.messages)
    assert dequantised == (case in KEPT.keys() - {"experts-mxfp4"} or case == "head")


LATENT_SIZES = {
    **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32},
    **{"qk_nope_head_dim": 24, "v_head_dim": 16},
}
LATENT_KEPT = {"latents", "q_b", "out", "inner", "down"}
LATENT = {
    "latent": tiny.Tiny("deepseek3", "DeepseekV3ForCausalLM", {**tiny.ROUTED, **LATENT_SIZES}, tiny.LATENT),
    "indexed": tiny.Tiny(
        "deepseek32",
        "DeepseekV32ForCausalLM",
        {**tiny.ROUTED, **LATENT_SIZES, "index_head_dim": 16},
        tiny.SPARSE_LATENT,
    ),
    "halves": tiny.Tiny(
        "longcat-flash",
        "LongcatFlashForCausalLM",
        {key: size for key, size in LATENT_SIZES.items() if "intermediate" not in key}
        | {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 32},
        tiny.LONGCAT,
    ),
}


@pytest.mark.skipif("torch_cuda" not in IMPLEMENTATIONS, reason="needs triton")
@pytest.mark.parametrize(("kind", "ranks"), [("latent", 1), ("latent", 2), ("indexed", 1), ("halves", 2)])
def test_torch_cuda_keeps_blocks_of_latent_attention_and_its_experts(
    kind: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """But not the projection from latents, which decodes multiply by heads; interleaved heads change their order."""
    from support.checkpoints import quantized_folder
    from support.devices.thread_ranks import on_ranks
    from support.devices.torch_cuda_model import Comm, TorchCudaModel

    from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix

    monkeypatch.setattr(quantized_folder, "BLOCK", (32, 16))
    LATENT[kind].save(tmp_path / "dense")
    saved = Saved(
        *write_quantized(tmp_path / "dense", tmp_path / "quantised", fp8(True), "block", "lm_head|weights_proj")
    )
    ids, weights = tiny.tokens(), list(saved.weights())
    dense: list[set[str]] = []

    def logits(comm: Comm) -> torch.Tensor:
        built = TorchCudaModel(saved.spec(), weights, 64, comm, schemes=saved.schemes())
        matrices = built.loader.params.by_name.items()
        kept = {name.rpartition(".")[2] for name, matrix in matrices if isinstance(matrix, PackedMatrix)}
        assert kept == LATENT_KEPT | ({"q", "k"} if kind == "indexed" else set())
        dense.append({name.rpartition(".")[2] for name, matrix in matrices if not isinstance(matrix, PackedMatrix)})
        return built.logits(ids)

    with caplog.at_level("INFO"):
        for actual in on_ranks(ranks, logits):
            torch.testing.assert_close(actual, saved.expected(ids), atol=TOLERANCE, rtol=TOLERANCE)
    assert all("kv_b" in names and not names & LATENT_KEPT for names in dense)
    others = len(saved.spec().mixers) - 1
    assert any(f"dequantised layers.0.mixers.0.kv_b and {others} more" in each for each in caplog.messages)


PARTLY = ("ignored", "head")
"""Cases some of whose parameters jax_tpu dequantises: the output head, matrices that are dense in part."""


DEVICES = [("v7x", 2), ("v6e", 1), ("v6e", 2)]
USUAL = {
    **{"int8": ("v6e", 1), "ignored": ("v6e", 1), "fp8": ("v6e", 2), "fused-block": ("v7x", 2)},
    **{"head": ("v7x", 2), "experts": ("v7x", 2), "experts-mxfp4": ("v6e", 2)},
}
"""Cases and devices with every type of numbers and every granularity of scales; dense, fused and routed matrices."""


@pytest.mark.skipif("jax_tpu" not in IMPLEMENTATIONS, reason="needs flax")
@pytest.mark.parametrize(
    ("saved", "device"),
    [
        pytest.param(
            *(name, device),
            marks=() if USUAL.get(name) == device else pytest.mark.slow_matrix,
            id=f"{name}-{device[0]}-{device[1]}",
        )
        for name in CASES
        for device in DEVICES
    ],
    indirect=["saved"],
)
def test_jax_tpu_keeps_what_xla_multiplies(
    saved: Saved, device: tuple[str, int], caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """`device`: a chip, and how many of them share the model."""
    from support.devices.jax_model import JaxModel

    from pagoda.backends.jax_tpu.weights.formats import matrix_formats
    from pagoda.kernels_pallas.chips import CHIPS

    ids, case, (chip, tensor) = tiny.tokens(), request.node.callspec.params["saved"], device
    with caplog.at_level("INFO"):
        formats = matrix_formats(None, saved.spec(), CHIPS[chip], saved.schemes())
        kept = {"int8": "int8", "experts-mxfp4": "e2m1"}.get(case, CHIPS[chip].float8)
        assert {form.numbers for form in formats.values()} == {kept}
        exact = {path: replace(form, rounds_inputs=False) for path, form in formats.items()}
        model = JaxModel(saved.spec(), saved.weights(), 64, tensor, formats=exact)
    expected = saved.expected(ids)
    torch.testing.assert_close(model.logits(ids), expected, atol=TOLERANCE, rtol=TOLERANCE)
    if exact != formats:  # tokens' inputs are rounded as well, as the checkpoint's authors did
        rounding = JaxModel(saved.spec(), saved.weights(), 64, tensor, formats=formats)
        rounded = rounding.logits(ids, prefilled=len(ids))  # decoding rounds them by the same code
        allowed = 0.2 if case == "experts" else 0.1  # a token may be routed elsewhere
        assert TOLERANCE < (rounded - expected).norm() / expected.norm() < allowed
    dequantised = any("jax_tpu: dequantised " in message for message in caplog.messages)
    assert dequantised == (case in PARTLY)


def write_gptq(dense: Path, folder: Path, group: int = 16) -> Saved:
    """A GPT-2 whose transposed matrices are packed as linear layers are: qweight [I / 8, O]. And its twin."""
    tensors = load_file(dense / "model.safetensors")
    stored, values = dict(tensors), dict(tensors)
    for name, weight in tensors.items():  # [I, O]
        if not name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            continue
        inputs, outputs = weight.shape
        grouped = weight.unflatten(0, (-1, group))
        scales = (grouped.abs().amax(1) / 7).half()
        numbers = (grouped / scales.float()[:, None]).round().clamp(-8, 7)
        values[name] = (numbers * scales.float()[:, None]).flatten(0, 1)
        codes = (numbers.flatten(0, 1).to(torch.int64) + 8).unflatten(0, (-1, 8))
        words = (codes << torch.arange(0, 32, 4)[:, None]).sum(1)
        module = name.removesuffix("weight")
        del stored[name]
        zeros = torch.full((inputs // group, outputs // 8), 0x77777777, dtype=torch.int32)
        order = torch.arange(inputs, dtype=torch.int32) // group
        parts = {"qweight": words.to(torch.int32), "scales": scales, "qzeros": zeros, "g_idx": order}
        stored |= {f"{module}{part}": tensor.contiguous() for part, tensor in parts.items()}
    twin = folder.with_name(f"{folder.name}-twin")
    for path, each in ((folder, stored), (twin, values)):
        shutil.copytree(dense, path)
        save_file({name: tensor.contiguous() for name, tensor in each.items()}, path / "model.safetensors")
    whole = json.loads((dense / "config.json").read_text())
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
    return Saved(folder, twin)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A model with its experts in one tensor, and the folder that `pagoda convert` makes of it."""
    folder = tmp_path_factory.mktemp("converted")
    replace(GPT_OSS, extra={**GPT_OSS.extra, "hidden_size": 64}).save(folder / "dense")
    command = ["convert", str(folder / "dense"), str(folder / "int4"), "--quantization", "int4"]
    assert main.main([*command, "--skip-tokenizer-init"]) == 0
    return Saved(folder / "int4", folder / "dense")


@pytest.mark.parametrize(
    "implementation", ["paged", "torch_cuda", pytest.param("jax_tpu", marks=pytest.mark.slow_matrix)]
)
def test_experts_that_were_converted_one_by_one(implementation: str, converted: Saved) -> None:
    """The logits of their values in float32, and nearly those of the model before."""
    if implementation not in IMPLEMENTATIONS:
        pytest.skip("not installed")
    ids, weights = tiny.tokens(), list(converted.weights())
    quantised = {name: value.scheme for name, value in weights if isinstance(value, QuantizedTensor)}
    assert quantised == converted.schemes()
    assert sum(".experts." in name for name in quantised) == 3 * 3
    exact = ((name, value.dequantize() if isinstance(value, QuantizedTensor) else value) for name, value in weights)
    expected = IMPLEMENTATIONS["naive"](converted.spec(), exact, 64)(ids)
    if implementation == "paged":
        original = converted.expected(ids)
        assert 0.001 < (expected - original).norm() / original.norm() < 0.5
        logits = IMPLEMENTATIONS["paged"](converted.spec(), iter(weights), 64)(ids)
    elif implementation == "torch_cuda":
        from support.devices.torch_cuda_model import TorchCudaModel

        logits = TorchCudaModel(converted.spec(), weights, 64, schemes=converted.schemes()).logits(ids)
    else:
        from support.devices.jax_model import JaxModel

        from pagoda.backends.jax_tpu.weights.formats import matrix_formats
        from pagoda.kernels_pallas.chips import CHIPS

        formats = matrix_formats(None, converted.spec(), CHIPS["v6e"], converted.schemes())
        assert sum("ffn" in path for path in formats) == 3 * 2, "gate and up are one"
        logits = JaxModel(converted.spec(), weights, 64, 1, formats=formats).logits(ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["paged", "torch_cuda", "jax_tpu"])
def test_packed_matrices_of_layers_whose_dense_ones_are_transposed(implementation: str, tmp_path: Path) -> None:
    if implementation not in IMPLEMENTATIONS:
        pytest.skip("not installed")
    tiny.Tiny("gpt2", "GPT2LMHeadModel", {"n_embd": 64, "n_head": 4, "n_inner": 128}, tiny.SMALL_GPT2).save(
        tmp_path / "dense"
    )
    saved, ids = write_gptq(tmp_path / "dense", tmp_path / "quantised"), tiny.tokens()
    assert len(saved.schemes()) == 2 * 6
    weights = list(saved.weights())
    assert {name for name, value in weights if isinstance(value, QuantizedTensor)} == set(saved.schemes())
    if implementation == "paged":
        logits = IMPLEMENTATIONS["paged"](saved.spec(), iter(weights), 64)(ids)
    elif implementation == "torch_cuda":
        from support.devices.torch_cuda_model import TorchCudaModel

        from pagoda.backends.torch_cuda.kernels.linear.weight_only import PackedMatrix

        model = TorchCudaModel(saved.spec(), weights, 64, schemes=saved.schemes())
        kept = sum(isinstance(matrix, PackedMatrix) for matrix in model.loader.params.by_name.values())
        assert kept == 2 * 4, "q, k and v are one"
        logits = model.logits(ids)
    else:
        from support.devices.jax_model import JaxModel

        from pagoda.backends.jax_tpu.weights.formats import matrix_formats
        from pagoda.kernels_pallas.chips import CHIPS

        formats = matrix_formats(None, saved.spec(), CHIPS["v6e"], saved.schemes())
        assert formats
        logits = JaxModel(saved.spec(), saved.weights(), 64, 1, formats=formats).logits(ids)
    torch.testing.assert_close(logits, saved.expected(ids), atol=1e-4, rtol=1e-4)


BITS = {
    **{"ct-int8-token": 8.5, "ct-int8-asymmetric": 9, "ct-fp8-token": 8.5, "ct-fp8-static": 8.02},
    **{
        "ct-fp8-block": 8.06,
        "ct-fp8-group": 9,
        "ct-mxfp8": 9,
        "mxfp8": 9,
        "ct-rotated": 5,
        "ct-sparse-24": 8.5,
        "ct-nvfp4": 6.51,
        "ct-mxfp4": 5,
    },
    **{"ct-w3a16": 5, "ct-w4a16": 5, "ct-w4a16-actorder": 5.58, "ct-w4a16-asymmetric": 6, "ct-w4a16-channel": 4.5},
    **{"ct-w8a16": 10, "gptq-2": 5, "gptq-3": 6, "gptq-4": 5, "gptq-4-ordered": 6.58, "gptq-4-v2": 6},
    **{"gptq-8-ordered": 9.58, "awq-gemm": 6, "awq-gemv": 6, "auto-round-gptq": 5, "auto-round-plain": 5},
    **{"hqq-4": 6, "hqq-3": 6, "bitnet": 4.5, "bitnet-auto": 4.5},
    **{"bnb-nf4": 4.5, "bnb-fp4-nested": 4.5, "bnb-int8": 8.5, "fbgemm-fp8": 8.5, "modelopt-fp8": 8.02},
    **{"modelopt-fp8-channel": 8.5, "modelopt-nvfp4": 6.51, "modelopt-mixed": 7.26, "quark-fp8": 8.02},
    **{"quark-int8": 8.5, "quark-int4": 5, "quark-uint4": 6, "quark-mxfp4": 5, "torchao-int8": 8.5},
    **{"torchao-int8-dynamic": 8.5, "torchao-fp8": 8.5, "torchao-intx4": 5, "torchao-int4": 6},
}
"""Fixture -> bits per weight of the quantised layers in memory: numbers, and scales and zero points in float32."""


@pytest.fixture(scope="module", params=quantized_fixtures.NAMES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = quantized_fixtures.write_folder(request.param, tmp_path_factory.mktemp("fixture") / request.param)
    return Saved(folder, folder)


def test_layers_as_libraries_write_them(stored: Saved) -> None:
    """Stored values, and the scheme that a backend allocates memory for, with their bytes."""
    name, weights = stored.folder.name, dict(stored.weights())
    ids, expected = quantized_fixtures.expected(name)
    quantised = {each: value for each, value in weights.items() if isinstance(value, QuantizedTensor)}
    assert {each: value.scheme for each, value in quantised.items()} == stored.schemes()
    assert len(quantised) == 7
    bits = 8 * sum(value.nbytes for value in quantised.values()) / sum(prod(v.shape) for v in quantised.values())
    assert bits == pytest.approx(BITS[name], abs=0.01)
    logits = IMPLEMENTATIONS["paged"](stored.spec(), iter(weights.items()), 64)(ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif("torch_cuda" not in IMPLEMENTATIONS, reason="needs triton")
def test_torch_cuda_gives_the_logits_of_fixtures(stored: Saved) -> None:
    from support.devices.torch_cuda_model import TorchCudaModel

    ids, expected = quantized_fixtures.expected(stored.folder.name)
    model = TorchCudaModel(stored.spec(), list(stored.weights()), 64, schemes=stored.schemes())
    torch.testing.assert_close(model.logits(ids), expected, atol=1e-4, rtol=1e-4)


FRACTIONS = ("torchao-int4", "hqq-3", "hqq-4")
"""Fixtures whose zero points are no whole numbers."""

IN_CI = ("ct-int8-asymmetric", "gptq-4-ordered", "awq-gemm", "bnb-nf4")


@pytest.mark.skipif("jax_tpu" not in IMPLEMENTATIONS, reason="needs flax")
@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow_matrix) for name in quantized_fixtures.NAMES],
)
def test_jax_tpu_gives_the_logits_of_fixtures(name: str, tmp_path: Path) -> None:
    from support.devices.jax_model import JaxModel

    from pagoda.backends.jax_tpu.weights.formats import matrix_formats
    from pagoda.kernels_pallas.chips import CHIPS

    folder = quantized_fixtures.write_folder(name, tmp_path / name)
    saved, (ids, expected) = Saved(folder, folder), quantized_fixtures.expected(name)
    formats = matrix_formats(None, saved.spec(), CHIPS["v6e"], saved.schemes())
    exact = {path: replace(form, rounds_inputs=False) for path, form in formats.items()}
    if name in FRACTIONS:
        with pytest.raises(WeightError, match="jax_tpu multiplies zero points that are whole numbers only"):
            JaxModel(saved.spec(), saved.weights(), 64, 1, formats=exact)
        return
    model = JaxModel(saved.spec(), saved.weights(), 64, 1, formats=exact)
    torch.testing.assert_close(model.logits(ids), expected, atol=1e-4, rtol=1e-4)


FEW_PROGRAMS = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
"""For jax_tpu, which compiles a program for each size of a step."""
SIZES = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64, "disable_log_stats": True}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)


def answer(folder: Path, **settings: Any) -> list[dict[int, float]]:
    """Tokens and logprobs of a greedy answer."""
    llm = LLM(str(folder), **{"backend": "reference", "dtype": "float32", **SIZES, **settings})
    try:
        output = llm.generate("A question", GREEDY, use_tqdm=False)[0].outputs[0]
    finally:
        llm.shutdown()
    assert output.logprobs is not None
    return [{token: entry.logprob for token, entry in row.items()} for row in output.logprobs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("served")
    dense = write_model(folder / "dense")
    return Saved(*write_quantized(dense, folder / "quantised", compressed_tensors(), "channel"))


def same(answer: list[dict[int, float]], expected: list[dict[int, float]], tolerance: float = TOLERANCE) -> bool:
    return len(answer) == len(expected) and all(
        row.keys() == want.keys() and all(abs(row[token] - want[token]) < tolerance for token in row)
        for row, want in zip(answer, expected)
    )


@pytest.mark.setting("--quantization")
def test_reference_serves_a_quantised_checkpoint(folders: Saved, caplog: pytest.LogCaptureFixture) -> None:
    expected = answer(folders.twin)
    with caplog.at_level("INFO"):
        assert same(answer(folders.folder), expected)
    assert any("reference: dequantised layers.0." in message for message in caplog.messages)
    assert same(answer(folders.folder, quantization="compressed-tensors"), expected)
    assert same(answer(folders.folder, quantization="fp8"), expected)


def test_matrices_in_tiles_of_tensor_cores_are_served_without_their_padding(tmp_path: Path) -> None:
    dense = write_model(tmp_path / "dense", hidden_size=64, intermediate_size=96)
    folder, twin = write_tiles(dense, tmp_path / "tiles")
    assert same(answer(folder), answer(twin))


@pytest.mark.parametrize(
    ("kind", "method", "words"),
    [
        ("folder", "int8", "int8: the checkpoint is already quantised; drop it, or use compressed-tensors or fp8"),
        ("folder", "gguf", "the model is not a GGUF file"),
        (
            "twin",
            "compressed-tensors",
            "compressed-tensors: the checkpoint is not quantised by it; drop it",
        ),
    ],
)
def test_another_quantization_is_refused(folders: Saved, kind: str, method: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization: {words}"):
        answer(getattr(folders, kind), quantization=method)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.setting("--kv-cache-dtype")
@pytest.mark.parametrize(
    ("backend", "scheme", "flag", "found"),
    [
        ("torch_cuda", SCHEME, "auto", "fp8"),
        ("jax_tpu", SCHEME, "auto", "fp8"),
        ("torch_cuda", SCHEME, "bfloat16", "bfloat16"),
        ("torch_cuda", {**SCHEME, "strategy": "attn_head"}, "auto", "auto"),
        ("torch_cuda", {**SCHEME, "num_bits": 4}, "auto", "auto"),
        ("reference", SCHEME, "auto", "auto"),
    ],
)
def test_the_cache_is_fp8_where_the_checkpoint_says_so(
    backend: str,
    scheme: dict[str, Any],
    flag: str,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if backend not in (*IMPLEMENTATIONS, "reference"):
        pytest.skip("not installed")
    monkeypatch.setenv(TORCH_CUDA_DEVICE.name, "cpu")
    config = compressed_tensors(kv_cache_scheme=scheme)
    folder, _ = write_quantized(write_model(tmp_path / "dense"), tmp_path / "quantised", config, "channel")
    args = EngineArgs(str(folder), backend=backend, kv_cache_dtype=flag, max_model_len=64)
    with caplog.at_level("INFO"):
        resolved = resolve(args.create_engine_config(), "llm")
    assert resolved.cache.cache_dtype == found
    shown = next(row for row in resolved.rows if row.name == "kv_cache_dtype")
    assert shown.value == found
    logged = [message for message in caplog.messages if message.startswith("KV cache: ")]
    if flag != "auto" or scheme is not SCHEME:
        assert not logged
    elif found == "fp8":
        assert logged == [
            "KV cache: fp8, as the checkpoint says; --kv-cache-dtype bfloat16 keeps the model's data type"
        ]
    else:
        assert "reference has no fp8 cache" in logged[0]


@pytest.mark.skipif("torch_cuda" not in IMPLEMENTATIONS, reason="needs triton")
def test_scales_of_a_checkpoints_cache_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With auto as with fp8; the scale is far from the values, so that it shows."""
    monkeypatch.setenv(TORCH_CUDA_DEVICE.name, "cpu")
    config = compressed_tensors(kv_cache_scheme=SCHEME)
    folder, _ = write_quantized(write_model(tmp_path / "dense"), tmp_path / "quantised", config, "channel")
    tensors = load_file(folder / "model.safetensors")
    scales = {f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor([40.0]) for layer in (0, 1) for part in "kv"}
    save_file(tensors | scales, folder / "model.safetensors")
    settings = {"backend": "torch_cuda", "enforce_eager": True, "quantization": None}
    auto = answer(folder, **settings)
    assert same(auto, answer(folder, **settings, kv_cache_dtype="fp8"))
    save_file(tensors, folder / "model.safetensors")
    assert not same(auto, answer(folder, **settings), 1e-4)


@pytest.mark.skipif("torch_cuda" not in IMPLEMENTATIONS, reason="needs triton")
def test_torch_cuda_serves_a_quantised_checkpoint(folders: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCH_CUDA_DEVICE.name, "cpu")
    served = answer(folders.folder, backend="torch_cuda", enforce_eager=True, quantization="fp8")
    assert same(served, answer(folders.twin), 1e-4)
    answer(folders.folder, backend="torch_cuda", enforce_eager=True, load_format="dummy")


@pytest.mark.skipif("jax_tpu" not in IMPLEMENTATIONS, reason="needs flax")
def test_jax_tpu_serves_a_quantised_checkpoint(folders: Saved) -> None:
    assert same(answer(folders.folder, backend="jax_tpu", **FEW_PROGRAMS), answer(folders.twin), 1e-4)


@pytest.mark.skipif("torch_cuda" not in IMPLEMENTATIONS, reason="needs triton")
def test_a_dense_matrix_that_the_config_calls_quantised() -> None:
    from support.devices.torch_cuda_model import TorchCudaModel

    spec = tiny_spec()
    with pytest.raises(WeightError, match=r"layers.0.mixers.0.o is not fp8, as its config.json states; download"):
        TorchCudaModel(spec, random_weights(spec), 16, schemes={"layers.0.mixers.0.o": Float8("channel")})


def rounded_twin(dense: Path, folder: Path, method: str) -> Path:
    """Write the model with the values that `method` leaves of its layers' matrices."""
    shutil.copytree(dense, folder)
    tensors = load_file(dense / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            value = quantize_on_the_fly("layers.0.ffn.up", weight.numpy(), method)
            assert isinstance(value, QuantizedTensor)
            tensors[name] = torch.from_numpy(value.dequantize())
    save_file(tensors, folder / "model.safetensors")
    return folder


ON_THE_FLY = [
    *(("reference", method) for method in ("int4", "tpu_int8", "bitsandbytes")),
    *(("torch_cuda", method) for method in ("int4", "bitsandbytes", "mxfp4", "mxfp8")),
    *(("reference", method) for method in ("mxfp4", "mxfp8")),
    pytest.param("jax_tpu", "mxfp4", marks=pytest.mark.slow_matrix),
    pytest.param("jax_tpu", "mxfp8", marks=pytest.mark.slow_matrix),
]


@pytest.mark.setting("--quantization")
@pytest.mark.parametrize(("backend", "method"), ON_THE_FLY)
def test_a_dense_model_is_quantised_while_it_is_loaded(
    backend: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if backend not in (*IMPLEMENTATIONS, "reference"):
        pytest.skip("not installed")
    monkeypatch.setenv(TORCH_CUDA_DEVICE.name, "cpu")
    dense = write_model(tmp_path / "dense", hidden_size=64, intermediate_size=128)
    cheap = {"torch_cuda": {"enforce_eager": True}, "jax_tpu": FEW_PROGRAMS}.get(backend, {})
    with caplog.at_level("INFO"):
        served = answer(dense, backend=backend, quantization=method, **cheap)
    assert same(served, answer(rounded_twin(dense, tmp_path / "twin", method)), 1e-4)
    assert not same(served, answer(dense), 1e-3)
    support = load_schemes(backend).scheme_support(scheme_of(method, 128) or Int4((1, 128)), False)
    warned = any(f"--quantization {method}: {backend} has no product" in message for message in caplog.messages)
    assert warned == (support.kind == "dequantises" and method not in load_schemes(backend).ROUNDED_ON_DEVICE)


@pytest.mark.skipif("jax_tpu" not in IMPLEMENTATIONS, reason="needs flax")
def test_a_backend_that_rounds_on_its_devices_gets_dense_weights(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "dense"))
    for method, on_device in (("fp8", True), ("int4", True), ("fp8_per_block", False), ("experts_int8", False)):
        args = EngineArgs(folder, backend="jax_tpu", quantization=method, max_model_len=64)
        resolved = resolve(args.create_engine_config(), "llm")
        assert resolved.runtime_quantization == (method if on_device else None)
        assert len(resolved.schemes) == (2 * 7 if method == "fp8_per_block" else 0)
    assert set(RUNTIME_QUANTIZATIONS) == set(METHODS)


@pytest.mark.skipif("jax_tpu" not in IMPLEMENTATIONS, reason="needs flax")
def test_convert_dequantises(folders: Saved, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    for name, folder in (("quantised", folders.folder), ("dense", folders.twin)):
        assert main.main(["convert", str(folder), str(tmp_path / name)]) == 0
    quantised, dense = (read_manifest(tmp_path / name).leaves for name in ("quantised", "dense"))
    assert quantised == dense
    assert "quantization_config" not in (tmp_path / "quantised" / "config.json").read_text()
