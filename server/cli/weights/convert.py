"""`pagoda convert`: write any readable model as a model folder whose weights are the TPU backend's own arrays.

The folder is served like any other; --load-format sharded_state is detected. With --quantization: a folder in the
compressed-tensors format, for every backend.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pagoda.backends.registry import load_converter
from pagoda.common.config.commands import COMMAND_SETTINGS, ConvertConfig
from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.settings import ENGINE_SETTINGS, ResolvedSettings, build
from pagoda.common.errors import ConfigError
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.transformers_spec import own_spec
from pagoda.common.weights.folder import code_files
from pagoda.common.weights.quantization.export import copy_other_files, hugging_face_tensors, write_quantized
from pagoda.common.weights.rules import apply_rules, experts_one_by_one, tensor_uses, with_equal_head
from pagoda.common.weights.sharded import ShardedCheckpoint
from pagoda.server.settings.flags import EngineArgs, resolve_settings
from pagoda.server.settings.resolve import Resolved, model_config, open_model, resolve
from pagoda.server.settings.tokenizer import open_tokenizer
from pagoda.server.startup.parameters import read_weights, with_progress

SETTINGS: Final = COMMAND_SETTINGS["convert"]
_BACKEND: Final = "jax_tpu"


def run(args: argparse.Namespace) -> int:
    """Convert and print a summary. Returns 0. Raises ConfigError or ModelError."""
    settings = resolve_settings(args, SETTINGS)
    config = build(ConvertConfig, settings.values)
    with _output_folder(Path(args.out)) as folder:
        if config.quantization is not None:
            print(f"{args.out}: {_quantise(_engine_config(args.model_tag, settings), config.quantization, folder)}")
            return 0
        resolved = _resolved(args.model_tag, settings)
        architectures = tuple(resolved.hf_config["architectures"])
        tokenizer = open_tokenizer(resolved.config)
        manifest = load_converter().convert(
            own_spec(resolved.spec, "pagoda convert"),
            read_weights(resolved.config, resolved.checkpoint, resolved),
            dtype=resolved.dtype,
            tensor=config.tensor_parallel_size,
            folder=folder,
            architectures=architectures,
        )
        manifest.write(folder)
        _write_json(folder / "config.json", _config(resolved))
        if generation := resolved.checkpoint.generation_config():
            _write_json(folder / "generation_config.json", generation)
        if tokenizer is not None:
            tokenizer.save(folder)
    print(f"{args.out}: {manifest.summary}")
    return 0


def _quantise(engine: EngineConfig, method: str, folder: Path) -> str:
    """Write a quantised model into `folder`. Returns a summary. Raises ConfigError, ModelError or WeightError."""
    model = engine.model
    load_format = engine.load.load_format
    if load_format in ("dummy", "sharded_state"):
        raise ConfigError("--load-format", f"{load_format} has no weights to quantise; use auto")
    checkpoint = open_model(engine, weights=True)
    if isinstance(checkpoint, ShardedCheckpoint):
        raise ConfigError("MODEL", f"{model.model} is already converted; use the model that it was made from")
    hf_config, quantization = model_config(engine, checkpoint)
    if quantization is not None:
        raise ConfigError("MODEL", f"{model.model} is quantised by {quantization.method}; use its unquantised weights")
    spec, family = spec_from_config(hf_config, code=partial(code_files, checkpoint.folder))
    parameters = params(spec)
    is_gguf = checkpoint.gguf_metadata is not None
    dtype = {"auto": "bfloat16" if is_gguf else None, "half": "float16", "float": "float32"}.get(
        model.dtype, model.dtype
    )
    progress = with_progress(checkpoint.tensors(), checkpoint.num_bytes, disable=not engine.load.use_tqdm_on_load)
    if not is_gguf:
        copy_other_files(checkpoint.folder, folder)
    elif generation := checkpoint.generation_config():
        _write_json(folder / "generation_config.json", generation)
    if (tokenizer := open_tokenizer(engine)) is not None and (is_gguf or model.tokenizer is not None):
        tokenizer.save(folder)
    stored_family = checkpoint.family(family)
    if spec.tied:
        progress = with_equal_head(stored_family.rules, progress, checkpoint.names)
    if is_gguf:
        unscaled = {name: replace(param, scale=1.0) for name, param in parameters.items()}
        weights = apply_rules(stored_family.rules, unscaled, progress, stored_family.ignored)
        progress = hugging_face_tensors(hf_config["architectures"][0], family, parameters, weights)
    single = experts_one_by_one(family.rules, parameters, progress)
    uses = tensor_uses(family.rules, parameters)
    exported = write_quantized(single, uses, parameters, method, dtype, folder)
    dtype_key = {} if dtype is None else {"dtype": dtype}
    unquantized = {key: value for key, value in hf_config.items() if not dtype_key or key != "torch_dtype"}
    _write_json(folder / "config.json", {**unquantized, **dtype_key, "quantization_config": exported.config})
    return exported.summary


def _resolved(model: str, settings: ResolvedSettings) -> Resolved:
    """Resolve the model to convert. Raises ConfigError or ModelError."""
    resolved = resolve(_engine_config(model, settings), "llm", settings.sources, weights=True)
    if isinstance(resolved.checkpoint, ShardedCheckpoint):
        raise ConfigError("MODEL", f"{model} is already converted and loads on any number of devices; serve it")
    return resolved


def _engine_config(model: str, settings: ResolvedSettings) -> EngineConfig:
    """Return the configuration of an engine for the source model. Raises ConfigError."""
    defaults = {name: setting.default for name, setting in ENGINE_SETTINGS.items()}
    engine_values = {
        name: value for name, value in settings.values.items() if SETTINGS[name] is ENGINE_SETTINGS.get(name)
    }
    values = {**defaults, **engine_values, "model": model, "backend": _BACKEND, "runner": "generate"}
    return EngineArgs.from_resolved(replace(settings, values=values)).create_engine_config()


def _config(resolved: Resolved) -> dict[str, Any]:
    """Return the model's config including overrides, with the dtype of the arrays."""
    return {**{k: v for k, v in resolved.hf_config.items() if k != "torch_dtype"}, "dtype": resolved.dtype}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _output_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` on success and removed on failure."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("OUT", f"{out} exists and is not an empty folder; use another, or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            yield folder
            folder.chmod(0o755)
            folder.replace(out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise ConfigError("OUT", f"{out} cannot be written ({error.strerror or error}); use another path") from None
