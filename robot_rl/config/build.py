"""Plain data to frozen dataclasses and back, with messages that say what to change.

A schema is a tree of keyword-only frozen dataclasses. Field types may be bool, int, float, str,
Path, Enum, Literal, None, tuples, lists, dicts with text keys, unions of these, and dataclasses.

A field may be one of several dataclasses: its type is then their base, a `Choice`, and the key `kind`
says which it is. One of them may be of several kinds itself: its `kind` is then a field.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from robot_rl.core.errors import ConfigError

T = TypeVar("T")

_PHRASES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    types.NoneType: "null",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A base of settings of several kinds; `kind` is an attribute of the class, or a field."""

    @classmethod
    def of_kind(cls, kind: str | None, at: str) -> type[Self]:
        """Returns the settings of a kind; the usual one if None. `at` begins the message of an error.

        Raises:
            ConfigError: there is no such kind.
        """
        raise NotImplementedError

    @classmethod
    def kinds(cls) -> list[str]:
        """Returns the kinds there are."""
        raise NotImplementedError

    @property
    def chosen(self) -> str:
        """The kind of these settings."""
        return cast("Any", self).kind


def choices(schema: type[Any]) -> dict[str, type[Choice]]:
    """Returns the fields of a schema that are one of several kinds, with the base of these."""
    return {key: hint for key, hint in hints_of(schema).items() if _is_choice(hint)}


def build(schema: type[T], values: Mapping[str, Any], *, at: str = "") -> T:
    """Returns `schema` filled from nested mappings; what is left out keeps its default.

    Raises:
        ConfigError: an unknown or missing key, or a value of another type or out of range; the
            message starts with the dotted path of the key.
    """
    fields = _fields(schema)
    for key in values:
        if key not in fields:
            raise ConfigError(f"{_join(at, key)}: no such key.{_suggest(schema, at, str(key))}")
    hints = hints_of(schema)
    filled = {key: _convert(hints[key], value, _join(at, key)) for key, value in values.items()}
    missing = [key for key, item in fields.items() if _is_required(item) and key not in filled]
    if missing:
        key = _join(at, missing[0])
        raise ConfigError(f"{key}: missing. Give it as `{key}=<{allowed(hints[missing[0]])}>`.")
    return _construct(schema, filled, at)


def plain(value: Any) -> Any:
    """Returns nested dicts, lists and scalars that `build` turns into an equal value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {"kind": value.chosen, **found} if isinstance(value, Choice) else found
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in cast("list[Any]", value)]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, Path) else value


def defaults(schema: type[Any]) -> dict[str, Any]:
    """Returns the plain defaults of a schema; keys without a default are left out."""
    found: dict[str, Any] = {}
    for key, item in _fields(schema).items():
        if item.default is not dataclasses.MISSING:
            found[key] = plain(item.default)
        elif item.default_factory is not dataclasses.MISSING:
            found[key] = plain(item.default_factory())
    return found


def allowed(hint: Any) -> str:
    """Describes a type in words: `a whole number or null`, `one of 'a', 'b'`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(allowed(part) for part in args)
    if origin is tuple and not _is_variadic(args):
        return f"a list of {len(args)}: " + ", ".join(allowed(part) for part in args)
    if origin in (tuple, list):
        return f"a list, each {allowed(args[0])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(repr(member.name) for member in hint)
    return _PHRASES.get(hint, "keys and values" if _is_tree(hint) else str(hint))


def _convert(hint: Any, value: Any, at: str) -> Any:
    """Returns `value` as the hinted type, or raises with the path `at`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, args, value, at)
    if origin is Literal:
        fits = [choice for choice in args if choice == value and type(choice) is type(value)]
        return fits[0] if fits else _refuse(hint, value, at, args)
    if origin in (tuple, list):
        return _convert_list(hint, value, at)
    if origin is dict or hint is dict:
        part = args[1] if args else Any
        items = value.items() if isinstance(value, Mapping) else _refuse(hint, value, at)
        return {str(key): _convert(part, item, _join(at, str(key))) for key, item in items}
    if dataclasses.is_dataclass(hint):
        values = value if isinstance(value, Mapping) else _refuse(hint, value, at)
        if _is_choice(hint):
            hint = hint.of_kind(values.get("kind"), at)
            if "kind" not in _fields(hint):
                values = {key: part for key, part in values.items() if key != "kind"}
        return build(cast("type[Any]", hint), values, at=at)
    return _convert_scalar(hint, value, at)


def _convert_scalar(hint: Any, value: Any, at: str) -> Any:
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    if issubclass(hint, Enum):
        names = [member.name for member in hint]
        return hint[value] if value in names else _refuse(hint, value, at, names)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():  # 1e5 is how people write it
        return int(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    return _refuse(hint, value, at)


def _convert_list(hint: Any, value: Any, at: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if not isinstance(value, list | tuple):
        return _refuse(hint, value, at)
    items = cast("list[Any]", value)
    if origin is tuple and not _is_variadic(args):
        if len(items) != len(args):
            return _refuse(hint, value, at)
        parts: list[Any] = list(args)
    else:
        parts = [args[0]] * len(items)
    pairs = enumerate(zip(parts, items, strict=True))
    return origin(_convert(part, item, f"{at}[{i}]") for i, (part, item) in pairs)


def _convert_union(hint: Any, args: tuple[Any, ...], value: Any, at: str) -> Any:
    if value is None and types.NoneType in args:
        return None
    parts = [part for part in args if part is not types.NoneType]
    if len(parts) == 1 and _is_tree(parts[0]):
        return _convert(parts[0], value, at)  # the message of the part is the better one
    for part in parts:
        try:
            return _convert(part, value, at)
        except ConfigError:
            continue
    return _refuse(hint, value, at)


def _refuse(hint: Any, value: Any, at: str, choices: tuple[Any, ...] | list[str] = ()) -> Any:
    remedy = ""
    if isinstance(value, str) and choices:
        close = difflib.get_close_matches(value, [str(choice) for choice in choices], n=1)
        remedy = f" Did you mean {close[0]!r}?" if close else ""
    elif isinstance(value, list | tuple | int | float | str) and (lists := _lists(hint)):
        remedy = _list_remedy(lists[0], value, at)
    elif hint is str and value is not None:
        remedy = f" Quote it to make it text: '{at}=\"{value}\"'."
    raise ConfigError(f"{at}: got {value!r}, allowed: {allowed(hint)}.{remedy}")


def _lists(hint: Any) -> list[Any]:
    """Returns the lists that a type allows."""
    return [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) in (tuple, list)]


def _list_remedy(hint: Any, value: Any, at: str) -> str:
    """Shows a list of the right length; one value stands for all of them."""
    args = typing.get_args(hint)
    if isinstance(value, str):
        value = [part for part in re.split(r"[\[\],\s]+", value) if part]
    values = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
    if typing.get_origin(hint) is tuple and not _is_variadic(args):
        if len(set(map(str, values))) != 1:
            return ""
        values = [values[0]] * len(args)
    listed = ",".join(map(str, values))
    return f" Write a list: {at}={listed if len(values) > 1 else f'[{listed}]'}"


def _construct(schema: type[T], filled: dict[str, Any], at: str) -> T:
    """Calls the constructor; its range checks get the path in front where they lack it."""
    try:
        return schema(**filled)
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if not at or text.startswith(at) else f"{at}: {text}") from error


def _suggest(schema: type[Any], at: str, key: str) -> str:
    """Names the nearest key: a sibling, else the same leaf or the nearest path further down."""
    for name, choice in choices(schema).items():
        if key in choice.kinds():
            return f" What {key!r} sets is in {name!r}: {name}.kind={key} {name}.<setting>=<value>."
    names = list(_fields(schema))
    paths = list(_paths(schema))
    leaves = [path for path in paths if path.rsplit(".", 1)[-1] == key]
    close = leaves[:1] or difflib.get_close_matches(key, names, n=1)
    close = close or difflib.get_close_matches(key, paths, n=1)
    if close:
        return f" Did you mean {_join(at, close[0])!r}?"
    return f" Known{f' in {at}' if at else ''}: {', '.join(names)}."


def _paths(schema: type[Any], at: str = "") -> Iterator[str]:
    """Yields every dotted key of a schema."""
    for key, hint in hints_of(schema).items():
        yield _join(at, key)
        if _is_choice(hint):
            hint = hint.of_kind(None, key)
        for part in (hint, *typing.get_args(hint)):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                yield from _paths(part, _join(at, key))


@cache
def hints_of(schema: type[Any]) -> dict[str, Any]:
    """Returns the types of a schema's keys."""
    hints = typing.get_type_hints(schema)
    return {key: hints[key] for key in _fields(schema)}


def _fields(schema: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {item.name: item for item in dataclasses.fields(schema) if item.init}


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _is_variadic(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and args[1] is Ellipsis


def _is_choice(hint: Any) -> typing.TypeGuard[type[Choice]]:
    return isinstance(hint, type) and issubclass(hint, Choice) and "kind" not in vars(hint)


def _is_tree(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or hint is dict or typing.get_origin(hint) is dict


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else str(key)
