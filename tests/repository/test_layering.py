"""Which packages and modules may import which."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from support.suite.rows import each_row

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "backends", "kernels_pallas", "server")

# What of the backends the server knows.
BACKENDS = ("pagoda.backends.registry", "pagoda.backends.modules")

# Package -> what of ours it may import (longest prefix wins).
OURS: dict[str, tuple[str, ...]] = {
    "common": ("pagoda.common",),
    "backends.registry": ("pagoda.common", "pagoda.backends"),
    "backends.modules": ("pagoda.common",),
    "backends.fallback": ("pagoda.common", "pagoda.backends.fallback"),
    "backends.cpu_kernels": ("pagoda.common", "pagoda.backends.cpu_kernels"),
    "backends.torch_decoder": ("pagoda.common", "pagoda.backends.torch_decoder"),
    "backends.reference": (
        "pagoda.common",
        "pagoda.backends.reference",
        "pagoda.backends.torch_decoder",
        "pagoda.backends.cpu_kernels",
        "pagoda.backends.fallback",
    ),
    "backends.torch_cuda": (
        "pagoda.common",
        "pagoda.backends.torch_cuda",
        "pagoda.backends.torch_decoder",
        "pagoda.backends.reference",
        "pagoda.backends.fallback",
    ),
    "backends.jax_tpu": (
        "pagoda.common",
        "pagoda.backends.jax_tpu",
        "pagoda.backends.fallback",
        "pagoda.kernels_pallas",
        "pagoda.__version__",
    ),
    "backends.simulated": (
        "pagoda.common",
        "pagoda.backends.simulated",
        "pagoda.backends.modules",
        "pagoda.__version__",
    ),
    "kernels_pallas": ("pagoda.kernels_pallas",),
    "server": ("pagoda.common", "pagoda.server", *BACKENDS, "pagoda.__version__"),
}
# The folders and modules of `common`, each of which may import only earlier entries. The engine and the protocols
# beside it that describe its interface form one entry.
COMMON_LAYERS = (
    ("errors",),
    ("config",),
    ("request_bounds",),
    ("models",),
    ("weights",),
    ("text",),
    ("engine", "backend", "sampling_params", "pooling_params"),
    ("beam_search",),
    ("observe",),
    ("distributed",),
)
# The folders and modules of `server`, likewise; entry points come last. A longer name counts before its folder.
LAYERS = (
    (
        *("outputs", "core_client.ipc_messages", "processing.workers.child", "vllm.logits_processors"),
        *("core_client.private_folder", "core_client.memory"),
    ),
    ("core_client.client",),
    ("settings",),
    ("vllm",),
    ("parsers",),
    ("vllm.parser_interface", "vllm.parser_plugins"),
    ("parsers.registry",),
    ("processing",),
    ("startup",),
    ("core_client",),
    ("llm_engine",),
    ("async_llm",),
    ("http",),
    ("api.chat_prompt",),
    ("llm",),
    ("api.openai", "api.anthropic", "api.pooling"),
    ("api.cohere", "api.admin"),
    ("api.app",),
    ("cli.client.http_client", "cli.diagnosis.machine"),
    ("bench",),
    ("cli",),
)
FOREIGN: dict[str, frozenset[str]] = {
    "common": frozenset({"jax", "flax", "torch", "triton", "transformers", "fastapi", "starlette", "uvicorn", "zmq"}),
    "server": frozenset({"jax", "flax", "torch", "triton"}),
    "server.bench.peers.worker": frozenset({"jax", "flax", "triton"}),  # runs transformers, by its interpreter
    "kernels_pallas": frozenset({"torch", "flax", "numpy.random"}),
    "backends.cpu_kernels": frozenset({"jax", "flax", "triton", "transformers", "fastapi"}),
    "backends.reference": frozenset({"jax", "flax", "triton", "transformers", "fastapi"}),
}


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def imports(path: Path) -> list[str]:
    """Every module a file imports, absolute, wherever in the file it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it from pagoda on"
            assert node.module is not None
            found.append(node.module)
            if node.module in ("pagoda", "pagoda.common", "pagoda.server"):
                found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def rule(table: dict, path: Path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    matches = [key for key in table if name == key or name.startswith(f"{key}.")]
    return table[max(matches, key=len)] if matches else None


@each_row("path", modules, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    allowed, forbidden = rule(OURS, path), rule(FOREIGN, path) or frozenset()
    for name in imports(path):
        top = name.split(".")[0]
        assert top not in PACKAGES, f"{name}: write pagoda.{name}"
        if top == "pagoda" and name != "pagoda" and allowed is not None:
            assert any(name == a or name.startswith(f"{a}.") for a in allowed), f"{path} may not import {name}"
        assert not {top, name} & forbidden, f"{path} may not import {name}"


def layer(name: str, layers: tuple[tuple[str, ...], ...] = LAYERS) -> int:
    """Return the index of the entry that a module belongs to: the longest one that its name begins with."""
    inner = name.split(".", 2)[2]
    entries = [
        (len(entry), index)
        for index, names in enumerate(layers)
        for entry in names
        if inner == entry or inner.startswith(f"{entry}.")
    ]
    assert entries, f"{name} is in no layer"
    return max(entries)[1]


@each_row("path", lambda: sorted((ROOT / "common").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_common_is_built_in_layers(path: Path) -> None:
    if path == ROOT / "common" / "__init__.py":
        return
    own = layer("pagoda." + ".".join(path.relative_to(ROOT).with_suffix("").parts), COMMON_LAYERS)
    for name in imports(path):
        if name.startswith("pagoda.common."):
            assert layer(name, COMMON_LAYERS) <= own, f"{path} may not import {name}"


@each_row("path", lambda: sorted((ROOT / "server").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_server_is_built_in_layers(path: Path) -> None:
    if path == ROOT / "server" / "__init__.py":
        return
    own = "pagoda." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for name in imports(path):
        if name.startswith("pagoda.server."):
            same_folder = name.split(".")[2] == own.split(".")[2]
            assert same_folder or layer(name) < layer(own), f"{path} may not import {name}"


def test_the_rules_bite(tmp_path: Path) -> None:
    assert rule(OURS, ROOT / "common" / "engine" / "x.py") == ("pagoda.common",)
    source = tmp_path / "x.py"
    source.write_text("def f():\n    import torch\n    from pagoda.server import llm\n")
    assert imports(source) == ["torch", "pagoda.server", "pagoda.server.llm"]
    assert layer("pagoda.server.processing.inputs") < layer("pagoda.server.http.body")
    assert layer("pagoda.common.models.spec", COMMON_LAYERS) < layer("pagoda.common.weights.rules", COMMON_LAYERS)
