"""peft's files: which module changes which parameter, by what, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import tiny_spec
from models.oracles.kept_logits import read_cases
from support.checkpoints.adapters import llama_modules, save_adapter, write_adapter
from support.checkpoints.tiny_folder import CONFIG

from pagoda.common.errors import ModelError
from pagoda.common.models.primitives import Param
from pagoda.common.models.registry import find, spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.weights.lora import dora
from pagoda.common.weights.lora.peft import BaseModel, read_adapter
from pagoda.common.weights.lora.weights import (
    AdapterWeights,
    adaptable,
    copy_elements,
    factor_elements,
    rank_bucket,
    slot_elements,
)
from pagoda.common.weights.quantization.on_the_fly import quantize
from pagoda.common.weights.quantization.schemes import Int8
from pagoda.common.weights.quantization.tensors import Value

MODULES = llama_modules(32, 48, 4, 2, 2)
LAYER = "base_model.model.model.layers.0"


def base(max_rank: int = 16, **config: Any) -> BaseModel:
    spec, family = spec_from_config({**CONFIG, **config})
    return BaseModel(family.rules, params(spec), adaptable(spec), max_rank)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def product(weights: AdapterWeights, name: str) -> np.ndarray:
    factors = weights.matrices[name]
    assert factors.a.shape[-2] == factors.b.shape[-1] == weights.rank
    return factors.b @ factors.a


def test_every_linear_module_changes_its_parameter(tmp_path: Path) -> None:
    weights = read_adapter(write_adapter(tmp_path / "a", MODULES, rank=3), base())
    expected = {f"layers.{layer}.mixers.0.{part}" for layer in range(2) for part in "qkvo"}
    expected |= {f"layers.{layer}.ffn.{part}" for layer in range(2) for part in ("gate", "up", "down")}
    assert weights.matrices.keys() == expected
    assert weights.rank == 8
    assert weights.num_bytes == sum(4 * 8 * sum(shape) for shape in MODULES.values())


def test_the_scale_is_in_b(tmp_path: Path) -> None:
    a, b = random(4, 32), random(32, 4)
    tensors = {f"{LAYER}.self_attn.q_proj.lora_A.weight": a, f"{LAYER}.self_attn.q_proj.lora_B.weight": b}
    for scale, config in (
        (6 / 4, {"lora_alpha": 6}),
        (6 / 2, {"lora_alpha": 6, "use_rslora": True}),
        (5 / 4, {"lora_alpha": 6, "alpha_pattern": {"layers.0.self_attn.q_proj": 5}}),
    ):
        weights = read_adapter(save_adapter(tmp_path / "a", tensors, r=4, **config), base())
        np.testing.assert_allclose(product(weights, "layers.0.mixers.0.q"), scale * (b @ a), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(weights.matrices["layers.0.mixers.0.q"].a[:4], a)


def test_embeddings_and_head_of_a_tied_model_are_apart(tmp_path: Path) -> None:
    tensors = {
        "base_model.model.model.embed_tokens.lora_embedding_A": (a := random(4, 257)),
        "base_model.model.model.embed_tokens.lora_embedding_B": (b := random(32, 4)),
        "base_model.model.model.embed_tokens.base_layer.weight": random(257, 32),
        "base_model.model.lm_head.lora_A.weight": (head_a := random(4, 32, seed=1)),
        "base_model.model.lm_head.lora_B.weight": (head_b := random(257, 4, seed=1)),
    }
    folder = save_adapter(tmp_path / "a", tensors, r=4, lora_alpha=4)
    weights = read_adapter(folder, base(tie_word_embeddings=True))
    np.testing.assert_allclose(product(weights, "embed"), (b @ a).T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(product(weights, "head"), head_b @ head_a, rtol=1e-4, atol=1e-5)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = random(300, 32)
    save_adapter(tmp_path / "a", tensors, r=4)
    with pytest.raises(ModelError, match="its vocabulary differs"):
        read_adapter(folder, base(tie_word_embeddings=True))


def dora_adapter(folder: Path, modules: dict[str, int], rank: int = 2, **config: Any) -> BaseModel:
    """Write a DoRA adapter of these modules of 32 inputs, by number of outputs; return the base model it is of."""
    tensors: dict[str, np.ndarray] = {}
    for seed, (module, outputs) in enumerate(modules.items()):
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = random(rank, 32, seed=seed)
        tensors[f"{name}.lora_B.weight"] = random(outputs, rank, seed=seed)
        tensors[f"{name}.lora_magnitude_vector"] = 1 + random(outputs, seed=seed) ** 2
    save_adapter(folder, tensors, r=rank, lora_alpha=3 * rank, use_dora=True)
    return base(**config)


def test_dora_scales_rows_to_the_lengths_of_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dense matrix, a quantised one, and a tied head; a few rows at a time."""
    monkeypatch.setattr(dora, "_CHUNK", 32 * 5)
    monkeypatch.setattr(dora, "_SUMMED", 7)
    modules = {"model.layers.0.self_attn.q_proj": 32, "model.layers.1.mlp.up_proj": 48, "lm_head": 257}
    model = dora_adapter(tmp_path / "a", modules, tie_word_embeddings=True)
    stored = read_adapter(tmp_path / "a", model)
    names = dict(zip(modules, ("layers.0.mixers.0.q", "layers.1.ffn.up", "head")))
    dense = {"layers.0.mixers.0.q": random(32, 32, seed=8), "embed": random(257, 32, seed=9)}
    packed = quantize(random(48, 32, seed=10), Int8("channel"))
    values = {"head": dense["embed"], "layers.1.ffn.up": packed.dequantize(), **dense}
    asked: list[set[str]] = []

    def read(wanted: Collection[str]) -> Iterator[tuple[str, Value]]:
        asked.append(set(wanted))
        yield from ((name, value) for name, value in (*dense.items(), ("layers.1.ffn.up", packed)))

    weights = dora.with_factors(stored, model.params, read)
    assert asked == [{"layers.0.mixers.0.q", "embed", "layers.1.ffn.up"}]
    assert not weights.magnitudes
    for seed, (module, outputs) in enumerate(modules.items()):
        merged = values[names[module]] + 3 * (random(outputs, 2, seed=seed) @ random(2, 32, seed=seed))
        expected = (1 + random(outputs, seed=seed) ** 2) / np.linalg.norm(merged.astype(np.float64), axis=1)
        factor = weights.matrices[names[module]].factor
        assert factor is not None
        np.testing.assert_allclose(factor, expected, rtol=1e-5)
        changed = factor[:, None] * values[names[module]] + product(weights, names[module])
        np.testing.assert_allclose(changed, expected[:, None] * merged, rtol=1e-4, atol=1e-5)
    assert dora.with_factors(weights, model.params, read) is weights, "an adapter without magnitudes"


def test_dora_of_a_fused_module_and_of_keys_that_are_values(tmp_path: Path) -> None:
    case = read_cases()["phi3"]
    model = BaseModel(find(case.architecture)[0].rules, params(case.spec), adaptable(case.spec), 16)
    parts = [f"layers.0.mixers.0.{part}" for part in "qkv"]
    counts = [model.params[name].shape[0] for name in parts]
    dora_adapter(tmp_path / "a", {"model.layers.0.self_attn.qkv_proj": sum(counts)})
    magnitudes = read_adapter(tmp_path / "a", model).magnitudes
    np.testing.assert_array_equal(np.concatenate([magnitudes[name] for name in parts]), 1 + random(sum(counts)) ** 2)
    assert [len(magnitudes[name]) for name in parts] == counts
    case = read_cases()["gemma4"]
    model = BaseModel(find(case.architecture)[0].rules, params(case.spec), adaptable(case.spec), 16)
    keys = model.params["layers.1.mixers.0.k"].shape[0]
    dora_adapter(tmp_path / "b", {"model.layers.1.self_attn.k_proj": keys})
    stored = read_adapter(tmp_path / "b", model)
    read = [("layers.1.mixers.0.k", random(keys, 32, seed=5))]
    weights = dora.with_factors(stored, model.params, lambda wanted: read if len(wanted) == 1 else [])
    first, second = (weights.matrices[f"layers.1.mixers.0.{part}"].factor for part in "kv")
    assert first is not None
    np.testing.assert_array_equal(first, second)


def test_whole_modules_of_an_adapter(tmp_path: Path) -> None:
    """With low-rank matrices of others, or alone; their names may have the words that peft leaves out."""
    stem = "base_model.model"
    embed, head = random(257, 32), random(257, 32, seed=1)
    both = {f"{stem}.model.embed_tokens.weight": embed, f"{stem}.lm_head.modules_to_save.default.weight": head}
    pair = {f"{LAYER}.self_attn.q_proj.lora_A.weight": random(4, 32)}
    pair[f"{LAYER}.self_attn.q_proj.lora_B.weight"] = random(32, 4)
    saved = ["embed_tokens", "lm_head"]
    model = replace(base(tie_word_embeddings=True), copied=("embed", "head"))
    for tensors, rank in ((both, 1), ({**both, **pair}, 8)):
        weights = read_adapter(save_adapter(tmp_path / "a", tensors, r=4, modules_to_save=saved), model)
        assert weights.rank == rank
        assert weights.matrices.keys() - {"layers.0.mixers.0.q"} == {"embed", "head"}
        for name, copy in (("embed", embed), ("head", head)):
            np.testing.assert_array_equal(weights.matrices[name].copy, copy)
            assert not product(weights, name).any()
    size = 4 * sum(array.nbytes // 4 for array in both.values())
    assert weights.num_bytes == size + 4 * 8 * (2 * (257 + 32) + 64)


@pytest.mark.parametrize(
    ("module", "shape", "words"),
    [
        (
            "model.norm.weight",
            (32,),
            "the weight of model.norm cannot be replaced per request, only the weights of embed",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            (48, 32),
            r"model\.layers\.0\.mlp\.up_proj cannot be replaced per request",
        ),
        ("score.weight", (2, 32), "the weight of score cannot be replaced"),
        ("lm_head.bias", (257,), "the bias of lm_head cannot be replaced"),
        ("model.embed_tokens.weight", (257, 32), "start the server with --lora-modules-to-save embed_tokens"),
        ("lm_head.weight", (300, 32), r"lm_head is \[300, 32\], in the model \[257, 32\]"),
    ],
)
def test_whole_modules_that_cannot_be_replaced(module: str, shape: tuple[int, ...], words: str, tmp_path: Path) -> None:
    name = module.rpartition(".")[0]
    folder = save_adapter(tmp_path / "a", {f"base_model.model.{module}": random(*shape)}, modules_to_save=[name])
    with pytest.raises(ModelError, match=words):
        read_adapter(folder, replace(base(), copied=("head",)))


def test_a_whole_module_beside_its_low_rank_matrices_is_refused(tmp_path: Path) -> None:
    tensors = {"base_model.model.lm_head.weight": random(257, 32)}
    tensors |= {"base_model.model.lm_head.lora_A.weight": random(4, 32)}
    tensors |= {"base_model.model.lm_head.lora_B.weight": random(257, 4)}
    folder = save_adapter(tmp_path / "a", tensors, r=4, modules_to_save=["lm_head"])
    with pytest.raises(ModelError, match="a copy of head, and low-rank matrices of it, too"):
        read_adapter(folder, replace(base(), copied=("head",)))


def test_dora_that_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    model = dora_adapter(folder, {"model.layers.0.self_attn.q_proj": 32})
    stored = read_adapter(folder, model)
    name = "layers.0.mixers.0.q"
    for values, words in (
        ([], f"the lengths of the base model's rows, and {name} cannot be read again"),
        ([(name, -product(stored, name))], f"{name}: a length of the base model's rows is 0"),
    ):
        with pytest.raises(ModelError, match=words):
            dora.with_factors(stored, model.params, lambda _, values=values: values)
    expert = "model.layers.1.mlp.experts.0.gate_proj"
    dora_adapter(folder, {expert: 16})
    with pytest.raises(ModelError, match=f"module {expert}: DoRA of experts is not supported"):
        read_adapter(folder, base(**MIXTURE))
    q = f"{LAYER}.self_attn.q_proj"
    for numbers, words in ((random(31), "has 31 numbers, the model's has 32"), (np.full(32, np.inf), "numbers beyond")):
        tensors = {f"{q}.lora_A.weight": random(4, 32), f"{q}.lora_B.weight": random(32, 4)}
        tensors[f"{q}.lora_magnitude_vector"] = numbers.astype(np.float32)
        with pytest.raises(ModelError, match=words):
            read_adapter(save_adapter(folder, tensors, r=4, use_dora=True), model)


MIXTURE = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
}


def test_experts_are_stacked_and_those_without_are_zero(tmp_path: Path) -> None:
    names = {f"model.layers.1.mlp.experts.{expert}.gate_proj": (16, 32) for expert in (0, 3)}
    weights = read_adapter(write_adapter(tmp_path / "a", names, rank=2), base(**MIXTURE))
    factors = weights.matrices["layers.1.ffn.experts.gate"]
    assert factors.a.shape == (4, 8, 32)
    assert factors.b.shape == (4, 16, 8)
    assert [bool(expert.any()) for expert in factors.b] == [True, False, False, True]
    unknown = write_adapter(tmp_path / "b", {"model.layers.1.mlp.experts.4.gate_proj": (16, 32)})
    with pytest.raises(ModelError, match="the model has 4 experts, so no module"):
        read_adapter(unknown, base(**MIXTURE))
    router = write_adapter(tmp_path / "c", {"model.layers.1.mlp.gate": (4, 32)})
    with pytest.raises(ModelError, match=r"layers\.1\.ffn\.router\) cannot have an adapter"):
        read_adapter(router, base(**MIXTURE))


def test_experts_beside_a_feed_forward_block_are_refused_by_name(tmp_path: Path) -> None:
    cases = read_cases()
    arctic, gemma, longcat = (
        BaseModel(find(cases[name].architecture)[0].rules, params(cases[name].spec), adaptable(cases[name].spec), 16)
        for name in ("arctic", "gemma4-experts", "longcat-flash")
    )
    one = write_adapter(tmp_path / "a", {"model.layers.1.block_sparse_moe.experts.0.w1": (48, 32)})
    with pytest.raises(ModelError, match=r"layers\.1\.shortcut\.moe\.experts\.gate\) cannot have an adapter"):
        read_adapter(one, arctic)
    halves = {"model.layers.0.mlps.1.up_proj": (48, 32), "model.layers.1.self_attn.1.q_b_proj": (80, 24)}
    adapted = read_adapter(write_adapter(tmp_path / "c", halves), longcat)
    assert adapted.matrices.keys() == {"layers.0.second.ffn.up", "layers.1.mixers.1.q_b"}
    one = write_adapter(tmp_path / "d", {"model.layers.1.mlp.experts.0.up_proj": (20, 32)})
    with pytest.raises(ModelError, match=r"layers\.1\.second\.moe\.experts\.up\) cannot have an adapter"):
        read_adapter(one, longcat)
    stem = "base_model.model.model.layers.0.experts"
    tensors = {f"{stem}.lora_A.weight": random(4 * 2, 20), f"{stem}.lora_B.weight": random(32, 4 * 2)}
    named = {"target_parameters": ["experts.down_proj"], "peft_version": "0.18.1"}
    with pytest.raises(ModelError, match=r"layers\.0\.side\.moe\.experts\.down\) cannot have an adapter"):
        read_adapter(save_adapter(tmp_path / "b", tensors, r=2, **named), gemma)


@pytest.mark.parametrize("version", [None, "0.18.1", "0.19.0"])
@pytest.mark.parametrize("square", [False, True])
def test_adapters_of_all_experts_in_one_parameter(version: str | None, square: bool, tmp_path: Path) -> None:
    """peft adds "o r e, e r i -> e i o" to a parameter [E, i, o]; since 0.19 "-> e o i" to one [E, o, i]."""
    width, swaps = 16 if square else 24, version == "0.19.0"
    config = {**MIXTURE, "moe_intermediate_size": width}
    shapes = {"base_layer.": (2 * width, 32), "": (32, width)}  # gate and up, down: outputs, inputs
    tensors, deltas = {}, []
    for seed, (inner, shape) in enumerate(shapes.items()):
        reads, writes = reversed(shape) if swaps else shape
        a, b = random(4 * 2, reads, seed=seed), random(writes, 2 * 4, seed=10 + seed)
        tensors[f"base_model.model.model.layers.0.mlp.experts.{inner}lora_A.weight"] = a
        tensors[f"base_model.model.model.layers.0.mlp.experts.{inner}lora_B.weight"] = b
        form = "ore,eri->eoi" if swaps else "ore,eri->eio"
        deltas.append(np.einsum(form, b.reshape(writes, 2, 4), a.reshape(4, 2, reads)) * 1.5)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    stated = {} if version is None else {"peft_version": version}
    folder = save_adapter(tmp_path / "a", tensors, r=2, lora_alpha=3, target_parameters=names, **stated)
    weights = read_adapter(folder, base(**config))
    gate, up, down = (product(weights, f"layers.0.ffn.experts.{part}") for part in ("gate", "up", "down"))
    np.testing.assert_allclose(np.concatenate([gate, up], 1), deltas[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(down, deltas[1], rtol=1e-4, atol=1e-5)


def test_adapters_of_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    stem = "base_model.model.model.layers.0.mlp.experts"
    named = {"target_parameters": ["experts.down_proj"], "peft_version": "0.19.0"}
    for shapes, rank, words in (
        (((9, 16), (32, 9)), 2, "has no whole rank for 4 experts"),
        (((68, 16), (32, 68)), 17, "r is 17, above --max-lora-rank 16"),
        (((12, 16), (32, 12)), 2, "r is 2 for model.layers.0.mlp.experts.down_proj, its matrices have 3"),
        (((8, 20), (32, 8)), 2, r"experts is \[32, 20\] in the adapter and \[32, 16\] in the model"),
    ):
        tensors = {f"{stem}.lora_{part}.weight": random(*shape) for part, shape in zip("AB", shapes)}
        with pytest.raises(ModelError, match=words):
            read_adapter(save_adapter(tmp_path / "a", tensors, r=rank, **named), base(**MIXTURE))


def test_a_torch_file_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = write_adapter(tmp_path / "a", MODULES)
    first = read_adapter(folder, base())
    from safetensors.torch import load_file

    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    second = read_adapter(folder, base())
    for name, factors in first.matrices.items():
        np.testing.assert_array_equal(factors.b, second.matrices[name].b)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=r"no adapter_model.safetensors or adapter_model.bin"):
        read_adapter(folder, base())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "only LORA adapters"),
        ({"bias": "all"}, "bias is trained"),
        ({"lora_bias": True}, "bias is trained"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save has lm_head, of which there is no tensor"),
        ({"modules_to_save": "lm_head"}, "modules_to_save 'lm_head' are not names of modules"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
        ({"target_parameters": "experts.gate_up_proj"}, "are not names of parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"r": 32}, "r is 32, above --max-lora-rank 16"),
        ({"rank_pattern": {"q_proj": 64}}, "r is 64, above --max-lora-rank 16"),
        ({"r": 5}, "r is 5 for model.layers.0.self_attn.q_proj, its matrices have 4"),
        ({"r": "4"}, "ranks are positive integers"),
        ({"lora_alpha": "x"}, "not numbers"),
        ({"alpha_pattern": {"(": 1}}, "is not a pattern of module names"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (32, 32)}, **{"r": 4, **config})
    with pytest.raises(ModelError, match=words):
        read_adapter(folder, base())


def test_a_dora_adapter_without_magnitudes_is_refused(tmp_path: Path) -> None:
    q = f"{LAYER}.self_attn.q_proj"
    tensors = {f"{q}.lora_A.weight": random(4, 32), f"{q}.lora_B.weight": random(32, 4)}
    with pytest.raises(ModelError, match="q_proj: lora_magnitude_vector is missing, though use_dora is set"):
        read_adapter(save_adapter(tmp_path / "a", tensors, r=4, use_dora=True), base())


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    q = f"{LAYER}.self_attn.q_proj"
    good = {f"{q}.lora_A.weight": random(4, 32), f"{q}.lora_B.weight": random(32, 4)}
    huge = np.full((32, 4), 1e6, np.float32)
    for more, words in (
        ({f"{q}.lora_B.weight": random(48, 4)}, r"is \[48, 32\] in the adapter and \[32, 32\] in the model"),
        ({f"{q}.lora_B.weight": random(32, 3)}, "are not factors"),
        ({f"{q}.lora_B.weight": np.full((32, 4), np.nan, np.float32)}, "numbers beyond 65504"),
        ({f"{q}.lora_B.weight": huge}, "numbers beyond 65504"),
        ({f"{q}.lora_magnitude_vector": random(32)}, "lora_magnitude_vector is there, but not use_dora"),
        ({"base_model.model.lm_head.weight": random(257, 32)}, "is no LoRA matrix"),
        ({f"{LAYER}.self_attn.x_proj.lora_A.weight": random(4, 32)}, r"no module model.layers.0.self_attn.x_proj"),
        ({f"{LAYER}.self_attn.k_proj.lora_A.weight": random(4, 32)}, "lora_A or lora_B is missing"),
    ):
        folder = save_adapter(tmp_path / "a", {**good, **more}, r=4)
        with pytest.raises(ModelError, match=words):
            read_adapter(folder, base())
    with pytest.raises(ModelError, match="has no LoRA matrices"):
        read_adapter(save_adapter(tmp_path / "a", {}, r=4), base())
    with pytest.raises(ModelError, match="no such folder"):
        read_adapter(tmp_path / "none", base())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no adapter_config.json"):
        read_adapter(tmp_path / "empty", base())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError):
        read_adapter(tmp_path / "a", base())


def test_adaptable_matrices_and_the_size_of_a_slot() -> None:
    spec = tiny_spec()
    matrices = adaptable(spec)
    assert "head" in matrices
    assert "head" not in params(spec)
    assert not any("norm" in name for name in matrices)
    assert slot_elements(matrices.values(), 8) == 8 * sum(sum(param.shape) for param in matrices.values())
    stacked = Param(name="experts", shape=(4, 24, 32), axes="EFD")
    assert slot_elements([stacked], 8) == 4 * 8 * (24 + 32)
    embed = Param(name="embed", shape=(96, 32), axes="VD")
    assert copy_elements({"embed": embed, "experts": stacked}, ("embed", "head")) == 96 * 32
    assert factor_elements([stacked, embed, Param(name="o", shape=(24, 32), axes="DF")]) == 32 + 24
    assert [rank_bucket(rank) for rank in (1, 2, 8, 9, 256, 257, 512)] == [1, 8, 8, 16, 256, 320, 512]
