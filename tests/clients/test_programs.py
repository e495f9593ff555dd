"""Each client's program (programs/) in the client's own environment, which `make test-clients` installs.

A program prints a line per feature: see programs/checks.py. The guide's table lists what is run here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
GUIDE = (HERE.parents[1] / "docs" / "guides" / "clients.md").read_text(encoding="utf-8")
ENVIRONMENTS = os.environ.get("PAGODA_CLIENTS")
NODE = "node"


@dataclass(frozen=True)
class ClientProgram:
    """A program, the environment it runs in, and the packages whose versions the guide states."""

    file: str
    environment: str
    packages: tuple[str, ...]
    server: str = "default"


CLIENT_PROGRAMS = (
    ClientProgram("run_openai.py", "python", ("openai",)),
    ClientProgram("run_anthropic.py", "python", ("anthropic",)),
    ClientProgram("run_instructor.py", "python", ("instructor",)),
    ClientProgram("run_langchain.py", "python", ("langchain-openai",)),
    ClientProgram("run_langchain_embeddings.py", "python", ("langchain-openai",), "embeddings"),
    ClientProgram("run_litellm.py", "python", ("litellm",)),
    ClientProgram("run_llm.py", "python", ("llm",)),
    ClientProgram("run_pydantic_ai.py", "python", ("pydantic-ai-slim",)),
    ClientProgram("run_llama_index.py", "llama-index", ("llama-index-llms-openai-like",)),
    ClientProgram("run_lm_eval.py", "lm-eval", ("lm_eval",)),
    ClientProgram("load/run_aiperf.py", "aiperf", ("aiperf",)),
    ClientProgram("load/run_guidellm.py", "guidellm", ("guidellm",)),
    ClientProgram("run_node.mjs", NODE, ("openai", "ai")),
    ClientProgram(
        "agents/run_agents.py",
        NODE,
        ("@openai/codex", "opencode-ai", "@qwen-code/qwen-code", "@anthropic-ai/claude-code"),
        "long",
    ),
    ClientProgram("agents/run_agent_loops.py", NODE, (), "loops"),
    ClientProgram("load/run_vllm_bench.py", "vllm", ()),
)


def versions(environment: str) -> dict[str, str]:
    """Return the pinned version of each package of an environment."""
    if environment == NODE:
        return json.loads((HERE / "requirements" / "package.json").read_text())["dependencies"]
    text = (HERE / "requirements" / f"{environment}.txt").read_text()
    return dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", text, re.MULTILINE))


def words(client: ClientProgram) -> list[str]:
    """Return the command that runs a client's program. Skip the test where the client is not installed."""
    program = str(PROGRAMS / client.file)
    if client.environment == "vllm":
        if shutil.which(os.environ.get("PAGODA_VLLM", "vllm")) is None:
            pytest.skip("vLLM is not installed; PAGODA_VLLM names its program")
        return [sys.executable, program]
    if ENVIRONMENTS is None:
        pytest.skip("clients are installed by `make test-clients`")
    folder = Path(ENVIRONMENTS) / client.environment
    if client.environment != NODE:
        return [str(folder / "bin" / "python"), program]
    if not (folder / "node_modules").is_dir():
        pytest.skip("npm is not installed, or could not install the packages of node")
    if client.file.endswith(".py"):
        return [sys.executable, program]
    return ["node", shutil.copy(program, folder)]  # node looks for packages beside a program


@pytest.mark.parametrize("client", CLIENT_PROGRAMS, ids=lambda client: client.file)
def test_a_client_works(
    client: ClientProgram, server_of: Callable[[str], str], home: Path, capsys: pytest.CaptureFixture
) -> None:
    command = words(client)
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    own |= {"PAGODA_URL": server_of(client.server), "PAGODA_MODEL": "small", "PYTHONDONTWRITEBYTECODE": "1"}
    own |= {"PYTHONPATH": str(HERE)}  # for checks.py and commands.py
    own |= {"PAGODA_NODE": str(Path(ENVIRONMENTS or "") / NODE), "PAGODA_VLLM": os.environ.get("PAGODA_VLLM", "vllm")}
    own |= {"PAGODA_HOME": str(home)} if client.server == "loops" else {}
    done = subprocess.run(command, capture_output=True, text=True, timeout=7200, env=own)
    lines = [tuple(line.split(" ", 2)) for line in done.stdout.splitlines() if re.match("(PASS|TASK|FAIL) ", line)]
    with capsys.disabled():
        print(f"\n| {client.file} | {' '.join(f'{name}:{result}' for result, name, *_ in lines)} |")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in lines if line[0] == "FAIL"] == []
    assert any(line[0] == "PASS" for line in lines)


@pytest.mark.parametrize("client", CLIENT_PROGRAMS, ids=lambda client: client.file)
def test_the_guide_lists_the_version_of_a_client(client: ClientProgram) -> None:
    assert f"`{Path(client.file).name}`" in GUIDE
    for package in client.packages:
        assert f"`{package}` {versions(client.environment)[package]}" in GUIDE


def test_every_program_is_run() -> None:
    programs = {path.relative_to(PROGRAMS).as_posix() for path in PROGRAMS.rglob("run_*")}
    assert programs == {client.file for client in CLIENT_PROGRAMS}
