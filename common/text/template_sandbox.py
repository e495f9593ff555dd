"""The sandbox of chat templates, which are untrusted code.

Jinja's immutable sandbox isolates a template from the interpreter; the limits here bound steps (loop iterations and
calls) and seconds per rendering, and characters per value.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import filters, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS: Final = 1_000_000
CALL_STEPS: Final = 4
"""Cost of a call, in loop iterations."""
MAX_SECONDS: Final = 10.0
MAX_CHARS: Final = 1 << 24
"""Maximum length of any value, including the output."""
MAX_INT_BITS: Final = 4096

_WIDE_FORMAT: Final = re.compile(r"\d{5}|\*|\{[^{}]*\{")
"""Format strings with a width above 9999, or with a width taken from an argument."""


class TemplateLimitError(jinja2.TemplateError):
    """A template exceeded a limit."""


def parse_template(source: str) -> nodes.Template:
    """Return a template's syntax tree. Raises jinja2.TemplateSyntaxError."""
    return _ENVIRONMENT.parse(source)


def compile_template(source: str) -> jinja2.Template:
    """Return a template ready to render, instrumented with the limits. Raises jinja2.TemplateSyntaxError."""
    tree = parse_template(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = _filtered(loop.iter, _count_iterations.__name__)
    for joined in list(tree.find_all(nodes.Concat)):
        joined.nodes = [_filtered(nodes.Concat(joined.nodes, lineno=joined.lineno), _check_length.__name__)]
    return _ENVIRONMENT.from_string(tree)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Budget:
    """Remaining steps and time of one rendering."""

    __slots__ = ("_deadline", "_steps")

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise TemplateLimitError(f"the chat template runs too long (more than {MAX_STEPS} steps)")


class _BudgetContext(Context):
    """A rendering's variables and its budget, which nested scopes share."""

    budget: _Budget

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = _Budget()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        inner = super().derived(locals)
        assert isinstance(inner, _BudgetContext)
        inner.budget = self.budget
        return inner


class _LimitedSandbox(ImmutableSandboxedEnvironment):
    context_class = _BudgetContext
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja's names
        assert isinstance(__context, _BudgetContext)
        __context.budget.spend(CALL_STEPS)
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            args = _check_method(text, __obj.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the output of a template, macro or block."""
        output: list[str] = []
        length = 0
        for piece in pieces:
            output.append(piece)
            length += len(piece)
            if length > MAX_CHARS:
                _too_long()
        return "".join(output)


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it per instance

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _too_long() -> NoReturn:
    raise TemplateLimitError(f"the chat template builds a text of more than {MAX_CHARS} characters")


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        _too_long()


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Reject an operation with an oversized result before it is computed."""
    if operator == "%" and isinstance(left, str):
        _check_format(left)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_size(len(left) + len(right))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and bits > MAX_INT_BITS:
            raise TemplateLimitError("the chat template computes too large a number")
    elif operator == "*":
        for text, times in ((left, right), (right, left)):
            if hasattr(text, "__len__") and isinstance(times, int):
                _check_size(len(text) * max(times, 0))


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("the chat template formats with too large or a computed width")


def _check_method(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Reject a string method call with an oversized result. Return its arguments, with iterators turned into lists."""
    if name == "translate":
        raise TemplateLimitError("chat templates may not use str.translate")
    if name == "join" and args:
        args = (list(args[0]),)
        _check_size(_joined_length(text, args[0]))
    elif name == "replace" and len(args) > 1:
        _check_size(_replaced_length(text, args[0], args[1]))
    elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        for width in (*args, *kwargs.values()):
            if isinstance(width, int):
                _check_size(width * (1 + text.count("\t") if name == "expandtabs" else 1))
    return args


def _joined_length(separator: str, items: list[Any]) -> int:
    return len(separator) * len(items) + sum(len(item) for item in items if hasattr(item, "__len__"))


def _replaced_length(text: str, old: Any, new: Any) -> int:
    return len(text) + text.count(str(old)) * len(str(new))


@jinja2.pass_context
def _count_iterations(context: Context, items: Any) -> Any:
    """Charge a loop's iterations: at once if their number is known, else one by one."""
    assert isinstance(context, _BudgetContext)
    if not hasattr(items, "__len__"):
        return _counted(context.budget, items)
    context.budget.spend(len(items))
    return items


def _counted(budget: _Budget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.spend(1)
        yield item


def _check_length(text: str) -> str:
    _check_size(len(text))
    return text


@functools.wraps(filters.do_replace)
def _replace(eval_ctx: Any, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    _check_size(_replaced_length(str(s), old, new))
    return filters.do_replace(eval_ctx, s, old, new, count)


@functools.wraps(filters.sync_do_join)
def _join(eval_ctx: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    _check_size(_joined_length(str(d), items))
    return filters.sync_do_join(eval_ctx, items, d, attribute)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_size(len(s) + (1 + s.count("\n")) * (width if isinstance(width, int) else len(width)))
    return filters.do_indent(s, width, first, blank)


def _center(value: str, width: int = 80) -> str:
    _check_size(width)
    return filters.do_center(value, width)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value)
    return filters.do_format(value, *args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML or ASCII escapes, as models were trained on."""
    if indent is not None and indent > 100:
        raise TemplateLimitError("the chat template indents JSON by more than 100")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return _check_length(encoder.encode(value))
    return _LimitedSandbox.concat(encoder.iterencode(value))  # Indentation multiplies the length of nested values.


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    _check_size(len(format) * 100)
    return datetime.now().strftime(format)


def _environment() -> _LimitedSandbox:
    environment = _LimitedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    for function in (_count_iterations, _check_length):
        environment.filters[function.__name__] = function
    environment.filters.update(
        replace=_replace, join=_join, indent=_indent, center=_center, format=_format, tojson=_tojson
    )
    for name in ("urlize", "xmlattr", "batch", "slice", "wordwrap", "random"):
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT: Final = _environment()
