"""Kernels as machine code by the real compiler, in its own process: some of each for sm_90, all with `gpu_matrix`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pagoda.backends.torch_cuda.kernels.frame import launch
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS, Chip, find_chip, settings, table
from pagoda.benchmarks.gpu.aot import compile as aot

KERNELS = Path(launch.__file__).parents[1]
SCHEDULING = ("num_warps", "num_stages")
TUNED = ("sm_80", "sm_90", "sm_100")
"""Chips whose settings were chosen so that nothing is spilled; others have theirs."""
FEW_BYTES = 32
"""What a thread may spill on the others."""


def test_every_kernel_is_compiled():
    """There is a list of what to compile for each folder with a kernel."""
    assert set(aot.FOLDERS) == {".".join(path.parent.relative_to(KERNELS).parts) for path in KERNELS.rglob("kernel.py")}
    assert len(aot.FOLDERS) > 8


SOME = "--chip", "sm_90", "--most", "1"


@pytest.fixture(scope="module", params=[SOME, pytest.param((), marks=pytest.mark.gpu_matrix)], ids=["some", "all"])
def built(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Compile in another process: in this one the interpreter replaces the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", aot.__name__, *request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_kernels_fit_their_chips(built: list[dict[str, Any]], request: pytest.FixtureRequest):
    everything = "all" in request.node.name
    assert {one["chip"] for one in built} == set(aot.TARGETS if everything else ["sm_90"])
    assert {one["name"].split("/")[0] for one in built} == set(aot.FOLDERS)
    assert all(one["shared"] <= CHIPS[one["chip"]].shared_bytes for one in built)


def test_hot_kernels_spill_nothing(built: list[dict[str, Any]]):
    hot = [one for one in built if one["hot"]]
    assert len(hot) > len(built) / 2, "most kernels are hot"
    assert not [one for one in hot if one["spilled"] > (0 if one["chip"] in TUNED else FEW_BYTES)]


def test_large_products_are_warp_group_instructions(built: list[dict[str, Any]]):
    wanting = [one for one in built if one["wants_wgmma"]]
    assert {one["name"].split("/")[0] for one in wanting} >= {"attention.prefill_attention"}
    assert not [one for one in wanting if not one["wgmma"]]


@pytest.mark.parametrize("path", sorted(KERNELS.glob("**/tuning.json")), ids=lambda path: path.parent.name)
def test_every_tuned_setting_is_compiled(path: Path):
    for name, entries in table(path).items():
        launches = aot.launches(".".join(path.parent.relative_to(KERNELS).parts), CHIPS[name]).values()
        for key, entry in entries.items():
            assert any(_has(launch.constants, launch, entry) for launch in launches), (
                f"{name}/{key} is compiled nowhere"
            )


def _has(constants: Mapping[str, Any], launch: Any, entry: Mapping[str, int]) -> bool:
    return all(
        getattr(launch, name) == value if name in SCHEDULING else constants.get(name) == value
        for name, value in entry.items()
    )


def test_settings_fall_back(tmp_path: Path):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"sm_80": {"default": {"A": 1}, "x": {"A": 2}}, "sm_90": {"x": {"A": 3}}}))
    assert [settings(path, CHIPS[chip], "x")["A"] for chip in ("sm_80", "sm_89", "sm_90", "sm_100")] == [2, 2, 3, 3]
    assert settings(path, CHIPS["sm_90"], "y")["A"] == 1


def test_settings_come_from_chips_with_no_more_shared_memory(tmp_path: Path):
    path = tmp_path / "tuning.json"
    table = {"sm_80": {"x": {"A": 1}, "y": {"A": 2}}, "sm_86": {"x": {"A": 3}}, "sm_100": {"x": {"A": 4}}}
    path.write_text(json.dumps(table))
    assert [settings(path, CHIPS[chip], "x")["A"] for chip in ("sm_80", "sm_89", "sm_100", "sm_120")] == [1, 3, 4, 3]
    assert [settings(path, CHIPS[chip], "y")["A"] for chip in ("sm_86", "sm_90", "sm_120")] == [2, 2, 2]


def test_chips():
    assert find_chip((9, 0), 114) == Chip((9, 0), CHIPS["sm_90"].shared_bytes, 114, True)
    assert find_chip((8, 7), 16).shared_bytes == CHIPS["sm_86"].shared_bytes
    with pytest.raises(ValueError, match=r"7\.5"):
        find_chip((7, 5), 40)
