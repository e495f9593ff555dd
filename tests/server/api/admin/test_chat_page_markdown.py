"""The chat page's Markdown: what it becomes, that no text becomes HTML, and that no text takes long."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
from support.suite.rows import each_row

from pagoda.server.api.admin.chat_page import PAGE

NODE = shutil.which("node")

pytestmark = pytest.mark.program("node")

# The least of a document that the renderer needs. It writes what was built as a list: [tag, attributes, children...].
DOCUMENT = """
class Element {
  constructor(tag) { this.tag = tag; this.attributes = {}; this.children = []; }
  set className(name) { this.attributes.class = name; }
  set textContent(text) { this.children = [text]; }
  setAttribute(name, value) { this.attributes[name] = value; }
  append(...nodes) { for (const each of nodes) if (each !== "") this.children.push(each); }
  toJSON() { return [this.tag, this.attributes, ...joined(this.children)]; }
}
function joined(nodes) {
  const out = [];
  for (const each of nodes) {
    if (typeof each === "string" && typeof out.at(-1) === "string") out.push(out.pop() + each);
    else out.push(each);
  }
  return out;
}
const document = { createElement: (tag) => new Element(tag) };
"""


def script() -> str:
    html = PAGE.read_text(encoding="utf-8")
    add = re.search(r"^function add\(.*?^}\n", html, re.DOTALL | re.MULTILINE)
    renderer = re.search(r"Begin of the renderer\.\n(.*?)// End of the renderer", html, re.DOTALL)
    assert add is not None
    assert renderer is not None
    end = 'const root = new Element("div"); markdown(root, JSON.parse(require("fs").readFileSync(0, "utf8")));'
    return f'"use strict";\n{DOCUMENT}{add[0]}{renderer[1]}{end} console.log(JSON.stringify(root));'


def rendered(text: str) -> list[Any]:
    """The blocks that the text becomes; attributes that are empty are left out."""
    assert NODE is not None
    done = subprocess.run([NODE, "-e", script()], input=json.dumps(text), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [simplified(each) for each in json.loads(done.stdout)[2:]]


def simplified(node: Any) -> Any:
    if isinstance(node, str):
        return node
    tag, attributes, *children = node
    return [tag, *([attributes] if attributes else []), *map(simplified, children)]


def link(text: str, address: str) -> list[Any]:
    return ["a", {"href": address, "target": "_blank", "rel": "noopener noreferrer"}, text]


ROWS = [["tr", ["th", "a"], ["th", "b"]], ["tr", ["td", "1"], ["td", ["em", "2"]]]]
TABLE = ["div", {"class": "table"}, ["table", *ROWS]]


@each_row(
    ("text", "blocks"),
    [
        ("one\ntwo\n\nthree", [["p", "one\ntwo"], ["p", "three"]]),
        ("# A\n### B #\nc", [["h3", "A"], ["h5", "B"], ["p", "c"]]),
        ("#no heading", [["p", "#no heading"]]),
        ("a **b *c* d** `e*f*`", [["p", "a ", ["strong", "b ", ["em", "c"], " d"], " ", ["code", "e*f*"]]]),
        ("snake_case_name and 2 * 3 * 4", [["p", "snake_case_name and 2 * 3 * 4"]]),
        ("_a_ __b__ ~~c~~ \\*d\\*", [["p", ["em", "a"], " ", ["strong", "b"], " ", ["del", "c"], " *d*"]]),
        ("``a`b``", [["p", ["code", "a`b"]]]),
        ("- a\n- **b**", [["ul", ["li", "a"], ["li", ["strong", "b"]]]]),
        ("3. a\n\n4. b", [["ol", {"start": "3"}, ["li", "a"], ["li", "b"]]]),
        ("- a\n  - b\n  - c\n- d", [["ul", ["li", ["p", "a"], ["ul", ["li", "b"], ["li", "c"]]], ["li", "d"]]]),
        ("text\n- a\n1. b", [["p", "text"], ["ul", ["li", "a"]], ["ol", ["li", "b"]]]),
        ("> a\n> b", [["blockquote", ["p", "a\nb"]]]),
        ("a\n\n---\n\nb", [["p", "a"], ["hr"], ["p", "b"]]),
        ("| a | b |\n|---|:-:|\n| 1 | *2* |\nend", [TABLE, ["p", "end"]]),
        ("a | b\nno table", [["p", "a | b\nno table"]]),
        (
            "[x](https://a.b/c_(d)) (http://e.f/g?h=1).",
            [["p", link("x", "https://a.b/c_(d)"), " (", link("http://e.f/g?h=1", "http://e.f/g?h=1"), ")."]],
        ),
    ],
)
def test_blocks(text: str, blocks: Any) -> None:
    assert rendered(text) == blocks


@pytest.mark.parametrize("end", ["\n```", ""])
def test_code_keeps_its_text_also_while_it_is_written(end: str) -> None:
    source = "if a < b:\n    # **c** [d](https://e)\n\n    - <b>"
    (box,) = rendered(f"```python\n{source}{end}")
    bar = ["div", {"class": "bar"}, ["span", "python"], ["button", {"class": "copy", "type": "button"}, "Copy"]]
    assert box == [
        "div",
        {"class": "code"},
        bar,
        ["pre", ["code", "if a < b:\n    # **c** [d](https://e)\n\n    - <b>"]],
    ]


def test_a_longer_fence_holds_a_shorter_one() -> None:
    box, after = rendered("````\n```\nx\n```\n````\nend")
    assert box[3] == ["pre", ["code", "```\nx\n```"]]
    assert after == ["p", "end"]


ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:x) ![y](javascript:alert(1))",
    "[x](\tjavascript:alert(1))",
    "[x](//evil) [y](/path) [z](#) [w]()",
    '[x](https://a" onmouseover="alert(1))',
    "[x](https://a'onclick='alert(1)') <https://a\"onclick=x>",
    "[<b>x</b>](https://a.b)",
    '```"><script>alert(1)</script>\n</code></pre><script>alert(1)</script>\n```',
    "| <i>a</i> | b |\n|---|---|\n| <script> | [x](javascript:x) |",
    "# <h1 onclick=x>\n> <b>\n- <u>\n1. **<s>**",
    "javascript:alert(1) <javascript:alert(1)>",
]
TAGS = frozenset(
    ["p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "div", "span", "button", "pre", "code"]
) | {"strong", "em", "del", "a", "table", "tr", "th", "td"}


@each_row("text", ATTACKS)
def test_no_text_becomes_html(text: str) -> None:
    def check(node: Any) -> None:
        if isinstance(node, str):
            return
        tag, *rest = node
        assert tag in TAGS
        attributes = rest[0] if rest and isinstance(rest[0], dict) else {}
        assert attributes.keys() <= {"class", "type", "href", "target", "rel", "start"}
        assert re.match(r"https?://\S+$", attributes.get("href", "http://x"))
        for each in rest[1:] if attributes else rest:
            check(each)

    for block in rendered(text):
        check(block)


@each_row(
    "text",
    ["[" * 50_000, "*" * 50_000, "`" * 50_000, "_a" * 30_000, "![](" * 20_000, "> " * 20_000, "- " * 20_000,
     "| " * 20_000 + "\n" + "|-" * 20_000, "**a " * 20_000, "<http://" * 10_000, "#" * 50_000, "- - " * 20_000 + "x",
     " -" * 20_000 + "x", "`a``b" * 10_000, "[a](" * 10_000, "~~" * 30_000, "\n".join(["- a"] * 5_000), "a\n|" * 5_000],
)  # fmt: skip
def test_no_text_takes_long(text: str) -> None:
    rendered(text)
