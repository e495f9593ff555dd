"""The host's cost of a step, measured where there is no GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from pagoda.backends.torch_cuda.kernels.frame.bound import BoundLaunch
from pagoda.benchmarks.gpu import host_cost


def test_steps_with_and_without_a_prompt() -> None:
    backend = host_cost.small_backend(64)
    for prompt in (0, 20):
        planned = host_cost.plans(32, 64, host_cost.KINDS["filtered"], prompt)
        cost = host_cost.cost(backend, 1, *planned)
        assert min(cost["pack_us"], cost["step_us"]) > 0


def test_an_eager_step_launches_up_to_the_driver(monkeypatch) -> None:
    """A norm before and after the mixer, the head's, rope and cache, attention, activation; the sampler's are more."""
    names: Counter[str] = Counter()
    start, begin, compiled = BoundLaunch.start, BoundLaunch._compile, Tensor.get_device

    def count(self: BoundLaunch, *launch: Any) -> None:
        names[self.kernel.__name__] += 1
        start(self, *launch)

    monkeypatch.setattr(BoundLaunch, "start", count)
    assert host_cost.eager_cost(steps=1)["step_us"] > 0
    of_layer = {"norm_kernel": 2, "rope_cache_kernel": 1, "prefill_attention": 1, "activation_kernel": 1}
    for name, each in of_layer.items():
        assert names[name] == 2 * (32 * each + (name == "norm_kernel")), "one step to warm up, one that is measured"
    assert (BoundLaunch._compile, Tensor.get_device) == (begin, compiled)
