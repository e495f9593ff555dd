"""Render chat messages to prompt text with the model's jinja template.

The rendered text must be encoded without adding special tokens: the template writes them itself.
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

BUILT_IN_TEMPLATES: Final = {"chatml_tools": Path(__file__).parent / "templates" / "chatml_tools.jinja"}
"""Name -> file of a template for models whose own template does not render tools."""

TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part -> the key that holds its text."""

MAX_TEMPLATE_KEYWORDS: Final = 64

_RESERVED_KEYWORDS: Final = frozenset(
    (
        *("messages", "tools", "documents", "chat_template", "template", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "bos_token", "eos_token", "pad_token", "unk_token", "return_dict"),
        *("return_tensors", "content_format", "special_tokens", "raise_exception", "strftime_now"),
    )
)
"""Names that chat_template_kwargs may not set: other request fields, and the template's built-in variables."""

_END_MARK: Final = "[[end of the message to go on with]] "
"""Appended to the final message to find its end in the rendered text; the space shows whether the template trims."""

ContentFormat = Literal["string", "openai"]
"""string: content is text. openai: content is a list of parts such as {"type": "text", "text": "..."}."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    must_show_tools: bool = False,
    **options: Any,
) -> str:
    """Call `render` with the model's template (or `template`) and its special tokens; `options` as there.

    Raises RequestError as `render` does, for a model without a template, for a template that ignores `documents`, and
    with `must_show_tools` for one that ignores `tools`.
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
    """Return `template`, else the model's template; `with_tools` prefers its "tool_use" template."""
    if template is not None:
        return template
    tool_use = tokenizer.chat_templates.get("tool_use") if with_tools else None
    return tool_use if tool_use is not None else tokenizer.chat_template


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
    """Return the prompt text of `messages`.

    `add_generation_prompt`: end with the opening of an assistant message. `continue_final_message`: end inside the last
    message, so that generation continues it. `special_tokens`: role -> text, such as "bos_token" -> "<s>".
    `content_format`: pass message contents as text or as a list of parts; auto: detected from the template.
    `kwargs`: further template variables.

    Raises RequestError("messages") if the messages are malformed or the template rejects them,
    RequestError("chat_template") if the template is not valid jinja.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message", "continue_final_message and add_generation_prompt exclude each other; set one"
        )
    compiled = _compiled(template)
    as_parts = (content_format_of(template) if content_format == "auto" else content_format) == "openai"
    try:
        plain = [_message(f"messages[{i}]", message, as_parts) for i, message in enumerate(_nonempty(messages))]
        variables = _plain_json("chat_template_kwargs", {**kwargs, "tools": tools, "documents": documents})
    except RecursionError:
        raise RequestError("messages", "the messages are nested too deeply") from None
    plain = _map_developer_role(template, plain)
    if continue_final_message:
        plain[-1] = {**plain[-1], "content": _with_end_mark(plain[-1]["content"])}
    scope = {"messages": plain, "add_generation_prompt": add_generation_prompt}
    text = _render(compiled, {**(special_tokens or {}), **variables, **scope})
    return _cut_at_mark(text) if continue_final_message else text


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    try:
        return compile_template(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise RequestError("chat_template", f"the chat template is not valid jinja: {_shortened(error)}") from None


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except Exception as error:  # a template can raise anything; the engine must serve the next request
        raise RequestError("messages", f"the chat template refused the messages: {_shortened(error)}") from None


def _shortened(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."


def _with_end_mark(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content + _END_MARK
    return [*content[:-1], {"type": "text", "text": (content[-1]["text"] if content else "") + _END_MARK}]


def _cut_at_mark(text: str) -> str:
    """Text up to the end mark, right-stripped if the template stripped the mark's space."""
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise RequestError("messages", "the chat template does not show the final message, so it cannot be continued")
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()


# Template variables.


def template_kwargs_error(kwargs: Mapping[str, Any]) -> str:
    """Return why these chat_template_kwargs are invalid; empty if they are valid."""
    if len(kwargs) > MAX_TEMPLATE_KEYWORDS:
        return f"may have at most {MAX_TEMPLATE_KEYWORDS} entries"
    reserved = next((name for name in kwargs if name in _RESERVED_KEYWORDS), None)
    return "" if reserved is None else f"may not set {reserved!r}"


@lru_cache(maxsize=32)
def variables_of(template: str) -> frozenset[str]:
    """Return the names a template reads; empty for invalid jinja."""
    try:
        tree = parse_template(template)
    except (jinja2.TemplateError, RecursionError):
        return frozenset()
    return frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")


# Detection of the content format, from the template's syntax tree.

_LIST_FILTERS: Final = frozenset({"list", "selectattr", "rejectattr", "select", "reject", "default", "d"})


@lru_cache(maxsize=32)
def content_format_of(template: str) -> ContentFormat:
    """Return "openai" if the template loops over a message's content, else "string".

    The loop may run over `x.content` or `x["content"]`, an alias or slice of it, a list filter of it, or a macro's
    parameter. Raises jinja2.TemplateSyntaxError.
    """
    tree = parse_template(template)
    aliases = _content_aliases(tree)
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, aliases) for loop in loops) else "string"


def _content_aliases(tree: nodes.Template) -> frozenset[str]:
    """Variables and macro parameters assigned from a content, to a fixed point. Ignores scopes."""
    aliases: frozenset[str] = frozenset()
    while True:
        grown = set(aliases)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
                grown.add(assign.target.name)
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                parameters = macros[call.node.name].args
                grown.update(p.name for p, value in zip(parameters, call.args) if _is_content(value, aliases))
        if grown == aliases:
            return aliases
        aliases = frozenset(grown)


def _is_content(node: nodes.Node, aliases: frozenset[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node, aliases)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter) and node.node is not None and node.name in _LIST_FILTERS:
        return _is_content(node.node, aliases)
    return False


# Messages as templates expect them.

_DEVELOPER: Final = "developer"


def _map_developer_role(template: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Map "developer" messages to "system" if `template` does not mention that role.

    All system messages are then merged into one at the front: many templates reject them elsewhere.
    """
    has_developer = any(message["role"] == _DEVELOPER for message in messages)
    if not has_developer or f"'{_DEVELOPER}'" in template or f'"{_DEVELOPER}"' in template:
        return list(messages)
    system = [message for message in messages if message["role"] in (_DEVELOPER, "system")]
    others = [message for message in messages if message["role"] not in (_DEVELOPER, "system")]
    return [{**system[0], "role": "system", "content": _joined([message["content"] for message in system])}, *others]


def _joined(contents: Sequence[str | list[dict[str, str]]]) -> str | list[dict[str, str]]:
    """Merge contents: texts joined by a blank line, or lists of parts concatenated."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(text for text in texts if text)
    return [part for content in contents for part in content if isinstance(part, dict)]


def _nonempty(messages: object) -> Sequence[object]:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages", "messages must be a non-empty list of messages")
    return messages


def _message(path: str, message: object, as_parts: bool) -> dict[str, Any]:
    """Normalise a message: plain JSON values, content as text or parts, tool-call arguments as objects."""
    if not isinstance(message, Mapping):
        raise RequestError("messages", f"{path} must be an object with role and content")
    if not isinstance(message.get("role"), str):
        raise RequestError("messages", f"{path}.role must be a string")
    plain = _without_empty(_plain_json(path, message))
    texts = _texts(f"{path}.content", plain.get("content"))
    plain["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    if "tool_calls" in plain:
        plain["tool_calls"] = [_tool_call(f"{path}.tool_calls", call) for call in _calls(path, plain["tool_calls"])]
    return plain


def _without_empty(message: dict[str, Any]) -> dict[str, Any]:
    """Drop nulls and an empty `tool_calls`, as clients send them back: templates test whether a key is defined."""
    return {
        key: value for key, value in message.items() if value is not None and not (key == "tool_calls" and value == [])
    }


def _texts(path: str, content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError("messages", f"{path} must be a string or a list of parts")
    return [_part(f"{path}[{i}]", part) for i, part in enumerate(content)]


def _part(path: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise RequestError("messages", f"{path} must be a string or an object with a type")
    if kind not in TEXT_PARTS:
        raise RequestError("messages", f"{path} has type {kind[:40]!r}; only text parts are supported")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError("messages", f"{path}.{TEXT_PARTS[kind]} must be a string")
    return text


def _calls(path: str, calls: object) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError("messages", f"{path}.tool_calls must be a list of calls")
    return calls


def _tool_call(path: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError("messages", f"{path} must contain objects with a function")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> dict[str, Any]:
    """Arguments as an object; {} if invalid, as rejecting what the model generated would end the conversation."""
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _plain_json(path: str, value: object) -> Any:
    """Copy into plain JSON types: nothing else may reach a template, not even a subclass of str."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_json(f"{path}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(f"{path}[{i}]", item) for i, item in enumerate(value)]
    field = path.partition("[")[0].partition(".")[0]
    raise RequestError(field, f"{path} contains a {type(value).__name__}, which is not a JSON value")
