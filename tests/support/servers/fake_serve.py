"""`pagoda serve` with a fake engine process; the model's name says how it behaves (see fake_engine)."""

import sys
from typing import Any

from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import PROGRAM, build

from pagoda.server.async_llm import AsyncLLM
from pagoda.server.cli import main
from pagoda.server.cli.serving import api_process, api_servers, serve
from pagoda.server.core_client.engine import ThreadClient
from pagoda.server.core_client.process_client import ProcessClient
from pagoda.server.core_client.restarting import RestartingClient

API_PROGRAM = (sys.executable, "-P", __file__, "--api-process")


def start_fake(config: Any, *, in_process: bool) -> ProcessClient | RestartingClient | ThreadClient:
    if restarts := config.runtime.restart_engine:
        return RestartingClient(lambda: ProcessClient(config, PROGRAM), restarts)
    return ThreadClient(config, build) if in_process else ProcessClient(config, PROGRAM)


def start_shared_fake(config: Any, *, clients: int) -> ProcessClient:
    return ProcessClient(config, PROGRAM, clients)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--api-process"]:
        sys.exit(api_process.main(sys.argv[2:], open_text=lambda _: byte_tokenizer()))
    serve.start_engine = start_fake
    serve.named_path = lambda _: None  # the names of fake models hold paths
    assert api_servers.run_api_servers.__defaults__ is not None
    api_servers.run_api_servers.__defaults__ = (start_shared_fake, API_PROGRAM)
    assert AsyncLLM.__init__.__kwdefaults__ is not None
    AsyncLLM.__init__.__kwdefaults__["open_text"] = lambda _: byte_tokenizer()
    sys.exit(main.main(["serve", *sys.argv[1:]]))
