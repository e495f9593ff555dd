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
from jinja2 import nodes

from pagoda.common.errors import RequestError
from pagoda.common.text.template_sandbox import compile_template, parse_template
from pagoda.common.text.tokenizer import Tokenizer

# Whether a chat template reads a message's content as text or as a list of parts, from its syntax tree.
#
# A template wants parts when it loops over some `x.content` or `x["content"]`, be it by another name, over a slice of
# it, through a filter that keeps a list a list, or as the argument of a macro.

ContentFormat = Literal["string", "openai"]
"""string: text. openai: a list of parts such as {"type": "text", "text": "..."}."""

_LIST_FILTERS: Final = frozenset({"list", "selectattr", "rejectattr", "select", "reject", "default", "d"})


@lru_cache(maxsize=32)
def content_format_of(template: str) -> ContentFormat:
    """What the template expects. Raises jinja2.TemplateSyntaxError."""
    tree = parse_template(template)
    names = _names_of_contents(tree)
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def _names_of_contents(tree: nodes.Template) -> frozenset[str]:
    """Variables and macro parameters that stand for a content. Scopes are not told apart."""
    names: frozenset[str] = frozenset()
    while True:
        found = set(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                found.add(assign.target.name)
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                parameters = macros[call.node.name].args
                found.update(p.name for p, value in zip(parameters, call.args) if _is_content(value, names))
        if found == names:
            return names
        names = frozenset(found)


def _is_content(node: nodes.Node, names: frozenset[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter) and node.node is not None and node.name in _LIST_FILTERS:
        return _is_content(node.node, names)
    return False


# Messages of a role that a template does not know: what OpenAI calls "developer" is told as the system's.
#
# Knows messages as templates see them. Knows no jinja.

_DEVELOPER: Final = "developer"
_BETWEEN: Final = "\n\n"
"""Between what several messages of the system say."""


def with_known_roles(template: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, a developer's as the system's where `template` never mentions developers.

    Then all that the system says is one message, the first: many templates refuse it elsewhere.
    """
    told = any(message["role"] == _DEVELOPER for message in messages)
    if not told or f"'{_DEVELOPER}'" in template or f'"{_DEVELOPER}"' in template:
        return list(messages)
    above = [message for message in messages if message["role"] in (_DEVELOPER, "system")]
    rest = [message for message in messages if message["role"] not in (_DEVELOPER, "system")]
    return [{**above[0], "role": "system", "content": _joined([message["content"] for message in above])}, *rest]


def _joined(contents: Sequence[str | list[dict[str, str]]]) -> str | list[dict[str, str]]:
    """Contents as one: texts with a blank line between, or parts in a row."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return _BETWEEN.join(text for text in texts if text)
    return [part for content in contents for part in content if isinstance(part, dict)]


# Variables of a chat template: which it reads, and which are not a request's to set.

_OWN_KEYWORDS: Final = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "chat_template",
        "template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "return_dict",
        "return_tensors",
        "content_format",
        "special_tokens",
        "raise_exception",
        "strftime_now",
    }
)
"""Names that chat_template_kwargs may not set: they are fields of the request, or the template's own surroundings."""

MAX_TEMPLATE_KEYWORDS: Final = 64


def fault_of_keywords(keywords: Mapping[str, Any]) -> str:
    """What is wrong with variables for a chat template; empty when nothing is."""
    if len(keywords) > MAX_TEMPLATE_KEYWORDS:
        return f"may have at most {MAX_TEMPLATE_KEYWORDS} entries"
    own = next((name for name in keywords if name in _OWN_KEYWORDS), None)
    return "" if own is None else f"may not set {own!r}"


@lru_cache(maxsize=32)
def variables_of(template: str) -> frozenset[str]:
    """Names that a template reads; none for one that is no valid jinja."""
    try:
        tree = parse_template(template)
    except (jinja2.TemplateError, RecursionError):
        return frozenset()
    return frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")


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
    parts = (content_format_of(template) if content_format == "auto" else content_format) == "openai"
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
