"""Write the keys of config.json that transformers' classes know, per `model_type`, into `known_keys.json`.

    python tools/known_keys.py            write common/models/hf_config/known_keys.json
    python tools/known_keys.py --check    exit with 1 if the file would change

The files of transformers are parsed, never imported. A key is known if its configuration class or a base class declares
it, maps it or takes it out of its keyword arguments, or if the modelling file of the same folder reads it; where there
is none, that of the class with which transformers computes the type. Its default is the declared one, else the literal
that `__post_init__` puts in the place of None. Keys that shared modules of transformers read, such as those of masks
and caches, are known to every type.

`common.models.hf_config.known_keys` says how the table is used; `tests/common/models/test_known_keys.py` compares it
with the installed transformers.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import EllipsisType, NoneType
from typing import Any, Final

from pagoda.common.models.hf_config import is_harmless
from pagoda.common.models.registry import is_supported
from pagoda.common.models.towers import TEXT_TOWERS

ROOT: Final = Path(__file__).resolve().parents[1]
TABLE: Final = ROOT / "common" / "models" / "hf_config" / "known_keys.json"
SHARED: Final = ("modeling_rope_utils.py", "masking_utils.py", "cache_utils.py", "modeling_utils.py")
"""Modules whose functions take the configuration of any model."""

GENERATORS: Final = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
BASE: Final = "PreTrainedConfig"
DEFAULT_THETA: Final = 10_000.0
"""Base of RoPE of configuration classes that state none."""

_RECEIVERS: Final = re.compile(r"(^|_)(config|cfg)$")
"""Names of variables and attributes that hold a configuration."""

_CLASS: Final = re.compile(r"^class (\w+)", re.MULTILINE)
_MODEL_CLASS: Final = re.compile(r"(Model|For[A-Z]\w*)$")


@dataclass
class ConfigClass:
    """A configuration class of transformers, by the text of its file."""

    node: ast.ClassDef
    path: Path
    bases: list[ConfigClass] = field(default_factory=list)

    @property
    def own(self) -> Iterator[tuple[str, ast.expr | None]]:
        """Yield the attributes that its body sets, with the expression of their value."""
        for statement in self.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                yield statement.target.id, statement.value
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        yield target.id, statement.value

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """Literal values of the class's attributes, its bases' included; `...` for a value that is not a literal."""
        values: dict[str, Any] = {}
        for base in reversed(self.bases):
            values |= base.attributes
        return values | {name: _literal(value) for name, value in self.own}

    @cached_property
    def declared(self) -> dict[str, Any]:
        """Default by key of the annotated fields, its bases' included; `...` for one that is not a literal."""
        values: dict[str, Any] = {}
        for base in reversed(self.bases):
            values |= base.declared
        for statement in self.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if "ClassVar" not in ast.unparse(statement.annotation):
                    values[statement.target.id] = _literal(statement.value)
            elif isinstance(statement, ast.Assign):  # A subclass changes a default without repeating its annotation.
                for target in statement.targets:
                    if isinstance(target, ast.Name) and target.id in values:
                        values[target.id] = _literal(statement.value)
        return values

    @cached_property
    def replaced(self) -> dict[str, Any]:
        """Literals that `__post_init__` sets where the file has None."""
        values: dict[str, Any] = {}
        for base in reversed(self.bases):
            values |= base.replaced
        for statement in self.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__post_init__":
                values |= dict(_replacements(statement))
        return values

    @cached_property
    def computed(self) -> set[str]:
        """Keys that `__post_init__` sets from others, whatever the file has."""
        functions = [node for node in self.node.body if isinstance(node, ast.FunctionDef)]
        own = {key for function in functions if function.name == "__post_init__" for key in _computed(function)}
        return own.union(*(base.computed for base in self.bases))

    @cached_property
    def names(self) -> set[str]:
        """Keys that the class and its bases name."""
        mapping = self.attributes.get("attribute_map")
        mapped = {*mapping, *mapping.values()} if isinstance(mapping, dict) else set()
        inherited = {name for base in self.bases for name in base.names}
        read = () if self.node.name == BASE else _read_keys(self.node, receivers=("self", "kwargs"))
        return {*self.declared, *mapped, *inherited, *read}


def _literal(value: ast.expr | None) -> Any:
    """Return the value of a literal expression or of a product of two, `...` for another one.

    The entries of an object that are not literals are left out.
    """
    match value:
        case ast.Dict(keys=keys, values=values):
            entries = {_literal(key): _literal(entry) for key, entry in zip(keys, values)}
            return {key: entry for key, entry in entries.items() if entry is not ...}
        case ast.BinOp(left=ast.Constant(value=int(left)), op=ast.Mult(), right=ast.Constant(value=int(right))):
            return left * right
        case ast.Constant() | ast.UnaryOp() | ast.List() | ast.Tuple():
            try:
                return json.loads(json.dumps(ast.literal_eval(value)))
            except (ValueError, TypeError):
                return ...
    return ...


def _replacements(function: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """Yield keys that are set to a literal if they are None, in a statement or in a conditional expression."""
    for statement in ast.walk(function):
        if isinstance(statement, ast.If) and (key := _none_test(statement.test)):
            for inner in statement.body:
                is_set = isinstance(inner, ast.Assign) and _self_attribute(inner.targets[0]) == key
                if is_set and (value := _literal(inner.value)) is not ...:
                    yield key, value
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.IfExp):
            key = _none_test(statement.value.test)
            value = _literal(statement.value.body)
            if key and _self_attribute(statement.targets[0]) == key and value is not ...:
                yield key, value


def _computed(function: ast.FunctionDef) -> Iterator[str]:
    """Yield keys that are set to what does not depend on their own value."""
    for statement in function.body:
        if isinstance(statement, ast.Assign) and (key := _self_attribute(statement.targets[0])):
            parts = [node for node in ast.walk(statement.value) if isinstance(node, ast.expr)]
            if _literal(statement.value) is ... and key not in map(_self_attribute, parts):
                yield key


def _none_test(test: ast.expr) -> str:
    """Return the key of `self.key is None`, "" for another test."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is) and _literal(test.comparators[0]) is None:
        return _self_attribute(test.left)
    return ""


def _self_attribute(node: ast.expr) -> str:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if isinstance(node, ast.Attribute) and is_own else ""


def _read_keys(tree: ast.AST, *, receivers: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield names read of a configuration: `config.x`, `getattr(config, "x")`, `kwargs.pop("x")`, `config["x"]`.

    `receivers`: names of other variables that hold one.
    """
    methods = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=receiver) if id(node) in methods or not _holds_config(receiver, receivers):
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[receiver, ast.Constant(value=str(name)), *_]):
                if _holds_config(receiver, receivers):
                    yield name
            case ast.Call(
                func=ast.Attribute(value=receiver, attr="get" | "pop" | "setdefault"),
                args=[ast.Constant(value=str(name)), *_],
            ) if _holds_config(receiver, receivers):
                yield name
            case ast.Subscript(value=receiver, slice=ast.Constant(value=str(name))):
                if _holds_config(receiver, receivers):
                    yield name


def _holds_config(node: ast.expr, receivers: tuple[str, ...]) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in receivers or _RECEIVERS.search(name) is not None


class Transformers:
    """The source of an installed transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._classes: dict[Path, dict[str, ConfigClass]] = {}

    def classes(self, path: Path) -> dict[str, ConfigClass]:
        """Return the classes of a configuration file that derive from `PreTrainedConfig`, by name."""
        if path in self._classes:
            return self._classes[path]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        known = self._classes[path] = self._imported(tree, path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                bases = [known[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in known]
                if bases or node.name == BASE:
                    known[node.name] = ConfigClass(node, path, bases)
        return known

    def _imported(self, tree: ast.Module, path: Path) -> dict[str, ConfigClass]:
        """Return the configuration classes that a file imports from others of transformers."""
        known: dict[str, ConfigClass] = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level and "configuration" in (node.module or ""):
                source = path.parents[node.level - 1].joinpath(*str(node.module).split(".")).with_suffix(".py")
                classes = self.classes(source)
                known |= {name.name: classes[name.name] for name in node.names if name.name in classes}
        return known

    def shared_keys(self) -> list[str]:
        """Return the keys that have a meaning in the configuration of any type."""
        trees = [ast.parse((self.folder / name).read_text(encoding="utf-8")) for name in SHARED]
        names = {name for tree in trees for name in _read_keys(tree)} | set(self._base().declared)
        return sorted(name for name in names if not is_harmless(name))

    def types(self) -> dict[str, dict[str, Any]]:
        """Return the entry of each model type of text whose folder has a class that pagoda computes."""
        shared = set(self.shared_keys())
        entries: dict[str, dict[str, Any]] = {}
        for path in sorted((self.folder / "models").glob("*/configuration_*.py")):
            modelling = self._modelling(path)
            if modelling is None:
                continue
            text = modelling.read_text(encoding="utf-8")
            architectures = sorted(name for name in _CLASS.findall(text) if _is_computed(name))
            if not architectures:
                continue
            read = set(_read_keys(ast.parse(text))) | shared
            lender = self._declared(modelling) if modelling.parent != path.parent else {}
            for known in self.classes(path).values():
                if known.path == path and "vocab_size" in {*known.names}:
                    entry = _entry(known, read, shared, architectures, lender)
                    entries[str(known.attributes["model_type"])] = entry
        return dict(sorted(entries.items()))

    def _modelling(self, path: Path) -> Path | None:
        """Return the modelling file of a configuration file: its own, or that of the class which computes its type."""
        own = path.with_name(path.name.replace("configuration_", "modeling_"))
        if own.is_file():
            return own
        kinds = (str(known.attributes.get("model_type")) for known in self.classes(path).values())
        return next((self._files[self._generators[kind]] for kind in kinds if kind in self._generators), None)

    def _declared(self, modelling: Path) -> dict[str, Any]:
        """Return the defaults of the configuration classes beside a modelling file."""
        classes = self.classes(modelling.with_name(modelling.name.replace("modeling_", "configuration_")))
        return {key: value for known in classes.values() for key, value in known.declared.items()}

    @cached_property
    def _generators(self) -> dict[str, str]:
        """The class with which transformers generates text, by `model_type`."""
        tree = ast.parse((self.folder / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8"))
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[pairs])) if name == GENERATORS:
                    return {kind: name for kind, name in ast.literal_eval(pairs) if name in self._files}
        return {}

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The modelling file of each class for generation."""
        files = sorted((self.folder / "models").glob("*/modeling_*.py"))
        found = ((name, path) for path in files for name in _CLASS.findall(path.read_text(encoding="utf-8")))
        return {name: path for name, path in found if name.endswith("ForCausalLM")}

    def _base(self) -> ConfigClass:
        return self.classes(self.folder / "configuration_utils.py")[BASE]


def _is_computed(architecture: str) -> bool:
    return architecture in TEXT_TOWERS or (_MODEL_CLASS.search(architecture) is not None and is_supported(architecture))


def _entry(
    known: ConfigClass, read: set[str], shared: set[str], architectures: list[str], lender: dict[str, Any]
) -> dict[str, Any]:
    """Return the entry of a configuration class. `lender`: defaults of the type whose modelling file it shares."""
    declared = known.declared | {key: value for key, value in known.replaced.items() if known.declared.get(key) is None}
    if "rope_parameters" in declared:
        theta = known.attributes.get("default_theta", DEFAULT_THETA)
        declared = ({} if theta is ... or isinstance(theta, dict) else {"rope_theta": theta}) | declared
    kept = {key: value for key, value in sorted(declared.items()) if not is_harmless(key) and key not in known.computed}
    # A list has an entry per layer, so it is no default for another number of layers.
    defaults = {key: value for key, value in kept.items() if not isinstance(value, list | NoneType | EllipsisType)}
    defaults |= {key: None for key, value in kept.items() if value is None and lender.get(key) is not None}
    mapping = known.attributes.get("attribute_map")
    others = {*known.names, *read} - defaults.keys() - shared
    return {
        "architectures": architectures,
        "aliases": dict(sorted(mapping.items())) if isinstance(mapping, dict) else {},
        "defaults": defaults,
        "keys": sorted(key for key in others if not is_harmless(key) and not key.startswith("__")),
    }


def table(folder: Path) -> str:
    """Return the content of the file, from the transformers in `folder`."""
    source = Transformers(folder)
    head = json.dumps({"transformers": version("transformers"), "shared": source.shared_keys()})[:-1]
    rows = (f"  {json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in source.types().items())
    return f'{head}, "types": {{\n' + ",\n".join(rows) + "\n}}\n"


def installed() -> Path:
    """Return the folder of the installed transformers."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    check = parser.parse_args().check
    text = table(installed())
    if check:
        return int(TABLE.read_text(encoding="utf-8") != text)
    TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
