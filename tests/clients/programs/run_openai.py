"""Features of openai against the server; see checks.py."""

from __future__ import annotations

import asyncio
import json
import time

from checks import ASK, MODEL, TOOL, V1, City, check, main
from openai import AsyncOpenAI, OpenAI

c = OpenAI(base_url=V1, api_key="none", max_retries=0)


class WarmCity(City):
    warm: bool


@check
def models():
    return [m.id for m in c.models.list()], c.models.retrieve(MODEL).id


@check
def chat():
    return (
        c.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_completion_tokens=16,
            user="u",
            store=True,
            metadata={"a": "b"},
            service_tier="auto",
            prompt_cache_key="x",
            safety_identifier="s",
            verbosity="low",
        )
        .choices[0]
        .message.content
    )


@check
def chat_parts():
    return (
        c.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "developer", "content": "Be short"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            max_tokens=8,
            n=2,
            logprobs=True,
            top_logprobs=2,
            seed=1,
            stop=["\n"],
            prediction={"type": "content", "content": "hi"},
            reasoning_effort="low",
            parallel_tool_calls=False,
            tools=[TOOL],
        )
        .choices[1]
        .logprobs.content[0]
        .token
    )


@check
def chat_stream():
    s = c.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(s)
    assert chunks[-1].usage.completion_tokens
    return len(chunks)


@check
def parse():
    return (
        c.chat.completions.parse(model=MODEL, messages=ASK, response_format=WarmCity, max_tokens=100)
        .choices[0]
        .message.parsed
    )


@check
def stream_helper():
    with c.chat.completions.stream(model=MODEL, messages=ASK, response_format=WarmCity, max_tokens=100) as s:
        kinds = {e.type for e in s}
        return kinds, s.get_final_completion().choices[0].message.parsed


@check
def tool_auto():
    return c.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL], max_tokens=40).choices[0].finish_reason


@check
def tool_required():
    r = (
        c.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=100)
        .choices[0]
        .message
    )
    return json.loads(r.tool_calls[0].function.arguments)


@check
def tool_named_round():
    r = (
        c.chat.completions.create(
            model=MODEL,
            messages=ASK,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            max_tokens=100,
        )
        .choices[0]
        .message
    )
    m = [*ASK, r, {"role": "tool", "tool_call_id": r.tool_calls[0].id, "content": "sunny"}]
    return c.chat.completions.create(model=MODEL, messages=m, tools=[TOOL], max_tokens=16).choices[0].message.content


@check
def tool_allowed():
    return (
        c.chat.completions.create(
            model=MODEL,
            messages=ASK,
            tools=[TOOL],
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]},
            },
            max_tokens=40,
        )
        .choices[0]
        .finish_reason
    )


@check
def tool_stream():
    with c.chat.completions.stream(
        model=MODEL,
        messages=ASK,
        tools=[
            {
                **TOOL,
                "function": {
                    **TOOL["function"],
                    "strict": True,
                    "parameters": {**TOOL["function"]["parameters"], "additionalProperties": False},
                },
            }
        ],
        tool_choice="required",
        max_tokens=100,
    ) as s:
        kinds = {e.type for e in s}
        return kinds, s.get_final_completion().choices[0].message.tool_calls[0].function.parsed_arguments


@check
def functions_old():
    return (
        c.chat.completions.create(
            model=MODEL, messages=ASK, functions=[TOOL["function"]], function_call="auto", max_tokens=30
        )
        .choices[0]
        .finish_reason
    )


@check
def functions_old_named():
    return (
        c.chat.completions.create(
            model=MODEL,
            messages=ASK,
            functions=[TOOL["function"]],
            function_call={"name": "get_weather"},
            max_tokens=80,
        )
        .choices[0]
        .message.function_call.arguments
    )


@check
def completions():
    return (
        c.completions.create(
            model=MODEL,
            prompt=["Once", "Two"],
            max_tokens=8,
            logprobs=2,
            echo=True,
            n=1,
            best_of=1,
            suffix=None,
            user="u",
        )
        .choices[1]
        .logprobs.tokens[:2]
    )


@check
def completions_stream():
    return len(list(c.completions.create(model=MODEL, prompt="Once", max_tokens=8, stream=True)))


@check
def responses():
    r = c.responses.create(
        model=MODEL,
        input="Say hi",
        max_output_tokens=16,
        instructions="Be short",
        store=True,
        metadata={"k": "v"},
        text={"verbosity": "low"},
        truncation="auto",
        include=["message.output_text.logprobs"],
        top_logprobs=1,
    )
    return r.status, r.output_text


@check
def responses_stream():
    with c.responses.stream(model=MODEL, input="Say hi", max_output_tokens=400, temperature=0) as s:
        kinds = [e.type for e in s]
        return kinds[0], kinds[-1], s.get_final_response().output_text


@check
def responses_parse():
    return c.responses.parse(
        model=MODEL, input="Paris is warm.", text_format=WarmCity, max_output_tokens=200, temperature=0
    ).output_parsed


@check
def responses_chain():
    a = c.responses.create(model=MODEL, input="My name is Bob", max_output_tokens=16)
    b = c.responses.create(model=MODEL, input="What is my name?", previous_response_id=a.id, max_output_tokens=16)
    assert b.previous_response_id == a.id
    g = c.responses.retrieve(b.id)
    assert g.id == b.id
    return b.output_text, c.responses.delete(a.id)


@check
def responses_background():
    r = c.responses.create(model=MODEL, input="Count", background=True, max_output_tokens=16)
    first = r.status
    while r.status in ("queued", "in_progress"):
        time.sleep(0.1)
        r = c.responses.retrieve(r.id)
    return first, r.status, r.output_text


@check
def responses_background_cancel():
    r = c.responses.create(model=MODEL, input="Count to 1000", background=True, max_output_tokens=2000)
    return c.responses.cancel(r.id).status


@check
def responses_input_items():
    r = c.responses.create(model=MODEL, input="hello there", max_output_tokens=16)
    return [i.content[0].text for i in c.responses.input_items.list(r.id)]


@check
def responses_input_tokens():
    return c.responses.input_tokens.count(model=MODEL, input="hello there").input_tokens


@check
def responses_tools():
    t = {"type": "function", **TOOL["function"], "strict": False}
    r = c.responses.create(
        model=MODEL, input="Weather in Paris?", tools=[t], tool_choice="required", max_output_tokens=100
    )
    call = next(o for o in r.output if o.type == "function_call")
    r2 = c.responses.create(
        model=MODEL,
        previous_response_id=r.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        tools=[t],
        max_output_tokens=16,
    )
    r3 = c.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "Weather?"},
            *r.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ],
        tools=[t],
        max_output_tokens=16,
    )
    return call.arguments, r2.status, r3.status


@check
def responses_reasoning():
    return c.responses.create(
        model=MODEL, input="hi", reasoning={"effort": "low", "summary": "auto"}, max_output_tokens=16
    ).status


@check
def conversations():
    v = c.conversations.create(items=[{"type": "message", "role": "user", "content": "My name is Bob"}])
    r = c.responses.create(model=MODEL, conversation=v.id, input="Who am I?", max_output_tokens=16)
    n = len(list(c.conversations.items.list(v.id)))
    return r.status, n, c.conversations.delete(v.id)


@check
def embeddings_refused():
    import openai

    try:
        return c.embeddings.create(model=MODEL, input="x")
    except openai.BadRequestError as e:
        return e.message[:80]
    except openai.NotFoundError as e:
        return e.message[:80]


@check
def files():
    f = c.files.create(file=("a.jsonl", b'{"a": 1}\n'), purpose="batch")
    assert c.files.retrieve(f.id).bytes == 9
    assert f.id in [x.id for x in c.files.list()]
    assert c.files.content(f.id).read() == b'{"a": 1}\n'
    return c.files.delete(f.id)


@check
def batches():
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": ASK, "max_tokens": 8},
    }
    f = c.files.create(file=("in.jsonl", (json.dumps(line) + "\n").encode()), purpose="batch")
    b = c.batches.create(
        input_file_id=f.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )
    end = time.time() + 60
    while b.status not in ("completed", "failed", "expired", "cancelled") and time.time() < end:
        time.sleep(0.3)
        b = c.batches.retrieve(b.id)
    out = c.files.content(b.output_file_id).text
    assert b.id in [x.id for x in c.batches.list(limit=100)]
    return b.status, b.request_counts, json.loads(out)["response"]["status_code"]


@check
async def async_chat():
    a = AsyncOpenAI(base_url=V1, api_key="none", max_retries=0)
    rs = await asyncio.gather(*(a.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8) for _ in range(4)))
    s = await a.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, stream=True)
    return len(rs), len([x async for x in s])


@check
def raw_headers():
    r = c.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, max_tokens=4, extra_headers={"X-Request-Id": "abc"}
    )
    return r.headers.get("x-request-id"), r.parse().id


@check
def moderations_refused():
    import openai

    try:
        return c.moderations.create(input="x")
    except openai.APIStatusError as e:
        return e.status_code


@check
def audio_501():
    import openai

    try:
        c.audio.transcriptions.create(model="w", file=("a.wav", b"x"))
    except openai.APIStatusError as e:
        return e.status_code, e.message[:60]


main()
