"""Settings of recurrent state, and what a conversation with a recurrent model finds in the prefix cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models.oracles.kept_logits import read_cases
from support.checkpoints.byte_text import byte_tokenizer
from support.checkpoints.tiny_folder import write_model
from support.servers.live_server import LiveServer, live_server
from support.suite.rows import each_row

from pagoda.common.config.groups.cache import StateSnapshots
from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import EngineArgs
from pagoda.server.settings.resolve import Resolved, resolve

OPENING = "<assistant> let me think of this before I answer, as I always do:"
"""Begins the answer in a prompt, and is not in the next prompt."""

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}" + OPENING + "{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with gated delta rules, without weights."""
    path = tmp_path_factory.mktemp("recurrent")
    config = read_cases()["qwen3-next"].config | {"vocab_size": 257, "max_position_embeddings": 2048}
    (path / "config.json").write_text(json.dumps(config))
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return path


def resolved(model: Path, **settings: Any) -> Resolved:
    args = EngineArgs(str(model), load_format="dummy", **settings)
    return resolve(args.create_engine_config(), "server", args.sources)


@pytest.mark.setting("--mamba-cache-mode", "--mamba-block-size", "--prefix-cache-retention-interval")
@each_row(
    ("settings", "expected"),
    [
        ({}, StateSnapshots(mode="align", unit=32, interval=1024)),
        ({"mamba_cache_mode": "all", "mamba_block_size": 64}, StateSnapshots(mode="all", unit=64, interval=1024)),
        ({"prefix_cache_retention_interval": 0}, StateSnapshots(mode="align", unit=32, interval=0)),
    ],
)
def test_limits_say_where_state_is_kept(folder: Path, settings: dict[str, Any], expected: StateSnapshots) -> None:
    found = resolved(folder, **settings)
    assert found.limits.snapshots == expected
    rows = {row.name: row.value for row in found.rows}
    assert (rows["mamba_cache_mode"], rows["mamba_block_size"]) == (expected.mode, expected.unit)


@pytest.mark.setting("--mamba-cache-mode")
def test_without_state_no_prefix_is_cached(folder: Path) -> None:
    found = resolved(folder, mamba_cache_mode="none")
    assert not found.limits.prefix_caching
    with pytest.raises(ConfigError, match="--mamba-cache-mode: none excludes --enable-prefix-caching"):
        resolved(folder, mamba_cache_mode="none", enable_prefix_caching=True)


@pytest.mark.setting("--mamba-block-size", "--prefix-cache-retention-interval")
@each_row(
    ("settings", "message"),
    [
        ({"mamba_block_size": 24}, "--mamba-block-size: 24 is not a multiple of the block size, 32; use 32"),
        ({"mamba_block_size": 0}, "--mamba-block-size: 0 is not positive; use a multiple of --block-size"),
        ({"prefix_cache_retention_interval": -1}, "--prefix-cache-retention-interval: -1 is negative"),
    ],
)
def test_unusable_values(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(folder, **settings)


def test_a_setting_without_effect_is_named(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    softmax = write_model(tmp_path)
    with caplog.at_level(logging.WARNING):
        resolved(softmax, mamba_cache_mode="all", prefix_cache_retention_interval=64)
        resolved(folder, mamba_block_size=64, enable_prefix_caching=False)
    assert [record.message for record in caplog.records if "--mamba" in record.message] == [
        "--mamba-cache-mode, --prefix-cache-retention-interval: no effect on a model without recurrent state",
        "--mamba-block-size: no effect without prefix caching",
    ]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    settings = {"load_format": "dummy", "max_model_len": 1024, "block_size": 16, "num_gpu_blocks_override": 80}
    with live_server(
        str(folder), engine=settings, chat_template=TEMPLATE, enable_prompt_tokens_details=True
    ) as running:
        yield running


def cached(server: LiveServer, messages: list[dict[str, str]]) -> int:
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def test_what_opens_the_answer_is_not_part_of_what_turns_share(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "a" * 294}]  # 300 tokens with its role
    assert cached(server, messages) == 0
    messages += [{"role": "assistant", "content": "b" * 40}, {"role": "user", "content": "c" * 94}]
    assert cached(server, messages) == 288
    messages += [{"role": "assistant", "content": "b" * 40}, {"role": "user", "content": "c" * 94}]
    assert cached(server, messages) == 300 + 51 + 100 - 3, "the last whole page"


def test_metrics_and_start_up_describe_the_states(server: LiveServer) -> None:
    text = server.request("GET", "/metrics", None, {})[1]
    assert 'mamba_block_size="16",mamba_cache_dtype="float32",mamba_cache_mode="align"' in str(text)
    assert "recurrent state" in server.llm.info.memory
    assert "room for 79" in server.llm.info.memory
