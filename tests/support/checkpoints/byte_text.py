"""A real Tokenizer whose tokens are the 256 bytes, and 256 for the end of a text."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from pagoda.common.text.tokenizer import Tokenizer

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """Token id = byte; "<eos>" is 256. The template: names of tools, `role: content;` per message, `assistant:`."""
    backend = tokenizers.Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(_letters())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return Tokenizer(backend, {"eos_token": "<eos>"}, {"default": template})


def framed_tokenizer() -> Tokenizer:
    """As byte_tokenizer, but each text ends with "<eos>", and tokens of a pair's second text are of type 1."""
    found = byte_tokenizer()
    found.backend.post_processor = processors.TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", EOS)]
    )
    return found


def _letters() -> list[str]:
    """How byte-level BPE spells each byte: printable ones as themselves, the others from code point 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
