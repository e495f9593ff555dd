import random
import string
import time
from itertools import pairwise

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from pagoda.common.errors import ModelError
from pagoda.common.text.gguf_tokenizer import SPLITS, TokenType, merges_from_scores, read_gguf
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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("rule", sorted(SPLITS))
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
    assert {rule: SPLITS[rule] for rule in common} == {rule: THEIRS[rule] for rule in common}


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


@pytest.mark.parametrize("metadata", list(awkward()))
def test_no_id_exceeds_the_vocabulary(metadata):
    backend = read_gguf(metadata).backend
    size = len(metadata["tokenizer.ggml.tokens"])
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


def test_a_large_vocabulary_is_read_in_a_second():
    """As fast as the library reads the same tokenizer from JSON, give or take; one call per added token was 10 times.

    Measured against the library, because a processor may be slow or shared.
    """
    metadata = large(262_144)
    start = time.process_time()
    backend = read_gguf(metadata).backend
    ours = time.process_time() - start
    written = backend.to_str()
    start = time.process_time()
    again = tokenizers.Tokenizer.from_str(written)
    theirs = time.process_time() - start
    assert backend.get_vocab_size() == again.get_vocab_size() == 262_144
    assert ours < 2.5 * theirs, f"{ours:.2f} s of CPU, the library {theirs:.2f} s"


def test_merges_are_every_split_into_two_tokens():
    choose = random.Random(5)
    tokens = list(dict.fromkeys("".join(choose.choices("abcé\x00日", k=choose.randrange(1, 7))) for _ in range(900)))
    scores = [float(choose.randrange(-40, 40)) for _ in tokens]
    mergeable = [choose.random() < 0.8 for _ in tokens]
    known = set(tokens)
    by_score = sorted((i for i, able in enumerate(mergeable) if able), key=lambda i: -scores[i])
    splits = [(tokens[i][:cut], tokens[i][cut:]) for i in by_score for cut in range(1, len(tokens[i]))]
    assert merges_from_scores(tokens, scores, mergeable) == [pair for pair in splits if known.issuperset(pair)]


def test_merges_of_an_empty_vocabulary():
    assert merges_from_scores(["a"], [0.0], [True]) == []
    assert merges_from_scores(["a", "b", "ab"], [0.0] * 3, [True, True, False]) == []


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "gpt2"}, "has no tokenizer"),
        ({**byte_level(), "tokenizer.ggml.model": "rwkv"}, "'rwkv' is not supported"),
        (byte_level("unheard-of"), "'unheard-of' is not known here"),
        ({k: v for k, v in byte_level().items() if not k.endswith("merges")}, "lacks tokenizer.ggml.merges"),
        ({k: v for k, v in sentencepiece().items() if not k.endswith("scores")}, "lacks tokenizer.ggml.scores"),
        ({**byte_level(), "tokenizer.ggml.merges": ["x nowhere"]}, "is inconsistent"),
        ({**sentencepiece(), "tokenizer.ggml.scores": [0.0]}, "279 tokens, 1 scores and 279 types"),
        ({**sentencepiece(), "tokenizer.ggml.token_type": [1, 1]}, "279 tokens, 279 scores and 2 types"),
    ],
)
def test_unusable_metadata_is_rejected_with_the_reason(metadata, message):
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(metadata)
    assert "\n" not in str(caught.value)
