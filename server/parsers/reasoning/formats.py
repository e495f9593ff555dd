"""Reasoning formats delimited by tags, one table entry per format, grouped by model family.

Start and end tags default to <think> and </think>. `starts_thinking`: the template opens the reasoning, so that the
output often lacks the start tag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from pagoda.server.parsers.parser import Content, DelimiterSet, Event, Parser, Reasoning

MAX_SPACE: Final = 256
"""Maximum number of white-space characters stripped around a tag; bounds how much text is buffered."""


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """Reasoning from one of `starts` to one of `ends`, with white space around both tags stripped.

    A start tag counts only at the beginning of the output or right after an end tag (which resumes the reasoning); in
    the middle of content it is content. An end tag without a start is dropped.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    starts_thinking: bool = False  # Output starts inside the reasoning unless the prompt closed it.
    turn_starts: tuple[str, ...] = ("<|im_start|>assistant",)  # Texts that open the assistant turn in the prompt.
    content_tags: tuple[str, str] | None = None  # Optional tags around the content, which are stripped.
    call_starts: tuple[str, ...] = ()  # A tool call that starts with one of these also ends the reasoning.
    special_tokens: bool = False  # The tags are special tokens, so they count in the middle of content, too.

    def thinks(self, prompt: str) -> bool:
        """Return whether output for this prompt starts inside the reasoning.

        Decided by what the prompt contains of the assistant turn. If no turn start is recognized (a template of
        another model), only a tag at the very end of the prompt counts, since users may write tags.
        """
        start = max((prompt.rfind(turn) + len(turn) for turn in self.turn_starts if turn in prompt), default=-1)
        turn = prompt[start:].strip() if start >= 0 else self._last_tag(prompt.rstrip())
        if not turn:
            return self.starts_thinking
        return turn.startswith(self.starts) and not any(end in turn for end in self.ends)

    def _last_tag(self, prompt: str) -> str:
        return next((tag for tag in (*self.starts, *self.ends) if prompt.endswith(tag)), "")

    def parser(self, prompt: str) -> Parser:
        return TaggedParser(self, self.thinks(prompt))


@cache
def _delimiters(texts: tuple[str, ...]) -> DelimiterSet:
    return DelimiterSet(texts)


class TaggedParser:
    """State machine for one output. Each state consumes what it can of the unread text and sets the next state."""

    __slots__ = (
        "_content_end",
        "_ends",
        "_format",
        "_has_reasoning",
        "_has_text",
        "_starts_thinking",
        "_state",
        "_tags",
        "_unread",
    )

    def __init__(self, format: TaggedFormat, starts_thinking: bool) -> None:
        self._format = format
        self._starts_thinking = starts_thinking
        self._ends = _delimiters((*format.ends, *format.call_starts))
        self._tags = _delimiters((*format.starts, *format.ends) if format.special_tokens else ())
        self._content_end = _delimiters(format.content_tags[1:] if format.content_tags else ())
        self._unread = ""
        self._has_text = False  # Text other than white space was emitted since the last tag.
        self._has_reasoning = False  # Reasoning was emitted before; more of it starts on a new line.
        self._state: Callable[[bool], list[Event]] = self._before

    def feed(self, text: str) -> list[Event]:
        self._unread += text
        return self._run(False)

    def finish(self) -> list[Event]:
        return self._run(True)

    def _run(self, final: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            state = self._state
            length = len(self._unread)
            events += state(final)
            if not self._unread or (self._state == state and len(self._unread) == length):
                return events

    def _before(self, final: bool) -> list[Event]:
        """At the beginning: expect a start tag or a superfluous end tag."""
        format = self._format
        tag = self._next_tag(format.starts if self._starts_thinking else (*format.starts, *format.ends), final)
        if tag is None:
            return []
        if tag in format.ends:
            self._skip(tag)
            self._state = self._after
        elif tag or self._starts_thinking:
            self._skip(tag)
            self._state = self._reasoning
        else:
            self._state = self._before_content
        return []

    def _reasoning(self, final: bool) -> list[Event]:
        return self._text_until(self._ends, Reasoning, self._after, final)

    def _before_content(self, final: bool) -> list[Event]:
        """No reasoning: expect content or its opening tag."""
        tags = self._format.content_tags
        tag = self._next_tag(tags[:1] if tags else (), final)
        if tag is None:
            return []
        if tag:
            self._skip(tag)
        self._state = self._tagged_content if tag else self._content
        return []

    def _after(self, final: bool) -> list[Event]:
        """After an end tag: reasoning may resume or be closed again, else content follows."""
        starts = self._format.starts
        ends = self._format.ends
        content_tags = self._format.content_tags
        tag = self._next_tag((*starts, *ends, *(content_tags[:1] if content_tags else ())), final)
        if tag is None:
            return []
        self._skip(tag)
        if tag in starts:
            self._state = self._reasoning
        elif tag not in ends:
            self._state = self._tagged_content if tag else self._content
        return []

    def _tagged_content(self, final: bool) -> list[Event]:
        return self._text_until(self._content_end, Content, self._content, final)

    def _text_until(
        self,
        ends: DelimiterSet,
        kind: type[Content] | type[Reasoning],
        then: Callable[[bool], list[Event]],
        final: bool,
    ) -> list[Event]:
        """Emit text up to one of `ends`, stripped. Trailing white space is buffered until other text follows."""
        text, end, rest = ends.split(self._unread, final=final)
        text = text if self._has_text else text.lstrip()
        emitted = text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]
        resumes = kind is Reasoning and self._has_reasoning and not self._has_text
        self._has_reasoning = self._has_reasoning or (kind is Reasoning and bool(emitted))
        if end:
            self._unread = (end if end in self._format.call_starts else "") + rest
            self._state = then
            self._has_text = False
        else:
            self._unread = ("" if final else text[len(emitted) :]) + rest
            self._has_text = self._has_text or bool(emitted)
        return [kind("\n" + emitted if resumes else emitted)] if emitted else []

    def _content(self, final: bool) -> list[Event]:
        """Emit content: up to the next tag if tags are special tokens, else all of it."""
        text = self._unread
        tag = ""
        self._unread = ""
        if self._format.special_tokens:
            text, tag, self._unread = self._tags.split(text, final=final)
        if tag:
            self._state = self._reasoning if tag in self._format.starts else self._after
        return [Content(text)] if text else []

    def _next_tag(self, tags: tuple[str, ...], final: bool) -> str | None:
        """Return which of `tags` follows after white space; "": none of them; None: undecided, needs more text."""
        text = self._unread.lstrip()
        if len(self._unread) - len(text) > MAX_SPACE:
            return ""
        tag = next((tag for tag in tags if text.startswith(tag)), None)
        if tag is not None:
            return tag
        if not final and (not text or any(tag.startswith(text) for tag in tags)):
            return None
        return ""

    def _skip(self, tag: str) -> None:
        """Drop the next white space and `tag`."""
        space = len(self._unread) - len(self._unread.lstrip())
        self._unread = self._unread[min(space, MAX_SPACE) + len(tag) :]


class PlainParser:
    """Emits all text as content, after `prefix`."""

    __slots__ = ("_prefix",)

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        text = self._prefix + text
        self._prefix = ""
        return [Content(text)]

    def finish(self) -> list[Event]:
        return []


# A tool call also ends the reasoning. Models quote the tags of their instructions while they reason, so a tag counts
# only together with what follows it in a call.
_JSON_CALLS: Final = ("<tool_call>\n{", "<tool_call>{")
_XML_CALLS: Final = ("<tool_call>\n<function=", "<tool_call><function=")

# Cohere Command A Reasoning: special tokens around reasoning and answer.
COMMAND3: Final = TaggedFormat(
    starts=("<|START_THINKING|>",),
    ends=("<|END_THINKING|>",),
    turn_starts=("<|CHATBOT_TOKEN|>",),
    content_tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    call_starts=("<|START_ACTION|>",),
    special_tokens=True,
)
COMMAND4: Final = replace(COMMAND3, content_tags=("<|START_TEXT|>", "<|END_TEXT|>"))

# DeepSeek V3.1 on: the template opens or closes the reasoning. R1, its distillations and QwQ (ChatML) always reason.
V3: Final = TaggedFormat(
    turn_starts=("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>", "<|im_start|>assistant"),
    call_starts=(
        "<｜tool▁calls▁begin｜>",
        "<｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        "<｜DSML｜ calls>",
    ),
)
R1: Final = replace(V3, starts_thinking=True)

# ERNIE 4.5 Thinking: the answer may be tagged, too.
ERNIE45: Final = TaggedFormat(
    starts_thinking=True,
    turn_starts=("<|im_start|>assistant", "\nAssistant: "),
    content_tags=("<response>", "</response>"),
    call_starts=_JSON_CALLS,
)

# Gemma 4: a channel of special tokens. After tool results the model continues the same turn.
GEMMA4: Final = TaggedFormat(
    starts=("<|channel>thought",),
    ends=("<channel|>",),
    turn_starts=("<|turn>model", "<tool_response|>"),
    call_starts=("<|tool_call>",),
    special_tokens=True,
)

# GLM 4.5 and later, and Ling 3: reason unless the template inserts an empty reasoning block.
GLM45: Final = TaggedFormat(
    turn_starts=("<|assistant|>", "<role>ASSISTANT</role>", "<|im_start|>assistant"), call_starts=("<tool_call>",)
)

# IBM Granite: 3.2 marks reasoning and response in words, 3.3 has tags for both, 4.2 for the reasoning only.
GRANITE: Final = TaggedFormat(
    starts=("Here is my thought process:", "Here's my thought process:", "<think>"),
    ends=("Here is my response:", "Here's my response:", "</think>"),
    turn_starts=("<|end_of_role|>",),
    content_tags=("<response>", "</response>"),
    call_starts=("<|tool_call|>",),
)
GRANITE_THINKING: Final = TaggedFormat(turn_starts=GRANITE.turn_starts, call_starts=_XML_CALLS)

# Holo2: reasons unless the template closes the reasoning.
HOLO2: Final = TaggedFormat(starts_thinking=True, call_starts=_JSON_CALLS)

# Hunyuan A13B: tagged answers. Hy3: the published weights use tags of their own.
HUNYUAN_A13B: Final = TaggedFormat(
    turn_starts=("<|extra_0|>", "<｜hy_Assistant｜>"), content_tags=("<answer>", "</answer>")
)
HY_V3: Final = TaggedFormat(
    starts=("<think>", "<think:opensource>"),
    ends=("</think>", "</think:opensource>"),
    turn_starts=HUNYUAN_A13B.turn_starts,
)

# K2 Horizon: a tag for each of three reasoning efforts.
K2_HORIZON: Final = TaggedFormat(
    starts=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
    ends=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
    call_starts=("<ifm|tool_calls>",),
)

# Kimi K2 Thinking and K2.5.
KIMI_K2: Final = TaggedFormat(
    turn_starts=("<|im_assistant|>assistant<|im_middle|>",), call_starts=("<|tool_calls_section_begin|>",)
)

# Kimi K3: XML-like elements of special tokens around reasoning and answer; the message's closing tag is dropped.
KIMI_K3: Final = TaggedFormat(
    starts=("<|open|>think<|sep|>",),
    ends=("<|close|>think<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    turn_starts=('<|open|>message role="assistant"<|sep|>',),
    content_tags=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    call_starts=("<|open|>tools<|sep|>",),
    special_tokens=True,
)

# MiniMax M2: the template opens the reasoning. M3: the template opens or closes it, or leaves it to the model.
MINIMAX_M2: Final = TaggedFormat(
    starts_thinking=True,
    turn_starts=("]~b]ai",),
    call_starts=("<minimax:tool_call>\n<invoke", "<minimax:tool_call><invoke"),
)
MINIMAX_M3: Final = TaggedFormat(
    starts=("<mm:think>",),
    ends=("</mm:think>",),
    turn_starts=("]~b]ai",),
    call_starts=("]<]minimax[>[<tool_call>",),
)

# Mistral's reasoning models (Magistral, Ministral): special tokens.
MISTRAL: Final = TaggedFormat(
    starts=("[THINK]",),
    ends=("[/THINK]",),
    turn_starts=("[/INST]", "[/TOOL_RESULTS]"),
    call_starts=("[TOOL_CALLS]",),
    special_tokens=True,
)

# OLMo 3 Think: the template opens the reasoning; the tags are ordinary text.
OLMO3: Final = TaggedFormat()

# Poolside Laguna: the template opens or closes the reasoning.
POOLSIDE_V1: Final = TaggedFormat(turn_starts=("<assistant>",), call_starts=("<tool_call>",))

# Qwen3 and later, MiMo, Nemotron 3: templates of reasoning-only models open the reasoning.
QWEN3: Final = TaggedFormat(call_starts=(*_JSON_CALLS, *_XML_CALLS))

# Seed-OSS: its notes on the thinking budget are part of the reasoning.
SEED_OSS: Final = TaggedFormat(
    starts=("<seed:think>",),
    ends=("</seed:think>",),
    turn_starts=("<seed:bos>assistant",),
    call_starts=("<seed:tool_call>\n<function=", "<seed:tool_call><function="),
)

# Step3 and Step 3.5.
STEP3: Final = TaggedFormat(
    starts_thinking=True, turn_starts=("<|BOT|>assistant",), call_starts=("<｜tool_calls_begin｜>",)
)
STEP3P5: Final = TaggedFormat(starts_thinking=True, call_starts=_XML_CALLS)


class AppendThink:
    """MiniMax M2 with the reasoning left in the content and its start tag restored, for clients that send it back."""

    starts: tuple[str, ...] = MINIMAX_M2.starts
    ends: tuple[str, ...] = MINIMAX_M2.ends

    def thinks(self, prompt: str) -> bool:
        return MINIMAX_M2.thinks(prompt)

    def parser(self, prompt: str) -> Parser:
        return PlainParser("<think>" if self.thinks(prompt) else "")


APPEND_THINK: Final = AppendThink()


class Identity:
    """No reasoning: all text is content."""

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def thinks(self, _prompt: str) -> bool:
        return False

    def parser(self, _prompt: str) -> Parser:
        return PlainParser()


IDENTITY: Final = Identity()
