"""Reasoning formats: parsed reasoning for every split, and whether a prompt opens the reasoning."""

from typing import Any

import pytest
from support.kernels.splits import events_of, read_all_splits, splits
from support.suite.rows import each_row

from pagoda.common.errors import ConfigError
from pagoda.server.parsers.parser import Content, Event, LeavesMarkup, Reasoning, merge_events
from pagoda.server.parsers.reasoning.formats import MAX_SPACE
from pagoda.server.parsers.reasoning.harmony import HARMONY
from pagoda.server.parsers.registry import REASONING_FORMATS, reasoning_format

CHATML = "<|im_start|>user\nHELLO<|im_end|>\n<|im_start|>assistant\n"
GRANITE = "<|start_of_role|>user<|end_of_role|>HELLO<|start_of_role|>assistant<|end_of_role|>"

OPENED = {
    "cohere_command3": "<|USER_TOKEN|>HELLO<|END_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>",
    "cohere_command4": "<|USER_TOKEN|>HELLO<|END_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>",
    "deepseek_r1": "<｜begin▁of▁sentence｜><｜User｜>HELLO<｜Assistant｜><think>\n",
    "deepseek_v3": "<｜User｜>HELLO<｜Assistant｜><think>",
    "deepseek_v4": "<｜User｜>HELLO<｜Assistant｜><think>",
    "deepseek_v41": "<｜User｜>HELLO<｜Assistant｜><think>",
    "ernie45": "<|im_start|>user\nHELLO<|im_end|>\n\n<|im_start|>assistant\n<think>\n",
    "gemma4": "<bos><|turn>user\nHELLO<turn|>\n<|turn>model\n<|channel>thought\n",
    "glm45": "<|user|>\nHELLO<|assistant|>\n<think>",
    "glm47": "[gMASK]<sop><|user|>HELLO<|assistant|><think>",
    "granite": GRANITE + "<think>",
    "granite_thinking_parser": GRANITE + "<think>\n",
    "holo2": CHATML + "<think>\n",
    "hunyuan_a13b": "<|startoftext|>HELLO<|extra_0|><think>",
    "hy_v3": "<｜hy_begin▁of▁sentence｜><｜hy_User｜>HELLO<｜hy_Assistant｜><think:opensource>",
    "k2_horizon": CHATML + "<ifm|think_faster>",
    "kimi_k2": "<|im_user|>user<|im_middle|>HELLO<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
    "kimi_k3": 'HELLO<|close|>message<|sep|><|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
    "ling3": "<role>HUMAN</role>HELLO<role>ASSISTANT</role><think>",
    "mimo": CHATML + "<think>",
    "minimax_m2": "]~b]user\nHELLO[e~[\n]~b]ai\n<think>\n",
    "minimax_m3": "]~b]user\nHELLO[e~[\n]~b]ai\n<mm:think>",
    "mistral": "<s>[INST]HELLO[/INST][THINK]",
    "nemotron_v3": CHATML + "<think>\n",
    "olmo3": CHATML + "<think>",
    "poolside_v1": "<user>HELLO</user><assistant><think>",
    "qwen3": CHATML + "<think>\n",
    "seed_oss": "<seed:bos>user\nHELLO<seed:eos><seed:bos>assistant\n<seed:think>",
    "step3": "<|BOT|>user\nHELLO<|EOT|><|BOT|>assistant\n<think>\n",
    "step3p5": CHATML + "<think>\n",
}
"""Prompts whose template opens the reasoning."""

ALWAYS = {"deepseek_r1", "ernie45", "holo2", "minimax_m2", "step3", "step3p5"}
"""Formats with `starts_thinking`."""


def tags(name: str) -> tuple[str, str]:
    format = reasoning_format(name)
    return format.starts[-1], format.ends[-1]


def read(name: str, prompt: str, text: str) -> list[Event]:
    return read_all_splits(lambda: reasoning_format(name).parser(prompt), text)


def test_every_format_loads() -> None:
    for name in REASONING_FORMATS:
        assert isinstance(reasoning_format(name).starts, tuple)
    with pytest.raises(ConfigError, match="--reasoning-parser: unknown format 'r1'; use one of cohere_command3, "):
        reasoning_format("r1")


@each_row("name", sorted(OPENED))
def test_thinking_and_content(name: str) -> None:
    start, end = tags(name)
    events = [Reasoning("Größer: 9.8 → <b>"), Content("It is\n 9.8 ✓ ")]
    assert read(name, "x", f"\n{start}\nGrößer: 9.8 → <b> \n{end}\n\nIt is\n 9.8 ✓ ") == events
    assert read(name, OPENED[name], f"\nGrößer: 9.8 → <b> \n{end}\n\nIt is\n 9.8 ✓ ") == events


@each_row("name", sorted(OPENED))
def test_a_prompt_that_opens_or_closes_the_thinking(name: str) -> None:
    format = reasoning_format(name)
    start, end = tags(name)
    prompt = OPENED[name]
    closed = f"{prompt}\n{end}\n\n"
    assert format.thinks(prompt)
    assert not format.thinks(closed)
    assert read(name, closed, " plain ") == [Content(" plain ")]
    assert format.thinks("x") is (name in ALWAYS)
    assert not format.thinks(f"{closed}I said {start}"), "the prompt contains content after the reasoning"
    bare = prompt.removesuffix("\n").removesuffix(start)
    assert not format.thinks(f"{bare}It is"), "an answer that goes on with its content"
    for tag in (start, end, start + end):
        assert format.thinks(bare.replace("HELLO", f"what is {tag}?")) is (name in ALWAYS), "users may write tags"
        assert format.thinks(prompt.replace("HELLO", f"what is {tag}?"))


@each_row("name", sorted(OPENED))
def test_an_answer_cut_anywhere_never_shows_half_a_tag_as_thinking(name: str) -> None:
    start, end = tags(name)
    text = f"{start}one two{end}three"
    for length in range(len(text) + 1):
        cut = text[:length]
        events = read(name, OPENED[name], cut)
        inside = cut.removeprefix(start)
        if end in cut:
            expected = [Reasoning("one two"), Content(cut.rpartition(end)[2])]
        else:
            expected = [] if start.startswith(cut) and cut == start else [Reasoning(inside.rstrip())]
        assert events == merge_events(expected), cut


def test_a_start_in_the_middle_is_content() -> None:
    assert read("qwen3", "x", "Use <think> here</think>") == [Content("Use <think> here</think>")]


@each_row("name", sorted(OPENED))
def test_thinking_that_goes_on_or_is_ended_twice(name: str) -> None:
    start, end = tags(name)
    events = [Reasoning("one\ntwo\nthree"), Content("It is")]
    assert (
        read(name, "x", f"{start}one{end}\n{start}\ntwo{end}{end}\n{start}{end}{start}three{end}\n{end}\nIt is")
        == events
    )
    assert read(name, OPENED[name] + end, f"\n{end}\n\nIt is") == [Content("It is")], "an end where nothing began"
    assert read(name, OPENED[name] + end, f"{start}hm{end}It is") == [Reasoning("hm"), Content("It is")]


@pytest.mark.parametrize("name", ["cohere_command3", "gemma4", "mistral"])
def test_control_tokens_mean_what_they_say_anywhere(name: str) -> None:
    start, end = tags(name)
    text = f"Well: {start}hm{end}\nit is {end}so. {start}no{end}"
    assert read(name, "x", text) == [
        Content("Well: "),
        Reasoning("hm"),
        Content("it is so. "),
        Reasoning("\nno"),
    ]
    assert read(name, "x", f"so {start[:-2]}") == [Content(f"so {start[:-2]}")]


def test_models_quote_the_tags_of_calls_while_they_think() -> None:
    thought = "I write <tool_call> and </tool_call>, or <tool_call>\n<tool_call>"
    for name in ("qwen3", "nemotron_v3", "step3p5", "ernie45"):
        assert read(name, OPENED[name], f"{thought}</think>ok") == [Reasoning(thought), Content("ok")]
    assert read("minimax_m2", OPENED["minimax_m2"], "in <minimax:tool_call> tags</think>ok") == [
        Reasoning("in <minimax:tool_call> tags"),
        Content("ok"),
    ]


def test_kimi_k3_has_elements() -> None:
    think, end = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
    answer = "<|open|>response<|sep|>1 < 2<|close|>response<|sep|><|close|>message<|sep|>"
    for prompt, text in (("x", f"{think}hm{end}{answer}"), (f"x{think}", f"hm{end}{answer}")):
        assert read("kimi_k3", prompt, text) == [Reasoning("hm"), Content("1 < 2")]
    assert read("kimi_k3", "x", answer.removeprefix("<|open|>response<|sep|>")) == [Content("1 < 2")]
    assert read("kimi_k3", f"x{think}", "hm<|open|>tools<|sep|>") == [Reasoning("hm"), Content("<|open|>tools<|sep|>")]


def test_gemma4_goes_on_after_the_results_of_tools() -> None:
    prompt = "<|turn>model\n<|tool_call>call:f{}<tool_call|><|tool_response>5<tool_response|>"
    assert not reasoning_format("gemma4").thinks(prompt)
    assert reasoning_format("gemma4").thinks(prompt + "<|channel>thought\n")


def test_cohere_wraps_its_answers() -> None:
    for name, tag in (("cohere_command3", "RESPONSE"), ("cohere_command4", "TEXT")):
        text = f"hm<|END_THINKING|><|START_{tag}|>5<|END_{tag}|>"
        assert read(name, OPENED[name], text) == [Reasoning("hm"), Content("5")]


def test_an_empty_thinking_says_nothing() -> None:
    assert read("qwen3", "x", "<think>\n\n</think>\n\nhi") == [Content("hi")]


def test_white_space_is_content_where_nothing_was_thought() -> None:
    assert read("qwen3", "x", "\n  hi\n") == [Content("\n  hi\n")]
    assert read("qwen3", "x", " \n") == [Content(" \n")]


@each_row("before", ["", "<think>", "<think>hm", "<think>hm</think>", "hm"])
@each_row("after", ["", "<think>x", "</think>x", "x"])
def test_white_space_without_end_is_text(before: str, after: str) -> None:
    space = "\n" * (2 * MAX_SPACE)
    for prompt in ("x", OPENED["qwen3"]):
        events = read("qwen3", prompt, before + space + after)
        emitted = "".join(event.text for event in events if isinstance(event, Content | Reasoning))
        assert after.removeprefix("</think>") in emitted or "</think>" not in before
    parser = reasoning_format("qwen3").parser("x")
    outputs = [parser.feed("\n") for _ in range(MAX_SPACE + 2)]
    assert outputs[-1], "buffered white space is bounded"


@pytest.mark.parametrize(("spaces", "events"), [(256, [Reasoning("a"), Content("b")]), (257, [])])
def test_white_space_that_a_tag_may_follow(spaces: int, events: list[Event]) -> None:
    text = " " * spaces + "<think>a</think>b"
    assert read("qwen3", "x", text) == (events or [Content(text)])


def test_an_end_tag_at_the_start_of_content_is_content() -> None:
    for text in ("</answer>x", "hm</answer>x"):
        assert read("hunyuan_a13b", "x", text) == [Content(text)]
    assert read("hunyuan_a13b", OPENED["hunyuan_a13b"], "hm</think></answer>x") == [
        Reasoning("hm"),
        Content("</answer>x"),
    ]


def test_granite_marks_reasoning_in_words() -> None:
    for start, end in (("Here is my thought process:", "Here's my response:"), ("<think>", "</think>")):
        text = f"{start} 9.11 < 9.8. {end}\n<response>9.8</response>"
        assert read("granite", "x", text) == [Reasoning("9.11 < 9.8."), Content("9.8")]
    assert read("granite", "x", "Here is my answer: 5") == [Content("Here is my answer: 5")]


@pytest.mark.parametrize(("name", "tag"), [("hunyuan_a13b", "answer"), ("ernie45", "response")])
def test_content_tags_are_stripped(name: str, tag: str) -> None:
    wrapped = f"\n<{tag}>\nIt <b>is</b>\n x\n</{tag}>"
    assert read(name, OPENED[name], f"hm</think>{wrapped}") == [Reasoning("hm"), Content("It <b>is</b>\n x")]
    assert read(name, OPENED[name] + "</think>", wrapped) == [Content("It <b>is</b>\n x")]
    assert read(name, OPENED[name], f"hm</think>\n<{tag}>\ncut </{tag[:-1]}") == [
        Reasoning("hm"),
        Content(f"cut </{tag[:-1]}"),
    ]
    assert read(name, OPENED[name], f"hm</think>\nno <{tag}>") == [Reasoning("hm"), Content(f"no <{tag}>")]


def test_minimax_append_think_restores_the_start_tag() -> None:
    name = "minimax_m2_append_think"
    assert read(name, OPENED["minimax_m2"], "hm</think>hi") == [Content("<think>hm</think>hi")]
    assert read(name, OPENED["minimax_m2"] + "</think>", "hi") == [Content("hi")]
    assert read(name, OPENED["minimax_m2"], "") == []


def test_identity_emits_all_text_as_content() -> None:
    assert read("identity", "<think>", "<think>hm</think>hi") == [Content("<think>hm</think>hi")]


# --- harmony ---

ANALYSIS = "<|channel|>analysis<|message|>User asks <b>.<|end|>"
FINAL = "<|channel|>final<|message|>Größe → 5"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"


def harmony_plain(text: str) -> list[Event]:
    """Parse with the `plain` parser as second stage, as without a tool format."""

    def all_of(pieces: list[str]) -> list[Event]:
        format = reasoning_format("openai_gptoss")
        assert isinstance(format, LeavesMarkup)
        first, second = format.parser("<|start|>assistant"), format.plain()
        events: list[Event] = []
        for batch in [*map(first.feed, pieces), first.finish()]:
            for event in batch:
                events += second.feed(event.text) if isinstance(event, Content) else [event]
        return merge_events(events + second.finish())

    whole = all_of([text])
    for pieces in splits(text):
        assert all_of(pieces) == whole, pieces
    return whole


def test_harmony_analysis_is_reasoning_and_other_channels_keep_markup() -> None:
    rest = PREAMBLE + CALL + "<|start|>assistant" + FINAL
    assert read("openai_gptoss", "<|start|>assistant", ANALYSIS + rest) == [
        Reasoning("User asks <b>."),
        Content(rest),
    ]


def test_harmony_without_its_markup() -> None:
    text = ANALYSIS + PREAMBLE + "<|start|>assistant" + FINAL
    assert harmony_plain(text) == [Reasoning("User asks <b>."), Content("I look.\nGröße → 5")]


@each_row(
    ("text", "events"),
    [
        (FINAL, [Content("Größe → 5")]),
        ("no markup < at all", [Content("no markup < at all")]),
        ("<|channel|>analysis<|message|>one<|end|><|start|>assistant" + ANALYSIS, [Reasoning("one\nUser asks <b>.")]),
        ("<|channel|>analysis<|message|>cut <|channel|>final<|message|>ok", [Reasoning("cut "), Content("ok")]),
        ("<|channel|>analysis<|message|>cut", [Reasoning("cut")]),
        ("<|channel|>anal", []),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", [Content("{}")]),
        ("<|channel|>" + "x" * 600, [Content("x" * 600)]),
        ("<|channel|>" + "x" * 600 + "<|message|>y", [Content("x" * 600 + "<|message|>y")]),
        (" to=functions.f<|channel|>commentary<|message|>{}<|call|>", [Content("{}")]),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
        ("", []),
    ],
)
def test_harmony_cases(text: str, events: list[Event]) -> None:
    assert harmony_plain(text) == events


def test_harmony_completes_the_header_of_a_recipient() -> None:
    call = " to=functions.f<|channel|>commentary<|message|>{}"
    assert read("openai_gptoss", "<|start|>assistant", call) == [Content("<|start|>assistant" + call)]


def test_harmony_shows_one_call_per_message_and_one_text_beside_it() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "ba"]
    asked = {"role": "assistant", "content": "Wait.", "thinking": "Hm.", "reasoning": "Hm.", "tool_calls": calls}
    user: dict[str, Any] = {"role": "user", "content": "?"}
    messages, tools = HARMONY.adapted(
        [user, asked, *results, {**asked, "tool_calls": calls[:1]}, results[1]],
        [{"type": "function", "function": {"name": "a"}}, {"function": {"name": "b", "description": "B"}}, "wrong"],
    )
    first = {"role": "assistant", "thinking": "Hm.\nWait.", "reasoning": "Hm.", "tool_calls": calls[:1]}
    second = {"role": "assistant", "tool_calls": calls[1:]}
    assert messages[:5] == [user, first, results[1], second, results[0]]
    assert messages[5:] == [first, results[1]]
    assert [tool["function"]["description"] for tool in tools[:2]] == ["", "B"]
    assert tools[2] == "wrong"
    plain = [user, {"role": "assistant", "content": "5", "thinking": "Hm."}]
    assert HARMONY.adapted(plain, []) == (plain, [])


def test_harmony_prompts() -> None:
    format = reasoning_format("openai_gptoss")
    assert format.thinks("<|start|>user<|message|>hi<|end|><|start|>assistant")
    prompt = "<|start|>assistant<|channel|>final<|message|>Well"
    assert not format.thinks(prompt)
    assert events_of(format.parser(prompt), [", hi"]) == [Content(", hi")]
