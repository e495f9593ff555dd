"""Logs as configured, in each process."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pagoda.common.config.groups.observability import LoggingConfig
from pagoda.common.errors import ConfigError
from pagoda.common.observe.logs import configure, configure_unless_done
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.settings.flags import AsyncEngineArgs, EngineArgs

LOGGERS = ("pagoda", "uvicorn", "vllm")


def say() -> None:
    log = logging.getLogger("pagoda.some.module")
    log.debug("quiet")
    log.info("usual")
    log.error("loud")


def config(**settings: Any) -> LoggingConfig:
    return EngineArgs(**settings).create_engine_config().logging


@pytest.mark.setting("--log-level")
@pytest.mark.variable("PAGODA_LOGGING_LEVEL")
def test_level(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    configure(config())
    say()
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["INFO", "ERROR"]
    configure(config(log_level="debug"))
    say()
    assert "quiet" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "error")
    configure(config())
    say()
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["ERROR"]


@pytest.mark.setting("--log-prefix")
@pytest.mark.variable("PAGODA_LOGGING_PREFIX")
def test_prefix(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_PREFIX", "100% [a]\n ")
    configure(config(), also=("uvicorn",))
    try:
        raise ValueError("cause")
    except ValueError:
        logging.getLogger("pagoda.x").exception("it failed")
    logging.getLogger("uvicorn").warning("so did I")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3
    assert all(line.startswith("100% [a]\\n ") for line in lines)


@pytest.mark.setting("--configure-logging")
@pytest.mark.variable("PAGODA_CONFIGURE_LOGGING")
def test_configure_logging_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    configure(config(), also=("uvicorn",))
    assert [logging.getLogger(name).handlers for name in LOGGERS] == [[], [], []]
    with pytest.raises(ConfigError, match="--log-config-file"):
        config(log_config_file="x.json")


def test_existing_handlers_are_kept() -> None:
    mine = logging.NullHandler()
    logging.getLogger("pagoda").addHandler(mine)
    configure_unless_done(config())
    assert logging.getLogger("pagoda").handlers == [mine]


@pytest.mark.setting("--log-config-file")
@pytest.mark.variable("PAGODA_LOGGING_CONFIG_PATH")
@pytest.mark.parametrize("logger", ["pagoda", "vllm"])
def test_logging_config_file(logger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "log"
    file = tmp_path / "logging.json"
    handler = {"class": "logging.FileHandler", "filename": str(target), "formatter": "short", "level": "ERROR"}
    file.write_text(
        json.dumps(
            {
                "formatters": {"short": {"format": "<%(message)s>"}},
                "handlers": {"file": handler},
                "loggers": {logger: {"handlers": ["file"], "level": "INFO", "propagate": False}},
            }
        )
    )
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(file))
    configure(config())
    say()
    for each in logging.getLogger("pagoda").handlers:
        each.close()
    assert target.read_text() == "<loud>\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ('{"handlers": {"h": {"class": "no.such.Handler"}}}', "Unable to configure handler 'h': "),
        ('{"version": 2}', "Unsupported version"),
    ],
)
def test_an_invalid_config_file_is_one_line(text: str | None, line: str, tmp_path: Path) -> None:
    file = tmp_path / "logging.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as error:
        configure(LoggingConfig(log_config_file=str(file)))
    assert error.value.setting == "--log-config-file"
    assert line in str(error.value)


def test_the_engine_process_uses_the_same_configuration(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import logging, os, sys; "
        "from pagoda.server.core_client import engine; from support.engines.fake_engine import build\n"
        "def loud(config, usage):\n"
        "    logging.getLogger('pagoda.x').info('hello')\n"
        "    return build(config, usage)\n"
        "os._exit(engine.serve(sys.argv[1], loud))"
    )
    engine = AsyncEngineArgs("fake", log_prefix="[engine] ").create_engine_config()
    client = ProcessClient(engine, (sys.executable, "-c", program))
    client.wait_ready()
    client.close()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "hello" in line]
    assert line.startswith("[engine] INFO ")


@pytest.mark.setting("--log-format")
def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure(config(log_format="json", log_prefix="replica 3"), also=("uvicorn",))
    try:
        raise ValueError('a "quoted"\ncause')
    except ValueError:
        logging.getLogger("pagoda.some.module").exception("it failed:\n%s", "\u2028")
    logging.getLogger("uvicorn").warning("so did I")
    failed, warned = map(json.loads, capsys.readouterr().err.splitlines())
    assert datetime.fromisoformat(failed["time"]).tzinfo is not None
    assert (failed["level"], failed["logger"]) == ("ERROR", "pagoda.some.module")
    assert (failed["message"], failed["prefix"]) == ("it failed:\n\u2028", "replica 3")
    assert failed["line"].startswith("test_logs:")
    assert failed["process"] == os.getpid()
    assert failed["exception"].splitlines()[-2:] == ['ValueError: a "quoted"', "cause"]
    assert (warned["logger"], warned["message"]) == ("uvicorn", "so did I")
    assert "exception" not in warned
