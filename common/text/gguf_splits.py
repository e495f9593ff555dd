"""The pre-tokenizer rules that GGUF files name in `tokenizer.ggml.pre`: how text is split before byte pairs are merged.

Each rule is the expression of the model family's own tokenizer.json. Names: llama.cpp's vocabulary loader
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import Regex, pre_tokenizers

# Parts of the expressions.
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD: Final = r"[^\r\n\p{L}\p{N}]?"
_WORDS: Final = rf"{_LEAD}\p{{L}}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATH_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_HAN: Final = "&&[^\\p{Han}]]"
_IDEOGRAPHS: Final = "[一-龥぀-ゟ゠-ヿ]+"
_ALL_BUT_SENTENCE_SIGNS: Final = " ?[^(\\s|.,!?…。，、।۔،)]+"
_ASIAN: Final = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_CASED_LETTERS: Final = "[{}]+".format(
    re.sub(
        "[0-9A-F]+",
        r"\\x{\g<0>}",
        "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
        "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
        "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
        "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
        "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
        "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
        "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
        "1E900-1E943",
    ).replace(" ", "")
)
"""Letters that have a case, as of some Unicode version."""
_DEEPSEEK_WORDS: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)


def _cased(contractions: str, digits: str, signs: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Words of capitals then small letters, each with its contraction."""
    words = rf"{_LEAD}{upper}*{lower}+{contractions}|{_LEAD}{upper}+{lower}*{contractions}"
    return rf"{words}|{digits}|{signs}|{_ENDS}"


GPT2: Final = ("gpt2",)
"""The library's own rule of GPT-2."""
SINGLE_DIGITS: Final = (r"\p{N}", "gpt2")
LLAMA3: Final = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_ENDS}",)
QWEN2: Final = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_ENDS}",)
GPT4O: Final = (_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", _PATH_SIGNS),)
_DEEPSEEK3: Final = (r"\p{N}{1,3}", _IDEOGRAPHS, rf"{_DEEPSEEK_WORDS}[\r\n]*|{_ENDS}")
_BAILING: Final = (
    rf"'(?i:[sdmt]|ll|ve|re)|{_LEAD}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_LINES: Final = r"[^\n]+|\n+"

SPLITS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), GPT2),
    **dict.fromkeys(("exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe"), GPT2),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), SINGLE_DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), SINGLE_DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), LLAMA3),
    **dict.fromkeys(("midm-2.0", "jina-v5-nano", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "kormo", "f2llmv2"), QWEN2),
    **dict.fromkeys(("grok-2", "solar-open"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"), GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_ALL_BUT_SENTENCE_SIGNS,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", *GPT4O)),
    "qwen35": (rf"{_CONTRACTIONS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS}",),
    "tekken": (_cased("", r"\p{N}", _PATH_SIGNS),),
    "kimi-k2": (
        r"\p{Han}+",
        _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", _SIGNS, _UPPER[:-1] + _NO_HAN, _LOWER[:-1] + _NO_HAN),
    ),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED_LETTERS}",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", "gpt2", "[0-9][0-9][0-9]"),
    "viking": (_ALL_BUT_SENTENCE_SIGNS, r"\p{N}"),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "seed-coder": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_ENDS}",),
    "ufakzeka": (rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_ENDS}",),
    "minicpm5": (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_SIGNS}|{_ENDS}"),
    "laguna": (_LINES, *QWEN2),
    "exaone-moe": (
        rf"{_CONTRACTIONS}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "jais-2": (
        rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
        + "|".join(rf"\s{{{run}}}(?!\S)" for run in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
        + r"|\s",
    ),
    "afmoe": (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, rf"{_DEEPSEEK_WORDS}[\r\n]*|{_ENDS}"),
    "spark2_5": (
        r"\p{N}{1,3}",
        _IDEOGRAPHS,
        rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    ),
    "youtu": (
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _cased(f"{_CONTRACTIONS}?", r"\p{N}", _PATH_SIGNS),
    ),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        "([\\t\\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        "gpt2",
    ),
}
"""`tokenizer.ggml.pre` -> expressions, applied in turn to the pieces that the one before leaves; "gpt2" is GPT-2's."""

RAW_TEXT: Final = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""Rules of merged pairs over UTF-8 text with marked spaces and byte tokens, instead of GPT-2's byte alphabet."""

WHOLE_PIECES: Final = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"}
)
"""Rules under which a piece that is itself a token skips merging, and bos is added unless the file overrides it."""
IGNORE_MERGES: Final = WHOLE_PIECES | {"minicpm5", "youtu", "granite-embed-multi-97m"}
ADD_BOS: Final = WHOLE_PIECES | {"chameleon"}


def splitter(rule: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer of a rule of `SPLITS`, byte alphabet included."""
    if rule == GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    # GPT-2's rule must see the text before the alphabet replaces it, so its expression stands in for it here.
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(_GPT2_EXPRESSION if expression == "gpt2" else expression), behavior="isolated")
        for expression in rule
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


_GPT2_EXPRESSION: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
