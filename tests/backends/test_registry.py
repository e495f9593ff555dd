import re
import subprocess
import sys
from typing import Any

import pytest

from pagoda.backends import registry
from pagoda.common.backend import ParallelSizes
from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.errors import ConfigError


def entry(name: str, *, needs: tuple[str, ...] = (), device: bool = True) -> registry.Entry:
    return registry.Entry(name, "m", needs, "thing", "pip install it", lambda: device)


def test_auto_takes_the_first_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (entry("a", needs=("surely_not_installed",)), entry("b", device=False), entry("simulated"), entry("d"))
    monkeypatch.setattr(registry, "BACKENDS", table)
    assert registry.choose_backend("auto") == "d"
    assert registry.explain("d") == (
        "a: surely_not_installed not installed; pip install it; b: no thing found; simulated: chosen by name only"
    )


def test_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (entry("a", needs=("surely_not_installed",)),))
    with pytest.raises(ConfigError, match="no backend can run here: a: surely_not_installed not installed; pip"):
        registry.choose_backend("auto")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("torch_cuda", "torch_cuda: "), ("abacus", "abacus is unknown; use auto")],
)
def test_an_unavailable_backend_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        registry.choose_backend(name)
    assert caught.value.setting == "--backend"


def test_auto_never_takes_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (entry("simulated"), entry("b")))
    assert registry.choose_backend("auto") == "b"
    assert registry.choose_backend("simulated") == "simulated"


def test_no_framework_is_imported_before_a_backend_is_loaded() -> None:
    code = (
        "import sys; from pagoda.backends import registry; registry.choose_backend('auto'); registry.explain();"
        "sys.exit(','.join({'torch', 'jax'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def parallel(**settings: Any) -> ParallelConfig:
    return ParallelConfig(**settings)


def test_parallel_sizes_keeps_only_supported_fields() -> None:
    assert registry.parallel_sizes("jax_tpu", parallel(tensor_parallel_size=4)) == ParallelSizes(tensor=4)
    assert registry.parallel_sizes("torch_cuda", parallel(tensor_parallel_size=2)) == ParallelSizes(tensor=2)
    assert registry.parallel_sizes("reference", parallel()) == ParallelSizes()


@pytest.mark.setting("--distributed-executor-backend")
def test_ranks_are_of_one_backend_and_more_than_one_device() -> None:
    assert registry.runs_ranks("torch_cuda", parallel(tensor_parallel_size=2))
    assert not registry.runs_ranks("torch_cuda", parallel(distributed_executor_backend="ray"))
    assert not registry.runs_ranks("jax_tpu", parallel(tensor_parallel_size=2, distributed_executor_backend="mp"))


@pytest.mark.setting("--distributed-executor-backend", "--data-parallel-size")
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "torch_cuda",
            {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
            "--distributed-executor-backend: uni is one process, torch_cuda needs 2 for 2 GPUs; use mp, or drop it",
        ),
    ],
)
def test_unsupported_parallel_sizes_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        registry.parallel_sizes(name, parallel(**settings))
