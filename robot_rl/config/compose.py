"""Hydra composes plain data from `robot_rl/configs` and overrides; `build` turns it into a schema.

Hydra has the defaults lists, groups, interpolation, the override grammar and the sweeps. Types are
checked after it, by `build`, because frozen keyword-only dataclasses with tuples and literals
are no OmegaConf structured configs.
"""

from __future__ import annotations

import io
import itertools
import re
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from robot_rl.config.build import build, choices, defaults, plain
from robot_rl.config.groups import CONFIGS, options
from robot_rl.config.typed import as_typed, split
from robot_rl.config.words import quoted
from robot_rl.core.errors import ConfigError, nearest
from robot_rl.core.files import read_checked_text

T = TypeVar("T")

CONFIG_REMEDY = "Restore the file from a copy, or start a new run with these settings."
"""What to do about a config.yaml that cannot be read."""

_KEY = re.compile(r"[+~]*[\w.@:/-]+", re.ASCII)
_hydra_lock = threading.RLock()


def load(schema: type[T], overrides: Sequence[str], *, config_name: str, folder: Path = CONFIGS) -> T:
    """Composes `<folder>/<config_name>.yaml` with Hydra overrides into a checked `schema`.

    A name of a group (`recipe=pick_cube`) selects `<folder>/<group>/<name>.yaml`; every other key
    is a dotted path into the schema. A command without groups needs no file. Works from any
    directory, and inside another Hydra program.

    Of a field of several kinds, `method=ppo` is short for `method.kind=ppo`. Where the recipe chose a kind
    with other settings, all that the recipe sets there is left out.

    Raises:
        ConfigError: an unknown recipe, key or value, or a bad type; the nearest name is offered.
    """
    root = config_name if (folder / f"{config_name}.yaml").is_file() else None
    parsed: list[Override] = []
    try:
        overrides, kinds, dropped = _kinds([*overrides], schema, root, folder)
        typed = (word if _is_group(word, folder) else as_typed(word, schema, kinds) for word in overrides)
        parsed = _parse([*dropped, *typed])
        for override in parsed:
            _check(override, folder)
        composed = _compose(root, [_spell(override, folder) for override in parsed], folder)
        usual = defaults(schema)
        for key, choice in choices(schema).items():
            chosen: Any = choice.of_kind(_kind(composed, key), f"{key}.kind")
            usual[key] = {"kind": chosen.kind, **defaults(chosen)}
        merged = OmegaConf.merge(usual, composed)
        values = cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=True, throw_on_missing=True))
    except (HydraException, OmegaConfBaseException) as error:
        for override in parsed:
            if str(error).startswith(f"Could not override '{override.key_or_group}'"):
                raise ConfigError(
                    f"{override.input_line}: the recipe is built on no {override.key_or_group}, allowed: "
                    f"recipes whose file says `- /{override.key_or_group}: <name>`."
                ) from error
        raise ConfigError(f"{config_name}: {_first_line(error)}") from error
    return build(schema, values)


def read(
    schema: type[T], path: Path, *, renewed: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> T:
    """Reads a file that holds what `dump` returned, with or without a first line of checksum.

    `renewed` returns settings of earlier versions under the keys of today.

    Raises:
        ConfigError: it is missing, damaged, or has an unknown key or value.
    """
    text = read_checked_text(path, ConfigError, CONFIG_REMEDY)
    try:
        loaded = OmegaConf.load(io.StringIO(text))
        values = OmegaConf.to_container(loaded, resolve=True)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {_first_line(error)} {CONFIG_REMEDY}") from error
    if not isinstance(loaded, DictConfig) or not loaded:
        got = "nothing" if not loaded else "a list"
        raise ConfigError(f"{path}: got {got}, allowed: keys and values. {CONFIG_REMEDY}")
    try:
        found = cast("dict[str, Any]", values)
        return build(schema, found if renewed is None else renewed(found))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def dump(config: Any) -> str:
    """Returns the whole resolved config as YAML; `read` gives an equal one back."""
    return yaml.safe_dump(plain(config), sort_keys=False, default_flow_style=None, width=100)


def sweep(argv: Sequence[str]) -> list[list[str]]:
    """Expands comma lists, `choice(...)`, `range(...)` and `glob(...)` into one argument list per job.

    `["recipe=smoke", "seed=0,1"]` gives `[["recipe=smoke", "seed=0"], ["recipe=smoke", "seed=1"]]`.
    Flags (`--json`) go to every job.
    """
    axes: list[list[str]] = []
    for word in argv:
        if word.startswith("-") or "=" not in word:
            axes.append([word])
            continue
        try:
            (override,) = OverridesParser.create().parse_overrides([word])
        except HydraException:  # as a path may be typed
            name, _, value = word.partition("=")
            axes.append([f"{name}={part}" for part in split(value)])
            continue
        if override.is_interval_sweep():
            raise ConfigError(f"{word}: an interval needs an optimiser. List the values: `key=0.1,0.2`.")
        key = override.get_key_element()
        values = override.sweep_string_iterator() if override.is_sweep_override() else None
        axes.append([word] if values is None else [f"{key}={value}" for value in values])
    return [list(job) for job in itertools.product(*axes)]


def _kinds(
    words: list[str], schema: type[Any], root: str | None, folder: Path
) -> tuple[list[str], dict[str, str | None], list[str]]:
    """Returns the words with `method=ppo` written out, and the kind of each field of several kinds.

    The third are words that drop what the recipe sets of another kind. Nothing is composed where no word
    says anything of such a field.
    """
    tagged = choices(schema)
    if not any(re.split(r"[.=]", word.lstrip("+~"), maxsplit=1)[0] in tagged for word in words):
        return words, {}, []
    for index, word in enumerate(words):
        key, _, value = word.partition("=")
        if key in tagged and not value.startswith("{"):
            words[index] = f"{key}.kind={value}"
    groups = _parse([word for word in words if _is_group(word, folder)])
    chosen = _parse([word for word in words if word.partition("=")[0].removesuffix(".kind") in tagged])
    for override in (*groups, *chosen):
        _check(override, folder)
    given: dict[str, str] = {}
    for override in chosen:
        key, value = override.key_or_group.removesuffix(".kind"), override.value()
        kind = value.get("kind") if isinstance(value, dict) else value
        given |= {} if kind is None else {key: str(kind)}
    recipe = _compose(root, [_spell(override, folder) for override in groups], folder)
    kinds: dict[str, str | None] = {}
    dropped: list[str] = []
    for key in tagged:
        of_recipe = _kind(recipe, key)
        kinds[key] = given.get(key, of_recipe)
        schemas = [tagged[key].of_kind(kind, key) for kind in (kinds[key], of_recipe)]
        if key in recipe and schemas[0] is not schemas[1]:
            dropped.append(f"~{key}")
    return words, kinds, dropped


def _kind(composed: DictConfig, key: str) -> str | None:
    """Returns what a composed section says which kind it is, if it does."""
    section = composed.get(key)
    return section.get("kind") if isinstance(section, DictConfig) else None


def _compose(root: str | None, overrides: list[str], folder: Path) -> DictConfig:
    with _hydra_lock, _hydra(folder):
        return compose(root, overrides=overrides)


def _parse(overrides: Sequence[str]) -> list[Override]:
    parser, parsed = OverridesParser.create(), list[Override]()
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals and not word.startswith("~"):
            raise ConfigError(f"{word}: got a word, allowed: key=value, for example `seed=3`.")
        try:
            parsed += parser.parse_overrides([word])
        except HydraException as error:
            if not _KEY.fullmatch(key):
                raise ConfigError(
                    f"{key}: no such key. Got {word!r}, allowed: key=value, such as seed=3."
                ) from error
            parsed += parser.parse_overrides([f"{key}={quoted(value)}"])  # text, which `build` may refuse
    return parsed


def _is_group(word: str, folder: Path) -> bool:
    return bool(options(word.partition("=")[0].lstrip("+~"), folder))


def _check(override: Override, folder: Path) -> None:
    """Raises for what Hydra would report without a remedy: sweeps, and groups without that option."""
    word, key = str(override.input_line), override.key_or_group
    if override.is_sweep_override():
        raise ConfigError(f"{word}: got several values for one run, allowed: one. Add -m to run them all.")
    known = options(key, folder)
    if known and not override.is_delete() and override.value() not in known:
        raise ConfigError(
            f"{key}: no {key} named {str(override.value())!r}.{nearest(str(override.value()), known)} "
            f"`robot-rl doctor --list {key}` shows all {len(known)}."
        )


def _spell(override: Override, folder: Path) -> str:
    """Returns the override as Hydra should see it: keys are always settable, `build` judges them."""
    word = str(override.input_line)
    is_key = not options(override.key_or_group, folder) and not override.is_hydra_override()
    return f"++{word}" if is_key and not word.startswith(("+", "~")) else word


@contextmanager
def _hydra(folder: Path) -> Generator[None]:
    """Initialises Hydra on a folder, and gives an outer Hydra program its own state back."""
    state = GlobalHydra.instance()
    outer = state.hydra
    state.clear()
    try:
        with initialize_config_dir(str(folder.resolve()), version_base="1.3", job_name="robot-rl"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
