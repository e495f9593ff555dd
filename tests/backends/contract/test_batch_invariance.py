"""--batch-invariant on the accelerators: a token's logprobs are the same bits in any batch, chunk and bucket.

And with or without it, logits have 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support.devices.jax_devices
import support.kernels.triton_interpreter  # noqa: F401
from support.checkpoints.tiny_folder import write_model
from support.engines.backend_options import make_options
from support.engines.reference_driver import Driver, tiny_spec

from pagoda import LLM, SamplingParams
from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.common.config.engine import Limits
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import ConfigError
from pagoda.common.models.mixers import LatentAttention
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import AltUp, ExpertGroups, ModelSpec, Moe, Router
from pagoda.common.weights.quantization.schemes import Int8

GENERATOR = np.random.default_rng(0)
SEQUENCES = [GENERATOR.integers(0, 96, length).tolist() for length in (50, 23, 38)]
EVERYTHING = SamplingRules(logprobs=-1)
LIMITS = Limits(max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4, block_size=4)

VOCAB = 96

Steps = Sequence[Mapping[int, int]]
"""Tokens of each sequence per step."""


class Interpreted(Device):
    """A CPU that runs kernels."""

    @property
    def use_kernels(self) -> bool:
        return True


def one_layer() -> ModelSpec:
    """A window, a soft cap, norms of q and k, and experts."""
    spec = tiny_spec(window=7, softcap=20.0, moe=True)
    return replace(spec, layers=spec.layers[1:])


def every_kind() -> ModelSpec:
    """A window, ALiBi, a soft cap, sinks, an output gate, norms of q and k, and experts."""
    full, windowed = tiny_spec(window=7).layers
    gated = replace(full.attention, output_gate=True, softcap=20.0, sinks=True)
    sloped = replace(full.attention, rope=None, alibi_slopes=(0.5, 0.25, 0.1, 0.7))
    router = Router(2, renormalise=True, scores="sigmoid", groups=ExpertGroups(2, 1, "best"))
    expert = replace(full.feed_forward, width=24, bias=False)
    experts = Moe(4, expert, router, shared=replace(expert, width=12), shared_gate=True)
    layers = (windowed, replace(full, mixers=(gated,), ffn=experts), replace(full, mixers=(sloped,)))
    return replace(tiny_spec(), layers=layers)


BACKENDS: dict[str, tuple[str, dict[str, Any], ModelSpec]] = {
    "torch_cuda": ("torch_cuda", {"device": CPU}, every_kind()),
    "jax_tpu": ("jax_tpu", {}, every_kind()),
    "kernels": ("torch_cuda", {"device": Interpreted(CPU.torch, CPU.chip, "interpreter")}, one_layer()),
}
KINDS = [
    ("torch_cuda", "float32"),
    ("torch_cuda", "bfloat16"),
    ("jax_tpu", "float32"),
    pytest.param("jax_tpu", "bfloat16", marks=pytest.mark.slow_matrix),
    ("kernels", "float32"),
]
"""The interpreter's bfloat16 is wrong."""


def logprobs(d: Driver, steps: Steps) -> dict[tuple[int, int], bytes]:
    """Return the logprobs of each sequence after each number of tokens that ended a chunk."""
    known: dict[tuple[int, int], bytes] = {}
    for step in steps:
        starts = [d.start(row, SEQUENCES[row], EVERYTHING) for row in step if (row, 0) not in known]
        known |= {(start.row, 0): b"" for start in starts}
        pieces = {row: SEQUENCES[row][d.context[row] : d.context[row] + count] for row, count in step.items()}
        rows, result = d.step(pieces, starts)
        for index, row in enumerate(rows):
            entry = result.logprobs[index]
            by_token = np.zeros(VOCAB, np.float32)
            by_token[entry.token_ids[0, 1:]] = entry.logprobs[0, 1:]
            known[row, d.context[row]] = by_token.tobytes()
    return known


@pytest.mark.setting("--batch-invariant")
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_logprobs_do_not_depend_on_the_batch(name: str, dtype: str) -> None:
    backend, options, spec = BACKENDS[name]
    d = Driver(spec, "scattered", rows=4, block_size=8, backend=backend, dtype=dtype, batch_invariant=True, **options)
    long, other = (30, 22) if name != "kernels" else (8, 6)
    alone = logprobs(d, [{0: long + 7}, *[{0: 1}] * 4])
    by_chunks = logprobs(d, [{0: long}, {0: 1}, {0: 7}, {0: 2}, {0: 1}])
    beside_others = logprobs(d, [{2: 5, 1: other}, {1: 1, 0: long + 7}, {0: 1, 2: 1}, {0: 1, 2: 16}, {0: 2, 2: 1}])
    in_one = logprobs(d, [{1: 5, 0: long + 11, 2: 3}])
    shared = {key: value for key, value in alone.items() if key[1]}
    assert len(set(shared.values())) == len(shared) == 5
    for other in (by_chunks, beside_others, in_one):
        same = shared.keys() & other.keys()
        assert len(same) >= 1
        assert all(other[key] == shared[key] for key in same), sorted(key for key in same if other[key] != shared[key])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch_cuda", "jax_tpu"])
def test_logits_of_16_bit_models_are_float32(backend: str, batch_invariant: bool) -> None:
    """Rounded to bfloat16, some of 96 logits would be equal, and greedy answers would depend on the token ids."""
    options = {"device": CPU} if backend == "torch_cuda" else {}
    d = Driver(
        tiny_spec(), rows=4, block_size=8, backend=backend, dtype="bfloat16", batch_invariant=batch_invariant, **options
    )
    (known,) = [value for (_, length), value in logprobs(d, [{0: 40}]).items() if length == 40]
    values = np.frombuffer(known, np.float32)
    assert len(set(values.tolist())) == VOCAB


@pytest.mark.parametrize("backend", ["torch_cuda", "jax_tpu"])
def test_an_engine_gives_the_same_logprobs_with_and_without_cached_prefixes(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    folder = str(write_model(tmp_path / "model"))
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 16, "dtype": "bfloat16"}
    llm = LLM(folder, backend=backend, batch_invariant=True, max_model_len=128, **options)
    prompts = [{"prompt_token_ids": [(7 * i + j * j) % 256 for j in range(5 + 20 * i)]} for i in range(4)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, logprobs=2, ignore_eos=True)

    def answers(chosen: list[dict[str, list[int]]]) -> tuple[list[list[dict[int, float]]], int]:
        done = llm.generate(chosen, params, use_tqdm=False)
        steps = [one.outputs[0].logprobs or [] for one in done]
        values = [[{token: entry.logprob for token, entry in step.items()} for step in each] for each in steps]
        return values, sum(one.num_cached_tokens or 0 for one in done)

    alone = [answers([prompt])[0][0] for prompt in prompts]
    together, cached = answers(prompts)
    llm.shutdown()
    assert cached > 0
    assert together == alone


def test_what_torch_cuda_cannot_compute_invariantly_is_refused_by_name() -> None:
    check = load_backend("torch_cuda").check
    with pytest.raises(ConfigError, match=r"--batch-invariant: .*NCCL.*--tensor-parallel-size 1, or drop it"):
        check(make_options(one_layer(), limits=LIMITS, tensor=2, batch_invariant=True))
    with pytest.raises(ConfigError, match=r"--batch-invariant: .*FLASHINFER.*--attention-backend auto, or drop it"):
        check(make_options(one_layer(), limits=LIMITS, attention="FLASHINFER", batch_invariant=True))
    for more in ({"quantization": "int8"}, {"schemes": {"layers.0.ffn.gate": Int8("channel")}}):
        with pytest.raises(ConfigError, match=r"--batch-invariant: .*quantised.*drop it"):
            check(make_options(tiny_spec(), limits=LIMITS, batch_invariant=True, **more))
    latent = LatentAttention(2, 12, 20, 10, 6, 0.3, Rope(1e4, 8, interleaved=True), Norm(1e-5))
    layer = replace(tiny_spec().layers[0], mixers=(latent,))
    with pytest.raises(ConfigError, match=r"--batch-invariant: .*LatentAttention.*drop it"):
        make_options(replace(tiny_spec(), layers=(layer,)), limits=LIMITS, batch_invariant=True)
    (layer,) = one_layer().layers
    chunked = replace(one_layer(), layers=(replace(layer, mixers=(replace(layer.attention, window=None, chunk=16),)),))
    with pytest.raises(ConfigError, match=r"--batch-invariant: .*in chunks.*drop it, or use --max-model-len 16"):
        make_options(chunked, limits=LIMITS, batch_invariant=True)
    streams = replace(one_layer(), alt_up=AltUp(2, 0, Norm(1e-5), False))
    with pytest.raises(ConfigError, match=r"--batch-invariant: .*AltUp.*drop it"):
        check(make_options(streams, limits=LIMITS, batch_invariant=True))


def test_jax_tpu_has_one_program_for_every_step() -> None:
    create = load_backend("jax_tpu").create
    limits = replace(LIMITS, block_size=8)
    sets = [create(make_options(one_layer(), limits=limits, batch_invariant=on))._program_set((8, 8)) for on in (1, 0)]
    (shape,) = sets[0].shapes
    assert (shape.tokens, shape.seqs, shape.pages, shape.decode_only) == (64, 4, 8, False)
    assert sets[0].shapes.shape_for(1, 1, True) == shape
    assert len(list(sets[1].shapes)) == 3
    assert ["batch_invariant" in each.facts for each in sets] == [True, False]


def test_what_jax_tpu_cannot_compute_invariantly_is_refused_by_name() -> None:
    create = load_backend("jax_tpu").create
    refused = {
        "--tensor-parallel-size 1": {"tensor": 2},
        "--speculative-config": {"limits": replace(LIMITS, block_size=8, max_drafts=2)},
    }
    for remedy, more in refused.items():
        with pytest.raises(ConfigError, match=rf"--batch-invariant: .*{remedy}"):
            create(
                make_options(one_layer(), **{"limits": replace(LIMITS, block_size=8), "batch_invariant": True} | more)
            )
