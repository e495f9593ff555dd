"""The commands and programs of the quick start, run as they are written but for the model's name and the address."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.served import REAL, environment, served, wait_ready

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "quickstart"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADDRESS = "http://localhost:8000"

pytestmark = pytest.mark.model


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text()
    return [block.replace("\\\n", " ") for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)]


def line(page: str, beginning: str) -> list[str]:
    """The words of the one command line of a page that begins like this."""
    lines = "".join([*blocks(page, "sh"), *blocks(page, "console")]).splitlines()
    (found,) = {each.removeprefix("$ ") for each in lines if each.removeprefix("$ ").startswith(beginning)}
    return shlex.split(found)


@pytest.fixture(scope="module")
def server(model_file: Path) -> Iterator[str]:
    """The server of the page on agents, which is that of the page on chat with further flags."""
    assert line("chat", "pagoda serve") == ["pagoda", "serve", MODEL]
    _, _, model, *flags = line("agent", "pagoda serve")
    assert model == MODEL
    with served(str(model_file), *flags, program=REAL) as (process, url):
        wait_ready(process)
        yield url


def run(words: list[str], **more: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment() | more)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_question_of_the_chat_page_is_answered(server: str) -> None:
    words = line("chat", "pagoda chat")
    assert words[:2] == ["pagoda", "chat"]
    answer = run([sys.executable, "-m", "pagoda.server.cli.main", *words[1:], "--url", f"{server}/v1"])
    assert answer.strip()  # it is sampled


@pytest.mark.program("curl")
def test_the_request_of_the_chat_page_is_answered(server: str) -> None:
    words = line("chat", "curl")
    words[1] = words[1].replace(ADDRESS.removeprefix("http://"), server)
    answer = json.loads(run([*words, "--silent", "--show-error", "--fail-with-body"]))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_the_agent_calls_its_tool(server: str, tmp_path: Path) -> None:
    (program,) = blocks("agent", "python")
    (tmp_path / "agent.py").write_text(program.replace(ADDRESS, server))
    assert line("agent", "python") == ["python", "agent.py"]
    lines = run([sys.executable, str(tmp_path / "agent.py")]).splitlines()
    assert lines[0].startswith("tool: It is sunny in "), lines


def test_the_programs_of_the_python_page_run(model_file: Path) -> None:
    program = "".join(blocks("python", "python"))
    assert program.count(MODEL) == 1
    lines = run([sys.executable, "-c", program.replace(MODEL, str(model_file))]).splitlines()
    assert lines[0] == "The capital of France is Paris."
    assert lines[1].startswith("'Once upon a time' -> ")
    assert lines[-1] in ("yes", "no")
