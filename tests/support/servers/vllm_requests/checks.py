"""Checks of values in answers: each a function with a name, by which tests/data/vllm_requests asks for it.

`@check(description)` makes a function of a value and arguments a kind of Want. In the description `{0}` is the first
argument, `{all}` are all of them and `{rest}` those after the first. A value that is absent is wrong, unless the kind
is about that; so is one that the function cannot read.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
import regex
from support.servers.vllm_requests.answers import MISSING, Views, value_at


@dataclass(frozen=True)
class Check:
    """`of_absent`: whether the function is asked about an absent value; `of_answers`: whether its argument is the path
    of a value of another answer, `number.path`, and the function gets that value."""

    description: str
    holds: Callable[..., bool]
    of_absent: bool = False
    of_answers: bool = False


CHECKS: dict[str, Check] = {}


@dataclass(frozen=True)
class Want:
    """A check of a value: its kind is a name of CHECKS."""

    kind: str
    arguments: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in CHECKS:
            raise ValueError(f"no check is called {self.kind!r}")
        inspect.signature(CHECKS[self.kind].holds).bind(None, *self.arguments)

    def __str__(self) -> str:
        shown = [repr(argument) for argument in self.arguments]
        return CHECKS[self.kind].description.format(*shown, all=", ".join(shown), rest=", ".join(shown[1:]))

    def holds(self, value: Any, views: Views) -> bool:
        """Whether the value is as wanted, given also the answers so far."""
        found = CHECKS[self.kind]
        if value is MISSING and not found.of_absent:
            return False
        try:
            arguments = [value_at(views, path) for path in self.arguments] if found.of_answers else self.arguments
            return bool(found.holds(value, *arguments))
        except (AttributeError, LookupError, TypeError, ValueError, struct.error, jsonschema.ValidationError):
            return False


Holds = Callable[..., bool]


def check(description: str, of_absent: bool = False, of_answers: bool = False) -> Callable[[Holds], Holds]:
    """Register the function as the kind of its name, without the underscore that keeps it from a builtin's."""

    def register(function: Holds) -> Holds:
        CHECKS[function.__name__.rstrip("_")] = Check(description, function, of_absent, of_answers)
        return function

    return register


# --- any value ---


@check("null, and not absent")
def null(value: Any) -> bool:
    return value is None


@check("null or absent", of_absent=True)
def gone(value: Any) -> bool:
    return value is None or value is MISSING


@check("no such key", of_absent=True)
def absent(value: Any) -> bool:
    return value is MISSING


@check("anything but null")
def given(value: Any) -> bool:
    return value is not None


@check("one of {all}")
def one_of(value: Any, *values: Any) -> bool:
    return value in values


@check("as {0}", of_answers=True)
def same(value: Any, kept: Any) -> bool:
    return value == kept


@check("not as {0}", of_answers=True)
def other(value: Any, kept: Any) -> bool:
    return value != kept


# --- numbers and sizes ---


@check("a number from {0} to {1}")
def between(value: Any, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and least <= value <= most


@check("{0} elements or characters")
def size(value: Any, number: int) -> bool:
    return hasattr(value, "__len__") and len(value) == number


@check("more than {0} elements or characters")
def longer(value: Any, number: int) -> bool:
    return hasattr(value, "__len__") and len(value) > number


@check("{0} to {1} elements or characters")
def sized(value: Any, least: int, most: int) -> bool:
    return hasattr(value, "__len__") and least <= len(value) <= most


# --- texts ---


@check("a string")
def text(value: Any) -> bool:
    return isinstance(value, str)


@check("null or an empty string")
def empty_or_null(value: Any) -> bool:
    return not value


@check("a string with {all}")
def contains(value: Any, *parts: str) -> bool:
    return isinstance(value, str) and all(part in value for part in parts)


@check("a string without {0}")
def lacks(value: Any, part: str) -> bool:
    return isinstance(value, str) and part not in value


@check("a string that begins with {0}")
def starts(value: Any, part: str) -> bool:
    return isinstance(value, str) and value.startswith(part)


@check("a string that does not begin with {0}")
def starts_not(value: Any, part: str) -> bool:
    return isinstance(value, str) and not value.startswith(part)


@check("a string that is wholly {0}")
def matches(value: Any, pattern: str) -> bool:
    return regex.fullmatch(pattern, value) is not None


@check("the JSON of {0}")
def json_of(value: Any, wanted: Any) -> bool:
    return bool(json.loads(value) == wanted)


@check("the JSON of an object")
def json_object(value: Any) -> bool:
    return isinstance(json.loads(value), dict)


@check("JSON of the schema {0}")
def json_of_schema(value: Any, schema: dict[str, Any]) -> bool:
    jsonschema.validate(json.loads(value), schema)
    return True


# --- objects and lists ---


@check("an object")
def body(value: Any) -> bool:
    return isinstance(value, dict)


@check("an object with {all}")
def keys(value: Any, *names: str) -> bool:
    return isinstance(value, dict) and set(names) <= set(value)


@check("a body whose status is one of {all}")
def body_status(value: Any, *statuses: str) -> bool:
    return value["status"] in statuses


TYPES = {"string": str, "integer": int, "array": list, "object": dict}


@check("an object whose values are null, absent or of the types {0}")
def typed_or_null(value: Any, types: dict[str, str]) -> bool:
    return all(isinstance(value.get(name), (TYPES[kind], type(None))) for name, kind in types.items())


@check("a list of integers")
def numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


@check("a list with {0}")
def includes(value: Any, wanted: Any) -> bool:
    return wanted in value


@check("a list in which no element but the first has the key {0}")
def only_in_first(value: Any, key: str) -> bool:
    return all(key not in one for one in value[1:])


# --- usage of tokens ---


def _usage_adds_up(chunk: dict[str, Any]) -> bool:
    """Whether a chunk counts tokens of the prompt and of the answer, and their sum."""
    usage = chunk["usage"]
    return usage_sum(usage) and usage["prompt_tokens"] > 0 and usage["completion_tokens"] > 0


def _completion_tokens(chunks: list[dict[str, Any]]) -> list[int]:
    return [chunk["usage"]["completion_tokens"] for chunk in chunks]


def _rises(chunks: list[dict[str, Any]], last: int) -> bool:
    """Whether each chunk counts more tokens than the one before, to the last."""
    counted = _completion_tokens(chunks)
    return counted == sorted(set(counted)) and counted[-1] == last


@check("usage whose total is the sum")
def usage_sum(value: Any) -> bool:
    return bool(value["prompt_tokens"] + value["completion_tokens"] == value["total_tokens"])


@check("usage only in the last chunk, which has no choices")
def usage_last(value: Any) -> bool:
    *before, last = value
    return all(chunk.get("usage") is None for chunk in before) and last["choices"] == [] and _usage_adds_up(last)


@check("usage in each chunk, and a last one without choices")
def usage_always(value: Any) -> bool:
    return all(map(_usage_adds_up, value)) and value[-1]["choices"] == []


@check("usage in each chunk that counts up to {0} tokens")
def usage_rises(value: Any, last: int) -> bool:
    return all(map(_usage_adds_up, value)) and _rises(value[:-1], last)


@check("a chunk with the role and no tokens, then usage that counts up to {0} tokens")
def role_then_usage(value: Any, last: int) -> bool:
    first = value[0]
    return _rises(value[:-1], last) and _completion_tokens([first]) == [0] and first["choices"][0]["logprobs"] is None


@check("usage that never falls after the first token, stands still only without choices, and ends with {0} tokens")
def counts_up(value: Any, last: int) -> bool:
    counted = _completion_tokens(value)
    steps = zip(value[1:], counted, counted[1:])
    rises = all(before == 0 or now > before or (not one["choices"] and now == before) for one, before, now in steps)
    return rises and counted[-1] == last and all(usage_sum(chunk["usage"]) for chunk in value)


# --- tokens and their probabilities ---


def _named_ids(names: list[str]) -> list[int]:
    return [int(name.removeprefix("token_id:")) for name in names]


@check("1 to {0} alternatives after the first token")
def alternatives_after_first(value: Any, most: int) -> bool:
    return all(1 <= len(top) <= most for top in value[1:])


@check("choices with {0} offsets of tokens in all, which begin with 0 and never fall")
def text_offsets(value: Any, number: int) -> bool:
    offsets = [offset for choice in value if choice.get("logprobs") for offset in choice["logprobs"]["text_offset"]]
    return offsets == sorted(offsets) and len(offsets) == number and offsets[0] == 0


@check("a choice whose logprobs name the ids of the prompt and of the answer")
def logprobs_of_all_ids(value: Any) -> bool:
    return bool(_named_ids(value["logprobs"]["tokens"]) == value["prompt_token_ids"] + value["token_ids"])


@check("chunks whose logprobs name the ids of their tokens")
def logprobs_of_ids(value: Any) -> bool:
    named = [number for choice in value for number in _named_ids(choice["logprobs"]["tokens"])]
    return named == [number for choice in value for number in choice["token_ids"]]


@check("logprobs with tokens named by ids, each the first of its alternatives")
def sampled_first(value: Any) -> bool:
    tops = [next(iter(top)) for top in value["top_logprobs"][1:]]
    return all(name.startswith("token_id:") for name in value["tokens"]) and value["tokens"][1:] == tops


@check("alternatives with at least {0} of the tokens {rest}")
def tokens_among(value: Any, least: int, *names: str) -> bool:
    return len(set(names) & {top["token"] for top in value}) >= least


@check("a token whose alternatives are itself and {all}")
def tokens_are(value: Any, *names: str) -> bool:
    return {top["token"] for top in value["top_logprobs"]} == {*names, value["token"]}


@check("a count that is the number of tokens")
def token_count(value: Any) -> bool:
    return bool(value["count"] == len(value["tokens"]))


@check("a text for each token, and their count")
def token_texts(value: Any) -> bool:
    return bool(len(value["token_strs"]) == len(value["tokens"]) == value["count"])


# --- calls of tools ---


@check("a message without calls")
def no_tool_calls(value: Any) -> bool:
    return not value.get("tool_calls")


@check("chunks with at most one piece of a call in each choice")
def one_piece_a_chunk(value: Any) -> bool:
    deltas = [choice["delta"] for chunk in value for choice in chunk["choices"]]
    return all(len(delta.get("tool_calls") or []) < 2 for delta in deltas)


@check("events whose pieces of input are together the JSON of {0}")
def input_of_deltas(value: Any, wanted: Any) -> bool:
    deltas = [event["delta"] for event in value if event["type"] == "content_block_delta"]
    return json_of("".join(delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"), wanted)


# --- responses and their events ---

BEGINNINGS = {
    "response.completed": "response.created",
    "response.output_item.done": "response.output_item.added",
    "response.output_text.done": "response.output_text.delta",
    "response.content_part.done": "response.content_part.added",
    "response.reasoning_text.done": "response.reasoning_text.delta",
    "response.reasoning_part.done": "response.reasoning_part.added",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}


def _events(value: Any, kind: str) -> list[dict[str, Any]]:
    return [event for event in value if event["type"] == f"response.{kind}.delta"]


@check("types of events of which each that ends something follows one that began it, innermost first")
def paired(value: Any) -> bool:
    stack: list[str] = []
    for kind in value:
        if kind == "response.created" or kind.endswith("added"):
            stack.append(kind)
        elif kind.endswith("delta"):
            if stack[-1] != kind:
                stack.append(kind)
        elif (kind.endswith("done") or kind == "response.completed") and stack.pop() != BEGINNINGS[kind]:
            return False
    return not stack


@check("an item of type {0}")
def has_item(value: Any, kind: str) -> bool:
    return kind in [item["type"] for item in value]


@check("items, of which none is a call")
def no_function_call(value: Any) -> bool:
    return len(value) >= 1 and all(item["type"] != "function_call" for item in value)


@check("a last item whose text has {all}")
def last_text(value: Any, *parts: str) -> bool:
    return all(part in value[-1]["content"][0]["text"] for part in parts)


@check("events whose pieces of text are together the text of the response, {0}")
def text_of_deltas(value: Any, wanted: str) -> bool:
    said = "".join(event["delta"] for event in _events(value, "output_text"))
    return bool(said == value[-1]["response"]["output"][-1]["content"][0]["text"] == wanted)


@check("events whose pieces of arguments are together the JSON of {0}")
def arguments_of_deltas(value: Any, wanted: Any) -> bool:
    return json_of("".join(event["delta"] for event in _events(value, "function_call_arguments")), wanted)


@check("events of text with {0} alternatives for each token")
def alternatives_in_deltas(value: Any, number: int) -> bool:
    return all(
        event["logprobs"]
        and all(log["logprob"] <= 0 and len(log["top_logprobs"]) == number for log in event["logprobs"])
        for event in _events(value, "output_text")
    )


# --- vectors, classes and scores ---

DTYPES = {"float32": ("f", 4), "float16": ("e", 2), "bfloat16": ("H", 2), "fp8_e4m3": ("B", 1), "fp8_e5m2": ("B", 1)}


def _floats(raw: bytes, dtype: str, endianness: str) -> list[float]:
    letter, width = DTYPES[dtype]
    found = struct.unpack(f"{'<>'[endianness == 'big']}{len(raw) // width}{letter}", raw)
    if dtype == "bfloat16":
        return [struct.unpack("<f", struct.pack("<I", number << 16))[0] for number in found]
    return list(found)


@check("a vector of length 1")
def unit_length(value: Any) -> bool:
    return abs(math.sqrt(sum(number * number for number in value)) - 1) < 0.01


@check("base64 of {0} numbers of type {1}, {2} endian, of length 1 where the type keeps two digits")
def vector_of(value: Any, number: int, dtype: str, endianness: str) -> bool:
    found = _floats(base64.b64decode(value), dtype, endianness)
    return len(found) == number and (dtype.startswith("fp8") or unit_length(found))


@check("metadata of vectors of {0} numbers of type {1}, {2} endian")
def metadata_of_vectors(value: Any, number: int, dtype: str, endianness: str) -> bool:
    return all(
        item["embed_dtype"] == dtype
        and item["endianness"] == endianness
        and item["shape"] == [number]
        and item["end"] - item["start"] == number * DTYPES[dtype][1]
        for item in json.loads(value)["data"]
    )


@check("base64 of {0} bytes")
def base64_bytes(value: Any, number: int) -> bool:
    return len(base64.b64decode(value)) == number


@check("the same numbers as floats and in base64")
def floats_and_base64(value: Any) -> bool:
    packed = _floats(base64.b64decode(value["base64"][0]), "float32", "little")
    return all(abs(one - two) < 1e-5 for one, two in zip(value["float"][0], packed))


@check("a probability for each of {0} classes")
def probabilities(value: Any, number: int) -> bool:
    return bool(len(value["probs"]) == value["num_classes"] == number)


@check("numbers whose sum is {0}")
def sums_to(value: Any, wanted: float) -> bool:
    return abs(sum(value) - wanted) < 1e-3


@check("{0} scores that never rise")
def falling_scores(value: Any, number: int) -> bool:
    scores = [result["relevance_score"] for result in value]
    return len(scores) == number and scores == sorted(scores, reverse=True)


# --- metrics ---


@check("metrics with the values {0}, whatever their labels")
def metrics(value: Any, values: dict[str, float]) -> bool:
    return all(re.search(rf"^vllm:{name}(\{{[^}}]*\}})? {number:.1f}$", value, re.M) for name, number in values.items())


@check("metrics of which {0} has a number in each label of {rest}")
def metric_labels(value: Any, metric: str, *labels: str) -> bool:
    found = re.search(rf"^vllm:{metric}\{{(.*)\}}", value, re.M)
    return found is not None and all(re.search(rf'{label}="\d', found[1]) for label in labels)


@check("metrics of an engine that sleeps: {0}")
def asleep(value: Any, state: str) -> bool:
    return all(
        re.search(rf'^vllm:engine_sleep_state\{{[^}}]*sleep_state="{name}"[^}}]*\}} {number}', value, re.M)
        for name, number in ((state, 1), ("awake", 0))
    )
