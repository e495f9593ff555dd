"""Plugins are loaded by name or entry point, run in each process, and named when they fail."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeBackend, full_layout
from support.servers.served import environment

from pagoda.common.config.engine import EngineConfig, Limits
from pagoda.common.engine.core import make_kv_manager
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.speculative.ngram import NgramProposer
from pagoda.common.engine.speculative.proposer import Drafter
from pagoda.common.errors import ConfigError
from pagoda.server.settings import plugins
from pagoda.server.settings.flags import EngineArgs

called: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_called_yet() -> Iterator[None]:
    called.clear()
    yield
    called.clear()


def note(config: EngineConfig) -> None:
    called.append(config.extension.additional_config)


def note_too(config: EngineConfig) -> None:
    called.append("too")


def note_plainly() -> None:
    called.append("plain")


def fail_plainly() -> None:
    raise OSError("no luck")


def fail(config: EngineConfig) -> None:
    raise OSError("no luck")


class Slow(Scheduler):
    """A scheduler that is the engine's own but for its name."""


class Favour:
    """A logits processor that makes one token certain."""

    def __init__(self, config: EngineConfig) -> None:
        self.token = config.extension.additional_config["favour"]

    def apply(self, logits: Any, token_ids: Any, num_prompt: int, extra_args: Any) -> None:
        logits[self.token] = 1e4


class NoProcessor:
    def __init__(self, config: EngineConfig) -> None:
        pass


def config(**settings: Any) -> EngineConfig:
    return EngineArgs("fake", **settings).create_engine_config()


def install(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Install entry points, given as `group__name="attribute of this module"`."""
    entries = []
    for key, value in points.items():
        group, name = key.split("__")
        target = value if "." in value else f"{__name__}:{value}"
        entries.append(EntryPoint(name, target.replace("..", ""), f"pagoda.{group}"))
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints(entries).select(group=group))


@pytest.mark.setting("--additional-config", "--plugins")
def test_general_plugins_get_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, general_plugins__one="note", general_plugins__two="note_too")
    plugins.load_general_plugins(config(additional_config={"a": 1}))
    assert called == [{"a": 1}, "too"]
    called.clear()
    plugins.load_general_plugins(config(plugins="two"))
    assert called == ["too"]
    called.clear()
    plugins.load_general_plugins(config(plugins=()))
    assert called == []


@pytest.mark.variable("PAGODA_PLUGINS")
def test_plugins_are_selected_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, general_plugins__one="note", general_plugins__two="note_too")
    monkeypatch.setenv("PAGODA_PLUGINS", "two")
    plugins.load_general_plugins(config())
    assert called == ["too"]


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("no.such.module", r"plugin 'one' \(no.such.module\) cannot be imported: ModuleNotFoundError"),
        ("fail", "plugin 'one' failed: OSError: no luck"),
    ],
)
def test_a_broken_plugin_is_named(monkeypatch: pytest.MonkeyPatch, target: str, line: str) -> None:
    install(monkeypatch, general_plugins__one=target)
    with pytest.raises(ConfigError, match=line):
        plugins.load_general_plugins(config())
    with pytest.raises(ConfigError, match="--plugins: plugin 'other' is not installed; installed: one"):
        plugins.load_general_plugins(config(plugins="other"))


def test_plugins_written_for_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """They get no arguments; one that fails is left out with a warning, as it may need vLLM itself."""
    entries = [
        EntryPoint("one", f"{__name__}:note_plainly", "vllm.general_plugins"),
        EntryPoint("two", f"{__name__}:fail_plainly", "vllm.general_plugins"),
        EntryPoint("three", "vllm.no.such:thing", "vllm.general_plugins"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints(entries).select(group=group))
    plugins.load_general_plugins(config())
    assert called == ["plain"]
    assert "plugin two of vllm.general_plugins is left out: OSError: no luck" in caplog.text
    assert "plugin three of vllm.general_plugins is left out: " in caplog.text
    monkeypatch.setenv("VLLM_PLUGINS", "two")
    plugins.load_general_plugins(config())
    assert called == ["plain"]


PLUGIN = """
import os
def run(config):
    with open(os.environ["WITNESS"], "a") as file:
        file.write(f"{os.getpid()} {config.extension.additional_config['word']}\\n")
"""


@pytest.mark.setting("--additional-config")
def test_a_plugin_runs_in_the_api_process_and_in_the_engine_process(tmp_path: Path) -> None:
    """An installed package, as pip leaves it, and the real engine process, which then finds no model."""
    (tmp_path / "somewhat.py").write_text(PLUGIN)
    about = tmp_path / "somewhat-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: somewhat\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[pagoda.general_plugins]\nsomewhat = somewhat:run\n")
    code = (
        "import os; from pagoda.server.settings.flags import EngineArgs\n"
        "from pagoda.server.core_client import start_engine\n"
        "config = EngineArgs('/no/such/model', additional_config={'word': 'hear'}).create_engine_config()\n"
        "client = start_engine(config, in_process=False)\n"
        "try: client.wait_ready()\n"
        "except Exception as error: print(os.getpid(), type(error).__name__)\n"
    )
    env = environment()
    env |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), env["PYTHONPATH"]]), "WITNESS": str(tmp_path / "seen")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    parent, error = done.stdout.split()
    lines = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert error == "ModelError", done.stderr
    assert [word for _, word in lines] == ["hear", "hear"]
    assert parent in {pid for pid, _ in lines}
    assert len({pid for pid, _ in lines}) == 2


def test_load_by_name_and_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, schedulers__slow="Slow", logits_processors__favour="Favour")
    for name in ("slow", f"{__name__}.Slow", f"{__name__}:Slow"):
        assert plugins.scheduler_of(config(scheduler_cls=name)).func is Slow  # type: ignore[attr-defined]
    assert plugins.scheduler_of(config()) is Scheduler
    options = plugins.sampler_options(
        config(logits_processors=["favour", f"{__name__}.Favour"], additional_config={"favour": 7})
    )
    assert [each.token for each in options.processors] == [7, 7]  # type: ignore[attr-defined]


def test_a_scheduler_of_your_own_gets_the_drafter() -> None:
    """If it is a subclass of pagoda's; another would ignore it."""
    drafter = Drafter(NgramProposer(2, 3), 100)
    limits = Limits(max_model_len=64, max_num_batched_tokens=16, max_num_seqs=4, block_size=4, max_drafts=2)
    for settings in ({"scheduler_cls": f"{__name__}.Slow"}, {}):
        make = plugins.scheduler_of(config(**settings), lambda: drafter)
        scheduler = make(limits, make_kv_manager(FakeBackend(full_layout()), full_layout(), limits, (64,)))
        assert isinstance(scheduler, Slow if settings else Scheduler)
        assert scheduler.stats().drafts is not None
    with pytest.raises(
        ConfigError, match=r"^--scheduler-cls: .*NoSubclass is no subclass of .*; drop --speculative-co"
    ):
        plugins.scheduler_of(config(scheduler_cls=f"{__name__}.NoSubclass"), lambda: drafter)


class NoSubclass:
    add = abort = num_unfinished = schedule = token_masks = update = stats = check_integrity = None


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"scheduler_cls": "fast"}, "--scheduler-cls: no pagoda.schedulers entry point 'fast'; installed: none"),
        ({"scheduler_cls": "no.such"}, "--scheduler-cls: no.such cannot be imported: ModuleNotFoundError"),
        ({"scheduler_cls": "json.JSONDecoder"}, "json.JSONDecoder is not a scheduler, it has no add, abort"),
        ({"logits_processors": ["json.NoSuch"]}, "--logits-processors: json.NoSuch cannot be imported"),
        ({"logits_processors": [f"{__name__}.Favour"]}, "Favour: its constructor failed: KeyError: 'favour'"),
        ({"logits_processors": [f"{__name__}.NoProcessor"]}, "NoProcessor has no method apply"),
    ],
)
def test_unsuitable_plugins_are_refused(settings: dict[str, Any], line: str) -> None:
    make = plugins.scheduler_of if "scheduler_cls" in settings else plugins.sampler_options
    with pytest.raises(ConfigError) as error:
        make(config(**settings))
    assert line in str(error.value)
    assert "\n" not in str(error.value)
