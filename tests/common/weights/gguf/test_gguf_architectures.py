"""Every architecture: a model saved by transformers, written as GGUF, reads back as the same spec and tensors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.suite.rows import each_row

from pagoda.backends.reference.model.naive.model import NaiveModel
from pagoda.common.config.groups.nested.pooler import PoolerConfig
from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.registry import pooling_spec, spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.weights.checkpoint import Checkpoint, open_checkpoint
from pagoda.common.weights.gguf import dequantize
from pagoda.common.weights.gguf.checkpoint import GgufCheckpoint
from pagoda.common.weights.gguf.dequantize import BlockType
from pagoda.common.weights.gguf.file import GgufFile
from pagoda.common.weights.quantization.tensors import QuantizedTensor
from pagoda.common.weights.rules import apply_rules, stored_schemes
from pagoda.common.weights.sentence_modules import gguf_sentence_modules
from pagoda.tests.common.weights.gguf.gguf_cases import APART, CASES, MOE, MULTIPLIED, OVERRIDES, REARRANGED, WRITTEN
from pagoda.tests.common.weights.gguf.gguf_writing import convert
from pagoda.tests.models.cases import nomic_mixture
from pagoda.tests.models.cases.tiny import TINY, Tiny, logits, tokens
from pagoda.tests.models.cases.tiny_pooling import CASES as CASES_OF_POOLING


def _tiny(case: str) -> Tiny:
    if case == "qwen3moe":
        return Tiny(case, "Qwen3MoeForCausalLM", MOE)
    name = CASES[case][1] if case in CASES else "falcon-h1"
    base = next(tiny for tiny in TINY if tiny.name == name)
    written = {**base.written, **WRITTEN.get(case, {})}
    return replace(base, extra={**base.extra, **OVERRIDES.get(case, {})}, written=written)


def _close(mine: object, theirs: object) -> bool:
    """Equal specs, up to what float32 metadata loses."""
    return _rounded(repr(mine)) == _rounded(repr(theirs))


def _rounded(text: str) -> list[str]:
    words = text.replace("=", " ").replace(",", " ").replace("(", " ").replace(")", " ").split()
    return [f"{float(word):.5g}" if word[0].isdigit() else word for word in words]


@each_row("case", [*CASES, "qwen3moe"])
def test_reads_back_what_transformers_saved(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, and with blocks in place of the matrices."""
    arch, _, extra = CASES.get(case, ("qwen3moe", "", {}))
    _tiny(case).save(tmp_path / "hf")
    expected = convert(tmp_path / "hf", tmp_path / "model.gguf", arch, extra)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    tensors, original = dict(checkpoint.tensors()), open_checkpoint(tmp_path / "hf")

    if checkpoint.config()["architectures"] == original.config()["architectures"] and arch not in APART:
        unused = {name for name in expected if name.endswith((".act_fn.beta", ".act_fn.eps"))}
        assert tensors.keys() == expected.keys() - unused
    assert checkpoint.num_tensors == len(tensors)
    assert checkpoint.num_bytes == sum(array.nbytes for array in tensors.values())

    assert _close(spec_from_config(checkpoint.config())[0], spec_from_config(original.config())[0])
    restored, written = _parameters(checkpoint), _parameters(original)
    assert restored.keys() == written.keys()
    for name, array in restored.items():
        np.testing.assert_allclose(array, written[name], rtol=0, atol=3e-7, err_msg=name)

    monkeypatch.setitem(dequantize._KERNELS, PAIR, lambda blocks, out: np.copyto(out, blocks.view(np.float32)))
    pairs = _of_pairs(tmp_path / "model.gguf")
    sizes = [value.nbytes for _, value in pairs.tensors()]
    assert (pairs.num_tensors, pairs.num_bytes) == (len(sizes), sum(sizes))
    spec, family = spec_from_config(pairs.config())
    values = dict(apply_rules(family.rules, params(spec), pairs.tensors(), family.ignored))
    blocks = {name: value.scheme for name, value in values.items() if isinstance(value, QuantizedTensor)}
    assert blocks == stored_schemes(family.rules, params(spec), pairs.schemes)
    even = {name for name in written if _is_matrix(name) and not written[name].shape[-1] % 2}
    assert even - blocks.keys() == set(OF_VALUES.get(case, ()))
    for name, value in values.items():
        array = value.dequantize() if isinstance(value, QuantizedTensor) else value
        np.testing.assert_array_equal(array, restored[name], err_msg=name)


PAIR = BlockType(1000, "PAIR", 2, 8)
"""Blocks of two numbers of float32."""
_OUT_OF_DELTA = tuple(f"layers.{layer}.mixers.0.o" for layer in range(3))
OF_VALUES = {"qwen35": _OUT_OF_DELTA, "qwen35moe": _OUT_OF_DELTA}
"""Matrices that are not kept in blocks, since the layout changes the order of their inputs."""


def _of_pairs(path: Path) -> GgufCheckpoint:
    """Open a file of float32 as if its matrices were of blocks."""
    file = GgufFile(path)
    file.tensors = {
        name: replace(info, type=PAIR) if len(info.shape) > 1 and not info.shape[-1] % 2 else info
        for name, info in file.tensors.items()
    }
    return GgufCheckpoint(file)


def _is_matrix(name: str) -> bool:
    return re.search(r"\.(q|k|v|o|gate|up|down)$|^head$", name) is not None


@each_row("case", [*REARRANGED, *MULTIPLIED])
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    tiny = _tiny(case)
    model = tiny.save(tmp_path / "hf")
    arch, _, extra = CASES.get(case, ("falcon-h1", "", {}))
    convert(tmp_path / "hf", tmp_path / "model.gguf", arch, extra)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    spec, family = spec_from_config(checkpoint.config())
    weights = apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored)
    token_ids = tokens(20)
    ours, theirs = NaiveModel(spec, weights, max_len=20).logits(token_ids), logits(model, token_ids)
    assert theirs.std() > 0.1, "a flat answer proves nothing"
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=0, atol=3e-5)


@each_row(
    ("arch", "case", "pooling"),
    [
        ("modern-bert", "modernbert", 1),
        ("bert", "bert", 2),
        ("bert", "roberta", 1),
        ("nomic-bert", "nomic", 1),
        ("jina-bert-v2", "jina-v2", 1),
        ("jina-bert-v3", "jina-v3", 1),
        ("gemma-embedding", "gemma3-both-ways", 1),
        ("qwen3", "qwen3", 3),
    ],
)
def test_embedders_read_back(arch: str, case: str, pooling: int, tmp_path: Path) -> None:
    """The same parameters, and the pooling that the file states."""
    tiny = next(each for each in CASES_OF_POOLING if each.name == case).tiny
    if arch == "gemma-embedding":  # llama.cpp fixes the scale, and the pattern unless the file states it
        tiny = replace(tiny, extra={**tiny.extra, "query_pre_attn_scalar": 12})
    tiny.save(tmp_path / "hf")
    extra = {"pooling_type": pooling} | ({} if arch == "qwen3" else {"attention.causal": False})
    convert(tmp_path / "hf", tmp_path / "model.gguf", arch, extra)
    checkpoint, original = open_checkpoint(tmp_path / "model.gguf"), open_checkpoint(tmp_path / "hf")
    assert checkpoint.gguf_metadata is not None
    modules = gguf_sentence_modules(checkpoint.gguf_metadata, checkpoint.config()["hidden_size"])
    assert modules is not None
    assert (modules.kind, modules.normalise) == ({1: "mean", 2: "first", 3: "last"}[pooling], True)
    values = []
    for each in (checkpoint, original):
        spec, family = pooling_spec(each.config(), "embed", modules, PoolerConfig())
        weights = dict(apply_rules(family.rules, params(spec), each.tensors(), family.ignored))
        values.append((spec, {name: np.asarray(value) for name, value in weights.items()}))
    (spec, ours), (written, theirs) = values
    if case == "roberta":  # whose first rows are those of padding
        written = replace(written, embedding=replace(written.embedding, position_offset=0))
        theirs["positions"] = theirs["positions"][2:]
    assert _close(spec, written)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=0, atol=3e-7, err_msg=name)


def test_reranker_reads_back(tmp_path: Path) -> None:
    """XLM-RoBERTa with one label: the same head; a file of an embedder has none."""
    tiny = next(each for each in CASES_OF_POOLING if each.name == "xlm-roberta-score").tiny
    tiny.save(tmp_path / "hf")
    extra = {"pooling_type": 4, "attention.causal": False, "classifier.output_labels": ["LABEL_0"]}
    convert(tmp_path / "hf", tmp_path / "model.gguf", "bert", extra)
    values = []
    for path in (tmp_path / "model.gguf", tmp_path / "hf"):
        checkpoint = open_checkpoint(path)
        spec, family = pooling_spec(checkpoint.config(), "classify", None, PoolerConfig())
        weights = dict(apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored))
        values.append((spec.pooler, {name: np.asarray(value) for name, value in weights.items()}))
    (pooler, ours), (written, theirs) = values
    assert pooler == written
    theirs["positions"] = theirs["positions"][2:]
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def test_nomic_mixture_reads_back(tmp_path: Path) -> None:
    """The same parameters, but for the bias of the experts, which files leave out."""
    tensors = {name: tensor.numpy() for name, tensor in nomic_mixture.tensors().items()}
    (tmp_path / "config.json").write_text(json.dumps(nomic_mixture.CONFIG))
    save_file(tensors, tmp_path / "model.safetensors")
    convert(tmp_path, tmp_path / "model.gguf", "nomic-bert-moe", {"attention.causal": False})
    values = []
    for path in (tmp_path / "model.gguf", tmp_path):
        checkpoint = open_checkpoint(path)
        spec, family = pooling_spec(checkpoint.config(), "embed", None, PoolerConfig())
        weights = dict(apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored))
        values.append((spec, {name: np.asarray(value) for name, value in weights.items()}))
    (spec, ours), (written, theirs) = values
    assert _close(spec, written)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, 0 if name.endswith("shared.down_bias") else theirs[name], err_msg=name)


def _parameters(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    spec, family = spec_from_config(checkpoint.config())
    values = apply_rules(family.rules, params(spec), checkpoint.tensors(), family.ignored)
    return {name: np.asarray(value) for name, value in values}


LLAMA = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 16,
    "feed_forward_length": 24,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def _write(path: Path, arch: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        writer.add_key_value(
            key if "." in key and key.startswith("tokenizer") else f"{arch}.{key}", value, _type(value)
        )
    for name, array in {"token_embd.weight": np.ones((10, 16), np.float32), **(tensors or {})}.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type(value: object) -> gguf.GGUFValueType:
    return gguf.GGUFValueType.get_type(value)


def _llama(path: Path, extra: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    return open_checkpoint(_write(path / "m.gguf", "llama", {**LLAMA, **extra}, tensors)).config()


def test_llama3_scaling_is_recovered_from_frequency_factors(tmp_path: Path) -> None:
    # The rule of Llama 3.1 (arXiv 2407.21783) for head_dim 8, theta 10000, factor 8, bands 1 and 4 over 8192 tokens.
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(0, 128, 2) / 128)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    extra = {"attention.key_length": 128, "attention.value_length": 128}
    assert _llama(tmp_path, extra, {"rope_freqs.weight": factors})["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_frequency_factors_become_equal_lists(tmp_path: Path) -> None:
    scaling = _llama(tmp_path, {}, {"rope_freqs.weight": np.array([2, 3], np.float32)})["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == [2.0, 3.0]
    assert scaling["attention_factor"] == 1.0


def test_two_scalings_at_once_are_refused(tmp_path: Path) -> None:
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    with pytest.raises(ModelError, match=r"both rope.scaling and rope_freqs"):
        _llama(tmp_path, extra, {"rope_freqs.weight": np.array([2, 3], np.float32)})


def test_yarn_metadata(tmp_path: Path) -> None:
    extra = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 30.0,
    }
    assert _llama(tmp_path, extra)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 30.0,
        "beta_slow": 1.0,
    }


def test_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", "bitnet", {"block_count": 1})
    with pytest.raises(ModelError, match=r"architecture bitnet is not supported; supported: .*llama, mistral3, .*gpt2"):
        open_checkpoint(path)


@each_row(
    ("extra", "message"),
    [
        ({"logit_scale": 2.0}, r"llama.logit_scale = 2.0 is not supported"),
        ({"rope.scaling.type": "other"}, "rope scaling other is not supported"),
        ({"rope.scaling.attn_factor": 2.0}, "attn_factor is not supported without yarn"),
        ({"attention.value_length": 8}, "keys and values differ"),
        ({"attention.causal": False}, "non-causal attention"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5},
            "yarn_ext_factor",
        ),
        ({"rope.dimension_count": 2, "attention.key_length": 4}, "a part of each head"),
        ({"attention.head_count": "four"}, "attention.head_count is 'four', expected one int"),
        ({"expert_count": 2, "expert_used_count": 1}, "experts in separate tensors"),
        ({"attention.head_count": [4, 2]}, "expected one int"),
        ({"attention.head_count": 0}, "head_count is 0"),
        ({"block_count": (1 << 31) - 1}, "block_count is 2147483647; it must be at most 10000"),
    ],
)
def test_unread_metadata_that_changes_the_computation_is_refused(
    extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        _llama(tmp_path, extra)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    metadata = {key: value for key, value in LLAMA.items() if key != "context_length"}
    with pytest.raises(ModelError, match=r"metadata llama\.context_length is missing"):
        open_checkpoint(_write(tmp_path / "m.gguf", "llama", metadata))


@each_row("name", ["blk.0.surprise.weight", "blk.x", "token_embd.scale", "v.patch_embd.weight"])
def test_unknown_tensor_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=f"tensor {name} is unknown in a llama model"):
        _llama(tmp_path, {}, {name: np.ones(4, np.float32)})


def test_rotary_rows_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", "llama", LLAMA, {"blk.0.attn_q.weight": np.ones((18, 16), np.float32)})
    with pytest.raises(WeightError, match="18 rows"):
        list(open_checkpoint(path).tensors())


def test_end_of_text_ids(tmp_path: Path) -> None:
    extra = {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<|im_end|>", "<|eot|>", "<|end|>"],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1],
    }
    checkpoint = open_checkpoint(_write(tmp_path / "m.gguf", "llama", {**LLAMA, **extra}))
    # <|end|> is an ordinary token here, so it ends nothing.
    assert checkpoint.generation_config() == {"bos_token_id": 0, "eos_token_id": [1, 3, 2]}
    assert checkpoint.gguf_metadata is not None
    assert checkpoint.gguf_metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"


def test_the_end_of_one_of_several_messages_ends_nothing(tmp_path: Path) -> None:
    """Harmony's answers have several messages, each ended by <|end|>."""
    extra = {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.tokens": ["<|start|>", "<|return|>", "<|end|>", "<|call|>"],
        "tokenizer.ggml.token_type": [3, 3, 3, 3],
    }
    checkpoint = open_checkpoint(_write(tmp_path / "m.gguf", "llama", {**LLAMA, **extra}))
    assert checkpoint.generation_config()["eos_token_id"] == [1, 3]


def test_layers_that_propose_drafts_are_dropped(tmp_path: Path) -> None:
    metadata = {**LLAMA, "block_count": 2, "nextn_predict_layers": 1, "expert_count": 4, "expert_used_count": 1}
    metadata |= {"expert_feed_forward_length": 8}
    tensors = {f"blk.{layer}.attn_q.weight": np.ones((16, 16), np.float32) for layer in (0, 1)}
    tensors["blk.1.nextn.enorm.weight"] = np.ones(16, np.float32)
    checkpoint = open_checkpoint(_write(tmp_path / "m.gguf", "glm4moe", metadata, tensors))
    assert checkpoint.config()["num_hidden_layers"] == 1
    assert {name for name, _ in checkpoint.tensors()} == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
    }


def test_latents_in_the_older_form(tmp_path: Path) -> None:
    """Keys and values of latents in one tensor, and head dims of the expanded form."""
    latents = {"attention.kv_lora_rank": 6, "attention.key_length": 8, "attention.value_length": 4}
    metadata = {**LLAMA, **latents, "rope.dimension_count": 2}
    stored = {"blk.0.attn_kv_b.weight": np.ones((40, 6), np.float32)}
    checkpoint = open_checkpoint(_write(tmp_path / "m.gguf", "deepseek2", metadata, stored))
    config = checkpoint.config()
    assert (config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]) == (6, 2, 4)
    assert dict(checkpoint.tensors())["model.layers.0.self_attn.kv_b_proj.weight"].shape == (40, 6)


def test_gate_and_up_of_jina_bert_in_two_tensors(tmp_path: Path) -> None:
    """As older files have them."""
    metadata = {**LLAMA, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False}
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        del metadata[key]
    gate, up = np.full((24, 16), 2, np.float32), np.full((24, 16), 3, np.float32)
    stored = {"blk.0.ffn_up.weight": up, "blk.0.ffn_gate.weight": gate}
    checkpoint = open_checkpoint(_write(tmp_path / "m.gguf", "jina-bert-v2", metadata, stored))
    joined = dict(checkpoint.tensors())["encoder.layer.0.mlp.gated_layers.weight"]
    np.testing.assert_array_equal(joined, np.concatenate([gate, up]))


def test_half_of_a_pair_of_tensors_is_refused(tmp_path: Path) -> None:
    latents = {"attention.kv_lora_rank": 6, "attention.key_length_mla": 8, "attention.value_length_mla": 4}
    stored = {"blk.0.attn_k_b.weight": np.ones((4, 6, 6), np.float32)}
    path = _write(tmp_path / "m.gguf", "deepseek2", {**LLAMA, **latents, "rope.dimension_count": 2}, stored)
    with pytest.raises(WeightError, match=r"tensor blk.0.attn_v_b.weight is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.ones((8, 16), np.float32), "float32"),
        (np.ones((8, 16), np.float16), "float16"),
    ],
)
def test_dtype_follows_the_matrices(array: np.ndarray, dtype: str, tmp_path: Path) -> None:
    assert _llama(tmp_path, {}, {"blk.0.attn_v.weight": array})["dtype"] == dtype


def test_dummy_opens_without_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(_write(tmp_path / "m.gguf", "llama", LLAMA), "dummy")
    assert (checkpoint.num_tensors, list(checkpoint.tensors())) == (0, [])
    assert checkpoint.config()["hidden_size"] == 16
