"""Settings of trials on a GPU, written into the kernels' tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_tuning
import pytest

RESULTS: dict[str, Any] = {
    "stage": "tune",
    "tiny": False,
    "spoil": 0.0,
    "machine": {"device": "cuda", "gpu": "NVIDIA H200"},
    "complete": True,
    "failed": {},
    "wrong": [],
    "best": {
        "16bit_h128_r16": {"us": 8.0, "settings": {"ROWS": 16, "TILE": 32}, "pieces": 4, "of_usual": 0.8},
        "h128_b2": {"us": 8.0, "settings": {"BLOCK_M": 64}, "of_usual": 0.98},
        "weight_only int4-16": {"us": 8.0, "settings": {"CHANNELS": 128}, "of_usual": 0.9},
    },
}


def run(folder: Path, results: dict[str, Any]) -> int:
    for name in ("decode_attention", "prefill_attention", "weight_only"):
        table = folder / name / "tuning.json"
        if not table.is_file():
            table.parent.mkdir()
            table.write_text(next(gpu_tuning.KERNELS.glob(f"**/{name}/tuning.json")).read_text())
    path = folder / "tune.json"
    path.write_text(json.dumps(results))
    return gpu_tuning.main([str(path), "--chip", "sm_90"], folder)


def test_what_is_faster_is_written(tmp_path: Path) -> None:
    assert run(tmp_path, RESULTS) == 0
    decode, prefill, products = (
        json.loads((tmp_path / name / "tuning.json").read_text())
        for name in ("decode_attention", "prefill_attention", "weight_only")
    )
    assert decode["sm_90"]["16bit_h128_r16"] == {"ROWS": 16, "TILE": 32}
    assert products["sm_90"]["int4-16"] == {"CHANNELS": 128}
    assert list(products) == ["sm_80", "sm_90"]
    own = (gpu_tuning.KERNELS / "attention" / "prefill_attention" / "tuning.json").read_text()
    assert prefill == json.loads(own), "2 % are within the noise"
    before = json.loads((gpu_tuning.KERNELS / "attention" / "decode_attention" / "tuning.json").read_text())
    before["sm_90"]["16bit_h128_r16"] = decode["sm_90"]["16bit_h128_r16"]
    assert decode == before, "nothing else changes"


def test_a_table_keeps_its_form(tmp_path: Path) -> None:
    table = tmp_path / "tuning.json"
    for name in ("decode_attention", "prefill_attention", "weight_only", "moe"):
        text = next(gpu_tuning.KERNELS.glob(f"**/{name}/tuning.json")).read_text()
        table.write_text(text)
        gpu_tuning.write(table, "sm_80", {})
        assert table.read_text() == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": {"device": "cpu"}}, "not run on a GPU"),
        ({"tiny": True}, "not run on a GPU at full size"),
        ({"complete": False}, "incomplete"),
        ({"wrong": ["gemm.checks/x"]}, "incomplete, or something failed"),
    ],
)
def test_other_results_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, RESULTS | change) == 2
    assert message in capsys.readouterr().err
    own = (gpu_tuning.KERNELS / "attention" / "decode_attention" / "tuning.json").read_text()
    assert (tmp_path / "decode_attention" / "tuning.json").read_text() == own
