"""GGUF files in every block type: the logits of the dequantised model, in little more memory than the file's."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from support.kernels.paged_model import PagedModel
from support.suite import memory

from pagoda.backends.reference.memory import held_bytes
from pagoda.backends.reference.model.linear import linear
from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.backends.reference.model.numerics import Numerics
from pagoda.backends.reference.model.quantized.block_kernels import dequantize_blocks
from pagoda.backends.reference.model.quantized.blocks import BlockMatrix, BlockTable
from pagoda.backends.reference.model.quantized.compiled import lanes
from pagoda.backends.reference.weights.load import Packer
from pagoda.common.backend import Weight
from pagoda.common.errors import WeightError
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.checkpoint import open_checkpoint
from pagoda.common.weights.gguf.dequantize import block_type, dequantize
from pagoda.common.weights.gguf.file import GgufFile
from pagoda.common.weights.quantization.schemes import Blocks
from pagoda.common.weights.quantization.tensors import QuantizedTensor, take_matrix
from pagoda.common.weights.rules import apply_rules

FLOAT32 = Numerics(torch.float32, torch.float32)
TYPES = [*(kind for kind in sorted(gguf.quants._type_traits, key=int) if kind is not Type.BF16), Type.Q1_0]


@cache
def some_blocks(kind: Type) -> np.ndarray:
    """Blocks of random bytes with values of which the largest is from 0.01 to 0.4."""
    known = block_type(int(kind))
    assert known is not None
    blocks = np.random.default_rng(int(kind)).integers(0, 256, (8000, known.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = np.abs(dequantize(blocks.reshape(-1), known, (len(blocks), known.elements)))
        sizes = values.max(-1)
    blocks = blocks[(sizes > 0.01) & (sizes < 0.4)]
    assert len(blocks) > 7
    return blocks


def matrix(kind: Type, *shape: int, seed: int = 0) -> QuantizedTensor:
    known, blocks = block_type(int(kind)), some_blocks(kind)
    assert known is not None
    *rows, inputs = shape
    chosen = np.random.default_rng(seed).integers(len(blocks), size=(*rows, inputs // known.elements))
    return QuantizedTensor(Blocks(known), blocks[chosen].reshape(*rows, -1), np.empty(0, np.float32), ())


@pytest.mark.parametrize("name", [kind.name for kind in TYPES])
def test_kernels_equal_those_of_the_file_reader(name: str) -> None:
    kind = block_type(int(Type[name]))
    assert kind is not None
    blocks = np.random.default_rng(0).integers(0, 256, (300, kind.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(blocks.reshape(-1), kind, (300, kind.elements))
        got = torch.empty(300, kind.elements)
        dequantize_blocks(torch.from_numpy(blocks), kind, got)
    np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_products_of_parts_of_several_types(tokens: int, batch_invariant: bool) -> None:
    """Several chunks of rows, scales of rows, dense parts between the others, a bias."""
    first, last = matrix(Type.Q4_K, 700, 512), matrix(Type.Q8_0, 24, 512, seed=1)
    scales = np.linspace(0.5, 2, 700, dtype=np.float32)
    scaled = QuantizedTensor(first.scheme, first.data, first.scales, (), row_scales=scales)
    torch.manual_seed(0)
    dense, bias, x = torch.randn(16, 512), torch.randn(740), torch.randn(tokens, 512)
    values = [first.dequantize() * scales[:, None], dense.numpy(), last.dequantize()]
    want = torch.nn.functional.linear(x, torch.from_numpy(np.concatenate(values)), bias)
    numerics = Numerics(torch.float32, torch.float32, batch_invariant)
    torch.testing.assert_close(linear([scaled, dense, last], bias, numerics)(x), want, atol=1e-4, rtol=1e-4)
    alone = linear(last, bias[-24:], numerics)(x)
    torch.testing.assert_close(alone, want[:, -24:], atol=1e-4, rtol=1e-4)


def test_rows_of_a_table() -> None:
    stored = matrix(Type.Q6_K, 50, 256)
    ids = torch.tensor([[3, 49], [0, 3]])
    rows = BlockTable(BlockMatrix.of(stored), torch.bfloat16)(ids)
    torch.testing.assert_close(rows, torch.from_numpy(stored.dequantize())[ids].bfloat16(), atol=0, rtol=0)


def test_a_matrix_of_a_stack() -> None:
    stored = matrix(Type.Q8_0, 3, 4, 64)
    np.testing.assert_array_equal(take_matrix(stored, 1).dequantize(), stored.dequantize()[1])


LLAMA = {"context_length": 64, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0}
EXPERTS = {"expert_count": 2, "expert_used_count": 1}


def write(
    path: Path,
    types: Mapping[str, Type],
    default: Type,
    width: int = 256,
    experts: int = 0,
    scales: Mapping[str, list[float]] | None = None,
) -> None:
    """A Llama of two layers with random blocks. `types`, `scales`: of the tensors whose names end so."""
    writer, vocab, ffn, keys = gguf.GGUFWriter(path, "llama"), 320, 2 * width, width // 2
    sizes = {"block_count": 2, "embedding_length": width, "feed_forward_length": ffn}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2}
    for key, value in {**LLAMA, **sizes, **heads, **(EXPERTS if experts else {})}.items():
        writer.add_key_value(f"llama.{key}", value, gguf.GGUFValueType.get_type(value))
    outputs: dict[str, tuple[int, ...]] = {"token_embd": (vocab, width), "output_norm": (width,)}
    for layer in range(2):
        stack = (experts,) if experts else ()
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "ffn_norm": (width,),
            "attn_q": (width, width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, width),
            f"ffn_gate{'_exps' if experts else ''}": (*stack, ffn, width),
            f"ffn_up{'_exps' if experts else ''}": (*stack, ffn, width),
            f"ffn_down{'_exps' if experts else ''}": (*stack, width, ffn),
        }
        if experts:
            block["ffn_gate_inp"] = (experts, width)
        outputs |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    noise = np.random.default_rng(0)
    for number, (name, shape) in enumerate(outputs.items()):
        kind = next((kind for end, kind in types.items() if name.endswith(end)), default)
        if len(shape) == 1 or name.endswith("ffn_gate_inp"):
            writer.add_tensor(f"{name}.weight", noise.normal(1, 0.1, shape).astype(np.float32))
        else:
            writer.add_tensor(f"{name}.weight", matrix(kind, *shape, seed=number).data, raw_dtype=kind)
            if (
                scale := next((scale for end, scale in (scales or {}).items() if name.endswith(end)), None)
            ) is not None:
                writer.add_tensor(f"{name}.scale", np.array(scale, np.float32))
                writer.add_tensor(f"{name}.input_scale", np.ones(len(scale), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path: Path) -> tuple[ModelSpec, list[Weight]]:
    checkpoint = open_checkpoint(path)
    spec, family = spec_from_config(checkpoint.config())
    family = checkpoint.family(family)
    return spec, list(apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored))


MIXED = {"attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "token_embd": Type.Q6_K}
FILES: dict[str, dict[str, Any]] = {
    **{kind.name: {"types": {}, "default": kind} for kind in TYPES},
    "Q4_K_M": {"types": MIXED, "default": Type.Q4_K},
    "experts": {"types": {"ffn_up_exps": Type.Q5_K}, "default": Type.Q8_0, "experts": 2},
}


@pytest.mark.parametrize("experts", [0, 2])
def test_scales_of_matrices(experts: int, tmp_path: Path) -> None:
    """As files of NVFP4 have them: one of each matrix, of each expert."""
    stacks = {"ffn_up_exps": [0.25, 2.0], "ffn_down_exps": [3.0, 0.5]}
    factors = {"attn_q": [0.5], **(stacks if experts else {"ffn_up": [0.25]})}
    write(tmp_path / "plain.gguf", {}, Type.NVFP4, experts=experts)
    write(tmp_path / "scaled.gguf", {}, Type.NVFP4, experts=experts, scales=factors)
    plain, found = (dict(open_checkpoint(tmp_path / name).tensors()) for name in ("plain.gguf", "scaled.gguf"))
    assert plain.keys() == found.keys()
    for name, value in found.items():
        before, after = (
            each.dequantize() if isinstance(each, QuantizedTensor) else each for each in (plain[name], value)
        )
        scale = np.float32(next((scale for stem, scale in factors.items() if f".{stem}." in name), [1.0]))
        wanted = before * scale.reshape(-1, *[1] * (before.ndim - 1))
        np.testing.assert_array_equal(after, wanted, err_msg=name)
    spec, weights = read(tmp_path / "scaled.gguf")
    ids = [5, 17, 3, 80, 41, 2]
    ours, theirs = PagedModel(spec, weights, 8).logits(ids), NaiveModel(spec, weights, max_len=8).logits(ids)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    write(tmp_path / "bad.gguf", {}, Type.NVFP4, experts=experts, scales={"attn_q": [0.5, 1.0]})
    with pytest.raises(WeightError, match=r"bad.gguf: tensor blk.0.attn_q.scale has 2 scales for 1 matrices"):
        dict(open_checkpoint(tmp_path / "bad.gguf").tensors())


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", **FILES[name])
    spec, weights = read(tmp_path / "m.gguf")
    ids = [5, 17, 3, 80, 41, 2]
    ours, theirs = PagedModel(spec, weights, 8).logits(ids), NaiveModel(spec, weights, max_len=8).logits(ids)
    assert theirs.std() > 0.05, "a flat answer proves nothing"
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


IN_BLOCKS = [kind for kind in TYPES if kind.name.startswith(("IQ", "TQ", "Q1", "Q2", "Q3"))]
SIZED = (Type.Q8_0, *IN_BLOCKS)


@pytest.mark.skipif(not lanes(), reason="elsewhere blocks are dequantised at load")
@pytest.mark.parametrize(
    ("types", "default"),
    [(MIXED, Type.Q4_K), *(({}, kind) for kind in SIZED)],
    ids=["Q4_K_M", *(kind.name for kind in SIZED)],
)
@pytest.mark.parametrize("experts", [0, 2])
def test_weights_take_little_more_memory_than_the_file(
    types: dict[str, Type], default: Type, experts: int, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", types, default, width=512, experts=experts)
    stored = sum(info.size for info in GgufFile(tmp_path / "m.gguf").tensors.values())
    memory.freeze()  # the collector looks at objects that are made from here on
    spec, weights = read(tmp_path / "m.gguf")
    with torch.inference_mode():
        model = Packer(spec, Numerics(torch.bfloat16, torch.float32)).pack(iter(weights))
    del weights
    held = held_tensors()
    assert stored <= sum(held.values()) <= 1.15 * stored
    assert model.num_bytes == held_bytes(model) == sum(held.values())


def held_tensors() -> dict[int, int]:
    """Memory and size of all tensors that the collector looks at."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not each.is_mkldnn]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def test_every_type_is_in_a_file() -> None:
    quantised = {kind for kind, (elements, _) in GGML_QUANT_SIZES.items() if elements > 1}
    assert quantised - set(TYPES) == {Type.Q8_1, Type.Q8_K}, "of activations, which files do not have"
