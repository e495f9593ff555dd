"""Cohere Command A, reasoning: special tokens around the thinking and around the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagoda.server.parsers.parser import Parser
from pagoda.server.parsers.reasoning.tagged import AllContent, TaggedFormat

COMMAND3: Final = TaggedFormat(
    starts=("<|START_THINKING|>",),
    ends=("<|END_THINKING|>",),
    turns=("<|CHATBOT_TOKEN|>",),
    wrapping=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    calls=("<|START_ACTION|>",),
    control=True,
)
COMMAND4: Final = replace(COMMAND3, wrapping=("<|START_TEXT|>", "<|END_TEXT|>"))


# DeepSeek: R1 and its distillations, which always think, and V3.1 on, whose template says whether they do.

_TURNS: Final = (
    "<｜Assistant｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁end｜>",
    "<|im_start|>assistant",  # QwQ, which is read as R1 is
)
_CALLS: Final = (
    "<｜tool▁calls▁begin｜>",
    "<｜DSML｜function_calls>",
    "<｜DSML｜tool_calls>",
    "<｜DSML｜ calls>",
)

R1: Final = TaggedFormat(unasked=True, turns=_TURNS, calls=_CALLS)
V3: Final = TaggedFormat(turns=_TURNS, calls=_CALLS)


# Gemma 4: a channel of special tokens holds the thinking.
#
# After the results of tools the model goes on in the same turn.

GEMMA4: Final = TaggedFormat(
    starts=("<|channel>thought",),
    ends=("<channel|>",),
    turns=("<|turn>model", "<tool_response|>"),
    calls=("<|tool_call>",),
    control=True,
)


# GLM-4.5 and later, which think unless the template shows an empty thinking; Ling 3 writes as they do.

GLM45: Final = TaggedFormat(
    turns=("<|assistant|>", "<role>ASSISTANT</role>", "<|im_start|>assistant"), calls=("<tool_call>",)
)


# Hunyuan A13B, which puts its answer between tags too, and Hy3, whose published weights have tags of their own.

_TURNS_HUNYUAN: Final = ("<|extra_0|>", "<｜hy_Assistant｜>")

HUNYUAN_A13B: Final = TaggedFormat(turns=_TURNS_HUNYUAN, wrapping=("<answer>", "</answer>"))
HY_V3: Final = TaggedFormat(
    starts=("<think>", "<think:opensource>"), ends=("</think>", "</think:opensource>"), turns=_TURNS_HUNYUAN
)


# K2 Horizon, which has tags for each of three efforts of thinking.

_EFFORTS: Final = ("think", "think_fast", "think_faster")

K2_HORIZON: Final = TaggedFormat(
    starts=tuple(f"<ifm|{effort}>" for effort in _EFFORTS),
    ends=tuple(f"</ifm|{effort}>" for effort in _EFFORTS),
    calls=("<ifm|tool_calls>",),
)


# Kimi K2, thinking, and K2.5.

KIMI_K2: Final = TaggedFormat(
    turns=("<|im_assistant|>assistant<|im_middle|>",), calls=("<|tool_calls_section_begin|>",)
)


# Kimi K3: elements of special tokens hold the thinking and the answer; what closes the message is no content.

KIMI_K3: Final = TaggedFormat(
    starts=("<|open|>think<|sep|>",),
    ends=("<|close|>think<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    turns=('<|open|>message role="assistant"<|sep|>',),
    wrapping=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    calls=("<|open|>tools<|sep|>",),
    control=True,
)


# MiniMax M2: the template opens the thinking. The second format leaves it in the content, with its start put back.

MINIMAX_M2: Final = TaggedFormat(
    unasked=True, turns=("]~b]ai",), calls=("<minimax:tool_call>\n<invoke", "<minimax:tool_call><invoke")
)


class AppendThink:
    """Thinking as content: what clients want that show it to the model again, as MiniMax M2 likes it."""

    starts: tuple[str, ...] = MINIMAX_M2.starts
    ends: tuple[str, ...] = MINIMAX_M2.ends

    def thinks(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within the thinking."""
        return MINIMAX_M2.thinks(prompt)

    def parser(self, prompt: str) -> Parser:
        """A reader that takes everything for content."""
        return AllContent("<think>" if self.thinks(prompt) else "")


APPEND_THINK: Final = AppendThink()


# MiniMax M3: the template opens or closes the thinking, or leaves it to the model.

MINIMAX_M3: Final = TaggedFormat(
    starts=("<mm:think>",), ends=("</mm:think>",), turns=("]~b]ai",), calls=("]<]minimax[>[<tool_call>",)
)


# Mistral's reasoning models (Magistral, Ministral): special tokens open and close the thinking.

MISTRAL: Final = TaggedFormat(
    starts=("[THINK]",),
    ends=("[/THINK]",),
    turns=("[/INST]", "[/TOOL_RESULTS]"),
    calls=("[TOOL_CALLS]",),
    control=True,
)


# Olmo 3 Think: the template opens the thinking; the tags are ordinary text.

OLMO3: Final = TaggedFormat()


# Poolside's Laguna: the template opens or closes the thinking.

POOLSIDE_V1: Final = TaggedFormat(turns=("<assistant>",), calls=("<tool_call>",))


# Seed-OSS. Its remarks on the thinking budget stand within the thinking and are part of it.

SEED_OSS: Final = TaggedFormat(
    starts=("<seed:think>",),
    ends=("</seed:think>",),
    turns=("<seed:bos>assistant",),
    calls=("<seed:tool_call>\n<function=", "<seed:tool_call><function="),
)


# Texts with which tool calls begin, for formats in which a call ends the thinking.
#
# Models quote the tags of their instructions while they think: only a tag with what follows it in a call is a call.

JSON_CALLS: Final = ("<tool_call>\n{", "<tool_call>{")
XML_CALLS: Final = ("<tool_call>\n<function=", "<tool_call><function=")


# ERNIE 4.5, thinking: the template opens the thinking; the answer may stand between tags too.

ERNIE45: Final = TaggedFormat(
    unasked=True,
    turns=("<|im_start|>assistant", "\nAssistant: "),
    wrapping=("<response>", "</response>"),
    calls=JSON_CALLS,
)


# IBM Granite: 3.2 says in words where its thinking and its response begin, 3.3 has tags for both, 4.2 for thinking.

_TURNS_GRANITE: Final = ("<|end_of_role|>",)

GRANITE: Final = TaggedFormat(
    starts=("Here is my thought process:", "Here's my thought process:", "<think>"),
    ends=("Here is my response:", "Here's my response:", "</think>"),
    turns=_TURNS_GRANITE,
    wrapping=("<response>", "</response>"),
    calls=("<|tool_call|>",),
)
THINKING: Final = TaggedFormat(turns=_TURNS_GRANITE, calls=XML_CALLS)


# Holo2, which always thinks unless the template shows that the thinking is over.

HOLO2: Final = TaggedFormat(unasked=True, calls=JSON_CALLS)


# Qwen3 and its successors, and others that write as they do: MiMo, Nemotron 3.
#
# Those that only think have a template that opens the thinking.

QWEN3: Final = TaggedFormat(calls=(*JSON_CALLS, *XML_CALLS))


# Step3 and 3.5: the template opens the thinking.

STEP3: Final = TaggedFormat(unasked=True, turns=("<|BOT|>assistant",), calls=("<｜tool_calls_begin｜>",))
STEP3P5: Final = TaggedFormat(unasked=True, calls=XML_CALLS)
