"""Features of langchain against the server; see checks.py."""

from __future__ import annotations

from checks import MODEL, V1, City, check, main
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

m = ChatOpenAI(model=MODEL, base_url=V1, api_key="none", max_retries=0, max_tokens=24)
big = ChatOpenAI(model=MODEL, base_url=V1, api_key="none", max_retries=0, max_tokens=150, temperature=0)


@tool
def get_weather(city: str) -> str:
    "Weather of a city"
    return "sunny"


@check
def invoke():
    return m.invoke([SystemMessage("short"), HumanMessage("hi")]).usage_metadata


@check
def stream():
    return len(list(m.stream("hi")))


@check
def batch():
    return len(m.batch(["a", "b"]))


@check
def bind_tools():
    return m.bind_tools([get_weather]).invoke("Weather in Paris?").content[:20]


@check
def bind_tools_any():
    r = big.bind_tools([get_weather], tool_choice="any").invoke("Weather in Paris?")
    t = r.tool_calls[0]
    return t, m.bind_tools([get_weather]).invoke(
        [HumanMessage("Weather?"), r, ToolMessage("sunny", tool_call_id=t["id"])]
    ).content[:20]


@check
def bind_tools_stream():
    chunks = list(big.bind_tools([get_weather], tool_choice="any").stream("Weather in Paris?"))
    return [call for chunk in chunks for call in chunk.tool_call_chunks][:1]


for method in ("json_schema", "function_calling", "json_mode"):

    def f(method=method):
        return big.with_structured_output(City, method=method, include_raw=method == "json_mode").invoke(
            "Paris is a city. Answer in JSON."
        )

    check(f, f"structured_{method}")


@check
def responses_api():
    return (
        ChatOpenAI(model=MODEL, base_url=V1, api_key="none", max_retries=0, max_tokens=24, use_responses_api=True)
        .invoke("hi")
        .response_metadata["status"]
    )


@check
def responses_api_stream():
    return len(
        list(
            ChatOpenAI(
                model=MODEL, base_url=V1, api_key="none", max_retries=0, max_tokens=24, use_responses_api=True
            ).stream("hi")
        )
    )


@check
def responses_api_tools():
    return (
        ChatOpenAI(model=MODEL, base_url=V1, api_key="none", max_retries=0, max_tokens=100, use_responses_api=True)
        .bind_tools([get_weather], tool_choice="any")
        .invoke("Weather in Paris?")
        .tool_calls
    )


@check
def reasoning():
    return (
        ChatOpenAI(
            model=MODEL,
            base_url=V1,
            api_key="none",
            max_retries=0,
            max_tokens=24,
            reasoning_effort="low",
            service_tier="auto",
            verbosity="low",
            store=True,
            logprobs=True,
            n=2,
        )
        .invoke("hi")
        .response_metadata["finish_reason"]
    )


@check
def completion():
    return OpenAI(model=MODEL, base_url=V1, api_key="none", max_retries=0, max_tokens=8).invoke("Once")


@check
async def astream():
    return len([c async for c in m.astream("hi")])


main()
