"""The command `llm` with a model of its extra-openai-models.yaml."""

from __future__ import annotations

from checks import MODEL, V1, main
from commands import BIN, HOME, works

FUNCTION = 'def weather(city: str) -> str:\n    "Weather"\n    return "sunny"'
(HOME / "extra-openai-models.yaml").write_text(
    f"""\
- model_id: chat
  model_name: {MODEL}
  api_base: {V1}
  supports_schema: true
  supports_tools: true
- model_id: base
  model_name: {MODEL}
  api_base: {V1}
  completion: true
"""
)


def llm(name: str, *words: str) -> None:
    works(name, str(BIN / "llm"), *words, LLM_USER_PATH=str(HOME))


CHAT = ("-m", "chat", "-o", "temperature", "0", "-o", "max_tokens")
llm("chat", *CHAT, "12", "Say hello")
llm("no_stream", *CHAT, "12", "--no-stream", "-s", "Be short", "Say hello")
llm("continued", "-c", "-o", "max_tokens", "12", "again")
llm("schema", *CHAT, "100", "--schema", "city str", "Paris is a city")
llm("functions", *CHAT, "60", "--functions", FUNCTION, "Weather in Paris?")
llm("json_object", *CHAT, "60", "-o", "json_object", "1", "Give JSON")
llm("completion", "-m", "base", "-o", "max_tokens", "12", "Once upon")
main()
