import json
import random
import string
import struct
import sys
from itertools import pairwise

import pytest
import tokenizers
from support.suite.rows import each_row
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from pagoda.common.errors import ModelError
from pagoda.common.text.gguf_merges import merges_from_scores
from pagoda.common.text.gguf_splits import SPLITS, splitter
from pagoda.common.text.gguf_tokenizer import TokenType, read_gguf
from pagoda.common.text.tokenizer import Tokenizer, load_tokenizer
from pagoda.common.weights.gguf.file import GgufFile

CORPUS = [
    "",
    "Hello world! It's 2024; we'll see.",
    "  leading, and   runs \t\t of  space \n\n\n end  ",
    "def f(x: int) -> list[str]:\n    '''doc'''\n    return [str(i) for i in range(x)]  # 100%\n",
    "1 22 333 4444 55555 3.14159 1,000,000 0xFF 2²",
    "Zürich naïve façade Œuvre ǅ ß ﬁ",
    "日本語のテキスト、中文字符。한국어 עברית العربية हिन्दी ไทย",
    "👩‍👩‍👧 🏳️‍🌈 🤷🏽‍♀️ 🇨🇭 ☃️",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name> <file_sep>x",
    "<|im_start|",
    "\x00 \x7f \u200b \u00a0 \ufeff \u2028",
    "https://example.org/a?b=c&d=%20 user@host ~/.config/x_y-z.toml",
    "don't DON'T we're I'll y'all 'tis",
    "a" * 300 + "é" * 50,
]


def random_texts(count, seed=0):
    choose = random.Random(seed)
    letters = string.ascii_letters + string.punctuation + " \n\t" * 8 + "éß日本👩\u200d"
    return ["".join(choose.choice(letters) for _ in range(choose.randrange(80))) for _ in range(count)]


@pytest.fixture(scope="module")
def real(model_file):
    return load_tokenizer(model_file)


@pytest.mark.model
def test_real_file_has_transformers_ids(real, model_file):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, config = get_gguf_tokenizer(str(model_file))
    theirs, _ = convert_gguf_tokenizer(architecture, vocabulary)
    for text in CORPUS + random_texts(300):
        ids = real.encode(text)
        assert ids == theirs.encode(text).ids, text
        assert real.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False) == text
    assert (real.vocab_size, real.bos_token_id, real.eos_token_id) == (theirs.get_vocab_size(), 1, 2)
    assert real.special_tokens == {role: config[role] for role in real.special_tokens}
    assert real.special_ids == theirs.get_added_tokens_decoder().keys()
    assert real.chat_template == config["chat_template"]


@pytest.mark.model
def test_saved_tokenizer_is_read_back_equal(real, tmp_path):
    real.save(tmp_path)
    again = load_tokenizer(tmp_path)
    for text in CORPUS + random_texts(50):
        assert again.encode(text) == real.encode(text), text
    assert (again.special_tokens, again.special_ids) == (real.special_tokens, real.special_ids)
    assert again.chat_templates == real.chat_templates


@pytest.mark.model
def test_digits_are_split_before_runs_of_spaces(real):
    """The file's rule is "smollm": digits first. transformers drops the rule, and splits a run of spaces before one."""
    assert [real.token_text(i) for i in real.encode("a  57\n\n8½")] == ["a", "  ", "5", "7", "\n\n", "8", "½"]


@pytest.mark.model
def test_tokenizer_from_metadata_that_is_already_open(model_file, real):
    again = load_tokenizer(model_file, gguf_metadata=GgufFile(model_file).metadata)
    assert again.encode(CORPUS[1]) == real.encode(CORPUS[1])


def byte_level(pre=None, **extra):
    tokens = [*(chr(code) for code in range(33, 127)), "Ġ", "he", "ll", "hell", "Ġhell", "10", "<s>", "</s>", "<tool>"]
    types = [TokenType.NORMAL] * (len(tokens) - 3) + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "Ġ hell", "1 0"],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return {**metadata, **{f"tokenizer.{key}": value for key, value in extra.items()}}


def pieces(metadata, text):
    parts = read_gguf(metadata)
    return parts.backend.encode(text).tokens


@each_row(
    ("pre", "expected"),
    [
        (None, ["hell", "o", "Ġhell", "Ġ", "10", "0"]),
        ("gpt-2", ["hell", "o", "Ġhell", "Ġ", "10", "0"]),
        ("smollm", ["hell", "o", "Ġhell", "Ġ", "1", "0", "0"]),
        ("qwen2", ["hell", "o", "Ġhell", "Ġ", "1", "0", "0"]),
        ("llama-bpe", ["<s>", "hell", "o", "Ġhell", "Ġ", "10", "0"]),
    ],
)
def test_splitting_rules(pre, expected):
    assert pieces(byte_level(pre), "hello hell 100") == expected


@each_row("rule", sorted(SPLITS))
def test_every_splitting_rule_preserves_the_text(rule):
    backend = read_gguf(byte_level(rule)).backend
    for text in ["hello hell 100", "It's  A\n\nhELL/he(ll)!\n", "<tool>x</s>"]:
        spaced = text.replace("\n", " ")
        assert backend.decode(backend.encode(spaced, add_special_tokens=False).ids, skip_special_tokens=False) == spaced


def test_splitting_expressions_are_those_of_transformers():
    """The splitting expressions equal those of transformers."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as THEIRS

    common = SPLITS.keys() & THEIRS.keys()
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o"} <= common
    assert {rule: SPLITS[rule] for rule in common} == {rule: (THEIRS[rule],) for rule in common}


LINE = "DON'T 1234567 日本x,Foo/\n\n  é $a"
PIECES = {
    "gpt-2": "DON|'|T| 1234567| 日本x|,|Foo|/|\n\n | é| $|a",
    "smollm": "DON|'|T| |1|2|3|4|5|6|7| 日本x|,|Foo|/|\n\n | é| $|a",
    "llama-bpe": "DON|'T| |123|456|7| 日本x|,Foo|/\n\n| | é| $|a",
    "glm4": "DON|'T| |123|456|7| 日本x|,Foo|/\n\n| | é| $|a",
    "qwen2": "DON|'T| |1|2|3|4|5|6|7| 日本x|,Foo|/\n\n| | é| $|a",
    "gpt-4o": "DON'T| |123|456|7| 日本x|,Foo|/\n\n| | é| $|a",
    "tekken": "DON|'T| |1|2|3|4|5|6|7| 日本x|,Foo|/\n\n| | é| $|a",
    "kimi-k2": "DON'T| |123|456|7| |日本|x|,Foo|/\n\n| | é| $|a",
    "deepseek-v3": "DON|'T| |123|456|7| |日本|x|,Foo|/\n\n| | é| $|a",
    "deepseek-llm": "DON|'|T| |1234567| |日本|x|,|Foo|/|\n|\n| | é| $|a",
    "deepseek-coder": "DON|'|T| |1|2|3|4|5|6|7| |日本|x|,|Foo|/|\n|\n| | é| $|a",
    "falcon": "DON|'|T| |123|456|7| 日本x|,|Foo|/|\n\n | é| |$|a",
    "bloom": "DON'T| 1234567| 日本x|,|Foo/|\n\n | é| $a",
    "viking": "DON'T| |1|2|3|4|5|6|7| 日本x|,|Foo/|\n\n | é| $a",
    "tiny_aya": "DON'T| |1|234|567| 日本x|,Foo|/\n\n| | é| $|a",
    "afmoe": "DON|'T| |1|234|567| |日本|x|,Foo|/\n\n| | é| $|a",
    "superbpe": "DON'T |1|234|567| 日本x,Foo/\n\n  é $a",
    "bailingmoe": "DON|'T| |1|2|3|4|5|6|7| 日本x|,Foo|/\n\n| | é| $|a",
    "seed-coder": "DON|'T| |1|2|3|4|5|6|7| 日本x|,Foo|/|\n\n| | é| $|a",
    "ufakzeka": "DON|'T| |1|2|3|4|5|6|7| 日本x|,Foo|/\n\n| | é| $|a",
    "minicpm5": "DON|'T| |123|456|7| 日本x|,Foo|/\n\n| | é| $|a",
    "laguna": "DON|'T| |1|2|3|4|5|6|7| 日本x|,Foo|/|\n\n| | é| $|a",
    "exaone-moe": "DON|'T| |1|2|3|4|5|6|7| 日本x|,Foo|/\n|\n| | é| $|a",
    "jais-2": "DON|'T| |123|456|7| 日本x|,Foo|/\n\n| | é| $|a",
    "spark2_5": "DON|'T| |1|2|3|4|5|6|7| |日本|x|,Foo|/|\n|\n| | é| $|a",
    "youtu": "DON'T| |1|2|3|4|5|6|7| |日本|x|,Foo|/\n\n| | é| $|a",
    "chameleon": "DON|'|T| |1|2|3|4|5|6|7| 日本x|,|Foo|/|\n|\n|  |é| |$|a",
    "qwen35": "DON|'T| |1|2|3|4|5|6|7| 日本x|,Foo|/\n\n| | é| $|a",
}


@each_row("rule", sorted(PIECES))
def test_splitting_rules_on_digits_ideographs_and_line_ends(rule):
    """Worked out by hand from the expressions of llama.cpp's vocabulary loader; every distinct rule is here."""
    decoder = decoders.ByteLevel()
    split = splitter(SPLITS[rule]).pre_tokenize_str(LINE)
    assert "|".join(decoder.decode([piece]) for piece, _ in split) == PIECES[rule]


def test_every_distinct_splitting_rule_is_worked_out():
    assert set(SPLITS.values()) == {SPLITS[rule] for rule in PIECES}


def test_special_and_user_defined_tokens_stay_whole():
    tokenizer = Tokenizer(read_gguf(byte_level()).backend)
    ids = tokenizer.encode("hell<tool></s>")
    assert [tokenizer.token_text(i) for i in ids] == ["hell", "<tool>", "</s>"]
    assert tokenizer.decode(ids) == "hell<tool>"


def test_bos_and_eos_are_added_as_the_metadata_states():
    both = byte_level(**{"ggml.add_bos_token": True, "ggml.add_eos_token": True})
    assert pieces(both, "he") == ["<s>", "he", "</s>"]
    assert pieces(byte_level(), "he") == ["he"]
    assert pieces(byte_level("llama-bpe", **{"ggml.add_bos_token": False}), "he") == ["he"]


def test_chat_templates_by_name():
    metadata = byte_level(chat_template="d", **{"chat_template.tool_use": "t"})
    assert read_gguf(metadata).chat_templates == {"default": "d", "tool_use": "t"}


def sentencepiece(**extra):
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    merged = ["▁h", "he", "ll", "▁he", "▁hell", "lo", "▁hello", "▁w", "or", "▁wor", "ld"]
    letters = list("▁helowrd日")
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *merged, *letters]
    plain = len(merged) + len(letters)
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(plain)],
        "tokenizer.ggml.token_type": types + [TokenType.NORMAL] * plain,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.{key}": value for key, value in extra.items()},
    }


def greedy_pieces(metadata, text):
    """Sentencepiece's definition, naively: again and again merge the pair whose union scores best, leftmost first."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not unions:
            return pieces
        at = min(unions)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_merge_order_follows_the_scores():
    metadata = sentencepiece()
    backend = read_gguf(metadata).backend
    choose = random.Random(1)
    for _ in range(300):
        text = "".join(choose.choice("helowrd ") for _ in range(choose.randrange(1, 30)))
        assert backend.encode(text, add_special_tokens=False).tokens == greedy_pieces(metadata, text), text


def test_sentencepiece_bytes_spaces_and_ends():
    tokenizer = Tokenizer(read_gguf(sentencepiece()).backend)
    ids = tokenizer.encode("hello é 日")
    assert ids[0] == 1
    assert [tokenizer.token_bytes(i) for i in ids[1:]] == [b" hello", b" ", b"\xc3", b"\xa9", b" ", "日".encode()]
    assert tokenizer.decode(ids) == "hello é 日"
    bare = Tokenizer(read_gguf(sentencepiece(**{"ggml.add_space_prefix": False, "ggml.add_bos_token": False})).backend)
    assert [bare.token_text(i) for i in bare.encode("hello")] == ["he", "ll", "o"]
    assert bare.decode(bare.encode(" hello")) == " hello"


SPACE = "\u2581"


def gemma(space=" ", merged=(), letters=string.ascii_letters + string.digits + string.punctuation + SPACE + "é日"):
    """A vocabulary laid out as Gemma 3's, written as llama.cpp's converter writes one: user-defined runs of spaces."""
    pieces = [(token, TokenType.CONTROL) for token in ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>")]
    pieces += [("\n" * run, TokenType.USER_DEFINED) for run in range(1, 32)]
    pieces += [(space * run, TokenType.USER_DEFINED) for run in range(2, 32)]
    pieces += [("\t" * run, TokenType.USER_DEFINED) for run in range(2, 32)]
    pieces += [(tag, TokenType.USER_DEFINED) for tag in ("<table>", "</table>", "<h1>", "</h1>")]
    pieces += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    plain = len(pieces)
    pieces += [(token, TokenType.NORMAL) for token in (*merged, *letters)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _ in pieces],
        "tokenizer.ggml.scores": [-1000.0] * plain + [-float(i) for i in range(len(pieces) - plain)],
        "tokenizer.ggml.token_type": [int(kind) for _, kind in pieces],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }


def as_on_the_hub(metadata):
    """The same vocabulary as transformers converts it into a tokenizer.json: runs are merges of marked spaces."""
    from transformers.convert_slow_tokenizer import generate_merges

    types = metadata["tokenizer.ggml.token_type"]
    runs = [kind == TokenType.USER_DEFINED for kind in types]
    pieces = [t.replace(" ", SPACE) if run else t for t, run in zip(metadata["tokenizer.ggml.tokens"], runs)]
    scores = [0.0 if run else score for score, run in zip(metadata["tokenizer.ggml.scores"], runs)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = generate_merges(vocab, dict(zip(pieces, scores)))
    hub = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    hub.normalizer = normalizers.Replace(" ", SPACE)
    hub.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    kinds = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    hub.add_tokens(
        [AddedToken(t, special=kinds[k], normalized=False) for t, k in zip(pieces, types) if TokenType(k) in kinds]
    )
    return hub


MERGED = ["th", "the", f"{SPACE}the", f"{SPACE}t", "he", "re", "there", f"{SPACE}x", "ab", "<h", "h1", "ta", "ble>"]
SPACED = [
    "two  spaces",
    "  lead and trail   ",
    " " * 31 + "x",
    " " * 32 + "x" + " " * 100,
    "\n\n\n \n  \n\t\t\tthe\t",
    "<table>  <h1> the </h1></table><tab le>",
    "<start_of_turn>user\nthere  you<bos>",
    "é  日\u00a0 \u3000 x",
]


@pytest.mark.parametrize("space", [" ", SPACE], ids=["raw", "marked"])
def test_runs_of_spaces_use_the_vocabularys_tokens(space):
    """llama.cpp's converter spells them with real spaces, other files with marks."""
    metadata = gemma(space, MERGED)
    tokenizer, hub = Tokenizer(read_gguf(metadata).backend), as_on_the_hub(gemma(merged=MERGED))
    choose = random.Random(2)
    texts = [
        *SPACED,
        *("".join(choose.choices("theabrx1<>/\n\t é" + " " * 20, k=choose.randrange(60))) for _ in range(300)),
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == hub.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids, False) == hub.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.encode("a  b", False) == [
        metadata["tokenizer.ggml.tokens"].index(token) for token in ("a", space * 2, "b")
    ]


def merged_gemma(newlines):
    """Gemma 4's kind: merges in the file, and newlines merged by the vocabulary where the file lists no merges."""
    metadata = gemma(SPACE, MERGED)
    types = metadata["tokenizer.ggml.token_type"]
    hub = as_on_the_hub(metadata)
    pairs = [(left, right) for left, right in json.loads(hub.to_str())["model"]["merges"]]
    types = [
        TokenType.NORMAL if kind == TokenType.USER_DEFINED and not token.strip(f"\n{SPACE}") else kind
        for token, kind in zip(metadata["tokenizer.ggml.tokens"], types)
    ]
    listed = [f"{left} {right}" for left, right in pairs if newlines or "\n" not in left]
    return hub, {
        **metadata,
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": listed,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
    }


@pytest.mark.parametrize("newlines", [True, False], ids=["all-merges", "no-newline-merges"])
def test_merges_over_marked_text(newlines):
    hub, metadata = merged_gemma(newlines)
    tokenizer = Tokenizer(read_gguf(metadata).backend)
    for text in [*SPACED, *CORPUS, *random_texts(200)]:
        ids = tokenizer.encode(text)
        assert ids == hub.encode(text, add_special_tokens=False).ids, text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


TRAINING = [*CORPUS, *SPACED, *random_texts(400, seed=7), "the café the then there Café ÀÉ 日本 日本語"] * 2


def wordpiece(**extra):
    """A trained vocabulary, and its metadata as llama.cpp's converter writes it: words marked, continuations bare."""
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer(lowercase=False)
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained.train_from_iterator(
        TRAINING, trainers.WordPieceTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    vocab = trained.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    spelled = [t if t in special else t[2:] if t.startswith("##") else SPACE + t for t in tokens]
    ids = {"bos": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}
    return vocab, {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": spelled,
        "tokenizer.ggml.token_type": [int(TokenType.CONTROL if t in special else TokenType.NORMAL) for t in tokens],
        **{f"tokenizer.ggml.{role}_token_id": vocab[token] for role, token in ids.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_has_transformers_ids(lowercase):
    from transformers import BertTokenizer

    vocab, metadata = wordpiece(**({} if lowercase else {"normalizer.lowercase": False}))
    theirs = BertTokenizer(vocab=vocab, do_lower_case=lowercase)
    ours = Tokenizer(read_gguf(metadata).backend)
    for text in [*CORPUS, *SPACED, *random_texts(200), "a [MASK] b[SEP]c", "x" * 99 + " " + "x" * 101]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode_pair(text, "the end") == (
            theirs.encode(text, "the end"),
            theirs(text, "the end")["token_type_ids"].index(1),
        )


def charsmap(pairs):
    """A precompiled character map of single bytes: a double array (its root at 0), then the replacements."""
    units, texts = [0] * 4096, b""
    units[0] = 256 << 10
    for number, (byte, text) in enumerate(pairs, 1):
        node = 256 ^ byte
        units[node] = byte | 1 << 8 | (number << 9) << 10
        units[node ^ (number << 9)] = 1 << 31 | len(texts)
        texts += text + b"\0"
    return list(struct.pack("<I4096I", 4 * len(units), *units) + texts)


def unigram(**extra):
    """A vocabulary of XLM-RoBERTa's layout, trained on the corpus, and its metadata."""
    trained = tokenizers.Tokenizer(models.Unigram())
    split = pre_tokenizers.WhitespaceSplit()
    trained.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Metaspace()])
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False, initial_alphabet=["a", SPACE]
    )
    trained.train_from_iterator([text for text in TRAINING if text != CORPUS[-1]], trainer)
    pieces = [(text, score) for text, score in json.loads(trained.to_str())["model"]["vocab"]]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.NORMAL] * (len(pieces) - 4)
    return pieces, {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [text for text, _ in pieces] + ["<mask>", "[PAD]"],
        # Tokens without a text of their own have any score.
        "tokenizer.ggml.scores": [score if i > 3 else -1e4 for i, (_, score) in enumerate(pieces)] + [-1e4] * 2,
        "tokenizer.ggml.token_type": [int(kind) for kind in [*kinds, TokenType.CONTROL, TokenType.UNUSED]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_sep_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def test_unigram_has_transformers_ids():
    from transformers import XLMRobertaTokenizer

    pieces, metadata = unigram()
    theirs = XLMRobertaTokenizer(vocab=[*pieces, ("<mask>", 0.0)])
    ours = Tokenizer(read_gguf(metadata).backend)
    for text in [*CORPUS, *SPACED, *random_texts(200), "a<mask> b </s>c"]:
        if "<mask>" not in text:
            assert ours.encode(text) == theirs.encode(text), text
            assert ours.encode_pair(text, "the end")[0] == theirs.encode(text, "the end"), text
    assert ours.encode("the end")[-1] == 2
    bare = Tokenizer(read_gguf({**metadata, "tokenizer.ggml.add_eos_token": False}).backend)
    assert bare.encode("the end") == ours.encode("the end")[:-1]


def test_unigram_keeps_spaces_and_maps_characters_as_the_file_states():
    _, metadata = unigram(remove_extra_whitespaces=False, precompiled_charsmap=charsmap([(9, b" "), (0x7E, b"th")]))
    ours = Tokenizer(read_gguf(metadata).backend)
    plain = Tokenizer(read_gguf(unigram(remove_extra_whitespaces=False)[1]).backend)
    assert ours.encode("a\t~e") == plain.encode("a the") != plain.encode("a\t~e")
    assert ours.encode("a  b") != ours.encode("a b")


def test_phi3_special_tokens_take_the_white_space_after_them():
    for name, spaces in (("Phi-3 mini", []), ("Llama", ["▁", "▁"])):
        tokenizer = Tokenizer(read_gguf({**sentencepiece(), "general.name": name}).backend)
        ids = tokenizer.encode("</s>  he")
        assert [tokenizer.token_name(i) for i in ids] == ["<s>", "</s>", *spaces, "▁he"]


def awkward():
    """Vocabularies whose tokens the library might renumber: runs of spaces, odd spellings, duplicates."""
    yield from (gemma(), gemma(SPACE), sentencepiece(), byte_level(), byte_level("llama-bpe"))
    for metadata in (gemma(), gemma(SPACE), byte_level()):
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        more = ["  ", f"{SPACE}x", " x", "  ", "", "[PAD9]", "a b"]
        for kind in TokenType:
            scores = [*metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens)), *(-1e4 for _ in more)]
            extra = {"tokens": [*tokens, *more], "token_type": [*types, *(int(kind) for _ in more)], "scores": scores}
            yield {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in extra.items()}}


@each_row("metadata", list(awkward()))
def test_no_id_exceeds_the_vocabulary(metadata):
    parts = read_gguf(metadata)
    backend, size = parts.backend, len(metadata["tokenizer.ggml.tokens"])
    assert parts.highest_id == max(backend.get_vocab(with_added_tokens=False).values())
    assert max(backend.get_vocab(with_added_tokens=True).values()) < size
    for text in [*CORPUS, *SPACED, *random_texts(50)]:
        assert max(backend.encode(text).ids, default=0) < size, text


def large(count):
    """A vocabulary of Gemma 3's size: 6,242 reserved tokens, and unions of earlier tokens."""
    letters = string.ascii_letters + "".join(map(chr, range(0x4E00, 0x4E00 + 4000))) + SPACE
    twos = [a + b for a in string.ascii_letters + SPACE for b in string.ascii_lowercase]
    fours = [a + b for a in twos[:90] for b in twos]
    sixes = [a + b for a in fours[:120] for b in twos]
    metadata = gemma(merged=[*twos, *fours, *sixes][: count - 6242 - len(letters) - 400], letters=letters)
    for key, value in (("tokens", None), ("scores", -1000.0), ("token_type", int(TokenType.CONTROL))):
        values = metadata[f"tokenizer.ggml.{key}"]
        values += [f"<unused{i}>" if value is None else value for i in range(count - len(values))]
    return metadata


def test_a_large_vocabulary_is_read_without_a_call_per_token():
    """Columns of arrays, not rows: 262,144 tokens take about 0.8 s so, and took 12.7 s with calls per added token."""
    metadata = large(262_144)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        backend = read_gguf(metadata).backend
    finally:
        sys.setprofile(before)
    assert backend.get_vocab_size() == 262_144
    assert calls < 20_000  # 8,450, of which 6,442 are for the reserved tokens


def every_split(tokens, scores, mergeable):
    known = set(tokens)
    by_score = sorted((i for i, able in enumerate(mergeable) if able), key=lambda i: -scores[i])
    splits = [(tokens[i][:cut], tokens[i][cut:]) for i in by_score for cut in range(1, len(tokens[i]))]
    return [pair for pair in splits if known.issuperset(pair)]


def random_vocabulary(seed, by_length):
    """Tokens of few letters. `by_length`: a token has a lower score than every part of it."""
    choose = random.Random(seed)
    words = ["".join(choose.choices("abcé\x00日", k=choose.randrange(1, 8))) for _ in range(900)]
    tokens = list(dict.fromkeys([*"abcé\x00日", *words]))
    scores = [-(len(token) if by_length else 0) * 50 + float(choose.randrange(-20, 20)) for token in tokens]
    return tokens, scores, [choose.random() < 0.9 for _ in tokens]


@each_row("by_length", [True, False])
@each_row("seed", range(4))
def test_pairs_that_are_left_out_are_never_merged(seed, by_length):
    tokens, scores, mergeable = random_vocabulary(seed, by_length)
    every, used = every_split(tokens, scores, mergeable), merges_from_scores(tokens, scores, mergeable)
    assert used == [pair for pair in every if pair in set(used)]
    if by_length:
        assert len(used) == len({"".join(pair) for pair in used}) < 0.7 * len(every)
    ids = {token: index for index, token in enumerate(tokens)}
    merged, expected = (tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs)) for pairs in (used, every))
    choose = random.Random(seed)
    texts = tokens + ["".join(choose.choices("abcé\x00日", k=choose.randrange(30))) for _ in range(3000)]
    assert [merged.encode(text).ids for text in texts] == [expected.encode(text).ids for text in texts]


def test_merges_of_a_trained_vocabulary_are_those_it_was_trained_with():
    trained = tokenizers.Tokenizer(models.BPE())
    trained.train_from_iterator(
        [*CORPUS, *map(str, SPLITS.values())], trainers.BpeTrainer(vocab_size=700, show_progress=False)
    )
    tokens = sorted(trained.get_vocab(), key=trained.token_to_id)
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    assert len(merges) > 200
    scores = [-float(index) for index in range(len(tokens))]
    assert merges_from_scores(tokens, scores, [True] * len(tokens)) == merges


def test_no_pair_is_left_out_where_a_byte_begins_a_token():
    """Fallbacks are put together like characters, though a token has several characters of their names."""
    tokens = [*"abc", "bc", "<0x41>", "<0x41>b", "<0x41>bc"]
    scores, fallbacks = [0.0] * 3 + [-2.0, 0.0, -1.0, -3.0], [token == "<0x41>" for token in tokens]
    able = [not each for each in fallbacks]
    pairs = [("<0x41>", "b"), ("b", "c"), ("<0x41>", "bc"), ("<0x41>b", "c")]
    assert merges_from_scores(tokens, scores, able, fallbacks) == pairs


def test_merges_are_cut_at_the_first_space_that_is_not_their_first_character():
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] += [" ", " e", " ee", "e ", "e e"]
    metadata["tokenizer.ggml.token_type"] += [int(TokenType.NORMAL)] * 5
    for merges, pairs in (
        (["h e", "  e"], [["h", "e"], [" ", "e"]]),
        (["h e", "e  "], [["h", "e"], ["e", " "]]),
        (["h e", " e e"], [["h", "e"], [" e", "e"]]),
    ):
        state = json.loads(read_gguf({**metadata, "tokenizer.ggml.merges": merges}).backend.to_str())
        assert state["model"]["merges"] == pairs


def test_merges_of_an_empty_vocabulary():
    assert merges_from_scores(["a"], [0.0], [True]) == []
    assert merges_from_scores(["a", "b", "ab"], [0.0] * 3, [True, True, False]) == []


def test_a_model_with_fewer_tokens_than_the_file_is_rejected_at_once(monkeypatch):
    tokenizer = load_tokenizer("", gguf_metadata=byte_level())
    monkeypatch.setattr("pagoda.common.text.tokenizer._highest_id", None)
    size = len(byte_level()["tokenizer.ggml.tokens"])
    assert tokenizer.with_vocab(size).vocab_size == size
    with pytest.raises(ModelError, match=f"ids up to {size - 1}, but the model's vocabulary has {size - 1} entries"):
        tokenizer.with_vocab(size - 1)


@each_row(
    ("metadata", "message"),
    [
        ({}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "gpt2"}, "has no tokenizer"),
        ({**byte_level(), "tokenizer.ggml.model": "rwkv"}, "'rwkv' is not supported"),
        (byte_level("unheard-of"), "'unheard-of' is not known here"),
        ({k: v for k, v in byte_level().items() if not k.endswith("merges")}, "lacks tokenizer.ggml.merges"),
        ({k: v for k, v in sentencepiece().items() if not k.endswith("scores")}, "lacks tokenizer.ggml.scores"),
        ({**byte_level(), "tokenizer.ggml.merges": ["x nowhere"]}, "is inconsistent"),
        ({**byte_level(), "tokenizer.ggml.merges": ["he"]}, "is inconsistent"),
        ({**sentencepiece(), "tokenizer.ggml.scores": [0.0]}, "279 tokens, 1 scores and 279 types"),
        ({**sentencepiece(), "tokenizer.ggml.token_type": [1, 1]}, "279 tokens, 279 scores and 2 types"),
    ],
)
def test_unusable_metadata_is_rejected_with_the_reason(metadata, message):
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(metadata)
    assert "\n" not in str(caught.value)
