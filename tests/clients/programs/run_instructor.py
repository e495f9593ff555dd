"""All modes of instructor with the clients of OpenAI and Anthropic, whole and as a stream of partial objects."""

from __future__ import annotations

from collections.abc import Iterable

import anthropic
import instructor
import openai
from checks import MODEL, URL, V1, City, TaskFailed, check, main

ASKED = [{"role": "user", "content": "Paris is a city in France."}]
OTHERS = ("GEMINI", "VERTEX", "COHERE", "MISTRAL", "CEREBRAS", "FIREWORKS", "WRITER", "BEDROCK", "PERPLEXITY", "GENAI")


def tried(mode: instructor.Mode, partial: bool) -> object:
    """Return the object that the model wrote. Raise TaskFailed if it wrote something else."""
    more: dict = {"max_tokens": 150, "temperature": 0}
    if mode.name.startswith("ANTHROPIC"):
        client = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0), mode=mode)
        more = {"max_tokens": 150}
        if "REASONING" in mode.name:
            more = {"max_tokens": 1200, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    else:
        client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key="none", max_retries=0), mode=mode)
        if "RESPONSES" in mode.name:
            more = {"max_output_tokens": 150, "temperature": 0}
    wanted = Iterable[City] if "PARALLEL" in mode.name else City
    ask = client.chat.completions.create_partial if partial else client.chat.completions.create
    try:
        found = ask(model=MODEL, messages=ASKED, response_model=wanted, max_retries=0, **more)
        return list(found) if partial or "PARALLEL" in mode.name else found
    except Exception as error:
        if "Error code" in str(error):
            raise
        raise TaskFailed(f"{type(error).__name__} {error}") from None


for each in instructor.Mode:
    if not any(other in each.name for other in (*OTHERS, "XAI", "OPENROUTER")):
        check(lambda mode=each: tried(mode, partial=False), each.name)
        if not any(word in each.name for word in ("ANTHROPIC", "PARALLEL")):
            check(lambda mode=each: tried(mode, partial=True), f"{each.name}_partial")
main()
