"""Features of llama_index against the server; see checks.py."""

from __future__ import annotations

from checks import MODEL, V1, City, TaskFailed, check, main
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def L(**k):
    own = {"model": MODEL, "api_base": V1, "api_key": "none", "max_retries": 0, "max_tokens": 16, "is_chat_model": True}
    return OpenAILike(**own | {"context_window": 2048} | k)


def get_weather(city: str) -> str:
    "Weather of a city"
    return "sunny"


T = FunctionTool.from_defaults(get_weather)


@check
def chat():
    return L().chat([ChatMessage(role="user", content="hi")]).message.content


@check
def complete():
    return L(is_chat_model=False).complete("Once").text


@check
def stream():
    return len(list(L().stream_chat([ChatMessage(role="user", content="hi")])))


@check
def stream_complete():
    return len(list(L(is_chat_model=False).stream_complete("Once")))


@check
def tools():
    return (
        L(is_function_calling_model=True, max_tokens=60)
        .chat_with_tools([T], user_msg="Weather in Paris?")
        .message.content
    )


@check
def tools_required():
    return (
        L(is_function_calling_model=True, max_tokens=100, temperature=0)
        .chat_with_tools([T], user_msg="Weather in Paris?", tool_required=True)
        .message.additional_kwargs
    )


@check
def structured():
    return (
        L(is_function_calling_model=True, max_tokens=100, temperature=0, should_use_structured_outputs=True)
        .as_structured_llm(City)
        .complete("Paris is a city")
        .raw
    )


@check
def structured_by_tool():
    try:
        return (
            L(is_function_calling_model=True, max_tokens=100, temperature=0)
            .as_structured_llm(City)
            .complete("Paris is a city")
            .raw
        )
    except ValueError as e:
        raise TaskFailed(str(e)) from None


@check
async def achat():
    return (await L().achat([ChatMessage(role="user", content="hi")])).message.content


main()
