"""Which schemas of the JSON-Schema-Test-Suite (draft 2020-12) can an answer be constrained to?

usage: python schema_suite.py SUITE [--only FILE ...] [--walks 20] [--output FILE]

SUITE: a clone of https://github.com/json-schema-org/JSON-Schema-Test-Suite (MIT), bare or not; its HEAD is read.

A schema counts if it compiles, every one of 20 random walks through its matcher is a valid instance (by jsonschema,
which does not assert formats), and at least 95 % of the suite's valid instances are accepted. An instance is accepted
if one of its texts is: its properties in any order, 1.0 also as 1. A schema whose grammar leaves a keyword to a check
of the finished answer counts as `checked`; a walk that fails this check is no answer.

fates: enforced, checked: the schema counts; narrow: too few valid instances are accepted; refused: it does not compile;
invalid: a walk has no end or is no valid instance, or an invalid instance is accepted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np

from pagoda.common.engine.structured_output.grammar import GrammarError, Matcher, Vocabulary
from pagoda.common.engine.structured_output.guidance import Guidance, guidance_text
from pagoda.common.engine.structured_output.schemas import Closing, answer_error
from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import StructuredOutputsParams

FOLDER: Final = "tests/draft2020-12"
END: Final = 256
MAX_TEXTS: Final = 240
MAX_TOKENS: Final = 3000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a schema."""

    file: str
    name: str
    fate: str
    reason: str
    valid: int
    accepted: int
    wrongly_accepted: int
    invalid: int


def suite(path: Path, only: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the file and the case of every schema."""
    git = ["git", "-C", str(path)]
    listing = subprocess.run([*git, "ls-tree", "--name-only", "HEAD", f"{FOLDER}/"], capture_output=True, check=True)
    for name in listing.stdout.decode().split():
        file = Path(name).stem
        if name.endswith(".json") and (not only or file in only):
            text = subprocess.run([*git, "show", f"HEAD:{name}"], capture_output=True, check=True).stdout
            for case in json.loads(text):
                yield file, case


@dataclass(frozen=True, slots=True)
class Settings:
    """How schemas are judged. `closing`: of objects, as for requests."""

    library: Guidance
    tokens: tuple[bytes, ...]
    walks: int = 20
    seed: int = 1
    closing: Closing = "no"


def settings(**given: Any) -> Settings:
    """Return settings with a vocabulary of single bytes, the end, and some words."""
    words = sorted(
        {f'"{name}"' for name in ("foo", "bar", "baz", "a", "b")} | {"true", "null", "foo", "12", "{}", "[]"}
    )
    tokens = (*(bytes([byte]) for byte in range(256)), b"", *(word.encode() for word in words))
    vocabulary = Vocabulary(tokens, frozenset({END}), (END,), lambda text: list(text.encode()))
    return Settings(Guidance(vocabulary), tokens, **given)


def texts(value: Any) -> Iterator[str]:
    """Yield some of the texts of a value."""
    if isinstance(value, dict) and value:
        for names in itertools.permutations(value):
            for parts in itertools.product(*(itertools.islice(texts(value[name]), 24) for name in names)):
                yield "{" + ",".join(f"{_text(name)}:{part}" for name, part in zip(names, parts)) + "}"
    elif isinstance(value, list) and value:
        for parts in itertools.product(*(itertools.islice(texts(part), 24) for part in value)):
            yield "[" + ",".join(parts) + "]"
    else:
        yield _text(value)
        if isinstance(value, float) and value.is_integer():
            yield str(int(value))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def accepts(matcher: Matcher, text: str) -> bool:
    """Return True if a text is a whole answer."""
    matcher = matcher.copy()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(END)


def walk(settings: Settings, start: Matcher, draw: random.Random) -> str | None:
    """Return a random answer; None if it comes to no end."""
    matcher = start.copy()
    data = b""
    bits = np.zeros((1, -(-len(settings.tokens) // 32)), np.uint32)
    for step in range(MAX_TOKENS):
        settings.library.fill([matcher], bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        if not allowed or matcher.error is not None:
            return None
        hurry = draw.random() < (0.7 if step > 60 else 0.25)
        last = [token for token in (END, *b'"]},') if token in allowed]
        words = [token for token in allowed if token > END] if draw.random() < 0.5 else []
        token = last[0] if hurry and last else draw.choice(words or allowed)
        if token == END:
            return data.decode("utf-8", "replace")
        if not matcher.accept(token):
            return None
        data += settings.tokens[token]
    return None


def judge(file: str, case: dict[str, Any], settings: Settings) -> Outcome:
    """Return what becomes of one schema."""
    schema = case["schema"]
    valid = [test["data"] for test in case["tests"] if test["valid"]]
    invalid = [test["data"] for test in case["tests"] if not test["valid"]]
    validator = jsonschema.Draft202012Validator(schema)

    def outcome(fate: str, reason: str, accepted: int = 0, wrong: int = 0) -> Outcome:
        return Outcome(file, case["description"], fate, reason, len(valid), accepted, wrong, len(invalid))

    try:
        text = guidance_text(StructuredOutputsParams(json=schema), {}, closing=settings.closing)
        grammar = settings.library.resolved(text)
        start = settings.library.compile(grammar.text)
    except (GrammarError, RequestError) as error:
        return outcome("refused", str(error).removeprefix("structured_outputs: "))

    def passes(text: str) -> bool:
        return not grammar.unchecked or not answer_error(grammar, text)

    def takes(value: Any) -> bool:
        return any(accepts(start, text) and passes(text) for text in itertools.islice(texts(value), MAX_TEXTS))

    accepted = sum(map(takes, valid))
    wrong = sum(map(takes, invalid))
    draw = random.Random(settings.seed)
    for _ in range(settings.walks):
        text = walk(settings, start, draw)
        if text is None:
            return outcome("invalid", "a walk comes to no end", accepted, wrong)
        try:
            if passes(text):
                validator.validate(json.loads(text))
        except (jsonschema.ValidationError, ValueError) as error:
            return outcome("invalid", f"{text[:100]}: {str(error).splitlines()[0]}", accepted, wrong)
        except Exception as error:  # a reference that jsonschema cannot follow
            return outcome("invalid", f"not validated: {error}", accepted, wrong)
    if wrong:
        return outcome("invalid", "accepts an invalid instance of the suite", accepted, wrong)
    if accepted < 0.95 * len(valid):
        return outcome("narrow", f"accepts {accepted} of {len(valid)} valid instances", accepted)
    return outcome("checked" if grammar.unchecked else "enforced", ", ".join(grammar.unchecked), accepted)


def main() -> None:
    """Print what is refused and why, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--walks", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--closing", choices=("no", "safe", "yes"), default="no")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    used = settings(walks=args.walks, seed=args.seed, closing=args.closing)
    outcomes = [judge(file, case, used) for file, case in suite(args.suite, args.only)]
    for outcome in outcomes:
        if outcome.fate != "enforced":
            print(f"{outcome.fate:9}{outcome.file}: {outcome.name}: {outcome.reason}")
    counts = Counter(outcome.fate for outcome in outcomes)
    print(
        json.dumps(
            {
                "schemas": len(outcomes),
                "count": counts["enforced"] + counts["checked"],
                **counts,
                "invalid instances": sum(outcome.invalid for outcome in outcomes),
                "accepted invalid instances": sum(outcome.wrongly_accepted for outcome in outcomes),
            }
        )
    )
    if args.output is not None:
        args.output.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    main()
