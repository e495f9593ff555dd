"""Calls as XML-like tags: a tag per argument, or arguments as nested elements.

Values are unquoted: the tool's schema decides their types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from pagoda.server.parsers.parser import Bracket, Parser, Tool
from pagoda.server.parsers.tool import json_text
from pagoda.server.parsers.tool.generator_parser import GeneratorParser, ParserOutput, calls_in_text
from pagoda.server.parsers.tool.python_text import MAX_DEPTH
from pagoda.server.parsers.tool.scanner import (
    MAX_NAME_LENGTH,
    QUOTES,
    Malformed,
    Scan,
    Scanner,
    Sink,
    markers,
    scan_name,
    scan_quoted_name,
)
from pagoda.server.parsers.tool.schemas import NULLABLE, STRING, SchemaShape, arguments_shape, as_json, parameter_types

# A tag per argument: <function=f><parameter=a>1</parameter></function>. Without a type in the schema, values are
# strings. Strings are streamed.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedParameters:
    """`call` name `name_end`, then per argument `key` name, one of `key_ends`, value `value_end`; then `call_end`."""

    blocks: tuple[tuple[str, str], ...] = ()  # Tags (begin, end) around calls, outermost first; models may omit them.
    kind: str = ""  # Optional text before `call`, followed by a name.
    call: str
    name_end: str = ""
    head_end: str = ""  # End of the call's opening tag, after `name_end` and further attributes.
    key: str
    key_ends: tuple[str, ...]
    json_ends: tuple[str, ...] = ()  # Those of `key_ends` after which a value without a schema type is JSON.
    between: str = ""  # Text between key and value.
    value_end: str
    quotes: tuple[str, str] = ("", "")  # Optional quotes around a value, which are dropped.
    lines: bool = False  # Values may be on separate lines.
    call_end: str
    stripped: tuple[str, ...] = ()  # Markup around content to drop.

    def brackets(self, _tools: Sequence[Tool]) -> tuple[Bracket, ...]:
        """Return the outermost block, or the call if there are no blocks."""
        inner = (self.kind, self.name_end, self.key, *self.key_ends, self.between, self.value_end)
        (begin, end), *blocks = (*self.blocks, (self.call, self.call_end))
        return (Bracket(begin, end, tuple(filter(None, (*inner, *(mark for pair in blocks for mark in pair))))),)

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(partial(self._scan, tools=tools))

    def _scan(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool]) -> Scan[None]:
        def scan(begin: str) -> Scan[None]:
            if begin != self.call:
                yield from self._block_start(scanner)
            yield from self._call(scanner, output, tools)

        ends = (*(end for _, end in self.blocks), self.call_end)
        openers = dict.fromkeys((*(begin for begin, _ in self.blocks), self.call), ends)
        yield from calls_in_text(scanner, output, openers, scan, stripped=self.stripped)

    def _block_start(self, scanner: Scanner) -> Scan[None]:
        """Scan the inner blocks' opening tags up to the start of a call."""
        yield from scanner.space()
        for begin, _ in self.blocks:
            yield from scanner.accept(begin)
            yield from scanner.space()
        if self.kind and (yield from scanner.accept(self.kind)) and not (yield from scanner.looking_at(self.call)):
            yield from scan_name(scanner)
        yield from scanner.expect(self.call)

    def _call(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool]) -> Scan[None]:
        name = yield from scan_quoted_name(scanner)
        yield from scanner.expect(self.name_end) if self.name_end else scanner.need(self.key, self.call_end)
        if self.head_end:
            yield from scanner.until(markers(self.head_end), json_text.discard)
            yield from scanner.expect(self.head_end)
        output.call(name)
        opening = "{"
        more = (self.key, self.call_end, *(end for _, end in self.blocks))
        while (yield from scanner.until(markers(*more), json_text.discard)) == self.key:
            yield from scanner.expect(self.key)
            key, end = yield from self._key(scanner)
            if self.between:
                yield from scanner.space()
                if not (yield from scanner.accept(self.between)):
                    continue  # The key has no value.
            output.arguments(f'{opening}"{json_text.escape(key)}": ')
            types = parameter_types(tools, name, key) or (frozenset() if end in self.json_ends else STRING)
            yield from self._value(scanner, output.arguments, types)
            opening = ", "
        yield from scanner.need(*more)
        output.arguments("{}" if opening == "{" else "}")

    def _key(self, scanner: Scanner) -> Scan[tuple[str, str]]:
        pieces: list[str] = []
        yield from scanner.until(markers(*self.key_ends), pieces.append)
        end = yield from scanner.expect(*self.key_ends)
        key = "".join(pieces).strip()
        if key.startswith(QUOTES) and key.endswith(key[0]):
            key = key[1:-1]
        if not 0 < len(key) <= MAX_NAME_LENGTH:
            raise Malformed
        return key, end

    def _value(self, scanner: Scanner, sink: Sink, types: frozenset[str]) -> Scan[None]:
        ends = yield from self._value_ends(scanner)
        is_null = types == NULLABLE and (yield from scanner.looking_at("null", "None"))
        if types == STRING or (types == NULLABLE and not is_null):
            sink('"')
            yield from self._text(scanner, lambda text: sink(json_text.escape(text)), ends)
            sink('"')
        else:
            pieces: list[str] = []
            yield from self._text(scanner, pieces.append, ends)
            sink(as_json("".join(pieces), types))

    def _value_ends(self, scanner: Scanner) -> Scan[tuple[str, ...]]:
        """Consume the value's opening quote or line break and return the possible ends of the value.

        If values are on separate lines, so are the next key and the end of the call.
        """
        opening, closing = self.quotes
        if opening and (yield from scanner.accept(opening)):
            return (closing + self.value_end,)
        if self.lines and (yield from scanner.accept("\n")):
            return (f"\n{self.value_end}", self.value_end, f"\n{self.key}", f"\n{self.call_end}")
        return (self.value_end,)

    def _text(self, scanner: Scanner, sink: Sink, ends: tuple[str, ...]) -> Scan[None]:
        """Copy the text up to one of `ends` to `sink`; consume the end if it is the value's own."""
        yield from scanner.until(markers(*ends), sink)
        if (yield from scanner.need(*ends)).endswith(self.value_end):
            yield from scanner.expect(*ends)


QWEN3_CODER: Final = TaggedParameters(
    blocks=(("<tool_call>", "</tool_call>"),),
    call="<function=",
    name_end=">",
    key="<parameter=",
    key_ends=(">",),
    value_end="</parameter>",
    lines=True,
    call_end="</function>",
)
SEED_OSS: Final = replace(QWEN3_CODER, blocks=(("<seed:tool_call>", "</seed:tool_call>"),))
MIMO: Final = replace(QWEN3_CODER, lines=False)
MINIMAX_M2: Final = TaggedParameters(
    blocks=(("<minimax:tool_call>", "</minimax:tool_call>"),),
    call="<invoke name=",
    name_end=">",
    key="<parameter name=",
    key_ends=(">",),
    value_end="</parameter>",
    call_end="</invoke>",
)
STEP3: Final = TaggedParameters(
    blocks=(("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"), ("<｜tool_call_begin｜>", "<｜tool_call_end｜>")),
    kind="function<｜tool_sep｜>",
    call="<steptml:invoke name=",
    name_end=">",
    key="<steptml:parameter name=",
    key_ends=(">",),
    value_end="</steptml:parameter>",
    call_end="</steptml:invoke>",
)
DEEPSEEK_V32: Final = TaggedParameters(
    blocks=(("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),),
    call='<｜DSML｜invoke name="',
    name_end='">',
    key='<｜DSML｜parameter name="',
    key_ends=('" string="true">', '" string="false">', '">'),
    json_ends=('" string="false">', '">'),
    value_end="</｜DSML｜parameter>",
    call_end="</｜DSML｜invoke>",
)
DEEPSEEK_V4: Final = replace(DEEPSEEK_V32, blocks=(("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),))
DEEPSEEK_V41: Final = TaggedParameters(
    blocks=(("<｜DSML｜ calls>", "</｜DSML｜ calls>"),),
    call='<｜DSML｜ invoke name="',
    name_end='">',
    key='<｜DSML｜ parameter name="',
    key_ends=DEEPSEEK_V32.key_ends,
    json_ends=DEEPSEEK_V32.json_ends,
    value_end="</｜DSML｜ parameter>",
    call_end="</｜DSML｜ invoke>",
)
GLM: Final = TaggedParameters(
    call="<tool_call>",
    key="<arg_key>",
    key_ends=("</arg_key>",),
    between="<arg_value>",
    value_end="</arg_value>",
    call_end="</tool_call>",
)
POOLSIDE: Final = replace(GLM, json_ends=("</arg_key>",))
HUNYUAN: Final = replace(GLM, blocks=(("<tool_calls>", "</tool_calls>"),), name_end="<tool_sep>")
DOTS: Final = replace(MINIMAX_M2, blocks=(("<dots_function_call>", "</dots_function_call>"),))
MINICPM5: Final = TaggedParameters(
    call="<function name=",
    name_end=">",
    key="<param name=",
    key_ends=(">",),
    json_ends=(">",),
    value_end="</param>",
    quotes=("<![CDATA[", "]]>"),
    call_end="</function>",
)
_KIMI_TYPES: Final = tuple(
    f'" type="{kind}"<|sep|>' for kind in ("number", "integer", "boolean", "null", "object", "array")
)
KIMI_K3: Final = TaggedParameters(
    blocks=(("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
    call='<|open|>call tool="',
    name_end='"',
    head_end="<|sep|>",
    key='<|open|>argument key="',
    key_ends=('" type="string"<|sep|>', *_KIMI_TYPES),
    json_ends=_KIMI_TYPES,
    value_end="<|close|>argument<|sep|>",
    call_end="<|close|>call<|sep|>",
    stripped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)

# Arguments as nested elements: <a>1</a><b><c>x</c></b>. Every tag has a prefix, so that values need no escaping.

_MIXED: Final = "$text"  # Property for the text of an element that also has children.


@dataclass(slots=True)
class Element:
    """A parsed element."""

    text: str = ""
    children: list[tuple[str, Element]] = field(default_factory=list)  # (tag name, element)


@dataclass(frozen=True, slots=True)
class Elements:
    """`prefix`<tool_call>, inside it `prefix`<invoke name="f"> elements with the arguments as elements."""

    prefix: str

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return GeneratorParser(partial(self._scan, tools=tools))

    def _scan(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool]) -> Scan[None]:
        block = f"{self.prefix}<tool_call>"
        call = f"{self.prefix}<invoke name="
        ends = (f"{self.prefix}</tool_call>", f"{self.prefix}</invoke>")

        def scan(begin: str) -> Scan[None]:
            if begin == block:
                yield from scanner.space()
                yield from scanner.expect(call)
            yield from self._call(scanner, output, tools, ends)

        yield from calls_in_text(scanner, output, {block: ends, call: ends[1:]}, scan)

    def _call(self, scanner: Scanner, output: ParserOutput, tools: Sequence[Tool], ends: tuple[str, ...]) -> Scan[None]:
        name = yield from scan_quoted_name(scanner)
        yield from scanner.expect(">")
        output.call(name)
        shape = arguments_shape(tools, name)
        opening = "{"
        tag = f"{self.prefix}<"
        yield from scanner.space()
        while (yield from scanner.need(tag, *ends)) == tag:
            key = yield from self._open_tag(scanner)
            output.arguments(f'{opening}"{json_text.escape(key)}": ')
            yield from self._value(scanner, output.arguments, key, shape.property(key))
            opening = ", "
            yield from scanner.space()
        output.arguments("{}" if opening == "{" else "}")

    def _open_tag(self, scanner: Scanner) -> Scan[str]:
        """Consume an opening tag and return its name."""
        yield from scanner.expect(f"{self.prefix}<")
        pieces: list[str] = []
        yield from scanner.until(markers(">"), pieces.append)
        yield from scanner.expect(">")
        name = "".join(pieces)
        if not 0 < len(name) <= MAX_NAME_LENGTH or name.startswith("/"):
            raise Malformed
        return name

    def _value(self, scanner: Scanner, sink: Sink, name: str, shape: SchemaShape) -> Scan[None]:
        if shape.types == STRING:
            sink('"')
            yield from scanner.until(markers(self.prefix), lambda text: sink(json_text.escape(text)))
            yield from scanner.expect(f"{self.prefix}</{name}>")
            sink('"')
        else:
            element = yield from self._element(scanner, name, 0)
            sink(_json(element, shape))

    def _element(self, scanner: Scanner, name: str, depth: int) -> Scan[Element]:
        """Scan an element after its opening tag, including the closing tag."""
        if depth == MAX_DEPTH:
            raise Malformed
        pieces: list[str] = []
        element = Element()
        while True:
            yield from scanner.until(markers(self.prefix), pieces.append)
            if (yield from scanner.accept(f"{self.prefix}</{name}>")):
                element.text = "".join(pieces)
                return element
            child = yield from self._open_tag(scanner)
            element.children.append((child, (yield from self._element(scanner, child, depth + 1))))


def _json(element: Element, shape: SchemaShape) -> str:
    """Return an element as JSON. An empty one may be an empty list or object."""
    if element.children:
        if "array" in shape.types:
            return f"[{', '.join(_json(child, shape.item()) for _, child in element.children)}]"
        return _object(element, shape)
    if not shape.types:
        return as_json(element.text, STRING)
    if not element.text.strip() and not shape.types & {"string", "null"}:
        return "[]" if "array" in shape.types else "{}" if "object" in shape.types else '""'
    return as_json(element.text, shape.types)


def _object(element: Element, shape: SchemaShape) -> str:
    """Return the children as a JSON object; children of the same name become a list."""
    values: dict[str, list[str]] = {}
    for name, child in element.children:
        values.setdefault(name, []).append(_json(child, shape.property(name)))
    if element.text.strip():
        values.setdefault(_MIXED, []).append(as_json(element.text, STRING))
    members = (
        f'"{json_text.escape(name)}": {item[0] if len(item) == 1 else "[" + ", ".join(item) + "]"}'
        for name, item in values.items()
    )
    return "{" + ", ".join(members) + "}"


MINIMAX_M3: Final = Elements("]<]minimax[>[")
