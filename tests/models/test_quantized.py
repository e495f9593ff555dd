"""Quantised checkpoints in every implementation: the logits of the same values in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import tiny
from models.test_parity import IMPLEMENTATIONS, Implementation
from support.quantized_folder import compressed_tensors, fp8, write_quantized
from support.reference_driver import random_weights, tiny_spec
from support.tiny_folder import write_model

from pagoda.common.backend import Weight
from pagoda.common.config.env import TORCH_CUDA_DEVICE
from pagoda.common.errors import ConfigError, WeightError
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.sampling_params import SamplingParams
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.quantization import (
    Float8,
    QuantizedTensor,
    Scheme,
    join_scales,
    parameter_schemes,
    read_quantization,
    without_quantization,
)
from pagoda.common.weights.rules import apply_rules, sources
from pagoda.common.weights.sharded import read_manifest
from pagoda.server.cli import main
from pagoda.server.llm import LLM

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """How a model is quantised. `kept`: pattern of matrices that stay dense."""

    config: dict[str, Any]
    group: str
    model: tiny.Tiny = tiny.Tiny("llama", "LlamaForCausalLM")
    kept: str = "lm_head"


MIXTRAL = tiny.Tiny("mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2})
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
        return apply_rules(family.rules, params(spec), join_scales(checkpoint.tensors(), config), family.ignored)

    def schemes(self) -> dict[str, Scheme]:
        config = open_checkpoint(self.folder).config()
        read = read_quantization(config)
        assert read is not None
        spec, family = spec_from_config(without_quantization(config))
        return parameter_schemes(read, params(spec), sources(family.rules, params(spec)))

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
    return Saved(*write_quantized(folder / "dense", folder / "quantised", case.config, case.group, case.kept))


@pytest.mark.parametrize("implementation", [IMPLEMENTATIONS["naive"], IMPLEMENTATIONS["paged"]], ids=["naive", "paged"])
def test_reference_gives_the_logits_of_the_dequantised_model(saved: Saved, implementation: Implementation) -> None:
    ids = tiny.tokens()
    assert sum(isinstance(value, QuantizedTensor) for _, value in saved.weights()) > 6
    logits = implementation(saved.spec(), saved.weights(), 64)(ids)
    torch.testing.assert_close(logits, saved.expected(ids), atol=TOLERANCE, rtol=TOLERANCE)


QKV_OUT_INNER_DOWN = 2 * 4  # matrices of two layers
KEPT = {"ignored": QKV_OUT_INNER_DOWN - 3, "fp8-block": 0, "fused-block": 0, "experts-block": 0}
"""Matrices that torch_cuda keeps packed, if not all."""


@pytest.mark.skipif("torch_cuda" not in IMPLEMENTATIONS, reason="needs triton")
@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_cuda_keeps_what_its_kernels_multiply(
    saved: Saved, ranks: int, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    from support.thread_ranks import on_ranks
    from support.torch_cuda_model import Comm, TorchCudaModel

    from pagoda.backends.torch_cuda.kernels.weight_only import PackedMatrix

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
    assert dequantised == (case in KEPT or case == "head")


DEQUANTISED = ("ignored", "fp8-block", "fused-block", "experts", "experts-block")
"""Cases that jax_tpu computes with dense matrices: not all of the layers' have scales per channel, or experts have."""


@pytest.mark.skipif("jax_tpu" not in IMPLEMENTATIONS, reason="needs flax")
@pytest.mark.parametrize(("chip", "tensor"), [("v6e", 1), ("v6e", 2), ("v7x", 2)])
def test_jax_tpu_keeps_what_xla_multiplies(
    saved: Saved, chip: str, tensor: int, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    from support.jax_model import JaxModel

    from pagoda.backends.jax_tpu.weights.placement import matrix_dtype
    from pagoda.kernels_pallas.chips import CHIPS

    ids, case = tiny.tokens(), request.node.callspec.params["saved"]
    quantized = matrix_dtype(None, saved.spec(), CHIPS[chip], saved.schemes())
    if case in DEQUANTISED or (case, chip) == ("int8", "v7x"):
        assert quantized is None
    else:
        assert quantized == ("int8" if case == "int8" else CHIPS[chip].float8)
    with caplog.at_level("INFO"):
        model = JaxModel(saved.spec(), saved.weights(), 64, tensor, quantized=quantized)
    torch.testing.assert_close(model.logits(ids), saved.expected(ids), atol=TOLERANCE, rtol=TOLERANCE)
    dequantised = any("jax_tpu: dequantised " in message for message in caplog.messages)
    assert dequantised == (quantized is None or case == "head")


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


@pytest.mark.skipif("torch_cuda" not in IMPLEMENTATIONS, reason="needs triton")
def test_torch_cuda_serves_a_quantised_checkpoint(folders: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCH_CUDA_DEVICE.name, "cpu")
    served = answer(folders.folder, backend="torch_cuda", enforce_eager=True, quantization="fp8")
    assert same(served, answer(folders.twin), 1e-4)
    answer(folders.folder, backend="torch_cuda", enforce_eager=True, load_format="dummy")


@pytest.mark.skipif("jax_tpu" not in IMPLEMENTATIONS, reason="needs flax")
def test_jax_tpu_serves_a_quantised_checkpoint(folders: Saved) -> None:
    assert same(answer(folders.folder, backend="jax_tpu"), answer(folders.twin), 1e-4)


@pytest.mark.skipif("torch_cuda" not in IMPLEMENTATIONS, reason="needs triton")
def test_a_dense_matrix_that_the_config_calls_quantised() -> None:
    from support.torch_cuda_model import TorchCudaModel

    spec = tiny_spec()
    with pytest.raises(WeightError, match=r"layers.0.mixers.0.o is not fp8, as its config.json states; download"):
        TorchCudaModel(spec, random_weights(spec), 16, schemes={"layers.0.mixers.0.o": Float8("channel")})


@pytest.mark.skipif("jax_tpu" not in IMPLEMENTATIONS, reason="needs flax")
def test_convert_dequantises(folders: Saved, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    for name, folder in (("quantised", folders.folder), ("dense", folders.twin)):
        assert main.main(["convert", str(folder), str(tmp_path / name)]) == 0
    quantised, dense = (read_manifest(tmp_path / name).leaves for name in ("quantised", "dense"))
    assert quantised == dense
    assert "quantization_config" not in (tmp_path / "quantised" / "config.json").read_text()
