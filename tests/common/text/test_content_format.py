"""What a template wants a message's content to be, and what it then gets."""

from typing import Any

import jinja2
import pytest

from pagoda.common.text.chat_template import content_format_of, render

LOOP = "{% for m in messages %}BODY{% endfor %}"

PARTS = [
    "{% for part in m.content %}{{ part.text }}{% endfor %}",
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}",
    "{% for part in m.content[1:] %}{{ part.text }}{% endfor %}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}",
    "{% set content = m.content %}{% set again = content %}{% for part in again %}{{ part.text }}{% endfor %}",
    "{% macro show(what) %}{% for part in what %}{{ part.text }}{% endfor %}{% endmacro %}{{ show(m.content) }}",
]
TEXT = [
    "{{ m.content }}",
    "{{ m['content'] | trim }}",
    "{% for line in m.content.split('x') %}{{ line }}{% endfor %}",
    "{% for call in m.tool_calls %}{{ call.name }}{% endfor %}{{ m.content }}",
    "{% for other in messages[::-1] %}{% endfor %}{{ m.content }}",
    "{% set content = m.content %}{{ content }}{% for i in range(3) %}{{ i }}{% endfor %}",
    "{% macro s(what) %}{% for part in what %}{{ part }}{% endfor %}{% endmacro %}{{ s(m.names) }}{{ m.content }}",
]


@pytest.mark.parametrize("body", PARTS)
def test_a_loop_over_the_content_wants_parts(body: str) -> None:
    assert content_format_of(LOOP.replace("BODY", body)) == "openai"


@pytest.mark.parametrize("body", TEXT)
def test_anything_else_wants_text(body: str) -> None:
    assert content_format_of(LOOP.replace("BODY", body)) == "string"


def test_what_is_no_template() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        content_format_of("{% for %}")


SHOW = LOOP.replace("BODY", "[{% for part in m.content %}{{ part.type }}={{ part.text }};{% endfor %}]")


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("x", "[text=x;]"),
        (["x", {"type": "input_text", "text": "y"}], "[text=x;text=y;]"),
        ([{"type": "refusal", "refusal": "no"}], "[text=no;]"),
        (None, "[]"),
        ([], "[]"),
    ],
)
def test_parts_are_of_one_kind(content: Any, shown: str) -> None:
    assert render(SHOW, [{"role": "user", "content": content}]) == shown
    assert render(SHOW, [{"role": "user", "content": content}], content_format="openai") == shown


def test_the_format_that_was_asked_for_wins() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]
    plain = LOOP.replace("BODY", "{{ m.content }}")
    assert render(plain, messages) == "x\ny"
    assert "'text': 'x'" in render(plain, messages, content_format="openai")
    assert render(SHOW, messages, content_format="string") == "[=;=;=;]"


@pytest.mark.parametrize("content", ["x", ["w", "x"], []])
def test_a_message_in_parts_can_be_continued(content: Any) -> None:
    template = LOOP.replace("BODY", "{% for part in m.content %}{{ part.text }}{% endfor %}</end>")
    messages = [{"role": "assistant", "content": content}]
    text = render(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "".join(content)
