"""Flags of newer versions of vLLM: each is a setting, or is refused with its own reason, wherever it is given."""

from __future__ import annotations

from pathlib import Path

import interface
import pytest
from support.suite.rows import each_row

from pagoda import LLM
from pagoda.common.config.settings import ENGINE_SETTINGS, from_file
from pagoda.common.config.without_setting import FLAGS_WITHOUT_SETTING
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import EngineArgs

NEWER = [line.split("\t")[1] for line in Path("tests/data/vllm_newer_flags.tsv").read_text().splitlines()[1:]]
KNOWN = {flag for settings in interface.groups().values() for each in settings.values() for flag in each.flags}


@each_row("flag", NEWER)
def test_a_flag_is_a_setting_or_has_a_reason(flag: str) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    assert (flag in KNOWN) != (name in FLAGS_WITHOUT_SETTING)


@each_row("spelling", ["--numa-bind", "--numa_bind", "--no-numa-bind", "--numa-bind=1"])
def test_serve_gives_the_reason(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        interface.parsers()["serve"].parse_args(["m", spelling])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert "numa-bind is not supported: there is no NUMA policy; start the server under numactl" in line


def test_a_json_flag_gives_the_reason_for_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        interface.parsers()["serve"].parse_args(["m", "--kernel-config.moe_backend", "triton"])
    assert "--kernel-config is not supported: each backend chooses its kernels" in capsys.readouterr().err


def test_a_keyword_gives_the_reason() -> None:
    with pytest.raises(ConfigError, match="moe_backend: is not supported: each backend chooses its kernels itself"):
        EngineArgs("m", moe_backend="triton")


def test_a_parameter_of_llm_gives_the_reason() -> None:
    with pytest.raises(ConfigError, match="offload_params: is not supported: weights are offloaded by"):
        LLM("m", offload_params=["w"])


def test_a_file_gives_the_reason(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("moe-backend: triton\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: moe-backend is not supported: each backend chooses"):
        from_file(str(tmp_path / "c.yaml"), ENGINE_SETTINGS)
