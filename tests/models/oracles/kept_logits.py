"""Logits of transformers kept as data, one case for each tiny model: read without transformers.

A case says how to make its weights again. `write_logits.py` writes the data; `test_kept_logits.py` recomputes it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models.cases import renames

from pagoda.common.backend import Weight
from pagoda.common.models.registry import spec_from_config, within_context
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.common.weights.rules import apply_rules

FOLDER = Path(__file__).parents[2] / "data" / "parity"
TOKENS = 40
"""Length of the prompt: longer than the windows, and than the trained context of the scaled rotaries."""
GREEDY = 8
"""Tokens after the prompt, each the most likely one."""
POSITIONS = (*range(0, TOKENS, 3), *range(TOKENS - 1, TOKENS + GREEDY))
"""Where logits are kept, of the prompt and what follows it."""


@dataclass(frozen=True)
class Draw:
    """How the values of a tensor are drawn: normally distributed, from a seed that its name gives."""

    shape: tuple[int, ...]
    mean: float
    std: float

    def values(self, seed: str) -> torch.Tensor:
        """Return the values in float32: the same on every machine, for this generator of numpy never changes."""
        generator = np.random.RandomState(zlib.crc32(seed.encode()))
        values = generator.standard_normal(self.shape) * self.std + self.mean
        return torch.from_numpy(np.asarray(values, np.float32))


@dataclass(frozen=True)
class Kept:
    """One case.

    `rename`: the function in `renames` that gives the tensors their names in the checkpoint. `names_only`: the maths
    are those of another case. `token_ids`: the prompt, and the tokens that transformers answers greedily.
    """

    name: str
    config: dict[str, Any]
    draws: Mapping[str, Draw]
    token_ids: list[int]
    rename: str | None = None
    names_only: bool = False
    seed: int = 0

    @property
    def architecture(self) -> str:
        """The name in its config.json."""
        (name,) = self.config["architectures"]
        return str(name)

    @cached_property
    def spec(self) -> ModelSpec:
        """As a server with this context makes it."""
        return within_context(spec_from_config(self.config)[0], TOKENS + GREEDY)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """As the class of transformers that computes them names them."""
        return {name: draw.values(f"{self.name} {self.seed} {name}") for name, draw in self.draws.items()}

    def weights(self) -> Iterator[Weight]:
        """The model's parameters, from the tensors of its checkpoint."""
        tensors = self.tensors if self.rename is None else getattr(renames, self.rename)(self.tensors)
        spec, family = spec_from_config(self.config)
        arrays = ((name, tensor.contiguous().numpy()) for name, tensor in tensors.items())
        return apply_rules(family.rules, params(spec), arrays, family.ignored)

    def line(self) -> str:
        """The case as a line of the file."""
        draws = {name: [list(draw.shape), draw.mean, draw.std] for name, draw in self.draws.items()}
        more = {"rename": self.rename} if self.rename else {}
        more |= {"names_only": True} if self.names_only else {}
        more |= {"seed": self.seed} if self.seed else {}
        return json.dumps(
            {"name": self.name, **more, "config": self.config, "draws": draws, "token_ids": self.token_ids}
        )

    @classmethod
    def read(cls, line: str) -> Kept:
        """Return the case of a line."""
        fields = json.loads(line)
        fields["draws"] = {name: Draw(tuple(shape), *of) for name, (shape, *of) in fields["draws"].items()}
        return cls(**fields)


def read_cases() -> dict[str, Kept]:
    """Return every case by its name."""
    lines = (FOLDER / "cases.jsonl").read_text().splitlines()
    return {case.name: case for case in map(Kept.read, lines)}


def read_logits() -> dict[str, torch.Tensor]:
    """Return the logits of transformers at `POSITIONS` by the case's name, float32 [P, V]."""
    with np.load(FOLDER / "logits.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}
