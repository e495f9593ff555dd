"""Features of anthropic against the server; see checks.py."""

from __future__ import annotations

import anthropic
from checks import ASK, MODEL, TOOL, URL, City, check, main

c = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
T = {"name": "get_weather", "description": "Weather", "input_schema": TOOL["function"]["parameters"]}


@check
def models():
    return [m.id for m in c.models.list()][:1]


@check
def message():
    return c.messages.create(
        model=MODEL,
        max_tokens=16,
        messages=ASK,
        system=[{"type": "text", "text": "Be short", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_k": 5},
        stop_sequences=["a1", "b", "c2", "d3", "e4"],
    ).stop_reason


@check
def stream():
    with c.messages.stream(model=MODEL, max_tokens=16, messages=ASK) as s:
        t = "".join(s.text_stream)
        return t, s.get_final_message().usage.output_tokens


@check
def count_tokens():
    return c.messages.count_tokens(model=MODEL, messages=ASK, tools=[T], system="x").input_tokens


@check
def tool_any():
    r = c.messages.create(
        model=MODEL,
        max_tokens=100,
        messages=ASK,
        tools=[{**T, "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    u = next(b for b in r.content if b.type == "tool_use")
    r2 = c.messages.create(
        model=MODEL,
        max_tokens=16,
        tools=[T],
        messages=[
            *ASK,
            {"role": "assistant", "content": r.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": u.id, "content": [{"type": "text", "text": "sunny"}]}
                ],
            },
        ],
    )
    return u.input, r2.stop_reason


@check
def tool_stream():
    with c.messages.stream(
        model=MODEL, max_tokens=100, messages=ASK, tools=[T], tool_choice={"type": "tool", "name": "get_weather"}
    ) as s:
        return {e.type for e in s}, s.get_final_message().content


@check
def thinking():
    return c.messages.create(
        model=MODEL,
        max_tokens=1100,
        messages=[{"role": "user", "content": "hi"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        stop_sequences=["."],
    ).stop_reason


@check
def thinking_adaptive():
    return c.messages.create(
        model=MODEL, max_tokens=16, messages=ASK, thinking={"type": "adaptive"}, output_config={"effort": "high"}
    ).stop_reason


@check
def document():
    return c.messages.create(
        model=MODEL,
        max_tokens=8,
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "source": {"type": "text", "media_type": "text/plain", "data": "The sky is blue."},
                        "title": "t",
                        "citations": {"enabled": False},
                    },
                    {"type": "text", "text": "Colour?"},
                ],
            }
        ],
    ).stop_reason


@check
def parse():
    return c.messages.parse(
        model=MODEL, max_tokens=100, messages=ASK, output_format=City, extra_body={"temperature": 0}
    ).parsed_output


@check
def beta_message():
    return c.beta.messages.create(
        model=MODEL,
        max_tokens=8,
        messages=ASK,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
    ).stop_reason


@anthropic.beta_tool
def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: the city
    """
    return "sunny"


@check
def tool_runner():
    r = c.beta.messages.tool_runner(model=MODEL, max_tokens=64, messages=ASK, tools=[weather], max_iterations=3)
    return [m.stop_reason for m in r]


@check
def tool_runner_forced():
    r = c.beta.messages.tool_runner(
        model=MODEL, max_tokens=100, messages=ASK, tools=[weather], tool_choice={"type": "any"}, max_iterations=2
    )
    return [m.stop_reason for m in r]


@check
def tool_runner_stream():
    r = c.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=100,
        messages=ASK,
        tools=[weather],
        stream=True,
        max_iterations=2,
        tool_choice={"type": "any"},
    )
    out = []
    for s in r:
        assert list(s)
        out.append(s.get_final_message().stop_reason)
    return out


@check
def server_tool():
    return c.messages.create(
        model=MODEL,
        max_tokens=8,
        messages=ASK,
        tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}],
    ).stop_reason


@check
async def async_message():
    a = anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)
    return (await a.messages.create(model=MODEL, max_tokens=8, messages=ASK)).usage.output_tokens


main()
