"""`pagoda run-batch` over a fake engine; the model's name says how it behaves (see fake_engine)."""

import sys
from typing import Any

from support.byte_text import byte_tokenizer
from support.fake_engine import build

from pagoda.server import cli
from pagoda.server.commands import run_batch
from pagoda.server.link.thread_client import ThreadClient
from pagoda.server.online.async_llm import AsyncLLM


def start_fake(config: Any, *, in_process: bool) -> ThreadClient:
    return ThreadClient(config, build)


if __name__ == "__main__":
    run_batch.start_engine = start_fake
    assert AsyncLLM.__init__.__kwdefaults__ is not None
    AsyncLLM.__init__.__kwdefaults__["open_text"] = lambda _: byte_tokenizer()
    sys.exit(cli.main(["run-batch", *sys.argv[1:]]))
