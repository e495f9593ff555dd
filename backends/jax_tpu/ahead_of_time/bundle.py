"""Compiled programs on disk: what `pagoda compile --output` writes and `pagoda serve --compiled-bundle` starts from.

    manifest.json    what the programs were compiled for, and the SHA-256 of every file
    000.xla ...      one executable each, as jax.experimental.serialize_executable and pickle write it

A bundle is taken only where every fact of its manifest holds. The hashes show damage, not malice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax

from pagoda.backends.jax_tpu.execution.compile_cache import KeyT, ProgramSet
from pagoda.backends.jax_tpu.execution.executable import from_bytes, model_facts, to_bytes
from pagoda.common.config.engine import Limits
from pagoda.common.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.backends.jax_tpu.ahead_of_time.report import Report

FLAG: Final = "--compiled-bundle"
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_SHAPES: Final = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle's manifest, read and in its format; whether it suits is asked when the model is known."""

    folder: Path
    facts: Mapping[str, Any]
    programs: Mapping[str, Mapping[str, str]]

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that the programs take; none of a model that pools."""
        return int(self.facts["num_blocks"])

    def load(self, catalogue: ProgramSet[KeyT]) -> dict[KeyT, jax.stages.Compiled]:
        """Every program of the catalogue, which was checked. Raises ConfigError naming the damaged file."""
        keys = {repr(key): key for key in catalogue}
        payloads = {keys[name]: self._read(self.programs[name]) for name in keys}
        devices = list(catalogue.model.mesh.devices.flat)
        return {key: from_bytes(payload, devices) for key, payload in payloads.items()}

    def check(self, catalogue: ProgramSet[Any], limits: Limits) -> None:
        """Raises ConfigError naming the first thing that differs between the bundle and what will run."""
        for name, value in make_facts(catalogue, limits).items():
            if self.facts.get(name) != value:
                there = self.facts.get(name)
                raise ConfigError(
                    FLAG,
                    f"{self.folder} was compiled for {name} {_said(there)}, here it is {_said(value)}; "
                    "compile it anew, or start with what it was compiled for",
                )
        absent = [name for name in map(repr, catalogue) if name not in self.programs]
        if absent:
            raise ConfigError(FLAG, f"{self.folder} lacks {len(absent)} programs, first {absent[0]}; compile it anew")

    def _read(self, program: Mapping[str, str]) -> bytes:
        path = self.folder / program["file"]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(FLAG, f"{path}: {error.strerror}; compile it anew") from None
        if hashlib.sha256(data).hexdigest() != program["sha256"]:
            raise ConfigError(FLAG, f"{path} is not the file that was compiled: its SHA-256 differs; copy it anew")
        return data


def open_bundle(folder: Path) -> Bundle:
    """Read a bundle's manifest, nothing else. Raises ConfigError."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ConfigError(
                FLAG, f"{path} has format {found['format']}, this version reads {FORMAT}; compile it anew"
            )
        bundle = Bundle(folder, found["facts"], {each["key"]: each for each in found["programs"]})
        if bundle.num_blocks < 0 or any(_outside(each["file"]) for each in found["programs"]):
            raise ValueError
    except OSError as error:
        raise ConfigError(FLAG, f"{path}: {error.strerror}; make one with pagoda compile --output") from None
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError):
        raise ConfigError(FLAG, f"{path} is no manifest of compiled programs; compile it anew") from None
    return bundle


def save_bundle(report: Report, folder: Path) -> str:
    """Write every program of a report; one line about it. The manifest comes last, so that half a bundle is none.

    Raises ConfigError when the folder cannot be written.
    """
    programs, size = [], 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        for number, program in enumerate(report.programs):
            data = to_bytes(program.executable)
            name = f"{number:03}.xla"
            (folder / name).write_bytes(data)
            programs.append({"key": repr(program.key), "file": name, "sha256": hashlib.sha256(data).hexdigest()})
            size += len(data)
        manifest = {"format": FORMAT, "facts": make_facts(report.catalogue, report.limits), "programs": programs}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", f"{folder}: {error.strerror}; name a folder that can be written") from None
    return f"{len(programs)} programs, {size / (1 << 20):.1f} MiB, in {folder}"


def make_facts(catalogue: ProgramSet[Any], limits: Limits) -> dict[str, Any]:
    """Everything that compiled programs depend on, as JSON has it."""
    return {
        **model_facts(catalogue.model),
        **{name: asdict(limits)[name] for name in _SHAPES},
        **catalogue.facts,
    }


def _outside(name: str) -> bool:
    return Path(name).name != name


def _said(value: Any) -> str:
    return "nothing" if value in (None, "") else str(value)
