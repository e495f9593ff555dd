"""What stands beside a model in a sentence-transformers folder: which modules follow it, and their weights.

Knows the files (modules.json, N_Pooling/config.json, N_Dense, sentence_bert_config.json); does not know the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from pagoda.common.config.groups.pooler import PoolingKind
from pagoda.common.errors import ModelError
from pagoda.common.models.spec import Dense, PoolerActivation
from pagoda.common.weights.files import NamedTensor, read_json, read_json_list
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
_WITHOUT_EFFECT: Final = ("Dropout",)


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """How embeddings are made of hidden states of `width` numbers. `normalise`: they end at length one.

    `folders`: of the weights of each dense layer. `max_seq_length`: texts are cut to so many tokens. `prompts`: texts
    that go before a text of some kind, by name.
    """

    kind: PoolingKind
    width: int
    dense: tuple[Dense, ...] = ()
    normalise: bool = False
    folders: tuple[Path, ...] = ()
    max_seq_length: int | None = None
    prompts: Mapping[str, str] | None = None

    def tensors(self) -> Iterator[NamedTensor]:
        """The weights of the dense layers: sentence_modules.0.linear.weight and so on. Raises WeightError."""
        for index, folder in enumerate(self.folders):
            file = _open(folder)
            for name in file.sizes:
                yield f"sentence_modules.{index}.{name}", file.tensor(name)


def read_sentence_modules(folder: Path) -> SentenceModules | None:
    """The modules that follow the model; None where the folder is no sentence-transformers one that pools.

    Raises ModelError for a module that is not known, or in a place where it cannot be.
    """
    if not (folder / "modules.json").is_file():
        return None
    listed = _modules(folder)
    kinds = [kind for kind, _ in listed if kind not in _WITHOUT_EFFECT]
    if "Pooling" not in kinds:
        return None
    at = kinds.index("Pooling")
    ends = kinds[at + 1 :]
    dense = [path for kind, path in listed if kind == "Dense"]
    normalise = "Normalize" in ends
    if kinds[:at] != ["Transformer"] or ends != ["Dense"] * len(dense) + ["Normalize"] * normalise:
        raise ModelError(
            f"{folder}/modules.json: has {', '.join(kinds)}; supported: Transformer, Pooling, Dense, Normalize, in "
            "this order"
        )
    pooling = read_json(next(path for kind, path in listed if kind == "Pooling") / "config.json")
    own = _optional(folder / "sentence_bert_config.json")
    length = own.get("max_seq_length")
    return SentenceModules(
        kind=_kind(folder, pooling),
        width=_size(folder, pooling, "word_embedding_dimension", "embedding_dimension"),
        dense=tuple(_dense(path) for path in dense),
        normalise=normalise,
        folders=tuple(dense),
        max_seq_length=length if isinstance(length, int) and length > 0 else None,
        prompts=_prompts(_optional(folder / "config_sentence_transformers.json")),
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(Kind, folder) of each module, in order. A list comes with a download, so it may only name folders inside."""
    try:
        entries = sorted(read_json_list(folder / "modules.json"), key=lambda entry: int(entry["idx"]))
        listed = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{folder}/modules.json: corrupt: not a list of modules with idx, type and path") from None
    for _, path in listed:
        if path.startswith("/") or ".." in PurePosixPath(path).parts or any(char in path for char in "\\\0:"):
            raise ModelError(f"{folder}/modules.json: names {path!r}, which is not a folder inside it")
    return [(kind, folder / path) for kind, path in listed]


def _kind(folder: Path, pooling: Mapping[str, Any]) -> PoolingKind:
    if isinstance(mode := pooling.get("pooling_mode"), str):
        modes = {mode: _MODE_NAMES.get(mode)}
    else:
        on = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
        modes = {key: _MODES.get(key) for key in on}
    found = next(iter(modes.values()), None)
    if len(modes) != 1 or found is None:
        raise ModelError(
            f"{folder}: the Pooling module uses {' and '.join(modes) or 'no mode'}; supported: "
            f"{', '.join(_MODES)}, one at a time; --pooler-config cannot mend it"
        )
    return found


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
