"""Compiled programs on disk: written by `pagoda compile --output`, loaded by `pagoda serve --compiled-bundle`.

    manifest.json    the configuration the programs were compiled for, and the SHA-256 of every file
    000.xla ...      one executable each, as jax.experimental.serialize_executable and pickle write it

A bundle is loaded only if every fact in its manifest matches. The hashes detect corruption, not tampering.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import jax

from pagoda.backends.jax_tpu.execution.programs import KeyT, ProgramSet, blocks_of, from_bytes, model_facts, to_bytes
from pagoda.common.config.engine import Limits
from pagoda.common.errors import ConfigError

FLAG: Final = "--compiled-bundle"
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_SHAPES: Final = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size")
_RECOMPILE: Final = "run pagoda compile --output again"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A parsed manifest. `check` compares it with the model once that is known."""

    folder: Path
    facts: Mapping[str, Any]
    programs: Mapping[str, Mapping[str, str]]  # repr of the program key -> its manifest entry

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """KV cache blocks of each pool that the programs were compiled for; 0 for a pooling model."""
        return blocks_of(self.facts)

    def load(self, program_set: ProgramSet[KeyT]) -> dict[KeyT, jax.stages.Compiled]:
        """Load every program of `program_set`; call `check` first. Raise ConfigError naming a damaged file."""
        keys = {repr(key): key for key in program_set}
        payloads = {keys[name]: self._read(self.programs[name]) for name in keys}
        devices = list(program_set.model.mesh.devices.flat)
        return {key: from_bytes(payload, devices) for key, payload in payloads.items()}

    def check(self, program_set: ProgramSet[Any], limits: Limits) -> None:
        """Raise ConfigError naming the first fact in which the bundle differs from this engine."""
        for name, value in make_facts(program_set, limits).items():
            if self.facts.get(name) != value:
                raise ConfigError(
                    FLAG,
                    f"{self.folder} was compiled for {name} {_display(self.facts.get(name))}, but this engine has "
                    f"{_display(value)}; {_RECOMPILE}, or start with the settings it was compiled for",
                )
        missing = [name for name in map(repr, program_set) if name not in self.programs]
        if missing:
            raise ConfigError(FLAG, f"{self.folder} lacks {len(missing)} programs, first {missing[0]}; {_RECOMPILE}")

    def _read(self, program: Mapping[str, str]) -> bytes:
        path = self.folder / program["file"]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(FLAG, f"{path}: {error.strerror}; {_RECOMPILE}") from None
        if hashlib.sha256(data).hexdigest() != program["sha256"]:
            raise ConfigError(FLAG, f"{path} is damaged: its SHA-256 differs from the manifest; copy it again")
        return data


def open_bundle(folder: Path) -> Bundle:
    """Read a bundle's manifest only. Raise ConfigError if it is missing or invalid."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ConfigError(
                FLAG, f"{path} has format {manifest['format']}, this version reads {FORMAT}; {_RECOMPILE}"
            )
        bundle = Bundle(folder, manifest["facts"], {each["key"]: each for each in manifest["programs"]})
        if min(bundle.num_blocks) < 0 or any(_outside(each["file"]) for each in manifest["programs"]):
            raise ValueError
    except OSError as error:
        raise ConfigError(FLAG, f"{path}: {error.strerror}; make one with pagoda compile --output") from None
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError):
        raise ConfigError(FLAG, f"{path} is not a valid manifest; {_RECOMPILE}") from None
    return bundle


def save_bundle(
    program_set: ProgramSet[KeyT],
    limits: Limits,
    programs: Iterable[tuple[KeyT, jax.stages.Compiled]],
    folder: Path,
) -> str:
    """Write the programs and return a one-line summary. Raise ConfigError if the folder cannot be written.

    The manifest is written last, so an incomplete bundle is never loaded.
    """
    entries = []
    size = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        for number, (key, executable) in enumerate(programs):
            data = to_bytes(executable)
            name = f"{number:03}.xla"
            (folder / name).write_bytes(data)
            entries.append({"key": repr(key), "file": name, "sha256": hashlib.sha256(data).hexdigest()})
            size += len(data)
        manifest = {"format": FORMAT, "facts": make_facts(program_set, limits), "programs": entries}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", f"{folder}: {error.strerror}; choose a writable folder") from None
    return f"{len(entries)} programs, {size / (1 << 20):.1f} MiB, in {folder}"


def make_facts(program_set: ProgramSet[Any], limits: Limits) -> dict[str, Any]:
    """Return everything compiled programs depend on, JSON-serialisable."""
    return {
        **model_facts(program_set.model),
        **{name: asdict(limits)[name] for name in _SHAPES},
        **program_set.facts,
    }


def _outside(name: str) -> bool:
    return Path(name).name != name


def _display(value: Any) -> str:
    return "nothing" if value in (None, "") else str(value)
