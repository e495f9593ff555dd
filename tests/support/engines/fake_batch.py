"""`pagoda run-batch` over a fake engine; the model's name says how it behaves (see fake_engine)."""

import sys
from typing import Any

from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import build

from pagoda.server.async_llm import AsyncLLM
from pagoda.server.cli import main
from pagoda.server.cli.batch import run_batch as batch
from pagoda.server.core_client.engine import ThreadClient


def start_fake(config: Any, *, in_process: bool) -> ThreadClient:
    return ThreadClient(config, build)


if __name__ == "__main__":
    batch.start_engine = start_fake
    assert AsyncLLM.__init__.__kwdefaults__ is not None
    AsyncLLM.__init__.__kwdefaults__["open_text"] = lambda _: byte_tokenizer()
    sys.exit(main.main(["run-batch", *sys.argv[1:]]))
