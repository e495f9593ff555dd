"""Read the modules of a sentence-transformers folder: pooling, dense layers and their weights.

Files: modules.json, N_Pooling/config.json, N_Dense/, sentence_bert_config.json, config_sentence_transformers.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pagoda.common.config.groups.nested.pooler import PoolingKind
from pagoda.common.errors import ModelError
from pagoda.common.models.registry import SentenceModules
from pagoda.common.models.spec import Dense, PoolerActivation
from pagoda.common.weights.files import NamedTensor, leaves_folder, read_json, read_json_list
from pagoda.common.weights.safetensors import SafetensorsFile
from pagoda.common.weights.torch_bin import TorchFile

_MODES: Final[Mapping[str, PoolingKind]] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_MODE_NAMES: Final[Mapping[str, PoolingKind]] = {"cls": "first", "mean": "mean", "lasttoken": "last"}
_ACTIVATIONS: Final[Mapping[str, PoolerActivation | None]] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.linear.Identity": None,
}
_NO_OPS: Final = ("Dropout",)
DENSE_TENSORS: Final = "sentence_modules."
"""Prefix of the weights of dense layers."""


def read_sentence_modules(folder: Path) -> SentenceModules | None:
    """Return the modules that follow the model; None if the folder has no modules.json with a Pooling module.

    Raises ModelError for an unsupported module or order of modules.
    """
    if not (folder / "modules.json").is_file():
        return None
    listed = _modules(folder)
    kinds = [kind for kind, _ in listed if kind not in _NO_OPS]
    if "Pooling" not in kinds:
        return _multi_vector(folder, listed) if kinds == ["Transformer", *["Dense"] * (len(kinds) - 1)] else None
    pooling_index = kinds.index("Pooling")
    after = kinds[pooling_index + 1 :]
    dense = [path for kind, path in listed if kind == "Dense"]
    normalise = "Normalize" in after
    if kinds[:pooling_index] != ["Transformer"] or after != ["Dense"] * len(dense) + ["Normalize"] * normalise:
        raise ModelError(
            f"{folder}/modules.json: has {', '.join(kinds)}; supported: Transformer, Pooling, Dense, Normalize, in "
            "this order"
        )
    pooling = read_json(next(path for kind, path in listed if kind == "Pooling") / "config.json")
    length = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
    return SentenceModules(
        kind=_kind(folder, pooling),
        width=_size(folder, pooling, "word_embedding_dimension", "embedding_dimension"),
        dense=tuple(_dense(path) for path in dense),
        normalise=normalise,
        folders=tuple(dense),
        max_seq_length=length if isinstance(length, int) and length > 0 else None,
        prompts=_prompts(_optional(folder / "config_sentence_transformers.json")),
    )


_GGUF_KINDS: Final[Mapping[int, PoolingKind]] = {1: "mean", 2: "first", 3: "last"}


def gguf_sentence_modules(metadata: Mapping[str, Any], width: int) -> SentenceModules | None:
    """Return the pooling and the dense layers that a GGUF file states, None without a pooling of whole texts.

    `width`: of the hidden states. Their weights are tensors of the file.
    """
    prefix = metadata.get("general.architecture")
    kind = _GGUF_KINDS.get(metadata.get(f"{prefix}.pooling_type", 0))
    if kind is None:
        return None
    sizes = [metadata.get(f"{prefix}.dense_{number}_feat_out") for number in (2, 3)]
    dense = tuple(Dense(size, bias=False) for size in sizes if isinstance(size, int))
    return SentenceModules(kind, width, dense, normalise=True)


def _multi_vector(folder: Path, listed: list[tuple[str, Path]]) -> SentenceModules | None:
    """Return the projections of every token (PyLate); None if there are none."""
    dense = [path for kind, path in listed if kind == "Dense"]
    if not dense:
        return None
    for path in dense:
        if read_json(path / "config.json").get("use_residual"):
            raise ModelError(f"{path}/config.json: use_residual is not supported")
    width = _size(dense[0], read_json(dense[0] / "config.json"), "in_features")
    return SentenceModules("all", width, tuple(map(_dense, dense)), normalise=True, folders=tuple(dense))


def side_tensors(folder: Path, files: tuple[str, ...]) -> Iterator[NamedTensor]:
    """Yield the tensors of state dicts beside the checkpoint as `stem.name`. Raises ModelError for a missing one."""
    for name in files:
        if not (folder / name).is_file():
            raise ModelError(f"{folder}: {name} is missing; download it again")
        file = TorchFile(folder / name)
        for tensor in file.sizes:
            yield f"{Path(name).stem}.{tensor}", file.tensor(tensor)


def module_tensors(modules: SentenceModules) -> Iterator[NamedTensor]:
    """Yield the weights of the dense layers as sentence_modules.0.linear.weight etc. Raises WeightError."""
    for index, folder in enumerate(modules.folders):
        file = _open(folder)
        for name in file.sizes:
            yield f"{DENSE_TENSORS}{index}.{name}", file.tensor(name)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(kind, folder) of each module, in order. Paths are untrusted: they must stay inside `folder`."""
    try:
        entries = sorted(read_json_list(folder / "modules.json"), key=lambda entry: int(entry["idx"]))
        listed = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ModelError(f"{folder}/modules.json: corrupt: needs a list of modules with idx, type and path") from None
    for _, path in listed:
        if leaves_folder(path):
            raise ModelError(f"{folder}/modules.json: names {path!r}, which is not a folder inside it")
    return [(kind, folder / path) for kind, path in listed]


def _kind(folder: Path, pooling: Mapping[str, Any]) -> PoolingKind:
    if isinstance(mode := pooling.get("pooling_mode"), str):
        modes = {mode: _MODE_NAMES.get(mode)}
    else:
        enabled = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
        modes = {key: _MODES.get(key) for key in enabled}
    kind = next(iter(modes.values()), None)
    if len(modes) != 1 or kind is None:
        raise ModelError(
            f"{folder}: the Pooling module uses {' and '.join(modes) or 'no mode'}; supported: "
            f"{', '.join(_MODES)}, one at a time; --pooler-config cannot override it"
        )
    return kind


def _dense(folder: Path) -> Dense:
    config = read_json(folder / "config.json")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if name not in _ACTIVATIONS:
        raise ModelError(f"{folder}/config.json: activation_function is {name!r}; supported: {', '.join(_ACTIVATIONS)}")
    return Dense(_size(folder, config, "out_features"), _ACTIVATIONS[name], bool(config.get("bias", True)))


def _size(folder: Path, config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        if isinstance(value := config.get(key), int) and value > 0:
            return value
    raise ModelError(f"{folder}: the module's config.json has no {keys[0]}")


def _prompts(config: Mapping[str, Any]) -> dict[str, str]:
    prompts = config.get("prompts")
    return {str(name): str(text) for name, text in prompts.items()} if isinstance(prompts, Mapping) else {}


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _open(folder: Path) -> SafetensorsFile | TorchFile:
    if (path := folder / "model.safetensors").is_file():
        return SafetensorsFile(path)
    if (path := folder / "pytorch_model.bin").is_file():
        return TorchFile(path)
    raise ModelError(f"{folder}: no weights: expected model.safetensors or pytorch_model.bin; download them again")
