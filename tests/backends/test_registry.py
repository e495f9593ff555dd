import subprocess
import sys

import pytest

from pagoda.backends import registry
from pagoda.common.errors import ConfigError


def entry(name: str, *, module: str | None = "m", needs: tuple[str, ...] = (), device: bool = True) -> registry.Entry:
    return registry.Entry(name, module, needs, "thing", "pip install it", lambda: device)


def test_auto_takes_the_first_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (entry("a", needs=("surely_not_installed",)), entry("b", device=False), entry("c", module=None), entry("d"))
    monkeypatch.setattr(registry, "BACKENDS", table)
    assert registry.choose_backend("auto") == "d"
    assert registry.explain("d") == (
        "a: surely_not_installed not installed; pip install it; b: no thing found; c: not in this version"
    )


def test_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (entry("a", needs=("surely_not_installed",)),))
    with pytest.raises(ConfigError, match="no backend can run here: a: surely_not_installed not installed; pip"):
        registry.choose_backend("auto")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("simulated", "not in this version"), ("torch_cuda", "torch_cuda: "), ("abacus", "abacus is unknown; use auto")],
)
def test_asking_for_what_is_not_there(name: str, reason: str) -> None:
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
