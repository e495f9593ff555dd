"""Pre-sharded checkpoints: loaded on other numbers of devices, damaged, or of another model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp
import numpy as np
import support.devices.jax_devices  # noqa: F401
from support.engines.reference_driver import Driver, random_weights, tiny_spec

from pagoda.backends.jax_tpu.execution.step_input import KernelChoice
from pagoda.backends.jax_tpu.model.model import Leaves, Model, build_model
from pagoda.backends.jax_tpu.parallel import make_mesh
from pagoda.backends.jax_tpu.weights import checkpoint as checkpoints
from pagoda.backends.jax_tpu.weights.convert import convert
from pagoda.backends.jax_tpu.weights.loading import load
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.errors import ConfigError, ModelError, WeightError
from pagoda.common.models.mixers import Attention
from pagoda.common.models.spec import Mlp, ModelSpec, Moe
from pagoda.common.weights.sharded import ARRAYS, ShardedCheckpoint

PROMPT = [5, 17, 3, 80, 41, 2, 9, 60, 33, 21, 7, 8, 90]


def spec_of(heads: int, kv_heads: int, *, moe: bool = False, norm_over: str = "per_head") -> ModelSpec:
    """Few KV heads, odd vocabulary and ffn width: only the width is divisible by eight devices."""
    spec = tiny_spec(moe=moe)

    def wider(mixer: Attention) -> Attention:
        return replace(mixer, heads=heads, kv_heads=kv_heads, qk_norm_over=norm_over, out_bias=True)

    def odd(ffn: Mlp | Moe) -> Mlp | Moe:
        return replace(ffn, expert=replace(ffn.expert, width=21)) if isinstance(ffn, Moe) else replace(ffn, width=45)

    layers = tuple(replace(layer, mixers=(wider(layer.attention),), ffn=odd(layer.ffn)) for layer in spec.layers)
    return replace(spec, layers=layers, vocab=97)


SPECS = {"mlp": spec_of(8, 2), "moe": spec_of(9, 3, moe=True, norm_over="full")}
PAIRS = {"mlp": {1: (8,), 8: (1, 8)}, "moe": {1: (2,), 8: (2,)}}
"""Kind -> number of devices converted for -> numbers of devices to load on."""


def write(folder: Path, spec: ModelSpec, tensor: int, dtype: str = "float32") -> ShardedCheckpoint:
    folder.mkdir()
    weights = random_weights(spec)
    convert(spec, weights, dtype=dtype, tensor=tensor, folder=folder, architectures=("X",)).write(folder)
    (folder / "config.json").write_text("{}")
    return ShardedCheckpoint(folder)


def model_of(spec: ModelSpec, tensor: int = 1, dtype: str = "float32") -> Model:
    kernel = KernelChoice(page_size=8, cache_dtype=dtype)
    return build_model(spec, kv_layout(spec, 8), make_mesh(tensor), jnp.dtype(dtype), 64, kernel)


def assert_same(model: Model, actual: Leaves, expected: Leaves) -> None:
    for path, leaf, one, other in zip(model.paths, model.leaves, actual, expected, strict=True):
        assert (one.shape, one.dtype, one.sharding) == (leaf.shape, leaf.dtype, leaf.sharding), path
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=str(path))


@pytest.mark.parametrize("kind", PAIRS)
def test_a_checkpoint_loads_on_any_number_of_devices(kind: str, tmp_path: Path) -> None:
    spec = SPECS[kind]
    models = {tensor: model_of(spec, tensor) for readers in PAIRS[kind].values() for tensor in readers}
    wanted = {tensor: load(model, random_weights(spec)) for tensor, model in models.items()}
    for written, readers in PAIRS[kind].items():
        checkpoint = write(tmp_path / str(written), spec, written)
        for tensor in readers:
            assert_same(models[tensor], checkpoints.load(models[tensor], checkpoint), wanted[tensor])


def test_more_and_fewer_devices_than_written_for_give_the_same_tokens(tmp_path: Path) -> None:
    spec = SPECS["mlp"]
    one = Driver(spec, block_size=8, backend="jax_tpu")
    wanted = one.generate(PROMPT, 12)
    for written, driver in ((8, one), (1, Driver(spec, block_size=8, backend="jax_tpu", tensor=8))):
        driver.backend._leaves = ()
        driver.backend.load_checkpoint(write(tmp_path / str(written), spec, written).folder)
        assert driver.generate(PROMPT, 12) == wanted


def test_each_device_reads_its_piece_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same number of devices, every chunk on disk lies within one device's piece."""
    checkpoint = write(tmp_path / "x", SPECS["mlp"], 8)
    model = model_of(SPECS["mlp"], 8)
    ocp = checkpoints.import_orbax()
    with checkpoints._checkpointer(ocp) as reader:
        stored = reader.metadata(checkpoint.arrays).item_metadata.tree
    reads: list[tuple[Any, ...]] = []
    read = checkpoints._read
    monkeypatch.setattr(checkpoints, "_read", lambda *args: reads.append(args[3:]) or read(*args))
    checkpoints.load(model, checkpoint)
    assert {name for name, _ in reads} == set(stored)
    for name, wanted in reads:
        piece, chunk = wanted.sharding.shard_shape(wanted.shape), stored[name].storage.chunk_shape
        assert wanted.shape == stored[name].shape
        assert all(whole % part == 0 for whole, part in zip(piece, chunk)), name


@pytest.mark.parametrize(
    ("stored", "requested", "tensor"),
    [
        pytest.param("bfloat16", "float32", 1, marks=pytest.mark.slow_matrix),
        ("float32", "bfloat16", 1),
        ("bfloat16", "float32", 8),
    ],
)
def test_loading_with_another_dtype(stored: str, requested: str, tensor: int, tmp_path: Path) -> None:
    spec = SPECS["mlp"]
    checkpoint = write(tmp_path / "x", spec, 1, stored)
    model, plain = model_of(spec, tensor, requested), model_of(spec, tensor, stored)
    cast = [leaf.astype(new.dtype) for leaf, new in zip(load(plain, random_weights(spec)), model.leaves)]
    assert_same(model, checkpoints.load(model, checkpoint), tuple(cast))


def altered(checkpoint: ShardedCheckpoint, change: Callable[[dict[str, Any]], object]) -> ShardedCheckpoint:
    path = checkpoint.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    return ShardedCheckpoint(checkpoint.folder)


def test_an_array_that_is_damaged_or_missing_is_named(tmp_path: Path) -> None:
    spec = SPECS["mlp"]
    checkpoint, model = write(tmp_path / "x", spec, 2), model_of(spec)
    index = next((checkpoint.arrays / "d").iterdir())
    data = max(checkpoint.arrays.rglob("d/*"), key=lambda path: path.stat().st_size)
    for path in (index, data):
        good = path.read_bytes()
        for bad in (good[: len(good) // 2], bytes(255 - byte for byte in good)):
            path.write_bytes(bad)
            with pytest.raises(WeightError, match=r"^\S+: array \S+ cannot be read \(.*\); copy it again, or convert"):
                checkpoints.load(model, checkpoint)
        path.write_bytes(good)
    checkpoints.load(model, checkpoint)

    def add_one(manifest: dict[str, Any]) -> None:
        manifest["leaves"]["embed"]["checksum"] += 1

    with pytest.raises(WeightError, match=r"array embed cannot be read \(its checksum differs\)"):
        checkpoints.load(model, altered(checkpoint, add_one))


def test_arrays_of_another_model_are_named(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "x", SPECS["mlp"], 8)
    wide = model_of(replace(SPECS["mlp"], vocab=113))
    with pytest.raises(WeightError, match=r"array embed is \[104, 32\] in the .*, but \[120, 32\] by its config.json"):
        checkpoints.load(wide, checkpoint)
    with pytest.raises(WeightError, match=r"array head is \[104, 32\] .*, but missing by its config.json; restore"):
        checkpoints.load(model_of(replace(SPECS["mlp"], tied=True)), checkpoint)
    odd = altered(checkpoint, lambda manifest: manifest["leaves"]["embed"].update(dtype="int8"))
    with pytest.raises(WeightError, match="array embed is int8, expected bfloat16 or float32; convert"):
        checkpoints.load(model_of(SPECS["mlp"]), odd)
    cut = altered(checkpoint, lambda manifest: manifest["leaves"].pop("embed"))
    with pytest.raises(WeightError, match="array embed is missing in the checkpoint of pagoda"):
        checkpoints.load(model_of(SPECS["mlp"]), cut)


def test_without_orbax_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write(tmp_path / "x", SPECS["mlp"], 1)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ConfigError, match=r"needs orbax-checkpoint \(.*\); pip install 'pagoda\[tpu\]'"):
        checkpoints.load(model_of(SPECS["mlp"]), checkpoint)
    with pytest.raises(ConfigError, match="needs orbax-checkpoint"):
        write(tmp_path / "y", SPECS["mlp"], 1)


def test_a_model_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1 << 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"OUT: the model takes .* GiB, 0.0 are free; use another disk"):
        write(tmp_path / "x", SPECS["mlp"], 1)
    assert not (tmp_path / "x" / ARRAYS).exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1}', "has format 1, this version reads 2; convert"),
        ('{"format": 2}', "is no manifest of a sharded checkpoint; convert"),
        ("[]", "is no manifest"),
        ("\xff", "is no manifest"),
        (None, "no manifest.json, so no sharded checkpoint; make one with pagoda convert"),
    ],
)
def test_invalid_manifests(text: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    if text is not None:
        (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=message):
        ShardedCheckpoint(tmp_path)
