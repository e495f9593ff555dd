"""Attention backends that were fastest on a GPU, written into the table of `--attention-backend auto`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attention_table
import pytest

HEADS = "h128_g4_bfloat16"


def number(kind: str, load: str, backend: str, us: float | None) -> dict[str, Any]:
    about = {"heads": HEADS, "kind": kind, "load": load, "backend": backend}
    return about | ({"absent": "no module"} if us is None else {"us": us, "right": True})


NUMBERS = [
    number("decode", "1x8k", "TRITON_ATTN", 10.0),
    number("decode", "64x4k", "TRITON_ATTN", 100.0),
    number("decode", "1x8k", "FLASH_ATTN", 20.0),
    number("decode", "64x4k", "FLASH_ATTN", 80.0),
    number("decode", "1x8k", "FLASHINFER", 5.0),
    number("decode", "64x4k", "FLASHINFER", None),
    number("prefill", "1x8k", "TRITON_ATTN", 100.0),
    number("prefill", "1x8k", "FLASH_ATTN", 96.0),
]
RESULTS: dict[str, Any] = {
    "stage": "peers",
    "tiny": False,
    "spoil": 0.0,
    "machine": {"device": "cuda"},
    "complete": True,
    "failed": {},
    "wrong": [],
    "numbers": {attention_table.PART: dict(enumerate(NUMBERS))},
}


def run(folder: Path, results: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    table, path = folder / "measured.json", folder / "peers.json"
    table.write_text('{"sm_80": {"h64_g4_bfloat16": {"decode": "FLASHINFER"}}}')
    path.write_text(json.dumps(results))
    status = attention_table.main([str(path), "--chip", "sm_90"], table)
    return status, json.loads(table.read_text())


def test_what_is_faster_over_all_loads_is_written(tmp_path: Path) -> None:
    """FlashInfer refused a load; in prefills 4 % are too little."""
    status, table = run(tmp_path, RESULTS)
    assert (status, table.pop("sm_80")) == (0, {"h64_g4_bfloat16": {"decode": "FLASHINFER"}})
    assert table == {"sm_90": {HEADS: {"decode": "FLASH_ATTN", "prefill": "TRITON_ATTN"}}}


@pytest.mark.parametrize(
    "change", [{"tiny": True}, {"wrong": ["x"]}, {"complete": False}, {"machine": {"device": "cpu"}}], ids=str
)
def test_other_results_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    status, table = run(tmp_path, RESULTS | change)
    assert (status, table.keys()) == (2, {"sm_80"})
