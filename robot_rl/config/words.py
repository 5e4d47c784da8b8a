"""A configuration as the words of a command line: `load` of the words gives it back."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar, cast

from robot_rl.config.build import choices, defaults, plain

T = TypeVar("T")

_BARE = re.compile(r"[A-Za-z_/][\w/.+@%-]*")
"""Text that needs no quotes, unless it reads as something else."""
_OTHER = {"true", "false", "null", "none", "nan", "inf"}


def words(config: T, base: T | None = None) -> list[str]:
    """Returns `key=value` for every setting that is not as in `base`, nested ones with their path.

    Args:
        config: a frozen dataclass.
        base: what is left out; None: the defaults of its schema.
    """
    usual = defaults(type(config)) if base is None else plain(base)
    for key, choice in choices(type(config)).items() if is_dataclass(config) else ():
        part, kind = getattr(config, key), usual[key]["kind"]
        if type(part) is not choice.of_kind(kind, key):
            usual[key] = {**defaults(type(part)), "kind": kind}
    return _differing(plain(config), usual, "")


def shell(found: list[str]) -> str:
    """Returns words as a shell takes them."""
    return " ".join(shlex.quote(word) for word in found)


def quoted(text: str) -> str:
    """Returns text in Hydra's quotes: backslashes count only where a quote follows them."""
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + (r"\"" if found[2] else ""), text)
    return f'"{escaped}"'


def _differing(values: Mapping[str, Any], usual: Mapping[str, Any], at: str) -> list[str]:
    found: list[str] = []
    for key, value in values.items():
        missing = key not in usual
        if not missing and value == usual[key]:
            continue
        if isinstance(value, Mapping) and value:
            known = usual.get(key)
            below = cast("Mapping[str, Any]", known) if isinstance(known, Mapping) else {}
            found += _differing(cast("Mapping[str, Any]", value), below, f"{at}{key}.")
        else:
            found.append(f"{at}{key}={_value(value)}")
    return found


def _value(value: Any) -> str:
    """Returns a value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(_value(part) for part in cast('list[Any]', value))}]"
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return "{" + ",".join(f"{key}:{_value(part)}" for key, part in pairs) + "}"
    if not isinstance(value, str):
        return repr(value)
    if _BARE.fullmatch(value) and value.lower() not in _OTHER:
        return value
    return quoted(value.replace("${", r"\${"))
