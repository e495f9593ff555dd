"""The host's cost of a step, measured where there is no GPU."""

from __future__ import annotations

from pagoda.backends.torch_cuda.kernels.bound import BoundKernel
from pagoda.benchmarks.gpu import host_cost


def test_an_eager_step_finds_its_launches_and_launches_none(monkeypatch) -> None:
    """A norm before and after the mixer, the head's, rope and cache, attention, activation; the sampler's are more."""
    names: list[str] = []
    find = BoundKernel.find
    monkeypatch.setattr(
        BoundKernel, "find", lambda self, *args: names.append(self.kernel.__name__) or find(self, *args)
    )
    launch = BoundKernel._launch
    assert host_cost.eager_cost(steps=1)["step_us"] > 0
    assert len(names) >= 2 * 5 * 32, "one step to warm up, one that is measured"
    assert {"norm_kernel", "rope_cache_kernel", "prefill_attention", "activation_kernel"} <= set(names)
    assert BoundKernel._launch is launch
