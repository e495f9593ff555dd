"""Layers on the host: the same numbers, less memory on the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.devices.torch_cuda_model import TorchCudaModel
from support.engines.reference_driver import Driver, random_weights, tiny_spec

from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.kernels.linear.weight_only import pack
from pagoda.common.config.groups.cache import CacheConfig
from pagoda.common.errors import ConfigError
from pagoda.common.models.primitives import Norm
from pagoda.common.models.spec import InputBlock, Mlp

TOKENS = [5, 17, 3, 80, 41, 2, 9, 11, 30, 7, 7, 60]
GIB = 1 << 30


def deep(layers: int, moe: bool = False):
    spec = tiny_spec(moe=moe)
    return replace(spec, layers=(spec.layers * layers)[:layers])


@pytest.mark.parametrize("how", [None, "int4"])
@pytest.mark.parametrize(("moe", "layers", "share", "chosen"), [(False, 7, 1.0, 7), (True, 8, 0.5, 4)])
def test_the_same_numbers_come_from_weights_on_the_host(moe, layers, share, chosen, how) -> None:
    spec = deep(layers, moe)
    weights = dict(random_weights(spec))
    pack_as = how and partial(pack, scheme=how)
    whole = TorchCudaModel(spec, weights.items(), 16, pack=pack_as)
    bytes_of_layers = sum(t.nbytes for n, t in whole.loader.params.tensors().items() if n.startswith("layers."))
    part = TorchCudaModel(spec, weights.items(), 16, pack=pack_as, offload=share * 1.3 * bytes_of_layers / GIB)
    assert len(part.on_host.layers) >= chosen
    want = whole.logits(TOKENS)
    for _ in range(2):
        torch.testing.assert_close(part.logits(TOKENS), want, rtol=1e-5, atol=1e-5)


def test_a_block_that_layers_share_stays_on_the_device() -> None:
    spec = tiny_spec()
    attention = replace(spec.layers[0].attention, beside_embedding=True, adapter_rank=3)
    block = InputBlock(Mlp(20, "silu", gated=True), Norm(1e-5), 0, 3)
    layer = replace(spec.layers[0], mixers=(attention, spec.layers[0].attention), block=block)
    spec = replace(spec, layers=(layer,) * 4)
    weights = dict(random_weights(spec))
    part = TorchCudaModel(spec, weights.items(), 16, offload=1.0)
    assert not [name for name in part.on_host.layers[0] if ".block." in name]
    assert part.on_host.layers.keys() == {0, 1, 2, 3}
    want = TorchCudaModel(spec, weights.items(), 16).logits(TOKENS)
    torch.testing.assert_close(part.logits(TOKENS), want, rtol=1e-5, atol=1e-5)


def test_memory_on_the_device_shrinks_by_all_but_two_layers() -> None:
    spec = deep(6)
    model = TorchCudaModel(spec, random_weights(spec), 16, offload=1.0)
    host = {n: t for n, t in model.loader.params.tensors().items() if n.startswith("layers.")}
    layer = sum(-(-t.nbytes // 512) * 512 for n, t in host.items() if n.startswith("layers.1."))
    assert model.on_host.saved == 4 * layer


def test_layers_are_spread_evenly() -> None:
    spec = deep(8)
    size = TorchCudaModel(spec, random_weights(spec), 16, offload=1.0).on_host.saved // 6
    part = TorchCudaModel(spec, random_weights(spec), 16, offload=4.5 * size / GIB)
    assert tuple(part.on_host.layers) == (1, 3, 5, 7)


@pytest.mark.parametrize("layers", [8, 2])
def test_offloading_less_than_three_layers_is_refused(layers: int) -> None:
    spec = deep(layers)
    with pytest.raises(ConfigError, match=r"--cpu-offload-gb: 1e-05 GiB are less than three layers.*use .* or more"):
        TorchCudaModel(spec, random_weights(spec), 16, offload=1e-5)


@pytest.mark.setting("--cpu-offload-gb")
def test_an_engine_with_layers_on_the_host_answers_and_plans_as_without() -> None:
    spec, prompt = deep(6), TOKENS[:7]
    plain, part = (
        Driver(spec, backend="torch_cuda", device=CPU, sleep_mode=True, cache=CacheConfig(cpu_offload_gb=gib))
        for gib in (0.0, 1.0)
    )
    saved = plain.backend.plan_memory().weights - part.backend.plan_memory().weights
    assert saved == TorchCudaModel(spec, random_weights(spec), 16, offload=1.0).on_host.saved > 0
    want = plain.generate(prompt, 8)
    assert part.generate(prompt, 8) == want
    part.backend.sleep(2)
    part.backend.wake_weights(lambda: random_weights(spec))
    part.backend.wake_kv_cache()
    assert part.generate(prompt, 8) == want
