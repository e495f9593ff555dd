"""LoRA adapters on the accelerators' backends: the log-probabilities of W + B A, alone and beside other adapters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import support.devices.jax_devices
import torch
from support.checkpoints.adapted_models import logprobs_of, merged, random_adapter, run, weights_of
from support.engines.reference_driver import Driver, tiny_spec
from support.suite.slow_matrix import thinned

from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.common.models.mixers import (
    Attention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    ShortConvolution,
)
from pagoda.common.models.primitives import Norm
from pagoda.common.models.rope import Rope
from pagoda.common.models.spec import Mlp, ModelSpec, Moe, SecondHalf
from pagoda.common.weights.lora.weights import LoraOptions, adaptable
from pagoda.common.weights.quantization.on_the_fly import quantize
from pagoda.common.weights.quantization.schemes import Int8

assert support.devices.jax_devices.DEVICES > 1

TOLERANCE = {"rtol": 0, "atol": 3e-5}
SLOTS, RANK = 9, 16
PROMPTS = {row: [(7 * row + 3 * at) % 96 for at in range(1 + row * 2 % 7)] for row in range(SLOTS + 1)}


def tied() -> ModelSpec:
    """Its layers and its head have biases, which DoRA's factors do not change."""
    spec = tiny_spec()
    layer = spec.layers[0]
    (attention,) = layer.mixers
    assert isinstance(attention, Attention)
    assert isinstance(layer.ffn, Mlp)
    biased = replace(attention, qkv_bias=True, out_bias=True)
    spec = replace(spec, tied=True, head_bias=True)
    return replace(spec, layers=(replace(layer, mixers=(biased,), ffn=replace(layer.ffn, bias=True)),) * 2)


def interleaved() -> ModelSpec:
    """Backends that rotate halves move the rows of q and k, those of B, too."""
    spec = tiny_spec()
    layer = spec.layers[0]
    (attention,) = layer.mixers
    assert isinstance(attention, Attention)
    assert attention.rope is not None
    other = replace(attention, rope=replace(attention.rope, interleaved=True))
    return replace(spec, layers=(replace(layer, mixers=(other,)), spec.layers[1]))


def shared_expert() -> ModelSpec:
    """Adapted mixtures with a shared expert and with identity experts, and a second half, whose ffn is adapted."""
    spec = tiny_spec(moe=True)
    first, second = spec.layers
    ffn = first.ffn
    assert isinstance(ffn, Moe)
    identity = replace(ffn, identity=3)
    half = SecondHalf(ffn.expert, identity, Norm(1e-5))
    second = replace(second, mixers=second.mixers * 2, ffn=identity, second=half)
    return replace(spec, layers=(replace(first, ffn=replace(ffn, shared=ffn.expert)), second))


def with_mixers(*mixers: Mixer) -> ModelSpec:
    spec = tiny_spec()
    return replace(spec, layers=tuple(replace(spec.layers[0], mixers=(mixer,)) for mixer in mixers))


SPECS = {"dense": tiny_spec(window=3), "tied": tied(), "interleaved": interleaved(), "mixture": shared_expert()}
RMS = Norm(1e-6)
LATENT = LatentAttention(4, 12, 20, 12, 6, 0.3, Rope(1e4, 8), RMS, gate_per_head=True)
DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4, norm=RMS)
KIMI = KimiDelta(heads=4, head_dim=8, taps=4, norm=RMS, rank=6)
LIGHTNING = LightningAttention(head_dim=8, scale=0.3, slopes=(0.5, 0.25, 0.125, 0.0625), norm=RMS, groups=2)
MIXERS: dict[str, tuple[Mixer, ...]] = {
    "latents": (LATENT, replace(LATENT, query_rank=None, gate_per_head=False)),
    "delta rules": (DELTA, KIMI, replace(KIMI, rank=None)),
    "state spaces": (
        Mamba2(heads=4, head_dim=6, groups=2, state_dim=8, taps=4, norm=RMS),
        Mamba(channels=24, state_dim=8, step_rank=3, taps=4, part_norm=RMS),
    ),
    "other recurrences": (LIGHTNING, ShortConvolution(channels=24, taps=3)),
}
SPECS |= {name: with_mixers(*mixers) for name, mixers in MIXERS.items()}


def make_driver(spec: ModelSpec, backend: str, slots: int = SLOTS, given=None, **make) -> Driver:
    lora = LoraOptions(slots, RANK, "float32", copies=("embed", "head"))
    if backend == "torch_cuda":
        make.setdefault("device", CPU)
    options = {
        "rows": SLOTS + 1,
        "block_size": 8,
        "backend": backend,
        "lora": lora,
        "weights": given or weights_of(spec),
    }
    return Driver(spec, "scattered", **options, **make)


@thinned(
    lambda backend, name: backend != "jax_tpu" or name in ("mixture", "latents", "delta rules", "state spaces"),
    backend=["torch_cuda", "jax_tpu"],
    name=list(SPECS),
)
def test_log_probabilities_are_those_of_merged_weights(name: str, backend: str) -> None:
    """Nine adapters and none in one batch, of different ranks and matrices, prompts and decode; then one alone.

    Every other one is a DoRA adapter; three have an embedding table or a head of their own.

    On jax_tpu mixers with recurrent state do not decode here: they project in the same way, by a further program. And
    none is alone there, as it is in the tests of slots.
    """
    spec, on_jax = SPECS[name], backend == "jax_tpu"
    driver = make_driver(spec, backend)
    matrices = driver.backend.adaptable()
    assert matrices.keys() == adaptable(spec).keys()
    copies = {0: ("embed", "head"), 3: ("head",), 5: ("embed",)}
    only = [("",), ("q", "v"), ("",), ("o", "down"), ("embed",), ("head",), ("",), ("gate", "up", "k"), ("",)]
    adapters = [
        random_adapter(
            matrices, [16, 8, 1][slot % 3], slot, only[slot], dora=slot % 2 == 0, copied=copies.get(slot, ())
        )
        for slot in range(SLOTS)
    ]
    for slot, adapter in enumerate(adapters):
        driver.backend.load_adapter(slot, adapter)
    slots = {row: row for row in range(SLOTS)}
    steps = 0 if on_jax and name in ("delta rules", "state spaces", "other recurrences") else 3
    results = list(run(driver, PROMPTS, slots, steps).items())
    if not on_jax:
        results += run(driver, {3: PROMPTS[3]}, {3: 3}).items()
    for slot, (tokens, found) in results:
        model = merged(spec, weights_of(spec), adapters[slot] if slot < SLOTS else None)
        want = logprobs_of(model, tokens[:-1])
        np.testing.assert_allclose(found, want, **TOLERANCE, err_msg=f"row {slot}")
        assert tokens[-1 - steps :] == want[-1 - steps :].argmax(1).tolist()
    slot, (tokens, found) = results[0]
    plain = logprobs_of(merged(spec, weights_of(spec), None), tokens[:-1])
    assert np.abs(plain - found).max() > 0.1, "the adapter changes something"


@thinned(  # a mixture has attention, and an expert that is an MLP
    lambda backend, name: backend != "jax_tpu" or name == "mixture",
    backend=["reference", "torch_cuda", "jax_tpu"],
    name=["dense", "mixture"],
)
def test_adapters_of_quantised_weights(backend: str, name: str) -> None:
    """The weights are integers times a power of two, the largest of each row 127, which 8 bits hold exactly."""
    spec, exact, stored = SPECS[name], [], []
    for parameter, values in weights_of(spec):
        numbers = np.clip(np.round(values * 128), -127, 127)
        if numbers.ndim > 1:
            numbers[..., 0] = 127
        exact.append((parameter, (numbers / 512).astype(np.float32)))
        packs = numbers.ndim > 1 and parameter.startswith("layers.") and not parameter.endswith("router")
        stored.append((parameter, quantize(exact[-1][1], Int8("channel")) if packs else exact[-1][1]))
    if backend == "reference":  # quantised by its checkpoint, not at load
        driver = make_driver(spec, backend, given=stored)
    else:
        driver = make_driver(spec, backend, quantization="int8_per_channel_weight_only", given=exact)
    adapter = random_adapter(driver.backend.adaptable(), 16, 0, dora=True, copied=("embed",))
    driver.backend.load_adapter(2, adapter)
    found = run(driver, {0: PROMPTS[4], 1: PROMPTS[6]}, {0: 2})
    for row, each in ((0, adapter), (1, None)):
        tokens, logprobs = found[row]
        np.testing.assert_allclose(logprobs, logprobs_of(merged(spec, exact, each), tokens[:-1]), **TOLERANCE)


def test_slots_are_written_again_after_their_memory_was_lost() -> None:
    """As after sleep at level 2; the empty slot is empty."""
    spec = SPECS["dense"]
    driver = make_driver(spec, "torch_cuda", slots=3)
    adapter = random_adapter(driver.backend.adaptable(), 8, 0, dora=True, copied=("head",))
    driver.backend.load_adapter(1, adapter)
    adapters = driver.backend._adapters()
    with torch.inference_mode():
        for stack in adapters._stacks.values():
            stack.a.fill_(np.nan)
            stack.b.fill_(np.nan)
            for array in stack.scaling or ():
                array.fill_(7)
        for copies in adapters._copies.values():
            copies.weights.fill_(np.nan)
            copies.rows.fill_(7)
        adapters._ranks.fill_(7)
        adapters.restore()
    found = run(driver, {0: PROMPTS[4], 1: PROMPTS[6]}, {0: 1, 1: 2})
    for row, each in ((0, adapter), (1, None)):
        tokens, logprobs = found[row]
        want = logprobs_of(merged(spec, weights_of(spec), each), tokens[:-1])
        np.testing.assert_allclose(logprobs, want, **TOLERANCE)


@pytest.mark.parametrize("backend", ["torch_cuda", "jax_tpu"])
def test_slots_are_replaced_and_an_empty_one_and_none_are_the_model(backend: str) -> None:
    """The next adapter changes fewer matrices, with a smaller rank: nothing is left of the first."""
    spec = SPECS["dense"]
    driver = make_driver(spec, backend, slots=2)
    matrices = driver.backend.adaptable()
    first = random_adapter(matrices, 16, 0, dora=True, copied=("embed", "head"))
    second = random_adapter(matrices, 8, 1, ("q", "down", "embed"))
    for adapter in (first, second):
        driver.backend.load_adapter(1, adapter)
        tokens, found = run(driver, {0: PROMPTS[4]}, {0: 1})[0]
        want = logprobs_of(merged(spec, weights_of(spec), adapter), tokens[:-1])
        np.testing.assert_allclose(found, want, **TOLERANCE)
    for slots in ({0: 0}, {}, None):
        tokens, found = run(driver, {0: PROMPTS[6]}, slots)[0]
        want = logprobs_of(merged(spec, weights_of(spec), None), tokens[:-1])
        np.testing.assert_allclose(found, want, **TOLERANCE)


class Interpreted(Device):
    """A CPU that runs kernels."""

    @property
    def use_kernels(self) -> bool:
        return True


def test_steps_through_the_interpreted_kernels() -> None:
    """Tensors of real steps are as the kernels want them: those of an attention, of experts, and of a tied head."""
    import support.kernels.triton_interpreter  # noqa: F401

    spec = replace(SPECS["mixture"], tied=True, layers=SPECS["mixture"].layers[:1])
    driver = make_driver(spec, "torch_cuda", slots=2, device=Interpreted(CPU.torch, CPU.chip, "interpreter"))
    matrices = driver.backend.adaptable()
    adapters = [
        random_adapter(matrices, 16, 0, copied=("embed", "head")),
        random_adapter(matrices, 8, 1, ("q", "down", "head"), dora=True),
    ]
    for slot, adapter in enumerate(adapters):
        driver.backend.load_adapter(slot, adapter)
    found = run(driver, {0: [5, 17, 3], 1: [9, 2], 2: [4]}, {0: 0, 1: 1}, steps=1)
    for row, adapter in enumerate([*adapters, None]):
        tokens, logprobs = found[row]
        np.testing.assert_allclose(
            logprobs, logprobs_of(merged(spec, weights_of(spec), adapter), tokens[:-1]), **TOLERANCE
        )
