"""Facts of released models, written down by hand: the keys of config.json, the published size, bytes of KV per token.

`parameters` is the published count, without layers that only propose drafts; `size` says who published it:

- "hub": the total of the tensors that the hub states, as public lists repeat it ("remembered": not looked up when the
  row was written),
- "keras-hub", "calculate-flops": the lists of sizes of these projects,
- "card", "paper": the rounded size in the model's card or paper, most of them as remembered.

"with the tower" counts one of media that the text model does not have, "less" says what was taken off.

`kv_bytes` is computed by hand, in bfloat16, over all layers: layers x KV heads x head dim x K and V x 2 bytes; for
latent attention layers x (latent + rotary channels, + those of an indexer's key) x 2 bytes. Recurrent layers keep
nothing per token, and windows count like the others. `state_bytes` are those of a sequence's recurrent state, computed
by hand in float32: layers x (state + kept inputs of the convolution) x 4 bytes.

`origin` or `source` says where the keys are from: the repository and path of a whole file, "transformers" and the type
whose class has the released model's values as defaults (the file then states nothing else), "memory" (written from
knowledge of the file), or the page that was read. A model `like` one of `hub_configs.GENERATORS` has its keys, but for
those in `config`.
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
    parameters: float | None  # None where no figure precise to 1 % was published.
    kv_bytes: int
    state_bytes: int
    origin: str


def _real(entry: dict[str, Any], config: dict[str, Any], origin: str) -> Real:
    kv_bytes = _product(entry["kv_bytes"])
    return Real(config, entry["parameters"], kv_bytes, _product(entry.get("state_bytes", "0")), origin)


def _product(text: str) -> int:
    return int(eval(text, {"__builtins__": {}}))  # Sums and products of numbers, as the docstring has them.


def _rows(name: str) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = json.loads((DATA / name).read_text())
    return {name: row for name, row in rows.items() if row["kv_bytes"] is not None}  # The others are refused.


def _remembered(row: dict[str, Any]) -> Real:
    return _real(row, {**GENERATORS[row["like"]], **row["config"]} if "like" in row else row["config"], row["source"])


FOUND: Final = {
    name: _real(row, row["config"], "ai-dynamo/aiconfigurator")
    for name, row in _rows("hub_configs/aiconfigurator.json").items()
}
"""Whole config.json files of released models, as a public repository has them, without quantisation and media."""

OTHERS: Final = {
    name: _real(row, row["config"], row["origin"]) for name, row in _rows("hub_configs/others.json").items()
}
"""Files that other public repositories have, without quantisation, and what transformers' classes take for granted."""

REAL: Final = {name: _remembered(row) for name, row in _rows("real_models.json").items()}
