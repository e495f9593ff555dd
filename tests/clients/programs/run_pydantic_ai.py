"""Features of pydantic_ai against the server; see checks.py."""

from __future__ import annotations

from checks import MODEL, V1, City, TaskFailed, check, main
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def P():
    return OpenAIProvider(openai_client=AsyncOpenAI(base_url=V1, api_key="none", max_retries=0))


S = {"max_tokens": 150, "temperature": 0}


def tried(f, name):
    async def g():
        try:
            return await f()
        except UnexpectedModelBehavior as e:
            raise TaskFailed(str(e)[:200]) from None

    return check(g, name)


for kind, cls in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):

    def made(kind=kind, cls=cls):
        async def plain():
            return (await Agent(cls(MODEL, provider=P()), system_prompt="Be short", model_settings=S).run("hi")).output

        async def stream():
            async with Agent(cls(MODEL, provider=P()), model_settings=S).run_stream("hi") as r:
                return len([x async for x in r.stream_text(delta=True)])

        async def tools():
            a = Agent(cls(MODEL, provider=P()), model_settings=S)

            @a.tool_plain
            def get_weather(city: str) -> str:
                "Weather of a city"
                return "sunny"

            return (await a.run("Weather in Paris?")).output

        async def output_tool():
            return (
                await Agent(cls(MODEL, provider=P()), output_type=City, model_settings=S).run("Paris is a city")
            ).output

        async def output_native():
            return (
                await Agent(cls(MODEL, provider=P()), output_type=NativeOutput(City), model_settings=S).run(
                    "Paris is a city"
                )
            ).output

        async def output_prompted():
            return (
                await Agent(cls(MODEL, provider=P()), output_type=PromptedOutput(City), model_settings=S).run(
                    "Paris is a city"
                )
            ).output

        async def history():
            a = Agent(cls(MODEL, provider=P()), model_settings=S)
            r = await a.run("hi")
            return (await a.run("again", message_history=r.all_messages())).usage

        for f in (plain, stream, tools, output_tool, output_native, output_prompted, history):
            tried(f, f"{kind}_{f.__name__}")

    made()
main()
