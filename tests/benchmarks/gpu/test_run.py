"""The GPU script on CPU tensors, on a machine as bare as can be: no git, no packages of ours but the carried ones."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpu_carry
import pytest
from support.suite.slow_matrix import some
from support.suite.watching import eventually

from pagoda.benchmarks.gpu import run
from pagoda.benchmarks.gpu.run import Results, best
from pagoda.benchmarks.gpu.stages import STAGES, TRIALS

# --- a machine that lacks packages which this one has, for processes: they see those alone outside site-packages ---

HIDE = """
import importlib.abc, importlib.machinery, importlib.metadata, sys

ABSENT, MODULES = {names!r}, {modules!r}
outside = lambda: [path for path in sys.path if "site-packages" not in path]


class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in MODULES:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, outside() if path is None else path)
        if found is None:
            raise ModuleNotFoundError(f"No module named {{name!r}}, as on a bare machine", name=name)
        return found


find = importlib.metadata.MetadataPathFinder.find_distributions


def distributions(context=importlib.metadata.DistributionFinder.Context()):
    if context.name is not None and context.name.lower().replace("_", "-") in ABSENT:
        context = importlib.metadata.DistributionFinder.Context(name=context.name, path=outside())
    return find(context)


importlib.metadata.MetadataPathFinder.find_distributions = staticmethod(distributions)
sys.meta_path.insert(0, Hidden())
"""


def bare(folder: Path, absent: tuple[str, ...]) -> Path:
    """`absent`: distributions, whose modules are hidden too."""
    modules = {path.parts[0].partition(".")[0] for name in absent for path in _files(name)}
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE.format(names=set(absent), modules=modules))
    return folder


def carry(folder: Path, names: tuple[str, ...]) -> None:
    """Wheels of distributions that are installed here, for this Python."""
    folder.mkdir(parents=True)
    for name in names:
        installed = importlib.metadata.distribution(name)
        with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{installed.version}-py3-none-any.whl", "w") as wheel:
            for path in _files(name):
                wheel.write(str(installed.locate_file(path)), str(path))


def _files(name: str) -> list[importlib.metadata.PackagePath]:
    files = importlib.metadata.distribution(name).files or []
    return [path for path in files if path.parts[0] != ".." and "__pycache__" not in path.parts]


# --- tests ---


ROOT = Path(__file__).resolve().parents[3]
COMMIT = "abc1234"
ENTRY = "KERNEL"


class Machine:
    """What is carried to it, and a way to run the script."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.carried = folder, folder / "carry"
        carry(self.carried / "wheels", gpu_carry.WHEELS)
        (self.carried / "carry.json").write_text(json.dumps({"commit": COMMIT}))
        with tarfile.open(self.carried / "triton-cache.tar.xz", "w:xz") as archive:
            for name, text in {
                "kernel.cubin": "code",
                "__grp__kernel.json": json.dumps({"child_paths": {"kernel.cubin": "/elsewhere/KERNEL/kernel.cubin"}}),
            }.items():
                entry = tarfile.TarInfo(f"{ENTRY}/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
        tools = folder / "bin"
        tools.mkdir()
        for name in ("sh", "dirname"):
            (tools / name).symlink_to(shutil.which(name) or "")
        hidden = bare(folder / "bare", gpu_carry.WHEELS)
        self.environment = {
            "PATH": str(tools),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(hidden),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *arguments: str, output: str = "out") -> subprocess.Popen[str]:
        fixed = [
            "--device",
            "cpu",
            "--tiny",
            "--output",
            str(self.folder / output),
            "--work",
            str(self.folder / "work"),
        ]
        command = [str(ROOT / "benchmarks" / "gpu.sh"), *fixed, "--carry", str(self.carried), *arguments]
        return subprocess.Popen(
            ["sh", *command],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, output: str = "out") -> tuple[int, str, dict[str, Any]]:
        """(exit status, what it printed, the JSON)."""
        process = self.start(*arguments, output=output)
        printed, _ = process.communicate(timeout=600)
        path = self.folder / output / f"{arguments[-1]}.json"
        return process.returncode, printed, json.loads(path.read_text()) if path.is_file() else {}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    return Machine(tmp_path_factory.mktemp("machine"))


def test_a_bare_machine_lacks_the_packages(machine: Machine) -> None:
    code = "import msgspec"
    done = subprocess.run([sys.executable, "-c", code], env=machine.environment, capture_output=True, text=True)
    assert "as on a bare machine" in done.stderr
    code = "import importlib.metadata as m; m.version('pydantic-core')"
    done = subprocess.run([sys.executable, "-c", code], env=machine.environment, capture_output=True, text=True)
    assert "PackageNotFoundError" in done.stderr


def test_smoke(machine: Machine) -> None:
    status, printed, report = machine.run("smoke")
    assert (status, report["failed"], report["wrong"]) == (0, {}, []), printed
    assert report["complete"]
    assert report["commit"] == COMMIT
    assert set(report["numbers"]) == set(STAGES["smoke"])
    assert len(report["carried"]["packages"]) == len(gpu_carry.WHEELS)
    assert (report["carried"]["cache_entries"], report["carried"]["compiled"]) == (1, 0)
    group = machine.folder / "work" / "triton-cache" / ENTRY / "__grp__kernel.json"
    assert json.loads(group.read_text())["child_paths"] == {"kernel.cubin": str(group.with_name("kernel.cubin"))}
    graphs = report["numbers"]["engine.graph_checks"].values()
    assert all(one["recompiles"] == [0, 0] and one["equal"] == one["of"] for one in graphs)


def test_short_measures_one_engine_in_order(machine: Machine) -> None:
    """A dry run of what a GPU of 15 minutes is used for: the order is printed, and the time of each number."""
    status, printed, report = machine.run("short")
    assert (status, report["failed"], report["wrong"]) == (0, {}, []), printed
    assert printed.startswith(f"short, at most 330 s, in this order: {', '.join(STAGES['short'])}\n")
    assert list(report["numbers"]) == list(STAGES["short"])
    assert list(report["numbers"]["engine.short"]) == ["decode_1", "decode_3", "prefill_24", "throughput_3x12/6"]
    assert {one["recompiles"] for one in report["numbers"]["engine.short"].values()} == {0}
    for part, numbers in report["numbers"].items():
        for name, number in numbers.items():
            assert f"\n{part}/{name} {number['took_s']} s {{" in printed


@pytest.mark.slow_matrix
def test_every_check_of_smoke_sees_an_error(machine: Machine) -> None:
    status, printed, report = machine.run("--spoil", "0.1", "smoke", output="spoiled")
    assert status == run.WRONG, printed
    checked = {
        f"{part}/{name}" for part, numbers in report["numbers"].items() for name in numbers if "right" in numbers[name]
    }
    assert len(checked) > 60
    assert checked == set(report["wrong"])
    assert f"WRONG {report['wrong'][0]}" in printed


@pytest.mark.parametrize(
    "stage",
    some(
        ["second", "decode", "prefill", "throughput", "serving", "invariance", "mixers", "experts", *TRIALS],
        usual=["experts"],
    ),
)
def test_the_other_stages_complete(machine: Machine, stage: str) -> None:
    status, printed, report = machine.run(stage)
    assert (status, report["complete"], report["failed"]) == (0, True, {}), printed
    assert set(report["numbers"]) == set(STAGES[stage])
    of_no_time = ("absent", "greedy_equal")  # a peer that is missing, a comparison of tokens
    for numbers in report["numbers"].values():
        for number in numbers.values():
            assert number.get("recompiles", 0) == 0
            assert any(name in number for name in ("step_ms", "seconds", "us", "ms", *of_no_time))
    if stage == "serving":
        assert len(report["numbers"]["serving.rates"]) == 3
        assert [one["right"] for one in report["numbers"]["serving.out_of_memory"].values()] == [True] * 4
    if stage == "tune":
        assert {"16bit_h128_r16", "h128_b2", "weight_only int8-8", "moe plain-16"} <= report["best"].keys()
    if stage == "tune_mixers":
        kernels = {"latent_attention 16bit", "latent_prefill h128_b2", "invariant_linear b2"}
        assert report["best"].keys() == kernels | {f"invariant_attention h{dim}_b2" for dim in (64, 128)}


@pytest.mark.slow_matrix
def test_missing_peer_packages_are_reported_as_absent(machine: Machine) -> None:
    """Of torch's, which is here; others say that they are not."""
    status, printed, report = machine.run("--only", "peers.attention", "peers")
    assert (status, report["failed"]) == (0, {}), printed
    numbers = report["numbers"]["peers.attention"]
    assert numbers["decode 32x1k sdpa"]["right"]
    assert numbers["prefill 8x1k sdpa"]["us" if "us" in numbers["prefill 8x1k sdpa"] else "ms"] > 0
    assert "No module named" in numbers["decode 32x1k flashinfer"]["absent"]


@pytest.mark.slow_matrix
def test_a_stage_that_is_killed_goes_on_where_it_was(machine: Machine) -> None:
    path = machine.folder / "out" / "kernels.json"
    process = machine.start("kernels")
    seen: list[dict] = []

    def has_written_three_times() -> bool:
        if path.is_file():
            state = json.loads(path.read_text())  # at any time it is whole
            if not seen or state != seen[-1]:
                seen.append(state)
        return len(seen) >= 3 or process.poll() is not None

    eventually(has_written_three_times)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    eventually(partial(_is_unused, machine.folder / "work"))  # what it had started ended with it
    first = json.loads(path.read_text())
    counts = [_count(state) for state in seen]
    assert counts == sorted(set(counts)), "it grows with every number"
    assert not first["complete"]
    status, printed, report = machine.run("kernels")
    assert (status, report["complete"]) == (0, True), printed
    for part, numbers in first["numbers"].items():
        for name, number in numbers.items():
            assert report["numbers"][part][name] == number, "measured once"
            assert f"\n{part}/{name} " not in printed
    assert _count(report) > _count(first)


def _is_unused(folder: Path) -> bool:
    """Whether no process works in the folder."""
    return str(folder) not in map(_working_folder, Path("/proc").glob("[0-9]*/cwd"))


def _working_folder(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _count(state: dict) -> int:
    return sum(map(len, state["numbers"].values()))


def test_numbers_of_an_earlier_run_are_taken_from_another_folder(machine: Machine) -> None:
    status, printed, report = machine.run("--previous", str(machine.folder / "out"), "experts", output="other")
    before = json.loads((machine.folder / "out" / "experts.json").read_text())
    assert (status, report["complete"], report["numbers"]) == (0, True, before["numbers"])
    assert "experts.speeds/" not in printed


def test_a_stage_out_of_time_is_unfinished(machine: Machine) -> None:
    status, printed, report = machine.run("--budget", "0", "smoke", output="short")
    assert status == run.UNFINISHED, printed
    assert (report["complete"], report["numbers"]) == (False, {})


@pytest.mark.gpu_matrix
@pytest.mark.parametrize("stage", list(STAGES))
def test_every_stage_goes_on_after_a_budget_of_five_seconds(machine: Machine, stage: str) -> None:
    """What it measured by then is in its file, and it goes on where it was."""
    status, printed, report = machine.run("--budget", "5", stage, output="five")
    assert status in (0, run.UNFINISHED), printed
    assert report["complete"] == (status == 0)
    assert (report["wrong"], report["failed"]) == ([], {})
    first = report["numbers"]
    _, _, report = machine.run("--budget", "5", stage, output="five")
    assert all(report["numbers"][part][name] == number for part in first for name, number in first[part].items())


def test_without_a_gpu_nothing_is_measured(machine: Machine) -> None:
    status, printed, _ = machine.run("--device", "cuda", "decode", output="none")
    assert (status, "no GPU found; nothing was measured" in printed) == (run.NOTHING, True)


def test_a_part_of_another_stage_is_refused(machine: Machine) -> None:
    status, printed, _ = machine.run("--only", "gemm.checks", "decode")
    assert status == 2
    assert "--only: gemm.checks is not of decode; its parts are engine.decode" in printed


def test_the_guide_lists_the_stages() -> None:
    guide = (ROOT / "docs" / "guides" / "nvidia.md").read_text()
    assert re.findall(r"^\$ benchmarks/gpu.sh .* (\w+)$", guide, re.MULTILINE) == list(STAGES)
    described = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", guide.partition("| stage |")[2], re.MULTILINE)
    assert [name.strip("`") for row in described for name in row.split(", ")] == list(STAGES)


def test_results_are_reused_for_the_same_code_and_machine_only(tmp_path: Path) -> None:
    def results(code: str) -> Results:
        return Results(tmp_path / "s.json", {"stage": "s", "code": code})

    first = results("a")
    first.on({"gpu": "H100"})
    first.numbers = {"part": {"x": {"us": 1}, "y": {"right": False}}}
    first.write()
    same, other = results("a"), results("b")
    for one in (same, other):
        one.take(first.path, tmp_path / "absent.json")
    assert (same.names, same.wrong) == (["part/x", "part/y"], ["part/y"])
    assert other.names == []
    same.on({"gpu": "H200"})
    assert same.names == []


def test_best_settings_are_compared_with_those_in_use() -> None:
    trials = {
        "usual": {"key": "k", "settings": {"n": 1}, "us": 10.0},
        "better": {"key": "k", "settings": {"n": 2}, "us": 8.0, "pieces": 4},
        "refused": {"key": "k", "settings": {"n": 3}, "refused": "registers"},
    }
    assert best({"part": trials}) == {"k": {"us": 8.0, "settings": {"n": 2}, "pieces": 4, "of_usual": 0.8}}
