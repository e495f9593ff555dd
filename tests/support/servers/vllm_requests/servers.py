"""The servers that the tables name: a model, fields of ServerConfig, fields of AsyncEngineArgs."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from support.servers.live_server import LiveServer, live_server

SMOL = "smol"
"""Stands for the file of the real model."""

TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.source_lang_code }}{{ p.text }}{% endfor %}{% endfor %}"


@dataclass(frozen=True)
class Served:
    model: str
    config: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


SERVERS = {
    SMOL: Served(SMOL, {**TOOLS, "enable_prompt_tokens_details": True, "enable_tokenizer_info_endpoint": True}),
    "fake": Served("fake"),
    "say": Served("fake:say", {**TOOLS, "enable_prompt_tokens_details": True}, {"reasoning_parser": "qwen3"}),
    "slow": Served("fake:slow"),
    "crash": Served("fake:crash"),
    "all-logprobs": Served("fake", {}, {"max_logprobs": -1}),
    "as-ids": Served("fake", {"return_tokens_as_token_ids": True}),
    "embeds": Served("fake", {}, {"enable_prompt_embeds": True}),
    "force-usage": Served("fake:slow", {"enable_force_include_usage": True}),
    "parts": Served("fake", {"chat_template": PARTS, "chat_template_content_format": "openai"}),
    "key": Served("fake", {"api_key": ["test"]}),
    "request-ids": Served("fake", {"enable_request_id_headers": True}),
    "root-path": Served("fake", {"api_key": ["abc-123"], "root_path": "/llm"}),
    "dev": Served("fake", {"server_dev_mode": True}, {"enable_sleep_mode": True}),
    "counted": Served("fake"),
    "counted-steps": Served("fake"),
    "embed": Served("fake:pool-plain", {"chat_template": TEMPLATE}),
    "matryoshka": Served("fake:pool-embed", {"chat_template": TEMPLATE}),
    "embed-key": Served("fake:pool-plain", {"api_key": ["test"]}),
    "classify": Served("fake:pool-classify", {"chat_template": TEMPLATE}),
    "whole": Served("fake:pool-whole"),
    "cross": Served("fake:pool-cross"),
    "tokens": Served("fake:pool-tokens"),
}


class Fleet:
    """Servers, each started when it is first asked for."""

    def __init__(self, model_file: str | None) -> None:
        self._stack = ExitStack()
        self._model_file = model_file
        self._running: dict[str, LiveServer] = {}

    def __getitem__(self, name: str) -> LiveServer:
        if name not in self._running:
            self._running[name] = self._start(SERVERS[name])
        return self._running[name]

    def forget(self, name: str) -> None:
        """Start that server anew for the next request: its engine failed."""
        self._running.pop(name, None)

    def close(self) -> None:
        self._stack.close()

    def _start(self, served: Served) -> LiveServer:
        engine = {"served_model_name": [name_of(served)]} | served.engine
        if served.model != SMOL:
            return self._stack.enter_context(live_server(served.model, engine=engine, **served.config))
        assert self._model_file is not None
        engine |= {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 29, "dtype": "float32"}
        server = self._stack.enter_context(live_server(self._model_file, ready=False, engine=engine, **served.config))
        asyncio.run_coroutine_threadsafe(server.state.wait_until_ready(), server._loop).result(180)
        return server


def name_of(served: Served) -> str:
    """Return the name under which a server's model is served."""
    return "smol" if served.model == SMOL else "fake"
