"""`pagoda serve` with a fake engine process; the model's name says how it behaves (see fake_engine)."""

import sys
from typing import Any

from support.byte_text import byte_tokenizer
from support.fake_engine import PROGRAM, build

from pagoda.server.async_llm import AsyncLLM
from pagoda.server.cli import main, serve
from pagoda.server.core_client.engine import ThreadClient
from pagoda.server.core_client.process_client import ProcessClient


def start_fake(config: Any, *, in_process: bool) -> ProcessClient | ThreadClient:
    return ThreadClient(config, build) if in_process else ProcessClient(config, PROGRAM)


if __name__ == "__main__":
    serve.start_engine = start_fake
    assert AsyncLLM.__init__.__kwdefaults__ is not None
    AsyncLLM.__init__.__kwdefaults__["open_text"] = lambda _: byte_tokenizer()
    sys.exit(main.main(["serve", *sys.argv[1:]]))
