"""Text of `--help` and `--help=WHAT`: an overview, a group, a flag, or the flags that match a word."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pagoda.common.config.deprecated import DeprecatedConfig
from pagoda.common.config.fields import did_you_mean, human_readable_int, human_readable_int_or_auto
from pagoda.common.config.settings import DOCUMENTED_GROUPS, ENGINE_GROUPS, Setting
from pagoda.common.errors import ConfigError

_SHARED: Final = frozenset(config.__name__ for config in DOCUMENTED_GROUPS)
"""Groups of several commands; the overview lists their names only."""

_GROUP_ALIASES: Final = {"vllmconfig": "extensionconfig", "frontend": "serverconfig"}
_ORDER: Final = ("implemented", "no effect", "refused")
_HUMAN: Final = (human_readable_int, human_readable_int_or_auto)
_INDENT: Final = 30
_MAX_METAVAR: Final = 40
_NUMBERS: Final = (int, float)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, or a positional argument."""

    spellings: tuple[str, ...]  # The spellings; empty: the argument is positional.
    metavar: str
    optional: bool  # The value may be omitted.
    text: str
    setting: Setting | None
    values: tuple[str, ...] = ()  # Values that the command knows, of a setting without choices.

    @property
    def names(self) -> frozenset[str]:
        """All spellings without leading dashes."""
        return frozenset(spelling.lstrip("-").lower() for spelling in self.spellings)


@dataclass(frozen=True, slots=True)
class Group:
    """A group of flags."""

    name: str
    description: str
    flags: tuple[Flag, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """The help of a command."""

    program: str
    description: str
    groups: tuple[Group, ...]

    @property
    def spellings(self) -> frozenset[str]:
        """All spellings of all flags."""
        return frozenset(spelling for group in self.groups for flag in group.flags for spelling in flag.spellings)


def help_text(page: Page, topic: str) -> str:
    """Return the text of `--help=what`. Raise ConfigError if nothing matches."""
    word = topic.strip().lower()
    if not word:
        return overview(page)
    if word == "listgroup":
        return "\n".join(_groups(group for group in page.groups if any(flag.setting for flag in group.flags)))
    if word == "all":
        return "\n\n".join(_group(group) for group in page.groups)
    for group in page.groups:
        if group.name.lower() == _GROUP_ALIASES.get(word, word):
            return _group(group)
    name = word.lstrip("-").replace("_", "-")
    flags = [flag for group in page.groups for flag in group.flags]
    for flag in flags:
        if name in flag.names:
            return _detail(flag, reads_config="--config" in page.spellings)
    return _search(page, name, word)


def overview(page: Page) -> str:
    """Return usage, the command's own flags, the names of the shared groups, and hints."""
    own_groups = [group for group in page.groups if group.name not in _SHARED]
    shared = [group for group in page.groups if _is_shared(group)]
    single = [flag for group in page.groups if group.name in _SHARED and not _is_shared(group) for flag in group.flags]
    parts = [_usage(page), page.description, *map(_group, own_groups)]
    if single:
        parts.append("\n".join(["Other flags:", *_columns((_synopsis(flag), _text(flag)) for flag in single)]))
    if shared:
        parts.append("\n".join(["Flag groups:", *_groups(shared)]))
        parts.append("\n".join(["More help:", *_hints(page, shared)]))
    return "\n\n".join(part for part in parts if part)


def _is_shared(group: Group) -> bool:
    """True if the overview lists the group's name only; a command may also have a single flag of such a group."""
    return group.name in _SHARED and len(group.flags) > 1


def _usage(page: Page) -> str:
    words = [
        f"[{flag.metavar}]" if flag.optional else flag.metavar
        for group in page.groups
        for flag in group.flags
        if not flag.spellings
    ]
    return " ".join(["usage:", page.program, *words, "[--flag VALUE ...]"])


def _hints(page: Page, groups: Sequence[Group]) -> Iterator[str]:
    group = next((group for group in groups if group.name == "SchedulerConfig"), groups[0])
    rows = [
        (f"--help={group.name}", "one group"),
        (f"--help={group.flags[0].spellings[0].lstrip('-')}", "one flag"),
        ("--help=max", "flags that match a word"),
        ("--help=all", "all flags"),
    ]
    if "--explain-config" in page.spellings:
        rows.append(("--explain-config", "resolved value, source and reason of every setting"))
    return _columns([(f"{page.program} {words}", text) for words, text in rows], indent=len(page.program) + 30)


def _groups(groups: Iterable[Group]) -> list[str]:
    return list(_columns((group.name, f"{group.description} ({len(group.flags)})".strip()) for group in groups))


def _group(group: Group) -> str:
    def rank(flag: Flag) -> int:
        return 0 if flag.setting is None else _ORDER.index(flag.setting.option.status)

    title = f"{group.name}: {group.description}" if group.description else f"{group.name}:"
    rows = ((_synopsis(flag), _text(flag)) for flag in sorted(group.flags, key=rank))
    return "\n".join([*_wrapped(title, 0), *_columns(rows)])


def _search(page: Page, name: str, word: str) -> str:
    """Return the flags with the word in their name or help. Raise ConfigError if there are none."""
    flags = [flag for group in page.groups for flag in group.flags]
    matching = [flag for flag in flags if any(name in flag_name for flag_name in flag.names)]
    described = [flag for flag in flags if flag not in matching and word in _text(flag).lower()]
    if not matching and not described:
        known_names = [flag_name for flag in flags for flag_name in flag.names] + [group.name for group in page.groups]
        near = did_you_mean(name, known_names) or "; try --help=listgroup"
        raise ConfigError("--help", f"no group, flag or help text matches {word!r}{near}")
    parts = []
    for title, matches in ((f"Flags named {name}:", matching), (f"Flags that mention {word}:", described)):
        if matches:
            parts.append("\n".join([title, *_columns((_synopsis(flag), _text(flag)) for flag in matches)]))
    return "\n\n".join(parts)


def _detail(flag: Flag, *, reads_config: bool) -> str:
    """Return the details of a flag. `reads_config`: the command reads --config and the environment too."""
    setting = flag.setting
    if setting is None:
        return "\n".join(_columns([(_synopsis(flag), _text(flag))]))
    rows = [
        ("group", setting.group),
        ("value", f"one of {', '.join(flag.values)}" if flag.values else _value(setting)),
        ("default", default_text(setting)),
    ]
    rows.append(("status", status_text(setting)))
    if reads_config:
        rows += [("key of --config", f"{setting.key}:"), ("variable", setting.variable)]
    if setting.config in (*ENGINE_GROUPS.values(), DeprecatedConfig):
        rows.append(("Python", f"LLM({setting.name}=...)"))
    return "\n".join([_synopsis(flag), *_wrapped(setting.option.help, 2), "", *_columns(rows, indent=20)])


def _value(setting: Setting) -> str:
    if setting.is_switch:
        return f"none: {setting.flag}, or --no-{setting.key}"
    if setting.is_json:
        return f"a JSON object, or single keys: {setting.flag}.key VALUE, {setting.flag}.list+ VALUE"
    if setting.is_list:
        return f"{setting.kind}: {setting.flag} A B, or repeat the flag"
    if setting.option.parse in _HUMAN:
        return "an integer; 4k is 4000, 4K is 4096, 25.6k is 25600"
    return setting.kind + ("; optional" if setting.option.optional_value is not None else "")


def status_text(setting: Setting) -> str:
    """Return `implemented`, or the status of a setting with its reason or replacement."""
    option = setting.option
    if option.deprecated is not None:
        return f"deprecated: use {option.deprecated}"
    if option.status == "implemented":
        return "implemented"
    return f"{option.status}: {option.reason}" if option.status == "no effect" else _refusal(setting)


def _refusal(setting: Setting) -> str:
    default = () if _is_plain(setting.default) else (default_text(setting),)
    accepted = ", ".join(map(str, (*default, *setting.option.accepts)))
    return f"only {accepted}: {setting.option.reason}" if accepted else f"refused: {setting.option.reason}"


def _is_plain(default: object) -> bool:
    """True if the default is empty or off, which the help does not show."""
    return default is None or default is False or default in ((), {}, "")


def _text(flag: Flag) -> str:
    return flag.text if flag.setting is None else describe(flag.setting, flag.values)


def describe(setting: Setting, values: Sequence[str] = ()) -> str:
    """Return a flag's help with its choices, default and status. `values`: its values if it has no choices."""
    values_or_choices = values or setting.choices
    choices = f" (one of {', '.join(values_or_choices)})" if values_or_choices and "{" not in metavar(setting) else ""
    default = "" if _is_plain(setting.default) else f" (default: {default_text(setting)})"
    status = "" if status_text(setting) == "implemented" else f" [{status_text(setting)}]"
    return f"{setting.option.help}{choices}{default}{status}"


def metavar(setting: Setting) -> str:
    """Return the placeholder of a flag's value: short choices, N for a number, or a word of its name."""
    choices = "{" + ",".join(map(str, setting.choices or ())) + "}"
    if setting.choices and len(choices) <= _MAX_METAVAR:
        return choices
    if setting.is_json:
        return "JSON"
    if setting.value_type in _NUMBERS:
        return "N"
    word = setting.name.rpartition("_")[2]
    return "FILE" if word == "json" else word.upper()


def default_text(setting: Setting) -> str:
    """Return the default as written in the file of `--config`."""
    return setting.shown(setting.default)


def _synopsis(flag: Flag) -> str:
    """Return `--max-num-seqs SEQS`, `--[no-]enforce-eager` or `-tp, --tensor-parallel-size SIZE`."""
    if not flag.spellings:
        return flag.metavar
    positive = {f"--no-{spelling[2:]}": spelling for spelling in flag.spellings if spelling.startswith("--")}
    words = [
        f"--[no-]{spelling[2:]}" if f"--no-{spelling[2:]}" in flag.spellings else spelling
        for spelling in flag.spellings
    ]
    shown = [word for word, spelling in zip(words, flag.spellings) if positive.get(spelling) not in flag.spellings]
    value = flag.metavar
    if flag.optional:
        value = f"[{value}]"
    elif flag.setting is not None and flag.setting.is_list:
        value += " ..."
    return " ".join(filter(None, (", ".join(sorted(shown, key=len)), value)))


def _columns(rows: Iterable[tuple[str, str]], indent: int = _INDENT) -> Iterator[str]:
    """Yield lines of two columns; a long left cell gets a separate line."""
    for left, right in rows:
        lines = _wrapped(right, indent)
        if len(left) + 4 > indent or not lines:
            yield f"  {left}"
        else:
            lines[0] = f"  {left}".ljust(indent) + lines[0].lstrip()
        yield from lines


def _wrapped(text: str, indent: int) -> list[str]:
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    margin = " " * indent
    return textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
