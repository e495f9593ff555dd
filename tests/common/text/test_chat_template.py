import json
from typing import Any

import jinja2
import pytest
from support.suite.rows import each_row
from tokenizers import Tokenizer as Backend
from tokenizers import models

from pagoda.common.errors import RequestError
from pagoda.common.text.chat_template import BUILT_IN_TEMPLATES, content_format_of, render, render_chat
from pagoda.common.text.tokenizer import Tokenizer

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {%- set call = tool_call.function if tool_call.function is defined else tool_call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments | tojson(indent=2) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
INSTRUCT = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {%- generation %}
        {{- " " + message["content"] | trim + eos_token}}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
TURNS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if message['role'] == 'tool' %}{% continue %}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""
DEFAULT_SYSTEM = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
TEMPLATES = {
    "chatml": CHATML, "headers": HEADERS, "instruct": INSTRUCT, "turns": TURNS, "default system": DEFAULT_SYSTEM
}  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "user", "content": "  What is <b>this</b>? é 日本 "},
    {"role": "assistant", "content": "A \"thing\" & more\n"},
    {"role": "user", "content": "And that?"},
]  # fmt: skip
CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "get", "arguments": {"city": "Zürich <1>", "n": [1, 2.5, None, True]}}}],
    },
]
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]


def oracle(template, messages, **options):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, **SPECIAL, **options)
    return rendered[0]


@each_row("name", sorted(TEMPLATES))
@each_row("prompt", [True, False])
def test_same_text_as_transformers(name, prompt):
    template = TEMPLATES[name]
    ours = render(template, CHAT, add_generation_prompt=prompt, special_tokens=SPECIAL, enable_thinking=False)
    assert ours == oracle(template, CHAT, add_generation_prompt=prompt, enable_thinking=False)
    assert "日本" in ours


@each_row("name", sorted(TEMPLATES))
@each_row("content", ["The answer", "The answer  ", "  \n The answer\n"])
def test_continued_messages_same_as_transformers(name, content):
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    ours = render(
        TEMPLATES[name], chat, add_generation_prompt=False, continue_final_message=True, special_tokens=SPECIAL
    )
    assert ours == oracle(TEMPLATES[name], chat, continue_final_message=True)
    assert ours.rstrip().endswith("The answer")


def test_tools_and_calls_same_as_transformers():
    ours = render(CHATML, CALLS, tools=TOOLS, special_tokens=SPECIAL)
    assert ours == oracle(CHATML, CALLS, tools=TOOLS, add_generation_prompt=True)
    assert "Zürich <1>" in ours


def test_arguments_as_text_become_objects():
    calls = [CALLS[0], {"role": "assistant", "tool_calls": json.loads(json.dumps(CALLS[1]["tool_calls"]))}]
    function = calls[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert render(CHATML, calls) == render(CHATML, CALLS)
    assert isinstance(function["arguments"], str)


@each_row("arguments", ['{"city": "Zü', "[]", "42", "", "[" * 100_000, None, [1]])
def test_invalid_tool_call_arguments_become_an_empty_object(arguments):
    calls = json.loads(json.dumps(CALLS))
    calls[1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert '"name": "get", "arguments": {}' in render(CHATML, calls)


def test_developer_messages_become_system_messages():
    chat = [
        {"role": "system", "content": "Be kind."},
        CHAT[0],
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
    ]
    both = [{"role": "system", "content": "Be kind.\n\nBe brief."}, CHAT[0]]
    for template in (CHATML, DEFAULT_SYSTEM):
        assert render(template, chat) == render(template, both)
        assert render(template, chat[1:]) == render(template, [{"role": "system", "content": "Be brief."}, CHAT[0]])


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LATE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a"},
    {"role": "system", "content": "It is late."},
]


def test_late_system_messages_move_to_the_front_if_the_template_refuses_them():
    assert render(STRICT, LATE) == "<system>Be brief.\n\nIt is late.<user>a"
    assert render(STRICT, LATE[:2]) == "<system>Be brief.<user>a"


def test_late_system_messages_move_to_the_front_if_the_template_drops_them():
    drops = "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    assert render(drops, LATE) == "Be brief.\n\nIt is late.a"


def test_late_system_messages_stay_where_the_template_shows_them():
    shows = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert render(shows, LATE) == "<system>Be brief.<user>a<system>It is late."


def test_developer_role_is_kept_if_the_template_mentions_it():
    template = "{% for m in messages %}{% if m.role == 'developer' %}D{% else %}{{ m.role }}{% endif %}{% endfor %}"
    chat = [CHAT[0], {"role": "developer", "content": "x"}]
    assert render(template, chat) == "userD"
    parts = "{% for m in messages %}{{ m.role }}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    chat = [{"role": "developer", "content": "x"}, CHAT[0], {"role": "system", "content": "y"}]
    assert render(parts, chat).startswith("system[x][y]user[")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, "two", {"type": "input_text", "text": "three"}]
    ours = render(HEADERS, [{"role": "user", "content": parts}], special_tokens=SPECIAL)
    assert ours == render(HEADERS, [{"role": "user", "content": "one\ntwo\nthree"}], special_tokens=SPECIAL)


@each_row(
    ("messages", "message", "field"),
    [
        ([], "non-empty", "messages"),
        ("hello", "non-empty", "messages"),
        (["hello"], r"messages\[0\] must be an object", "messages[0]"),
        ([{"content": "x"}], r"messages\[0\].role", "messages[0].role"),
        ([{"role": 1, "content": "x"}], r"messages\[0\].role", "messages[0].role"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string", "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content\[0\].type is 'image_url'; the model is served text-only",
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"messages\[0\].content\[0\].text",
            "messages[0].content[0].text",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], "with a type", "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "extra": {1, 2}}], "not a JSON value", "messages[0].extra"),
        (
            [CHAT[0], {"role": "user", "content": "x", "tool_calls": ["y"]}],
            "with a function",
            "messages[1].tool_calls[0].function",
        ),
        (
            [{"role": "assistant", "tool_calls": {"id": "x"}}],
            r"messages\[0\].tool_calls must be a list",
            "messages[0].tool_calls",
        ),
    ],
)
def test_malformed_messages_are_refused(messages, message, field):
    with pytest.raises(RequestError, match=message) as caught:
        render(CHATML, messages)
    assert caught.value.field == field


def test_the_built_in_template_shows_tools_calls_and_their_results():
    template = BUILT_IN_TEMPLATES["chatml_tools"].read_text()
    calls = [{"function": {"name": "f", "arguments": '{"a": 1}'}}, {"function": {"name": "g", "arguments": "{}"}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "43"},
        {"role": "assistant", "content": "ok"},
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    text = render(template, messages, tools=[tool])
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in system
    assert rest == (
        "<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = render(template, messages[1:2])
    assert plain.endswith("assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


ASKS_WHAT_IS_DEFINED = """\
{%- for message in messages %}
    {%- if message.role == "user" or message.tool_calls is not defined %}
        {{- message.content }}
    {%- else %}
        {%- for call in message.tool_calls %}{{ call.function.name }}{% endfor %}
    {%- endif %}
    {%- if message.reasoning_content is defined %}{{ "(" + message.reasoning_content + ")" }}{% endif %};
{%- endfor %}
"""
"""Tests which keys are defined, as templates of Hermes models do."""


@pytest.mark.parametrize("absent", [{}, {"tool_calls": []}, {"tool_calls": None, "reasoning_content": None}])
def test_null_keys_and_empty_tool_calls_are_dropped(absent):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **absent}]
    assert render(ASKS_WHAT_IS_DEFINED, messages) == "a;b;"
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert render(ASKS_WHAT_IS_DEFINED, [called]) == "f;"


def test_deeply_nested_messages_are_refused():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        render(CHATML, [{"role": "user", "content": "x", "extra": deep}])


def test_template_exceptions_become_errors_of_messages():
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render(INSTRUCT, [CHAT[0], CHAT[0]], special_tokens=SPECIAL)
    assert caught.value.field == "messages"


def test_prompt_and_continuation_exclude_each_other():
    with pytest.raises(RequestError) as caught:
        render(CHATML, CHAT, add_generation_prompt=True, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_a_message_that_the_template_omits_cannot_be_continued():
    with pytest.raises(RequestError, match="does not show the final message"):
        render("{{ 'hello' }}", CHAT, add_generation_prompt=False, continue_final_message=True)


def test_invalid_template_error_names_chat_template():
    with pytest.raises(RequestError, match="not valid jinja") as caught:
        render("{% for %}", CHAT)
    assert caught.value.field == "chat_template"


@each_row(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x * 9 %}{% endfor %}",
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x|replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('x', 'xx') %}{% endfor %}",
        "{{ range(1000000000)|list }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ '\t'.expandtabs(1000000000) }}",
        "{{ 'x'|indent(1000000000, true) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ [[1]]|tojson(indent=1000000000) }}",
        "{{ 'xxxx'.translate({120: 'y' * 1000000}) }}",
        "{{ ('x' * 10000)|join('y' * 10000) }}",
        "{{ ('x' * 10000).join('y' * 10000) }}",
        "{{ lipsum(100000) }}",
    ],
)
def test_runaway_templates_end_with_an_error(template):
    with pytest.raises(RequestError) as caught:
        render(template, CHAT)
    assert len(str(caught.value)) < 600


@each_row(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_templates_cannot_reach_the_interpreter(template):
    try:
        text = render(template, CHAT)
    except RequestError:
        return
    assert text == ""


def test_many_messages_fit_the_bounds():
    chat = [{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(2001)]
    assert len(render(INSTRUCT, chat, special_tokens=SPECIAL)) > 2_000_000


def test_loop_variables_work_in_instrumented_loops():
    template = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last }} {% endfor %}"
    assert render(template, CHAT) == "1/3 2/3 3/3! "
    assert render("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", CHAT) == "a1"
    assert render("{% for m in messages|map(attribute='role') %}{{ m }}{{ loop.last }} {% endfor %}", CHAT) == (
        "userFalse assistantFalse userTrue "
    )


def test_strftime_now():
    assert render("{{ strftime_now('%Y') }}", CHAT).isdigit()


def test_rendering_does_not_change_the_callers_messages():
    chat = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    render(CHATML, chat, add_generation_prompt=False, continue_final_message=True)
    assert chat == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]


def test_render_chat_uses_the_models_template():
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = Tokenizer(backend, SPECIAL, {"default": HEADERS})
    assert render_chat(tokenizer, CHAT) == render(HEADERS, CHAT, special_tokens=SPECIAL)
    assert render_chat(tokenizer, CHAT, template="{{ eos_token }}") == "</s>"
    with pytest.raises(RequestError, match="no chat template"):
        render_chat(Tokenizer(backend), CHAT)


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


@each_row("body", PARTS)
def test_a_loop_over_the_content_selects_the_openai_format(body: str) -> None:
    assert content_format_of(LOOP.replace("BODY", body)) == "openai"


@each_row("body", TEXT)
def test_other_templates_select_the_string_format(body: str) -> None:
    assert content_format_of(LOOP.replace("BODY", body)) == "string"


def test_content_format_of_invalid_jinja() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        content_format_of("{% for %}")


SHOW = LOOP.replace("BODY", "[{% for part in m.content %}{{ part.type }}={{ part.text }};{% endfor %}]")


@each_row(
    ("content", "shown"),
    [
        ("x", "[text=x;]"),
        (["x", {"type": "input_text", "text": "y"}], "[text=x;text=y;]"),
        ([{"type": "refusal", "refusal": "no"}], "[text=no;]"),
        (None, "[]"),
        ([], "[]"),
    ],
)
def test_content_parts_are_normalised_for_both_formats(content: Any, shown: str) -> None:
    assert render(SHOW, [{"role": "user", "content": content}]) == shown
    assert render(SHOW, [{"role": "user", "content": content}], content_format="openai") == shown


def test_a_given_content_format_overrides_detection() -> None:
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
