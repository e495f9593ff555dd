"""Features of litellm against the server; see checks.py."""

from __future__ import annotations

import litellm
from checks import ASK, MODEL, TOOL, URL, V1, check, main

litellm.suppress_debug_info = True


def k(prefix, **more):
    return dict(
        model=f"{prefix}/{MODEL}", api_base=V1, api_key="none", messages=ASK, max_tokens=12, num_retries=0, **more
    )


for P in ("openai", "hosted_vllm"):

    def made(P=P):
        def chat():
            return litellm.completion(**k(P)).choices[0].message.content

        def stream():
            return len(list(litellm.completion(**k(P), stream=True, stream_options={"include_usage": True})))

        def tools():
            return litellm.completion(**(k(P, tools=[TOOL]))).choices[0].finish_reason

        def tools_required():
            return (
                litellm.completion(**(k(P, tools=[TOOL], tool_choice="required") | {"max_tokens": 100}))
                .choices[0]
                .message.tool_calls[0]
                .function.arguments
            )

        def json_mode():
            return litellm.completion(**k(P, response_format={"type": "json_object"})).choices[0].finish_reason

        def reasoning_effort():
            return litellm.completion(**k(P, reasoning_effort="low", drop_params=True)).choices[0].finish_reason

        def text():
            return (
                litellm.text_completion(
                    model=f"{'text-completion-openai' if P == 'openai' else P}/{MODEL}",
                    api_base=V1,
                    api_key="none",
                    prompt="Once",
                    max_tokens=8,
                )
                .choices[0]
                .text
            )

        def responses():
            return litellm.responses(
                model=f"{P}/{MODEL}", api_base=V1, api_key="none", input="hi", max_output_tokens=16
            ).status

        async def achat():
            return (await litellm.acompletion(**k(P))).usage.completion_tokens

        for f in (chat, stream, tools, tools_required, json_mode, reasoning_effort, text, responses, achat):
            check(f, f"{P}_{f.__name__}")

    made()


@check
async def anthropic_messages():
    return (
        await litellm.anthropic.messages.acreate(
            model=f"openai/{MODEL}", api_base=V1, api_key="none", messages=ASK, max_tokens=12
        )
    )["stop_reason"]


@check
def anthropic_provider():
    return (
        litellm.completion(model=f"anthropic/{MODEL}", api_base=URL, api_key="none", messages=ASK, max_tokens=12)
        .choices[0]
        .finish_reason
    )


@check
def error_classes():
    for error, more in (
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "word " * 9_000}]}),
    ):
        try:
            litellm.completion(**k("openai") | more)
        except error:
            continue
        raise AssertionError(f"no {error.__name__}")


main()
