"""Write the reference pages of docs/ and the README's counts from the tables that the program itself runs on.

usage: python tools/docs.py            writes what has changed and names it
       python tools/docs.py --check    writes nothing; exit status 1 when a page is stale

What is counted is in interface.py beside it.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, get_args

import interface
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic_core import PydanticUndefined

from pagoda import server
from pagoda.common.config.env import VARIABLES, EnvVar
from pagoda.common.config.fields import human_readable_int, human_readable_int_or_auto
from pagoda.common.config.groups.commands import COMMAND_SETTINGS, WITH_ENGINE
from pagoda.common.config.settings import Setting
from pagoda.common.models.registry import ARCHITECTURES
from pagoda.common.observe.metrics import Metrics
from pagoda.server.app import BODIES, bodies_of
from pagoda.server.http.body import RequestBody, is_hint, is_unsupported
from pagoda.server.http.fields.sampling import SamplingFields, StreamOptions
from pagoda.server.settings.flags import default_text

ROOT: Final = Path(__file__).resolve().parents[1]
STATUSES: Final = ("implemented", "no effect", "refused")

_BEGIN: Final = "<!-- interface: written by tools/docs.py -->\n"
_END: Final = "<!-- end of interface -->"
_WRITTEN: Final = "<!-- written by tools/docs.py; `make docs` writes it anew -->\n\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say which pages are stale")
    check = parser.parse_args().check
    stale = {path: text for path, text in pages().items() if not path.is_file() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale and check:
        print("run `make docs`", file=sys.stderr)
    return 1 if stale and check else 0


def pages() -> dict[Path, str]:
    """Every generated page, as it should be."""
    reference = ROOT / "docs" / "reference"
    return {
        reference / "flags.md": _flags(),
        reference / "environment.md": _environment(),
        reference / "metrics.md": _metrics(),
        reference / "models.md": _models(),
        reference / "api.md": _api(),
        ROOT / "README.md": _readme((ROOT / "README.md").read_text()),
    }


# --- pages ---


def _flags() -> str:
    text = (
        f"{_WRITTEN}# Flags\n\nA flag is a keyword of `LLM(...)` and `EngineArgs(...)` (`max_num_seqs`), a key of the "
        "file of `--config` (`max-num-seqs`) and a variable (`PAGODA_MAX_NUM_SEQS`) too. A switch has a `--no-` form. "
        "A JSON setting can be written in pieces: `--hf-overrides.rope_theta 5e5`.\n\n"
        "Status: *implemented*; *no effect*: accepted with one warning that says why; *refused*: an error unless the "
        "value is the default or one of those named. `chat`, `complete` and `bench serve` read flags alone.\n\n"
    )
    text += _table(
        ("argument", "what it is"), ((f"`{name}`", about) for name, about in interface.BY_THE_PARSER.items())
    )
    about = _about_groups()
    for group, known in interface.groups().items():
        text += f"\n## {group}\n\n{about.get(group, '')} Commands: {_users(group, known)}.\n\n"
        text += _table(
            ("flag", "value", "default", "key and variable", "what it is", "status"), map(_flag_row, known.values())
        )
    return text


def _users(group: str, known: Mapping[str, Setting]) -> str:
    found = []
    for command, settings in COMMAND_SETTINGS.items():
        count = sum(setting.group == group for setting in settings.values())
        if count:
            found.append(f"`{command}`" + (" (some)" if count < len(known) else ""))
    return ", ".join(found)


def _about_groups() -> dict[str, str]:
    """What the help says under each group's title."""
    found: dict[str, str] = {}
    for name, command in interface.commands():
        if name in COMMAND_SETTINGS:
            for group in interface.parser_of(command)._action_groups:
                found.setdefault(str(group.title), " ".join((group.description or "").split()))
    return found


def _flag_row(setting: Setting) -> tuple[str, ...]:
    default = default_text(setting)
    elsewhere = any(COMMAND_SETTINGS[name].get(setting.name) == setting for name in WITH_ENGINE)
    return (
        ", ".join(f"`{flag}`" for flag in setting.flags),
        _kind(setting),
        default if default == "nothing" else f"`{default}`",
        f"`{setting.flag[2:]}` `{setting.variable}`" if elsewhere else "",
        setting.option.help,
        _status(setting),
    )


def _kind(setting: Setting) -> str:
    names: dict[Any, str] = {int: "integer", float: "number", str: "text"}
    if setting.is_switch:
        return "switch"
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    if setting.is_json:
        return "JSON object"
    if setting.is_list:
        return f"one or more: {names[get_args(setting.plain)[0]]}"
    if setting.option.parse in (human_readable_int, human_readable_int_or_auto):
        return "integer, also `25.6k` or `2K`"
    return names.get(setting.plain, "text")


def _status(setting: Setting) -> str:
    option = setting.option
    old = f"deprecated: use `{option.deprecated}`" if option.deprecated else ""
    if option.status == "implemented":
        return old or "implemented"
    why = f"*{option.status}*: {option.why}" + (f"; {old}" if old else "")
    accepted = ", ".join(f"`{value}`" for value in option.accepts)
    return f"{why} (accepted besides the default: {accepted})" if accepted else why


def _environment() -> str:
    text = (
        f"{_WRITTEN}# Environment variables\n\nEvery setting has a variable of its own, `PAGODA_` and its name; "
        "[flags](flags.md) lists them. Flags and the file of `--config` are stronger. Those below mean something "
        "besides, or exist elsewhere and are answered here.\n\n"
    )
    for status in STATUSES:
        rows = [_variable_row(variable) for variable in VARIABLES if variable.status == status]
        head = ("variable", "what it is", *(["why"] if status != "implemented" else []))
        text += f"## {status.capitalize()}\n\n{_table(head, rows)}\n"
    return text.rstrip("\n") + "\n"


def _variable_row(variable: EnvVar) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in (variable.name, *variable.aliases))
    return (names, variable.help) if variable.status == "implemented" else (names, variable.help, variable.why)


def _metrics() -> str:
    metrics = Metrics("m")
    rows = []
    for family in metrics.registry.collect():
        if family.name.startswith(("vllm:", "pagoda:")):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
            rows.append((f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), family.documentation))
    return (
        f"{_WRITTEN}# Metrics\n\n`GET /metrics`, in Prometheus' text format, under vLLM's names where it has them, so "
        "that its dashboards work. `vllm:cache_config_info` carries the KV cache's facts as labels once the model is "
        "loaded; on Linux the usual `process_*` metrics are there too.\n\n"
        + _table(("metric", "kind", "labels", "what it is"), sorted(rows))
    )


def _models() -> str:
    families: dict[str, list[str]] = {}
    for architecture, (module, _) in ARCHITECTURES.items():
        families.setdefault(module, []).append(architecture)
    rows = []
    for module, architectures in sorted(families.items()):
        about = (import_module(f"pagoda.common.models.families.{module}").__doc__ or "").partition("\n")[0]
        names = ", ".join(f"`{name}`" for name in architectures)
        rows.append((names, about, f"[{module}.py](../../common/models/families/{module}.py)"))
    return (
        f"{_WRITTEN}# Supported models\n\n`architectures` of `config.json` decides. A model of another architecture is "
        "refused at start, and so is a config key that nobody here reads. Each is held against transformers, logits in "
        "float32 to 3e-5.\n\n" + _table(("architecture", "what it is", "file"), rows)
    )


def _api() -> str:
    text = (
        f"{_WRITTEN}# HTTP API\n\n## Routes\n\n"
        + _table(("route", "what it answers"), _route_rows())
        + "\nA request field is *honoured*, *ignored* or *refused*. Ignored fields and fields that are not listed are "
        "accepted without effect and named in the response header `x-pagoda-ignored`, or a 400 with "
        "`--strict-requests`. Of a refused field null, the default and empty values pass; any other value is a 400 "
        "that names the field.\n"
    )
    shared = set(SamplingFields.model_fields)
    titles: dict[type[RequestBody], str] = {SamplingFields: "Fields of every body that samples"}
    for path in sorted(BODIES):
        for body in bodies_of(path):
            titles[body] = f"{titles[body]}, `{path}`" if body in titles else f"`{body.__name__}`: `POST {path}`"
    for body, title in (titles | {StreamOptions: "`stream_options`"}).items():
        left_out = shared if issubclass(body, SamplingFields) and body is not SamplingFields else set()
        rows = (row for name, row in _field_rows(body) if name not in left_out)
        about = " ".join((body.__doc__ or "").split())
        text += f"\n## {title}\n\n{about}\n\n" + _table(("field", "type", "default", "status", "notes"), rows)
    return text


def _route_rows() -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for route in _routes():
        about = " ".join((route.endpoint.__doc__ or "").partition("\n\n")[0].split())
        for method in sorted(route.methods or ()):
            found[f"`{method} {route.path.replace(':path', '')}`"] = about
    return sorted(found.items(), key=lambda row: row[0].split("/", 1)[1])


def _routes() -> Iterator[APIRoute]:
    """Every route of every API, whichever flag it needs."""
    for package in ("openai", "openai.responses", "anthropic", "cohere", "pooling", "admin"):
        path = Path(server.__file__).parent.joinpath(*package.split("."))
        for module in pkgutil.iter_modules([str(path)]):
            for value in vars(import_module(f"{server.__name__}.{package}.{module.name}")).values():
                if isinstance(value, APIRouter):
                    yield from (route for route in value.routes if isinstance(route, APIRoute))


def _field_rows(body: type[RequestBody]) -> Iterator[tuple[str, tuple[str, ...]]]:
    properties = body.model_json_schema()["properties"]
    for name, field in body.model_fields.items():
        status = "refused" if is_unsupported(field) else "ignored" if is_hint(field) else "honoured"
        default = field.get_default(call_default_factory=True)
        accepted = " or ".join(f"`{json.dumps(value)}`" for value in field.examples or ())
        notes = [field.description or "", f"{accepted} is accepted." if accepted and status == "refused" else ""]
        yield (
            name,
            (
                f"`{name}`",
                _json_type(properties[name]) if status == "honoured" else "",
                "required" if default is PydanticUndefined else f"`{json.dumps(default)}`",
                status if status == "honoured" else f"*{status}*",
                "; ".join(filter(None, notes)),
            ),
        )


def _json_type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_json_type(each) for each in schema["anyOf"]))
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if schema.get("type") == "array":
        return f"list of {_json_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _readme(text: str) -> str:
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    counts = []
    for kind, name, found in (
        ("flags", "flags", interface.flag_statuses()),
        ("environment variables", "env", interface.variable_statuses()),
        ("commands", "commands", interface.command_statuses()),
    ):
        count = Counter(found.values())
        counts.append((kind, str(len(interface.rows(name))), *(str(count[status]) for status in STATUSES)))
    return before + _BEGIN + _table(("of vLLM's", "there are", *STATUSES), counts) + _END + after


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; empty when it has no rows."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]) + "\n" if lines else ""


if __name__ == "__main__":
    sys.exit(main())
