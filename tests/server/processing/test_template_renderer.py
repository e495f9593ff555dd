"""Templates and messages that would take any time or memory are refused, and the next conversation is rendered."""

from __future__ import annotations

import math
import resource
import subprocess
import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.suite.fork_server import FreshPopen
from support.suite.rows import each_row

from pagoda.common.errors import EngineDeadError, QueueFullError, RequestError
from pagoda.common.text.chat_template import MAX_TEMPLATE_CHARS, render
from pagoda.server.processing.workers import worker
from pagoda.server.processing.workers.template_worker import MEMORY_BYTES
from pagoda.server.processing.workers.worker import TemplateRenderer

CHAT = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(seconds=0.2)
    yield made
    made.close()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateRenderer]:
    """One whose processes import for themselves what they need."""
    monkeypatch.setattr(subprocess, "Popen", FreshPopen)
    made = TemplateRenderer(seconds=0.5)
    yield made
    made.close()


# Values nested in one another: 2 ** 60 leaves of 60 lists.
LISTS = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
DICTS = "{% set n = namespace(x={}) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}"
TUPLES = "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
TWO = (
    "{% set n = namespace(x=[1], y=[1]) %}"
    "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)

BOMBS = {
    "tojson": LISTS + "{{ n.x | tojson }}",
    "tojson of objects": DICTS + "{{ n.x | tojson(indent=2) }}",
    "string": LISTS + "{{ n.x | string }}",
    "output": LISTS + "{{ n.x }}",
    "concatenation": LISTS + "{{ n.x ~ '' }}",
    "pprint": LISTS + "{{ n.x | pprint }}",
    "%r": LISTS + "{{ '%r' % (n.x,) }}",
    "format": LISTS + "{{ '{}'.format(n.x) }}",
    "==": TWO + "{{ n.x == n.y }}",
    "!=": TWO + "{{ n.x != n.y }}",
    "<": TWO + "{{ n.x < n.y }}",
    "in": TWO + "{{ n.x in [n.y] }}",
    "index": TWO + "{{ [n.y].index(n.x) }}",
    "count": TWO + "{{ [n.y].count(n.x) }}",
    "sort": TWO + "{{ [n.x, n.y] | sort }}",
    "max": TWO + "{{ [n.x, n.y] | max }}",
    "unique": TUPLES + "{{ [n.x] | unique | list }}",
    "keys": TUPLES + "{{ {n.x: 1} }}",
    "key of a lookup": TUPLES + "{{ {}[n.x] }}",
    "groupby": TUPLES + "{{ [{'a': n.x}, {'a': n.x}] | groupby('a') }}",
    "sum": "{{ range(99999) | map('string') | map('list') | sum(start=[]) }}",
    "product": "{% for i in range(99) %}{{ (range(99999) | list) * 100 == (range(99999) | list) * 100 }}{% endfor %}",
    "memory": (
        "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = [n.x, 'x' * 9999999 ~ i] %}{% endfor %}"
    ),
}


@each_row("name", BOMBS)
def test_a_template_that_takes_any_time_is_refused_in_time(renderer: TemplateRenderer, name: str) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(RequestError) as caught:
        renderer.render(BOMBS[name], CHAT, lane="client")
    assert caught.value.field == "messages"
    assert "\n" not in str(caught.value)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime < 30, "processor time, of whatever else runs"
    assert renderer.render(PLAIN, CHAT, lane="client") == "<user>hi"


def nested(depth: int, width: int = 1) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] * width
    return value


@each_row(
    "extra",
    lambda: [
        [nested(300)] * 5_000,  # indented: 450 M characters
        nested(4, 40),
        {"k" * 9: nested(250, 1)},
        nested(200_000),
    ],
)
def test_messages_that_a_models_template_blows_up(renderer: TemplateRenderer, extra: Any) -> None:
    template = "{% for m in messages %}{{ m.extra | tojson(indent=4) }}{% endfor %}"
    error: RequestError | None = None
    text = ""
    try:
        text = renderer.render(template, [{"role": "user", "content": "x", "extra": extra}])
    except RequestError as raised:
        error = raised
    assert len(text) < 1 << 24
    assert error is None or (error.field == "messages" and "\n" not in str(error))
    assert renderer.render(PLAIN, CHAT) == "<user>hi"


def resident(pid: int) -> int:
    """Bytes that a process has used at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def test_memory_of_bombs_is_bounded(fresh: TemplateRenderer) -> None:
    peaks = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            worker, _ = fresh._lane("client")
            if worker.pid is not None:
                try:
                    peaks.append(resident(worker.pid))
                except (OSError, StopIteration):
                    continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for name in ("memory", "tojson of objects", "string"):
            with pytest.raises(RequestError):
                fresh.render(BOMBS[name], CHAT, lane="client")
    finally:
        ended.set()
        thread.join()
    assert 50 << 20 < max(peaks) < MEMORY_BYTES + (64 << 20)


def test_a_bomb_delays_no_other_lane() -> None:
    patient = TemplateRenderer(seconds=1_000.0)
    bomb = patient.submit("client", lambda: patient.render(BOMBS["key of a lookup"], CHAT, lane="client"))
    assert patient.submit("short", lambda: patient.render(PLAIN, CHAT, lane="short")).result(60) == "<user>hi"
    assert not bomb.done()
    patient.close()
    with pytest.raises((RequestError, EngineDeadError)):
        bomb.result(60)


def test_too_many_templates_of_clients_at_once_are_refused(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_WAITING_TEMPLATES", 1)
    release = threading.Event()
    waiting = renderer.submit("client", release.wait)
    with pytest.raises(QueueFullError):
        renderer.submit("client", release.wait)
    release.set()
    assert waiting.result(20)
    assert renderer.submit("client", lambda: 5).result(20) == 5


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ("{{ raise_exception('no') }}", "messages"),
        ("{% for %}", "chat_template"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "chat_template"),
    ],
)
def test_errors_are_those_of_render(renderer: TemplateRenderer, template: str, field: str) -> None:
    with pytest.raises(RequestError) as ours:
        renderer.render(template, CHAT)
    with pytest.raises(RequestError) as local:
        render(template, CHAT)
    assert str(ours.value) == str(local.value)
    assert ours.value.field == local.value.field == field


class Text(str):
    """A string that a template must not reach."""


@each_row(
    "messages",
    [
        [{"role": "user", "content": "é 日本 \ud800 \x00"}],
        ({"role": "user", "content": [{"type": "text", "text": "a"}]},),
        [MappingProxyType({"role": Text("user"), "content": Text("x")})],
        [{"role": "user", "content": "x", "n": [10**30, 0.1, math.inf, True, None]}],
    ],
)
def test_the_text_is_that_of_render(renderer: TemplateRenderer, messages: Any) -> None:
    template = PLAIN + "{{ messages | tojson }}{{ add_generation_prompt }}{{ word }}"
    options: Mapping[str, Any] = {"word": ("a", 1), "special_tokens": MappingProxyType({"bos_token": "<s>"})}
    assert renderer.render(template, messages, **options) == render(template, messages, **options)


@each_row(
    "messages",
    [
        None,
        5,
        "hello",
        [],
        [5],
        [{"role": "user", "content": {1, 2}}],
        [{"role": "user", "content": "x", "n": 10**9999}],
    ],
)
def test_what_is_no_json_is_refused(renderer: TemplateRenderer, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        renderer.render(PLAIN, messages)
    assert caught.value.field.startswith("messages")


def test_circular_messages_are_refused(renderer: TemplateRenderer) -> None:
    circle: dict[str, Any] = {"role": "user", "content": "x"}
    circle["again"] = circle
    with pytest.raises(RequestError):
        renderer.render(PLAIN, [circle])


def test_variables_of_a_template(renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert renderer.variables_of(PLAIN + "{{ tools }}", lane="short").result(20) >= {"messages", "tools"}
    assert renderer.variables_of("{% for %}", lane="short").result(20) == frozenset()
    monkeypatch.setattr(renderer, "_call", None)  # it is cached
    assert "tools" in renderer.variables_of(PLAIN + "{{ tools }}", lane="short").result(20)


def test_a_template_whose_analysis_takes_any_time(renderer: TemplateRenderer) -> None:
    """Each assignment is from the next one, so that each pass of the search for the content's aliases finds one."""
    names = [f"a{i}" for i in range(9_000)]
    template = "".join(f"{{% set {a} = {b} %}}" for a, b in pairwise(names)) + "{% set a8999 = m.content %}"
    with pytest.raises(RequestError, match=r"more than 0.2 s"):
        renderer.render(template, CHAT, lane="client")


def test_a_closed_renderer_starts_no_process() -> None:
    closed = TemplateRenderer()
    assert closed.render(PLAIN, CHAT) == "<user>hi"
    closed.close()
    with pytest.raises(EngineDeadError):
        closed.render(PLAIN, CHAT)
    closed.close()


def test_the_process_has_none_of_the_heavy_libraries(fresh: TemplateRenderer) -> None:
    fresh.start(PLAIN)
    pid = fresh._lane("short")[0].pid
    assert pid is not None
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert not any(name in mapped for name in ("numpy", "tokenizers", "torch"))
