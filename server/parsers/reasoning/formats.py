"""Reasoning formats delimited by tags, one table entry per format, grouped by model family.

Start and end tags default to <think> and </think>. `starts_thinking`: the template opens the reasoning, so that the
output often lacks the start tag.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagoda.server.parsers.parser import Parser
from pagoda.server.parsers.reasoning.tagged import PlainParser, TaggedFormat

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
