"""Whether a chat template reads a message's content as text or as a list of parts, from its syntax tree.

A template wants parts when it loops over some `x.content` or `x["content"]`, be it by another name, over a slice of it,
through a filter that keeps a list a list, or as the argument of a macro.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal

from jinja2 import nodes

from pagoda.common.text.template_sandbox import parse_template

ContentFormat = Literal["string", "openai"]
"""string: text. openai: a list of parts such as {"type": "text", "text": "..."}."""

_LIST_FILTERS: Final = frozenset({"list", "selectattr", "rejectattr", "select", "reject", "default", "d"})


@lru_cache(maxsize=32)
def content_format(template: str) -> ContentFormat:
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
