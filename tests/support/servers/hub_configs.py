"""The keys of published config.json files, one entry for each way in which a family's files are written.

They are in `tests/data/hub_configs`. Values are the published ones, except that models are cut to a few layers. An
entry `like` another, which stands before it, has its keys, but for those that it states itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

Config = dict[str, Any]
DATA: Final = Path(__file__).parents[2] / "data"


def _read(name: str) -> dict[str, Any]:
    return json.loads((DATA / "hub_configs" / f"{name}.json").read_text())


def like(entry: Config, others: Mapping[str, Config]) -> Config:
    """The keys of an entry, among them those of the one that it is like."""
    own = {key: value for key, value in entry.items() if key != "like"}
    return {**others[entry["like"]], **own} if "like" in entry else own


def _configs(name: str) -> dict[str, Config]:
    found: dict[str, Config] = {}
    for model, entry in _read(name).items():
        found[model] = like(entry, found)
    return found


SAVED: Final[Config] = _read("saved")
"""What all writers add."""

LEGACY: Final[Config] = _read("legacy")
"""Everything that PretrainedConfig of transformers 2 to 4 wrote into files when it was asked for all of it."""

GENERATORS: Final = _configs("generators")
POOLERS: Final = _configs("poolers")
