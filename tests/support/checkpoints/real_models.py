"""Facts of released models, written down by hand: the keys of config.json, the published size, bytes of KV per token.

They are in `tests/data/real_models.json`. `parameters` is the published count: exact where the hub's index of tensors
states it, else that of the model's card, without layers that only propose drafts. `kv_bytes` is computed by hand, in
bfloat16, over all layers: layers x KV heads x head dim x K and V x 2 bytes; for latent attention layers x (latent +
rotary channels, + those of an indexer's key) x 2 bytes. Recurrent layers keep nothing per token, and windows count like
the others.

`source` of the keys: "memory" (written from knowledge of the file), "transformers 5" (defaults of its configuration
class, which are the released model's), or the page that was read. A model `like` one of `hub_configs.GENERATORS` has
its keys, but for those in `config`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from support.servers.hub_configs import DATA, GENERATORS


@dataclass(frozen=True)
class Real:
    """One released model."""

    config: dict[str, Any]
    parameters: float
    kv_bytes: int
    source: str


def _real(entry: dict[str, Any]) -> Real:
    config = {**GENERATORS[entry["like"]], **entry["config"]} if "like" in entry else entry["config"]
    kv_bytes = eval(entry["kv_bytes"], {"__builtins__": {}})  # sums and products of numbers, as the docstring has them
    return Real(config, entry["parameters"], kv_bytes, entry["source"])


def _file(entry: dict[str, Any]) -> Real:
    kv_bytes = eval(entry["kv_bytes"], {"__builtins__": {}})
    return Real(entry["config"], entry["parameters"], kv_bytes, "github.com/ai-dynamo/aiconfigurator")


_FILES: Final = json.loads((DATA / "hub_configs" / "aiconfigurator.json").read_text())
FOUND: Final = {name: _file(entry) for name, entry in _FILES.items() if entry["parameters"] is not None}
"""Whole config.json files of released models, as a public repository has them, without quantisation and media."""

REAL: Final = {name: _real(entry) for name, entry in json.loads((DATA / "real_models.json").read_text()).items()}
