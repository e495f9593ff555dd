"""Example outputs in every tool format, with their events."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.server.parsers.parser import Arguments, Content, Event, Reasoning, Tool, ToolCall

TOOLS = (
    Tool(
        "weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "place": {"$ref": "#/$defs/place"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "unit": {"enum": ["C", "F"]},
            },
            "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
        },
    ),
    Tool("now", {}),
)


@dataclass(frozen=True)
class Example:
    """An output in a format and its events. A call is (name, arguments) or (name, arguments, id)."""

    format: str
    text: str
    events: tuple[Event, ...]


def example(form: str, text: str, *parts: str | Reasoning | tuple[str, ...]) -> Example:
    events: list[Event] = []
    calls = 0
    for part in parts:
        if isinstance(part, str):
            events.append(Content(part))
        elif isinstance(part, Reasoning):
            events.append(part)
        else:
            events.append(ToolCall(calls, part[0], part[2] if len(part) > 2 else None))
            if part[1]:
                events.append(Arguments(calls, part[1]))
            calls += 1
    return Example(form, text, tuple(events))


PARIS = '{"city": "Paris 🗼", "days": 3}'
TRICKY = '{"city": "a \\"}]</tool_call> b\\\\", "place": {"lat": [1.5, {"x": null}]}}'
CALLS = (("weather", PARIS), ("now", "{}"))

EXAMPLES = [
    # JSON between tags.
    *(
        example(
            form,
            f'Let me see.\n<{tag}>\n{{"name": "weather", "arguments": {PARIS}}}\n</{tag}>\n<{tag}>\n'
            f'{{"name": "now", "arguments": {{}}}}\n</{tag}>\n',
            "Let me see.\n",
            *CALLS,
        )
        for form, tag in (
            ("hermes", "tool_call"),
            ("longcat", "longcat_tool_call"),
            ("ernie45", "tool_call"),
            ("qwen3_json", "tool_call"),
        )
    ),
    example(
        "hermes",
        f'<tool_call>{{"name": "weather", "arguments": {TRICKY}}}</tool_call> Done.',
        ("weather", TRICKY),
        " Done.",
    ),
    example("hermes", '<tool_call>\n{"arguments": {"a": 1}, "name": "now"}\n</tool_call>', ("now", '{"a": 1}')),
    example(
        "hermes",
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\\\u00e9 \\ud83d\\ude00\\"}"}</tool_call>',
        ("now", '{"a": "\\u00e9 😀"}'),
    ),
    example(
        "hermes",
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "other", "arguments": null}</tool_call>',
        ("now", "{}"),
        ("other", "{}"),
    ),
    example("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', ("now", "{}")),
    example(
        "hermes",
        '<tool_call>{"name": "now", "thought": [1, "}"], "arguments": {"a": "x\n\ty", "b": "it\\\'s \\d"}}</tool_call>',
        ("now", '{"a": "x\\n\\ty", "b": "it\'s \\\\d"}'),
    ),
    example(
        "hermes",
        '\n\n<tool_call>{"name": "now"}</tool_call>\nand\n<tool_call>{"name": "now"}\n<tool_call>'
        '{"name": "now"}}</tool_call>\n',
        ("now", "{}"),
        "\nand\n",
        ("now", "{}"),
        ("now", "{}"),
        "}\n",
    ),
    example(
        "hermes", '<tool_call>{"name": "now", "arguments": {"a": 1</tool_call> sorry', ("now", '{"a": 1'), " sorry"
    ),
    example(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": <x>}}</tool_call> sorry',
        ("now", '{"a": '),
        "<x>}} sorry",
    ),
    example(
        "hermes",
        "I use <tool_call> to call <tool_call>{oops}</tool_call>, <tool",
        "I use <tool_call> to call <tool_call>{oops}</tool_call>, <tool",
    ),
    example(
        "hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', '<tool_call>{"arguments": {"a": 1}}</tool_call>'
    ),
    example("granite4", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', ("now", "{}")),
    # A list of calls as JSON.
    *(
        example(
            form,
            f'{before}[{{"name": "weather", "arguments": {PARIS}}}, {{"arguments": {{}}, "name": "now"}}]{after}',
            *CALLS,
        )
        for form, before, after in (
            ("granite", "<|tool_call|> ", ""),
            ("granite", "<tool_call>", ""),
            ("granite", "<tool_call>", "</tool_call>"),
            ("granite", "", ""),
            ("phi4_mini_json", "functools", ""),
            ("phi4_mini_json", "<|tool_call|>", "<|/tool_call|>"),
            ("jamba", "<tool_calls>", "</tool_calls>"),
            ("hunyuan_a13b", "<tool_calls>\n", "\n</tool_calls>\n"),
            ("mistral", "[TOOL_CALLS] ", ""),
            ("mistral", "[TOOL_CALLS]", "\n"),
            ("xlam", "", "\n"),
            ("xlam", "[TOOL_CALLS]", ""),
            ("xlam", "<tool_call>", "</tool_call>"),
            ("xlam", "```json\n", "\n```"),
            ("xlam", "</think>\n", ""),
        )
    ),
    example("granite", "<|tool_call|>[] none", "<|tool_call|>[] none"),
    example(
        "jamba",
        'So: <tool_calls>[{"name": "now"}, 5, {"name": "now"}]</tool_calls>!',
        "So: ",
        ("now", "{}"),
        '5, {"name": "now"}]!',
    ),
    example("xlam", "Hm.</think>[1] is one.", "Hm.</think>[1] is one."),
    example("xlam", 'As in\n```json\n{"a": 1}\n```\n', 'As in\n```json\n{"a": 1}\n```\n'),
    example("xlam", '```json\n{"name": "Ann"}\n```', '```json\n{"name": "Ann"}\n```'),
    example("xlam", '[{"name": "Ann", "age": 3}]', '[{"name": "Ann", "age": 3}]'),
    example("phi4_mini_json", "import functools\nfunctools.reduce", "import functools\nfunctools.reduce"),
    example(
        "minimax",
        f'Hm. <tool_calls>\n{{"name": "weather", "arguments": {PARIS}}}\n{{"name": "now", "arguments": {{}}}}'
        "\n</tool_calls>",
        "Hm. ",
        *CALLS,
    ),
    # One call after the other as JSON.
    example(
        "granite-20b-fc",
        f'Now <function_call> {{"name": "weather", "arguments": {PARIS}}}\n<function_call> '
        '{"name": "now", "arguments": {}}',
        "Now ",
        *CALLS,
    ),
    example(
        "internlm",
        f'Well.<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {PARIS}}}<|action_end|>\n',
        "Well.",
        CALLS[0],
    ),
    example(
        "gigachat3",
        f'Well.<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "weather", "arguments": {PARIS}}}',
        "Well.",
        CALLS[0],
    ),
    example("gigachat3", '<|function_call|>{"name": "now", "arguments": {}}</s>', ("now", "{}"), "</s>"),
    *(
        example(
            form,
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
            f'{PARIS}}},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]<|END_ACTION|>',
            *CALLS,
        )
        for form in ("cohere_command3", "cohere_command4")
    ),
    example(
        "apertus",
        f'Ok. <|tools_prefix|>[{{"weather": {PARIS}}}, {{"now": {{}}}}]<|tools_suffix|>',
        "Ok. ",
        *CALLS,
    ),
    example(
        "apertus",
        '<|tools_prefix|>[{"now": {}, "x": 1}]<|tools_suffix|> and <|tools_prefix|>now',
        ("now", "{}"),
        ', "x": 1}] and <|tools_prefix|>now',
    ),
    *(
        example(form, text, *events)
        for form in ("llama3_json", "llama4_json")
        for text, events in (
            (f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}', CALLS),
            (f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {PARIS}}}', CALLS[:1]),
            (' {"parameters": {}, "name": "now"} <|eom_id|>', (("now", "{}"), " <|eom_id|>")),
            ('{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}',)),
            ('{"name": "Ann"}', ('{"name": "Ann"}',)),
            ('{"title": 1, "name": "now", "parameters": {}}', ('{"title": 1, "name": "now", "parameters": {}}',)),
            ('{"title": "{}", "name": "x"} {', ('{"title": "{}", "name": "x"} {',)),
            (" {x} <|python_tag|>print(1)", (" {x} <|python_tag|>print(1)",)),
            (
                f'Let me.\n\n{{"name": "weather", "parameters": {PARIS}}}\nThen:\n'
                '{"name": "now", "parameters": {}}',
                ("Let me.\n", CALLS[0], "\nThen:", CALLS[1]),
            ),
            ('Like so:\n{"name": "Ann"}\n{x}', ('Like so:\n{"name": "Ann"}\n{x}',)),
        )
    ),
    # A name, then JSON.
    example("mistral", f"Right.[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now{{}}", "Right.", *CALLS),
    example("mistral", f"[TOOL_CALLS]weather[CALL_ID]Ab3dE6gH9[ARGS]{PARIS}", ("weather", PARIS, "Ab3dE6gH9")),
    example("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "x"}]', ("now", "{}")),
    example("mistral", '[TOOL_CALLS] [{"id": "x", "name": "now", "arguments": {}}]', ("now", "{}", "x")),
    example("mistral", "[TOOL_CALLS] is a mark. [TOOL", "[TOOL_CALLS] is a mark. [TOOL"),
    example(
        "deepseek_v3",
        "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        + PARIS
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
        "<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "Ok.",
        *CALLS,
    ),
    example(
        "deepseek_v31",
        f"Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n",
        "Ok.",
        *CALLS,
    ),
    example(
        "deepseek_v31",
        "Hm<｜tool▁calls▁begin｜>foo<｜tool▁sep｜>{}<｜tool▁calls▁end｜>",
        "Hm<｜tool▁calls▁begin｜>foo<｜tool▁sep｜>{}<｜tool▁calls▁end｜>",
    ),
    example(
        "kimi_k2",
        "See: <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0 <|tool_call_argument_begin|>"
        f"{PARIS} <|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "See: ",
        ("weather", PARIS, "functions.weather:0"),
        ("now", "{}", "functions.now:1"),
    ),
    example(
        "kimi_k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>bad:0<|tool_call_argument_begin|>{"a": 1'
        "<|tool_call_end|><|tool_call_begin|>now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        ("bad", '{"a": 1', "bad:0"),
        ("now", "{}", "now:1"),
    ),
    example(
        "kimi_k2",
        "<|tool_call_begin|>functions.now<|tool_call_argument_begin|><|tool_call_end|>"
        "<|tool_call_begin|>now:3<|tool_call_argument_begin|>'x'<|tool_call_end|>",
        ("now", "{}"),
        ("now", "", "now:3"),
        "'x'",
    ),
    example(
        "plamo3",
        "Ok.<|plamo:begin_tool_requests:plamo|>"
        + "".join(
            f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
            f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{arguments}"
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
            for name, arguments in CALLS
        )
        + "<|plamo:end_tool_requests:plamo|>",
        "Ok.",
        *CALLS,
    ),
    # Python.
    *(
        example(form, before + text + after, *events)
        for form, before, after in (
            ("pythonic", "", ""),
            ("llama4_pythonic", "", ""),
            ("llama4_pythonic", "<|python_start|>", "<|python_end|>"),
            ("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
            ("olmo3", "<function_calls>", "</function_calls>"),
        )
        for text, events in (
            ("[weather(city='Paris 🗼', days=3), now()]", CALLS),
            (
                "[weather(city=\"it's \\\"so\\\"\", tags=('a', 'b',), note=None, exact=True)]\n",
                (("weather", '{"city": "it\'s \\"so\\"", "tags": ["a", "b"], "note": null, "exact": true}'),),
            ),
            (
                "[ns.f(a={'x': {1: [-.5, +2, 07, 1e3, 1_000]}, 'y': {'u', 'v'}}, b='''two\nlines\\n''', c='', "
                "d=[], e={})]",
                (
                    (
                        "ns.f",
                        '{"a": {"x": {"1": [-0.5, 2, 7, 1e3, 1000]}, "y": ["u", "v"]}, "b": "two\\nlines\\n", "c": "", '
                        '"d": [], "e": {}}',
                    ),
                ),
            ),
            (
                "[f(a='\\x41\\u00e9\\U0001f600\\d', b=false, c=null)]",
                (("f", '{"a": "\\u0041\\u00e9😀\\\\d", "b": false, "c": null}'),),
            ),
        )
    ),
    example("pythonic", "[now(), f(a=b'x')]", ("now", "{}"), ("f", '{"a": '), "b'x')]"),
    example("pythonic", "[f(a=1,), now()]", ("f", '{"a": 1}'), ("now", "{}")),
    example("pythonic", "[1] is a footnote.", "[1] is a footnote."),
    example("pythonic", "[f(x)] is a list.", "[f(x)] is a list."),
    example("pythonic", "[f(x==1)]", "[f(x==1)]"),
    example("pythonic", "Then [now()]", "Then [now()]"),
    example(
        "olmo3",
        "Fine.\n<function_calls>\nweather(city='Paris 🗼', days=3)\nnow()\n</function_calls>\n",
        "Fine.\n",
        *CALLS,
    ),
    example("olmo3", "<function_calls>f(x=1])\nnow()</function_calls>", ("f", '{"x": 1'), "])\nnow()"),
    # Parameters between tags.
    *(
        example(
            form,
            before + head + f"<function=weather>\n<parameter=city>{nl}Paris 🗼{nl}</parameter>\n"
            f"<parameter=days>{nl}3{nl}</parameter>\n</function>\n"
            + tail
            + head
            + "<function=now>\n</function>\n"
            + tail,
            *([before] if before else []),
            *CALLS,
        )
        for form, before, head, tail, nl in (
            ("qwen3_coder", "Let me.\n", "<tool_call>\n", "</tool_call>\n", "\n"),
            ("qwen3_xml", "", "<tool_call>\n", "</tool_call>\n", "\n"),
            ("qwen3_coder", "", "", "", "\n"),
            ("step3p5", "Let me.\n", "<tool_call>\n", "</tool_call>\n", "\n"),
            ("mimo", "Let me.\n", "<tool_call>", "</tool_call>", ""),
            ("seed_oss", "", "<seed:tool_call>\n", "</seed:tool_call>\n", "\n"),
            ("seed_oss", "Let me.\n", "<seed:tool_call>\n", "</seed:tool_call>\n", ""),
        )
    ),
    example(
        "qwen3_coder",
        '<tool_call>\n<function=weather>\n<parameter=city>\n  if x < 1:\n    "</p>"\n\n</parameter>\n'
        "<parameter=place>\n{'lat': 1.5}\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=note>\nnull\n"
        '</parameter>\n<parameter=tags>\n["a"]\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>',
        (
            "weather",
            '{"city": "  if x < 1:\\n    \\"</p>\\"\\n", "place": {"lat": 1.5}, "exact": true, "note": null, '
            '"tags": ["a"], "unit": "C"}',
        ),
    ),
    example(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\nx y\n</parameter>\n"
        "<parameter=c>\n007\n<parameter=d>\n\n</parameter>\n</function>\n</tool_call>",
        ("f", '{"a": "5", "b": "x y", "c": "007", "d": ""}'),
    ),
    example(
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>a\n</parameter>\n<parameter=note>\n\nb\n\n</parameter>\n"
        "</function>\n</seed:tool_call>",
        ("weather", '{"city": "a\\n", "note": "\\nb\\n"}'),
    ),
    example(
        "mimo",
        "<function=weather><parameter=city>\nParis\n</parameter><parameter=days>\n3</parameter></function>",
        ("weather", '{"city": "\\nParis\\n", "days": 3}'),
    ),
    example(
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\nmany\n</parameter>\n<parameter=note>\n5\n"
        "</parameter>\n</tool_call>\nbye",
        ("weather", '{"days": "many", "note": "5"}'),
        "\nbye",
    ),
    example("qwen3_coder", "<tool_call>{}</tool_call> and <function= x", "<tool_call>{}</tool_call> and <function= x"),
    example("qwen3_coder", "<tool_call>\n<function=now>\noops</function>\n</tool_call>", ("now", "{}")),
    example(
        "qwen3_coder",
        '<function="weather">\nHm.\n<parameter="city">\na\n</parameter>\n</function>\n</tool_call> bye',
        ("weather", '{"city": "a"}'),
        " bye",
    ),
    example(
        "mimo",
        "<tool_call><function=weather><parameter=city>\na\n</parameter></function></tool_call>",
        ("weather", '{"city": "\\na\\n"}'),
    ),
    example(
        "minimax_m2",
        '<minimax:tool_call><invoke name="weather"><parameter name="city">\na\n</parameter></invoke>'
        "</minimax:tool_call>",
        ("weather", '{"city": "\\na\\n"}'),
    ),
    example(
        "qwen3_coder",
        '<tool_call><function=f><parameter="a>1</parameter><parameter=\'b\'>2</parameter><parameter=""">3</parameter>'
        "</function></tool_call>",
        ("f", '{"\\"a": "1", "b": "2", "\\"": "3"}'),
    ),
    example(
        "minimax_m2",
        'Ok.<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris 🗼</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "Ok.",
        *CALLS,
    ),
    example(
        "minimax_m2",
        '<minimax:tool_call><invoke name="weather"><parameter name="city">  a\n</parameter></invoke>'
        "</minimax:tool_call>",
        ("weather", '{"city": "  a\\n"}'),
    ),
    *(
        example(
            "minimax_m2",
            f"<minimax:tool_call><invoke name={quote}weather{quote}><parameter name={quote}city{quote}>'a'</parameter>"
            "</invoke></minimax:tool_call>",
            ("weather", '{"city": "\'a\'"}'),
        )
        for quote in ("'", "")
    ),
    example(
        "dots",
        'Ok.<dots_function_call>\n<invoke name="weather">\n<parameter name="city">Paris 🗼</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</dots_function_call>',
        "Ok.",
        *CALLS,
    ),
    example(
        "minicpm5",
        'Ok.\n<function name="weather"><param name="city">Paris 🗼</param><param name="days">3</param></function>\n'
        '<function name="now"></function>',
        "Ok.\n",
        *CALLS,
    ),
    example(
        "minicpm5",
        '<function name="f"><param name="a"><![CDATA[x < "]]y]]></param><param name="b">[1]</param></function>',
        ("f", '{"a": "x < \\"]]y", "b": [1]}'),
    ),
    example(
        "kimi_k3",
        '<|open|>response<|sep|>Ok.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weather" index="1"'
        '<|sep|><|open|>argument key="city" type="string"<|sep|>Paris 🗼<|close|>argument<|sep|><|open|>argument '
        'key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"'
        "<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "Ok.",
        *CALLS,
    ),
    example(
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>5'
        '<|close|>argument<|sep|><|open|>argument key="b" type="null"<|sep|>null<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        ("f", '{"a": "5", "b": null}'),
    ),
    *(
        example("minimax_m3", text.replace("~", "]<]minimax[>["), *events)
        for text, events in (
            (
                'Ok.\n~<tool_call>\n~<invoke name="weather">\n~<city>Paris 🗼~</city>\n~<days>3~</days>\n'
                '~</invoke>\n~<invoke name="now">\n~</invoke>\n~</tool_call>',
                ("Ok.\n", *CALLS),
            ),
            (
                '~<invoke name="weather">~<tags>~<item>a~</item>~<item>5~</item>~</tags>~<place>~<lat>1.5~</lat>'
                "~<at>x~</at>~<at>2~</at>~</place>~</invoke>",
                (("weather", '{"tags": ["a", "5"], "place": {"lat": 1.5, "at": ["x", "2"]}}'),),
            ),
            (
                '~<invoke name="f">~<a>5~</a>~<b>x~<c>~</c>~</b>~</invoke>\n'
                '~<invoke name="weather">~<tags> ~</tags>~<place>~</place>~</invoke>',
                (("f", '{"a": "5", "b": {"c": "", "$text": "x"}}'), ("weather", '{"tags": [], "place": {}}')),
            ),
            (
                '~<invoke name="now">~<a>x~</b>~</invoke> sorry',
                (("now", '{"a": '), "x]<]minimax[>[</b> sorry"),
            ),
        )
    ),
    example(
        "step3",
        "Ok.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="weather">\n<steptml:parameter name="city">Paris 🗼</steptml:parameter>\n'
        '<steptml:parameter name="days"> 3 </steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜>now\n<steptml:invoke name="now"></steptml:invoke>'
        "<｜tool_call_end｜>"
        "<｜tool_calls_end｜>",
        "Ok.",
        *CALLS,
    ),
    *(
        example(
            form,
            f'Ok.\n\n<｜DSML｜{block}>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">'
            'Paris 🗼</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
            f'</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{block}>',
            "Ok.\n\n",
            *CALLS,
        )
        for form, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    example(
        "deepseek_v41",
        'Ok.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">'
        'Paris 🗼</｜DSML｜ parameter>\n<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
        '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="now">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        "Ok.\n\n",
        *CALLS,
    ),
    example(
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">5'
        '</｜DSML｜parameter><｜DSML｜parameter name="b" string="false">5</｜DSML｜parameter></｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        ("f", '{"a": "5", "b": 5}'),
    ),
    example(
        "deepseek_v4",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">5</｜DSML｜parameter></｜DSML｜invoke>',
        ("f", '{"a": 5}'),
    ),
    example(
        "glm45",
        "Ok.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris 🗼</arg_value>\n<arg_key>days</arg_key>"
        "\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "Ok.\n",
        *CALLS,
    ),
    example(
        "glm47",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris 🗼</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
        *CALLS,
    ),
    *(
        example(
            form,
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
            ("f", arguments),
        )
        for form, arguments in (("glm47", '{"a": "5"}'), ("ling3", '{"a": "5"}'), ("poolside_v1", '{"a": 5}'))
    ),
    example(
        "hy_v3",
        "Ok.<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris 🗼</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n"
        "</tool_calls>",
        "Ok.",
        *CALLS,
    ),
    example("glm45", "<tool_call>f<arg_key>a</arg_key>\n</tool_call>", ("f", "{}")),
    example("glm45", "<tool_call>is a tag</tool_call>", "<tool_call>is a tag</tool_call>"),
    # Marks around strings.
    *(
        example(
            form,
            f"Ok.{begin}call:weather{{city:{mark}Paris 🗼{mark},days:3}}{end}{begin}call:now{{}}{end}",
            "Ok.",
            *CALLS,
        )
        for form, begin, end, mark in (
            ("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
            ("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
        )
    ),
    example(
        "functiongemma",
        '<start_function_call>call:weather{city:<escape>a, "b": {}\n<escape>days:<escape>3<escape>,'
        "tags:[<escape>x<escape>,<escape>y<escape>],place:{lat:-1.5,<escape>at<escape>:true},exact:True,note:word}"
        "<end_function_call>",
        (
            "weather",
            '{"city": "a, \\"b\\": {}\\n", "days": 3, "tags": ["x", "y"], '
            '"place": {"lat": -1.5, "at": true}, "exact": true, "note": "word"}',
        ),
    ),
    example(
        "gemma4",
        "<|tool_call>call:f{a:,b:[1, <tool_call|><|tool_call>call:f{a:5 <tool_call|> bye",
        ("f", '{"a": "", "b": [1]}'),
        ("f", '{"a": 5}'),
        " bye",
    ),
    # Harmony.
    example(
        "openai",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>Soon.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + PARIS + "<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|><|call|>",
        Reasoning("Think."),
        "Soon.",
        *CALLS,
    ),
    example("openai", "<|channel|>final<|message|>Hello <b>you</b>.<|return|>", "Hello <b>you</b>."),
    example(
        "openai",
        "<|start|>assistant<|channel|>commentary to=now<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>analysis to=python code<|message|>1+1<|call|>",
        ("now", "{}"),
        Reasoning("1+1"),
    ),
    example("openai", "<|channel|>commentary to=functions.now<|message|>foo<|call|>", ("now", "foo")),
    example("openai", "<|channel|>final<|message|>1 <", "1 <"),
    example("openai", "<|channel|>analysis<|message|>1 <", Reasoning("1 <")),
    example("openai", "No messages at all.", "No messages at all."),
    example("openai", f"<|channel|>{'never a message ' * 20}", f"<|channel|>{'never a message ' * 20}"),
    example(
        "qwen3_coder",
        "<function=weather>\n<parameter=note>\nnullable\n</parameter>\n</function>"
        "<function=weather>\n<parameter=note>\nNone\n</parameter>\n</function>",
        ("weather", '{"note": "nullable"}'),
        ("weather", '{"note": null}'),
    ),
]
