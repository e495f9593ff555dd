"""Kimi K3: elements of special tokens hold the thinking and the answer; what closes the message is no content."""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

KIMI_K3: Final = TaggedFormat(
    starts=("<|open|>think<|sep|>",),
    ends=("<|close|>think<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    turns=('<|open|>message role="assistant"<|sep|>',),
    wrapping=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    calls=("<|open|>tools<|sep|>",),
    control=True,
)
