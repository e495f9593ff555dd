"""Chat messages to prompt text, by the jinja template that came with a model.

Knows the shape of messages and what templates expect to see; knows no tokens and no HTTP. The text is meant to be
encoded without added special tokens: the template writes its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import jinja2

from pagoda.common.errors import RequestError
from pagoda.common.text import content_format as formats
from pagoda.common.text.roles import with_known_roles
from pagoda.common.text.template_keywords import variables_of
from pagoda.common.text.template_sandbox import compile_template
from pagoda.common.text.tokenizer import Tokenizer

TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part -> the key that holds its text."""

BUILT_IN_TEMPLATES: Final = {"chatml_tools": Path(__file__).parent / "templates" / "chatml_tools.jinja"}
"""Name -> file of a template for models whose own shows no tools."""

_END_MARK: Final = "[[end of the message to go on with]] "
"""Put behind the final message to find its end in the rendered text; the space shows whether the template trims."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    content_format: Literal["auto", "string", "openai"] = "auto",
    **kwargs: Any,
) -> str:
    """The prompt text of `messages`.

    `add_generation_prompt`: end with what opens the assistant's answer. `continue_final_message`: end within the last
    message, so that the answer goes on with it. `special_tokens`: role -> text, such as "bos_token" -> "<s>".
    `content_format`: give the template each content as text, or as a list of parts; auto: what it looks for.
    `kwargs`: further variables of the template. Raises RequestError("messages") when the messages are malformed or the
    template refuses them, RequestError("chat_template") when it is no valid jinja.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message", "continue_final_message and add_generation_prompt exclude each other; set one"
        )
    compiled = _compiled(template)
    parts = (formats.content_format(template) if content_format == "auto" else content_format) == "openai"
    try:
        plain = [_message(f"messages[{i}]", message, parts) for i, message in enumerate(_nonempty(messages))]
        variables = _plain("chat_template_kwargs", {**kwargs, "tools": tools, "documents": documents})
    except RecursionError:
        raise RequestError("messages", "the messages are nested too deeply") from None
    plain = with_known_roles(template, plain)
    if continue_final_message:
        plain[-1] = {**plain[-1], "content": _marked(plain[-1]["content"])}
    scope = {"messages": plain, "add_generation_prompt": add_generation_prompt}
    text = _render(compiled, {**(special_tokens or {}), **variables, **scope})
    return _cut_at_mark(text) if continue_final_message else text


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    must_show_tools: bool = False,
    **options: Any,
) -> str:
    """`render` with a model's own template and special tokens. `template` replaces the template; options as there.

    `must_show_tools`: raise RequestError("tools") for a template that would leave the tools out. One that would leave
    documents out is always refused: they are there to be read.
    """
    source = template_of(tokenizer, template, with_tools=bool(tools))
    if source is None:
        raise RequestError(
            "messages", "the model has no chat template; pass one with --chat-template, or use plain completions"
        )
    if tools and must_show_tools and "tools" not in variables_of(source):
        raise RequestError(
            "tools",
            "the model's chat template does not show it any tools; serve it with a --chat-template that does "
            "(chatml_tools for ChatML models)",
        )
    if options.get("documents") and "documents" not in variables_of(source):
        raise RequestError(
            "documents", "the model's chat template does not show it any documents; put their text into a message"
        )
    return render(source, messages, tools=tools or None, special_tokens=tokenizer.special_tokens, **options)


def template_of(tokenizer: Tokenizer, template: str | None, *, with_tools: bool) -> str | None:
    """The template to use: `template`, else the model's own, of which some have another one for tools."""
    if template is not None:
        return template
    own = tokenizer.chat_templates.get("tool_use") if with_tools else None
    return own if own is not None else tokenizer.chat_template


def _nonempty(messages: object) -> Sequence[object]:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages", "messages must be a non-empty list of messages")
    return messages


def _message(place: str, message: object, parts: bool) -> dict[str, Any]:
    """A message as templates expect it: plain values, content text or parts, the arguments of tool calls objects."""
    if not isinstance(message, Mapping):
        raise RequestError("messages", f"{place} must be an object with role and content")
    if not isinstance(message.get("role"), str):
        raise RequestError("messages", f"{place}.role must be a string")
    plain: dict[str, Any] = _without_absent(_plain(place, message))
    texts = _texts(f"{place}.content", plain.get("content"))
    plain["content"] = [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)
    if "tool_calls" in plain:
        plain["tool_calls"] = [_tool_call(f"{place}.tool_calls", call) for call in _calls(place, plain["tool_calls"])]
    return plain


def _without_absent(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without null values and without an empty `tool_calls`, as clients send them back.

    Templates ask whether a key is defined: one branches to calls, and drops the content, for a list of none.
    """
    return {
        key: value for key, value in message.items() if value is not None and not (key == "tool_calls" and value == [])
    }


def _calls(place: str, calls: object) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError("messages", f"{place}.tool_calls must be a list of calls")
    return calls


def _texts(place: str, content: object) -> list[str]:
    """The parts of a content. A template that knows text only is given them with line breaks between."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError("messages", f"{place} must be a string or a list of parts")
    return [_part(f"{place}[{i}]", part) for i, part in enumerate(content)]


def _marked(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    """The content with the end mark behind its text."""
    if isinstance(content, str):
        return content + _END_MARK
    return [*content[:-1], {"type": "text", "text": (content[-1]["text"] if content else "") + _END_MARK}]


def _part(place: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise RequestError("messages", f"{place} must be a string or an object with a type")
    if kind not in TEXT_PARTS:
        raise RequestError("messages", f"{place} has type {kind[:40]!r}; only text parts are supported")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError("messages", f"{place}.{TEXT_PARTS[kind]} must be a string")
    return text


def _tool_call(place: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError("messages", f"{place} must hold objects with a function")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: object) -> dict[str, Any]:
    """The arguments of a call as an object. Whatever else a model made of them becomes an empty one.

    They are said already and stay in the conversation: to refuse them would end it.
    """
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _plain(place: str, value: object) -> Any:
    """A copy made of plain JSON values: nothing else may reach a template, not even a subclass of str."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{place}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{place}[{i}]", item) for i, item in enumerate(value)]
    field = place.partition("[")[0].partition(".")[0]
    raise RequestError(field, f"{place} holds a {type(value).__name__}, which is no JSON value")


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    try:
        return compile_template(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise RequestError("chat_template", f"the chat template is not valid jinja: {_shown(error)}") from None


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except Exception as error:  # a template can fail in any way; the engine must serve the next request
        raise RequestError("messages", f"the chat template refused the messages: {_shown(error)}") from None


def _shown(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."


def _cut_at_mark(text: str) -> str:
    """The text up to the end of the final message. A template that trims it would have trimmed its end as well."""
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise RequestError("messages", "the chat template does not show the final message, so it cannot be continued")
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()
