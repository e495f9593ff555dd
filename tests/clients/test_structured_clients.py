"""Clients that ask for data or run tools, unchanged, against the real server: `make test-clients`.

Each is skipped where it is not installed. The model is small: requests must succeed, its answers need not be right.
"""

from __future__ import annotations

import pytest
from pydantic import BaseModel

KEY = "secret"
QUESTION = [{"role": "user", "content": "Paris is a city in France. Which city?"}]


class City(BaseModel):
    """A city."""

    city: str


# --- openai ---


def test_openai_responses_are_chained_and_run_in_the_background(server: str) -> None:
    client = pytest.importorskip("openai").OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0)
    first = client.responses.create(model="smollm2", input="My name is Ann.", max_output_tokens=16)
    later = client.responses.create(
        model="smollm2", input="And now?", previous_response_id=first.id, max_output_tokens=16, background=True
    )
    while later.status in ("queued", "in_progress"):
        later = client.responses.retrieve(later.id)
    assert later.status in ("completed", "incomplete")
    assert later.previous_response_id == first.id


def test_openai_parses_answers(server: str) -> None:
    client = pytest.importorskip("openai").OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0)
    asked = {"model": "smollm2", "messages": QUESTION, "response_format": City, "temperature": 0, "max_tokens": 100}
    assert client.chat.completions.parse(**asked).choices[0].message.parsed.city
    with client.chat.completions.stream(**asked) as stream:
        assert {event.type for event in stream} >= {"chunk", "content.delta", "content.done"}
        assert stream.get_final_completion().choices[0].message.parsed.city


# --- anthropic ---


def test_anthropic_tool_runner(server: str) -> None:
    anthropic = pytest.importorskip("anthropic")

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather of a city.

        Args:
            city: its name
        """
        return "sunny"

    client = anthropic.Anthropic(base_url=server, api_key=KEY, max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="smollm2",
        max_tokens=100,
        messages=QUESTION,
        tools=[weather],
        tool_choice={"type": "any"},
        max_iterations=2,
        extra_body={"temperature": 0},
    )
    reasons = [message.stop_reason for message in runner]
    assert reasons[0] in ("tool_use", "max_tokens")


# --- instructor ---


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(server: str, mode: str) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0), mode=instructor.Mode[mode]
    )
    most = {"max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens": 150}
    asked = {"model": "smollm2", "messages": QUESTION, "response_model": City, "temperature": 0, "max_retries": 0}
    assert client.chat.completions.create(**asked, **most).city


# --- pydantic-ai ---


@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
async def test_pydantic_ai(server: str, api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=f"{server}/v1", api_key=KEY)
    agent = pydantic_ai.Agent(
        getattr(models, api)("smollm2", provider=provider),
        output_type=pydantic_ai.NativeOutput(City),
        model_settings={"max_tokens": 100, "temperature": 0},
    )
    assert (await agent.run("Paris is a city.")).output.city


# --- LlamaIndex ---


def test_llama_index(server: str) -> None:
    llms = pytest.importorskip("llama_index.llms.openai_like")
    core = pytest.importorskip("llama_index.core.llms")
    model = llms.OpenAILike(
        model="smollm2", api_base=f"{server}/v1", api_key=KEY, max_retries=0, max_tokens=8, is_chat_model=True
    )
    question = [core.ChatMessage(role="user", content="Say hello.")]
    assert model.chat(question).message.content
    assert len(list(model.stream_chat(question))) > 2
