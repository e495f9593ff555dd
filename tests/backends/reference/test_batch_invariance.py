"""--batch-invariant: a sequence's logits are the same bits, alone or beside others, in whatever chunks it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints.tiny_folder import write_model
from support.engines.backend_options import make_options
from support.engines.reference_driver import random_weights, tiny_spec

from pagoda import LLM, SamplingParams
from pagoda.backends.reference.execution import make_batch
from pagoda.backends.reference.memory import allocate
from pagoda.backends.reference.model.decoder import Decoder
from pagoda.backends.reference.model.linear import ROWS, linear
from pagoda.backends.reference.model.numerics import numerics
from pagoda.backends.reference.model.ops import activation, sigmoid
from pagoda.backends.reference.weights.load import Packer
from pagoda.backends.registry import check_batch_invariant
from pagoda.backends.torch_decoder.mixers.invariant_attention import KEYS, QUERIES
from pagoda.common.config.engine import Limits
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import GatedDelta
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import ExpertGroups, ModelSpec, Moe, Router

BLOCK, LENGTH = 16, KEYS + 2 * QUERIES + 5
GENERATOR = np.random.default_rng(0)
SEQUENCES = [GENERATOR.integers(0, 96, length).tolist() for length in (LENGTH, 41, ROWS + 7)]

Cuts = Sequence[int]
"""Lengths of a sequence's chunks."""


def spec() -> ModelSpec:
    """Windows, chunks, ALiBi, a soft cap, sinks, output gates, narrow values, norms of q and k, and experts."""
    full, windowed = tiny_spec(window=KEYS // 2).layers[0], tiny_spec(window=KEYS // 2).layers[1]
    gated = replace(full.attention, output_gate=True, qk_norm=Norm(1e-5), softcap=20.0, sinks=True)
    sloped = replace(full.attention, rope=None, alibi_slopes=(0.5, 0.25, 0.1, 0.7), alibi_root=True, value_dim=12)
    chunked = replace(full.attention, chunk=KEYS // 2 - 3, chunk_lookback=1, output_gate=True, gate_per_head=True)
    router = Router(2, renormalise=True, scores="sigmoid", groups=ExpertGroups(2, 1, "best"))
    experts = Moe(4, replace(full.feed_forward, width=24), router, shared=replace(full.feed_forward, width=12))
    layers = (full, windowed, replace(full, mixers=(gated,), ffn=experts), replace(full, mixers=(sloped,)))
    return replace(tiny_spec(), layers=(*layers, replace(full, mixers=(chunked,))))


def logits(decoder: Decoder, chunks: Sequence[tuple[int, Cuts]], dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """Logits of each sequence that is named, all computed together, one chunk of each per step."""
    layout = kv_layout(decoder.spec, BLOCK)
    pages, groups = -(-LENGTH // BLOCK), len(layout.groups)
    count = len(chunks) * groups * pages
    caches = allocate(layout, (1 + count,) * len(layout.pools), dtype)
    tables = 1 + np.random.default_rng(7).permutation(count).astype(np.int32).reshape(groups, len(chunks), pages)
    at, parts = [0] * len(chunks), {number: [] for number, _ in chunks}
    for step in range(max(len(cuts) for _, cuts in chunks)):
        rows = [row for row, (_, cuts) in enumerate(chunks) if step < len(cuts)]
        rows.sort(key=lambda row: chunks[row][1][step] != 1)  # decodes come first
        ends = {row: at[row] + chunks[row][1][step] for row in rows}
        token_ids = [token for row in rows for token in SEQUENCES[chunks[row][0]][at[row] : ends[row]]]
        starts = np.cumsum([0, *(ends[row] - at[row] for row in rows)], dtype=np.int32)
        plan = StepPlan(
            step=0,
            starts=(),
            rows=np.array(rows, np.int32),
            query_start=starts,
            context=np.array([at[row] for row in rows], np.int32),
            token_ids=np.array(token_ids, np.int32),
            block_tables=tuple(table[rows] for table in tables),
            samples=np.ones(len(rows), np.bool_),
        )
        hidden = decoder.hidden(torch.tensor(token_ids), make_batch(plan, layout), caches)
        for index, row in enumerate(rows):
            parts[chunks[row][0]].append(decoder.logits(hidden[starts[index] : starts[index + 1]]))
            at[row] = ends[row]
    return {number: torch.cat(rows) for number, rows in parts.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_logits_do_not_depend_on_the_batch(dtype: str) -> None:
    numbers = numerics(dtype, batch_invariant=True)
    model = spec()
    decoder = Decoder(model, Packer(model, numbers).pack(random_weights(model)), numbers, LENGTH)
    alone = logits(decoder, [(0, [LENGTH])], numbers.compute)[0]
    assert alone.std() > 0.1
    for chunks in (
        [(0, [LENGTH - 3, 1, 1, 1])],
        [(2, [ROWS + 7]), (0, [LENGTH])],
        [(1, [30, *[1] * 11]), (2, [5, 1, *[ROWS]]), (0, [3, 37, LENGTH - 45, *[1] * 5])],
    ):
        assert torch.equal(logits(decoder, chunks, numbers.compute)[0], alone), chunks


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"])
def test_an_element_does_not_depend_on_its_place(name: str) -> None:
    function = sigmoid if name == "sigmoid" else activation(name, batch_invariant=True)
    both = 3 * torch.randn(300, 2 * 1537, generator=torch.Generator().manual_seed(0))
    x = both[:, :1537]  # as the gate of a gated block
    whole = function(x)
    for begin, end in ((0, 1), (7, 9), (299, 300), (3, 250)):
        assert torch.equal(function(x[begin:end]), whole[begin:end])
    if name not in ("relu2", "sigmoid"):
        torch.testing.assert_close(whole, activation(name)(x.contiguous()), atol=1e-6, rtol=1e-6)


def test_what_cannot_be_invariant_is_refused_by_name() -> None:
    limits = Limits(max_model_len=64, max_num_batched_tokens=32, max_num_seqs=2, block_size=16)
    delta = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=4, norm=Norm(1e-6))
    model = replace(tiny_spec(), layers=(replace(tiny_spec().layers[0], mixers=(delta,)),))
    with pytest.raises(ConfigError, match=r"--batch-invariant: .*GatedDelta.*drop it"):
        make_options(model, limits=limits, batch_invariant=True)
    with pytest.raises(
        ConfigError,
        match=r"--batch-invariant: simulated does not support it; .*--backend jax_tpu or torch_cuda or reference",
    ):
        check_batch_invariant("simulated")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_of_many_inputs_does_not_depend_on_the_other_rows(dtype: str) -> None:
    numbers, generator = numerics(dtype, batch_invariant=True), torch.Generator().manual_seed(0)
    layer = linear(torch.randn(576, 1536, generator=generator).to(numbers.weights), None, numbers)
    x = torch.randn(3 * ROWS + 5, 1536, generator=generator).to(numbers.compute)
    whole = layer(x)
    for begin, end in ((0, 1), (1, 2), (5, 29), (ROWS, 2 * ROWS + 3)):
        assert torch.equal(layer(x[begin:end]), whole[begin:end])


@pytest.mark.setting("--batch-invariant")
def test_an_engine_gives_the_same_log_probabilities_in_any_batch(tmp_path: Path) -> None:
    llm = LLM(
        str(write_model(tmp_path / "model")),
        backend="reference",
        dtype="bfloat16",
        batch_invariant=True,
        enable_prefix_caching=False,
        max_num_batched_tokens=48,
        max_num_seqs=8,
    )
    prompts = [{"prompt_token_ids": [(7 * i + j * j) % 256 for j in range(5 + 9 * i)]} for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)

    def answers(chosen: list[dict[str, list[int]]]) -> list[list[dict[int, float]]]:
        done = llm.generate(chosen, params, use_tqdm=False)
        steps = [one.outputs[0].logprobs or [] for one in done]
        return [[{token: entry.logprob for token, entry in step.items()} for step in each] for each in steps]

    together = answers(prompts)
    assert together == [answers([prompt])[0] for prompt in prompts]
    llm.shutdown()
