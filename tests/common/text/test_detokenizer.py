import random
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from pagoda.common.text.token_bytes import byte_alphabet
from pagoda.common.text.tokenizer import (
    ByteStream,
    Detokenizer,
    Tokenizer,
    TokenPieces,
    WindowStream,
    load_tokenizer,
    open_stream,
)

PIECES = [*(f"<0x{byte:02X}>" for byte in range(256)), "<s>", "</s>", "▁", "a", "b", "c", "▁a", "ab", "▁ab", "日", "é▁"]
BYTE_LEVEL_WORDS = ["Ġ", "Ġa", "ab", "abc", "ĠĠ", "ðŁĳ", "æĹ"]


def sentencepiece(strip=True):
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def byte_level():
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *BYTE_LEVEL_WORDS]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def metaspace():
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


TOKENIZERS = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(),
    "sentencepiece without prefix": sentencepiece(strip=False),
    "metaspace": metaspace(),
}
BYTES = TOKENIZERS["byte level"]


def ids_of(text, tokenizer=BYTES):
    return tokenizer.encode(text, add_special_tokens=False)


def chunked(ids, cuts):
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


def streamed(tokenizer, prompt, chunks, **options):
    """Return the pieces and the detokenizer, checking its invariants at each step."""
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    pieces = []
    for i, chunk in enumerate(chunks):
        pieces.append(detokenizer.append(chunk, i == len(chunks) - 1))
        assert detokenizer.text == "".join(pieces)
    return pieces, detokenizer


def same_but_for_the_end(ours, theirs):
    """True if equal up to an incomplete last character."""
    return theirs.startswith(ours) and set(theirs[len(ours) :]) <= {"\ufffd"} and len(theirs) - len(ours) <= 3


def test_stream_class_by_decoder():
    kinds = {name: type(open_stream(tokenizer, [])) for name, tokenizer in TOKENIZERS.items()}
    assert kinds.pop("metaspace") is WindowStream
    assert set(kinds.values()) == {ByteStream}


@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 270)), cuts=st.lists(st.integers(0, 50), max_size=5))
def test_byte_level_stream_pieces_join_to_the_decoded_text(skip, ids, cuts):
    pieces, _ = streamed(BYTES, [], chunked(ids, cuts), skip_special_tokens=skip)
    assert same_but_for_the_end("".join(pieces), BYTES.decode(ids, skip))


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 50), max_size=5), ends=st.lists(st.booleans()))
def test_streams_of_any_text_equal_decoding_at_once(name, skip, text, cuts, ends):
    """Each character as bytes, special tokens in between, any chunks: equal to decoding all at once."""
    tokenizer = TOKENIZERS[name]
    special = tokenizer.backend.token_to_id("<s>")
    ids = []
    for i, char in enumerate(text):
        known = tokenizer.backend.token_to_id(char.replace(" ", "▁"))
        spelt = ids_of(char) if tokenizer is BYTES else list(char.encode()) if known is None else [known]
        ids += spelt + [special] * (i < len(ends) and ends[i])
    pieces, _ = streamed(tokenizer, [], chunked(ids, cuts), skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_chunking_does_not_change_the_text(name, ids, cuts):
    tokenizer = TOKENIZERS[name]
    whole, _ = streamed(tokenizer, [], [ids])
    pieces, _ = streamed(tokenizer, [], chunked(ids, cuts))
    assert "".join(pieces) == "".join(whole)


def byte_tokens(data, tokenizer=BYTES):
    """One token per byte."""
    if tokenizer is not BYTES:
        return list(data)
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    return [tokenizer.backend.token_to_id(letters[byte]) for byte in data]


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_incomplete_characters_are_withheld(name):
    text = "€👩‍👩‍👧é"
    pieces, _ = streamed(TOKENIZERS[name], [], [[i] for i in byte_tokens(text.encode(), TOKENIZERS[name])])
    assert [piece for piece in pieces if piece] == list(text)


def test_an_unfinished_character_at_the_end_is_dropped():
    ids = ids_of("a€")[:-1]
    pieces, detokenizer = streamed(BYTES, [], [ids])
    assert pieces == ["a"]
    assert detokenizer.text == "a"


def test_invalid_bytes_become_replacement_characters():
    ids = byte_tokens(b"\xff\x80")
    pieces, _ = streamed(BYTES, [], [[i] for i in ids])
    assert "".join(pieces) == "\ufffd\ufffd" == BYTES.decode(ids)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 270), max_size=30), prompt=st.lists(st.integers(0, 255), max_size=3))
def test_pieces_of_tokens_join_to_the_text(name, ids, prompt):
    tokenizer = TOKENIZERS[name]
    ids = [token for token in ids if token not in tokenizer.special_ids]
    pieces, got = TokenPieces(tokenizer, prompt), []
    for token in ids:
        peeked = pieces.peek(token)
        assert peeked == pieces.peek(token)
        got.append(pieces.push(token))
        assert got[-1] == peeked
    text, _ = streamed(tokenizer, prompt, [ids])
    assert "".join(got) == "".join(text)


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_a_character_belongs_to_the_token_that_completes_it(name):
    tokenizer = TOKENIZERS[name]
    pieces = TokenPieces(tokenizer)
    assert [pieces.push(token) for token in byte_tokens("é🙂a".encode(), tokenizer)] == ["", "é", "", "", "", "🙂", "a"]
    pieces.push(byte_tokens("é".encode(), tokenizer)[0])
    special, *others = (tokenizer.backend.token_to_id("<s>"), *byte_tokens("éa".encode(), tokenizer)[1:])
    assert [pieces.peek(token) for token in (special, *others)] == ["<s>", "é", "\ufffda"]
    assert pieces.push(special) == "<s>"
    assert pieces.push(others[0]) == "é"


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace"])
def test_the_leading_space_is_dropped_only_at_the_start_of_the_text(name):
    tokenizer = TOKENIZERS[name]
    word, bos, a = (tokenizer.backend.token_to_id(piece) for piece in ("▁ab", "<s>", "a"))
    text = lambda prompt, **options: "".join(streamed(tokenizer, prompt, [[word], [word]], **options)[0])  # noqa: E731
    assert text([]) == text([bos]) == "ab ab"
    assert text([a]) == text([bos, a, bos]) == " ab ab"
    assert text([bos], skip_special_tokens=False) == " ab ab"


def test_byte_runs_of_invalid_utf8():
    tokenizer = TOKENIZERS["sentencepiece"]
    pieces, _ = streamed(tokenizer, [], [[0xE2, 0x82, 0xAC], [0xFF], [PIECES.index("a")]])
    assert pieces == ["€", "\ufffd", "a"]


@pytest.mark.field("SamplingParams.spaces_between_special_tokens")
def test_spaces_between_special_tokens():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer(backend)
    ids = [0, 2, 3, 2, 1]
    for spaces in (True, False):
        options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        pieces, _ = streamed(tokenizer, [], [[i] for i in ids], **options)
        assert "".join(pieces) == tokenizer.decode(ids, **options)
    assert "".join(pieces) == "a <s></s><s> b"


def naive_stop(text, stops, include):
    """Character by character: the stop string that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[: end if include else end - len(hit)], hit
    return text, None


@pytest.mark.parametrize("include", [False, True])
@settings(max_examples=400, deadline=None)
@given(
    words=st.lists(st.sampled_from(["a", "b", "c", "ab", "abc", "Ġ", "Ġa"]), max_size=25),
    stops=st.lists(st.text("abc ", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 25), max_size=8),
)
def test_stop_strings_across_token_and_chunk_boundaries(include, words, stops, cuts):
    ids = [BYTES.backend.token_to_id(word) for word in words]
    pieces, detokenizer = streamed(BYTES, [], chunked(ids, cuts), stop=stops, include_stop_str_in_output=include)
    text, hit = naive_stop(BYTES.decode(ids), stops, include)
    assert ("".join(pieces), detokenizer.stop_hit) == (text, hit)
    if hit is not None:
        assert detokenizer.append(ids, True) == ""
        assert detokenizer.text == text


@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.sampled_from("abc"), max_size=20), stop=st.text("abc", min_size=1, max_size=4))
def test_only_a_possible_stop_prefix_is_withheld(words, stop):
    detokenizer = Detokenizer(BYTES, [], stop=[stop])
    text = ""
    for word in words:
        detokenizer.append(ids_of(word))
        text += word
        if detokenizer.stop_hit:
            break
        withheld = next((k for k in range(len(stop) - 1, 0, -1) if text.endswith(stop[:k])), 0)
        assert detokenizer.text == text[: len(text) - withheld]


def test_withheld_text_is_emitted_at_the_end():
    detokenizer = Detokenizer(BYTES, [], stop=["abcd"])
    assert detokenizer.append(ids_of("xab")) == "x"
    assert detokenizer.append(ids_of("c")) == ""
    assert detokenizer.append([], True) == "abc"
    assert detokenizer.text == "xabc"


def test_stop_strings_within_min_tokens_are_ignored():
    ids = ids_of("bxbyb")
    for count, text in [(0, ""), (1, "bx"), (2, "bx"), (3, "bxby"), (5, "bxbyb")]:
        pieces, detokenizer = streamed(BYTES, [], [ids[:2], ids[2:]], stop=["b"], min_tokens=count)
        assert "".join(pieces) == text
        assert detokenizer.num_tokens == min(len(text) + 1, 5)


def test_a_stop_string_may_begin_within_min_tokens():
    pieces, detokenizer = streamed(BYTES, [], [ids_of("xab")], stop=["ab"], min_tokens=2)
    assert (pieces, detokenizer.stop_hit) == (["x"], "ab")


def test_tokens_after_the_stop_string_do_not_count():
    pieces, detokenizer = streamed(BYTES, [], [ids_of("a.bcd")], stop=["."])
    assert (pieces, detokenizer.num_tokens) == (["a"], 2)


def test_unknown_ids_decode_to_nothing():
    for tokenizer in TOKENIZERS.values():
        pieces, _ = streamed(tokenizer, [], [[10**6, -1] if tokenizer.byte_table else [10**6]] * 200)
        assert "".join(pieces) == ""


@pytest.mark.model
def test_real_vocabulary(model_file):
    tokenizer = load_tokenizer(model_file)
    choose = random.Random(0)
    for _ in range(300):
        ids = [choose.randrange(tokenizer.vocab_size) for _ in range(choose.randrange(1, 60))]
        cuts = [choose.randrange(60) for _ in range(choose.randrange(6))]
        skip = choose.random() < 0.5
        pieces, _ = streamed(tokenizer, ids[:3], chunked(ids, cuts), skip_special_tokens=skip)
        assert same_but_for_the_end("".join(pieces), tokenizer.decode(ids, skip))
