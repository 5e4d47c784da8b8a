"""A setting as a person types it, in Hydra's grammar: text needs no quotes, a list no brackets.

Hydra's lexer refuses paths with umlauts, brackets, `=` or `,`, and zsh refuses `[1,2]` without quotes.
The schema knows what a setting is: text is taken as it stands, and `a,b` is a list where a list is wanted.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robot_rl.config.build import choices, hints_of
from robot_rl.config.words import quoted
from robot_rl.core.files import at_home

_OPENING, _CLOSING = "([{", ")]}"
_QUOTED = re.compile(r"""(["'])(?:\\.|(?!\1).)*\1""", re.DOTALL)
_SWEEP = re.compile(r"(choice|range|glob|interval)\(.*\)", re.DOTALL)


def as_typed(word: str, schema: type[Any], kinds: Mapping[str, str | None] | None = None) -> str:
    """Returns `key=value` in Hydra's grammar; values that are neither text nor lists stay as they are.

    `kinds` names the kind of each field of several kinds; without a name it is the usual one.
    """
    key, equals, value = word.partition("=")
    if not equals or not value or key.startswith("~"):
        return word
    hint, has_null = _hint(schema, key.lstrip("+"), kinds or {})
    if hint is None or (has_null and value == "null") or _SWEEP.fullmatch(value):
        return word
    if _is_text(hint):
        return f"{key}={_text(value)}"
    if typing.get_origin(hint) in (tuple, list):
        return f"{key}={_list(value, typing.get_args(hint)[0])}"
    return word


def split(value: str) -> list[str]:
    """Splits at commas, except those within quotes and brackets."""
    parts, depth, at = [""], 0, 0
    while at < len(value):
        found = _QUOTED.match(value, at)
        piece = found.group() if found else value[at]
        depth += (piece in _OPENING) - (piece in _CLOSING)
        if piece == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += piece
        at += len(piece)
    return parts


def _hint(schema: type[Any], key: str, kinds: Mapping[str, str | None]) -> tuple[Any, bool]:
    """Returns the type of a dotted key without its None, and whether it had one; None for an unknown key."""
    hint: Any = schema
    has_null = False
    for name in key.split("."):
        if not dataclasses.is_dataclass(hint):
            return None, False
        above = typing.cast("type[Any]", hint)
        hint = hints_of(above).get(name)
        if name in choices(above):
            hint = hint.of_kind(kinds.get(name), name)
        has_null = False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
            has_null = len(parts) < len(typing.get_args(hint))
            hint = parts[0] if len(parts) == 1 or all(map(_is_text, parts)) else None
    return hint, has_null


def _is_text(hint: Any) -> bool:
    return hint is str or hint is Path


def _text(value: str) -> str:
    """Returns text in Hydra's quotes, unless it has its own; `~` at the beginning is the home folder."""
    if _QUOTED.fullmatch(value):
        return value
    return quoted(at_home(value))


def _list(value: str, part: Any) -> str:
    if value.startswith("[") and value.endswith("]"):
        value = value[1:-1]
    parts = [item.strip() for item in split(value)] if value.strip() else []
    return f"[{','.join(_text(item) if _is_text(part) and item != 'null' else item for item in parts)}]"
