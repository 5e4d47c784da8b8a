"""The words of `robot-rl replay`: its help texts, and how paths and settings are read and checked."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from robot_rl.core.errors import ConfigError, DatasetError, nearest, require
from robot_rl.core.files import at_home
from robot_rl.data.episode import EpisodeSource
from robot_rl.data.reading import OnDamage, ReadingConfig, ReadOptions, spans_of, whole_number
from robot_rl.data.store.reader import open_source

if TYPE_CHECKING:
    from robot_rl.data.lerobot.damage import Problem as DatasetProblem
    from robot_rl.data.lerobot.reader import Dataset

ABOUT = """\
A store is a folder that a robot or a simulator records into. Its journal/ survives crashes; sealed episodes
form a LeRobotDataset v3. Plain datasets (v3, v2.1) can be read too. repair and seal are for stores, compact
is for v3, upgrade for v2.1.
"""

HELP = {
    "info": """\
  info    PATH       prints episodes, steps, time and success, by source, device and policy; also losses
            and READING""",
    "verify": """\
  verify  PATH       reads everything, compares checksums, decodes every video; exit code 1 if damaged
            and episodes=, cameras=, rename= of READING, to check only a part""",
    "repair": """\
  repair  STORE      removes damaged parts and notes what is lost; damaged files move to journal/damaged""",
    "fetch": """\
  fetch   RUN        copies what arms of other machines recorded for a run (hub.pictures=stay) into its
            experience/, through the run's hub; again: what was added since""",
    "seal": """\
  seal    STORE      moves finished episodes from the journal into the dataset
            images=video|png   pictures as video, or without further loss (default video)
            codec=h264|av1     of the video""",
    "checksum": """\
  checksum PATH      records checksums of all files as they are now, after a change on purpose""",
    "compact": """\
  compact PATH       joins the files of many episodes into few; nothing is encoded again""",
    "merge": """\
  merge   PATH ...   writes all episodes into one new dataset
            out=FOLDER         rows, videos and other files are copied unchanged
            images=, codec=    as for seal: records the episodes again instead
            fps=30             changes datasets of another rate to this one: each instant gets the newest row.
                               This suits actions that are positions, not steps of one control period
            drop=NAME,NAME     columns, files, entries of meta/info.json to leave out. Without drop= a loss
                               is refused
            and READING, for every PATH""",
    "split": """\
  split   PATH       writes parts into new datasets
            FOLDER=0.8 FOLDER=0.2 (shares), or FOLDER=0-79 FOLDER=80,82-99 (episodes)
            and images=, codec=, drop= as for merge, and READING, after which episodes count from 0""",
    "filter": """\
  filter  PATH       writes the episodes that pass every test into a new dataset
            out=FOLDER         and images=, codec=, drop= as for merge, and READING
            success=true|false by=real,human instruction="..." min_steps=20""",
    "rename": """\
  rename  PATH       writes a new dataset with other names; nothing is encoded again
            out=FOLDER         actions=action state=observation.state ...""",
    "stats": """\
  stats   PATH       computes the statistics again, in place""",
    "tasks": """\
  tasks   PATH       lists the instructions: number, text, episodes, steps; and READING
            0="pick up the cube"   changes the text of number 0, in place and in all episodes""",
    "upgrade": """\
  upgrade PATH       writes a dataset of version 2.1 as version 3; nothing is encoded again
            out=FOLDER         and READING""",
}

READING = """
READING selects what is read of a dataset:
            episodes=0-9,12    only these episodes, counted from 0
            cameras=front,wrist  only these cameras
            on_damage=skip     leaves damaged episodes out and names them
            rename=actions:action,state:observation.state   maps other names to LeRobot's
"""
_WITHOUT = """\
repair, seal, checksum, compact and stats change a whole folder in place, and to rename every word is a name
of a column. For a part, write it with filter first. A journal has only episodes: use filter episodes=0-9 or
split FOLDER=0-9.
"""
_READING = ("rename", "cameras", "on_damage", "episodes")
_READS = {
    **dict.fromkeys(("info", "merge", "split", "filter", "tasks", "upgrade"), _READING),
    "verify": ("rename", "cameras", "episodes"),
}
"""The words of READING that each action takes."""
_FILTER = "robot-rl replay filter PATH WORD out=NEW"
_WHOLE = {
    "verify": f"verify finds damage, and leaves none out. To leave it out: {_FILTER}",
    "repair": f"repair works on a whole journal. To choose from sealed episodes: {_FILTER}",
    "fetch": f"fetch copies all of it. To choose from what is here: {_FILTER}",
    "seal": f"seal moves all finished episodes into the dataset. To choose from sealed episodes: {_FILTER}",
    "checksum": "checksum records every file of the dataset, whatever its name.",
    "compact": f"compact joins all files of the dataset in place. Write the part first: {_FILTER}",
    "stats": "stats computes the statistics of the whole dataset in place, under the names in its files. "
    f"Write the part first: {_FILTER}",
    "tasks": f"a text is changed in all episodes. Write the part first: {_FILTER}",
    "rename": "every word except out= is the name of a column. For both: robot-rl replay filter PATH "
    "rename=<name there>:<new name> WORD out=NEW",
}
"""Why an action takes no words of READING; WORD stands for the word that was typed."""
_COPYING = ("images", "codec", "drop")

EXAMPLES = """
Type first:
  robot-rl replay info demos
  robot-rl replay filter demos out=good success=true
  robot-rl replay split good train=0.9 held_out=0.1
"""


def help_of(action: str | None) -> str:
    """Returns the help of one action, or of all actions."""
    if action is None:
        return "\n".join([ABOUT, *HELP.values(), READING + _WITHOUT, EXAMPLES])
    if action in _READS:
        return f"{HELP[action]}\n{READING}"
    why = _WHOLE[action].replace("WORD", "episodes=0-9")
    return f"{HELP[action]}\n\n{textwrap.fill(f'No episodes=, cameras=, on_damage= and rename=: {why}', 100)}"


def parsed(action: str, typed: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the paths and the settings among the words; `~` at the start of a path is the home folder.

    A word with `=` is a path if that path exists. The folder of a part may have `=` in its name.
    """
    paths: list[str] = []
    settings: dict[str, str] = {}
    for word in typed:
        if "=" not in word or os.path.exists(at_home(word)):
            paths.append(at_home(word))
            continue
        key, _, value = word.partition("=")
        if action == "split" and key not in (*_COPYING, *_READS["split"]):
            key, _, value = word.rpartition("=")
            key = at_home(key)
        if key in settings:
            raise ConfigError(f"replay {action}: got {key}= twice, allowed: once")
        settings[key] = at_home(value) if key == "out" else value
    return paths, settings


def one_path(action: str, paths: Sequence[str]) -> str:
    """Returns the only path."""
    if len(paths) != 1:
        raise ConfigError(
            f"replay {action}: got {len(paths)} paths, allowed: one. Usage: robot-rl replay {action} PATH"
        )
    return paths[0]


def recorded(action: str, paths: Sequence[str]) -> str:
    """Returns the only path, of a store or a dataset; for a run folder the error names those inside."""
    path = one_path(action, paths)
    folder = Path(path)
    if not folder.is_dir():
        raise DatasetError(f"{folder}: no such folder. Give one that holds a store or a LeRobotDataset.")
    if not (folder / "meta").is_dir() and not (folder / "journal").is_dir():
        places = [folder / name for name in ("experience", "demos")]
        places += [part for place in places if place.is_dir() for part in sorted(place.iterdir())]
        inside = [f"{place}" for place in places if (place / "meta").is_dir()]
        is_run = "a run folder" if (folder / "config.yaml").is_file() else "no store and no dataset"
        hint = f"Its recordings are in {' and '.join(inside)}." if inside else "Nothing is recorded in it."
        if is_run == "a run folder":
            hint += " With hub.pictures=stay arms' machines have others: robot-rl replay fetch."
        raise DatasetError(f"{folder}: this is {is_run}. {hint}")
    return path


def out_of(action: str, settings: dict[str, str]) -> str:
    """Returns the folder to write."""
    if "out" not in settings:
        raise ConfigError(f"replay {action}: out is missing. Give a new folder: out=<folder>")
    return settings["out"]


def allow(action: str, settings: dict[str, str], *allowed: str) -> None:
    """Refuses settings that an action does not take; for words of READING the error says why."""
    refuse_reading(action, settings)
    known = (*allowed, *_READS.get(action, ()))
    for key in settings:
        if key not in known:
            raise ConfigError(
                f"replay {action}: no setting {key!r}.{nearest(key, known) if known else ' It takes none.'}"
            )


def refuse_reading(action: str, settings: Mapping[str, str]) -> None:
    """Refuses words of READING, for an action that always works on the whole dataset."""
    for key, value in settings.items():
        if key in _READING:
            why = _WHOLE[action].replace("WORD", f"{key}={value}")
            raise ConfigError(f"replay {action}: {key}= has no meaning here: {why}")


def pictures(action: str, settings: dict[str, str], *also: str) -> dict[str, Any]:
    """Returns the options `images`, `codec` and `drop`, and refuses unknown settings."""
    allow(action, settings, *(_COPYING[:-1] if action == "seal" else _COPYING), *also)
    choices = {"images": ("video", "png"), "codec": ("h264", "av1")}
    drop = {"drop": settings["drop"].split(",")} if "drop" in settings else {}
    return drop | {
        key: choice(action, key, settings[key], {name: name for name in names})
        for key, names in choices.items()
        if key in settings
    }


def choice(action: str, key: str, text: str, choices: dict[str, Any]) -> Any:
    """Returns the value of one of several words."""
    if text not in choices:
        raise ConfigError(f"replay {action}.{key}: got {text!r}, allowed: {', '.join(choices)}")
    return choices[text]


def number(action: str, key: str, text: str) -> int:
    """Parses a whole number."""
    return whole_number(text, f"replay {action}.{key}")


def rate(action: str, text: str) -> float:
    """Parses `fps`."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    require(0 < rate < math.inf, f"replay {action}.fps", text, "a rate above 0 in Hz")
    return rate


def reading(action: str, settings: dict[str, str]) -> ReadOptions:
    """Removes the words of READING from the settings and returns them as options."""
    given = {key: settings.pop(key) for key in _READS[action] if key in settings}
    if "on_damage" in given:
        choice(action, "on_damage", given["on_damage"], {"raise": "raise", "skip": "skip"})
    return ReadingConfig(
        rename=tuple(given["rename"].strip("{}").split(",")) if "rename" in given else (),
        episodes=given.get("episodes"),
        cameras=tuple(given["cameras"].split(",")) if "cameras" in given else None,
        on_damage=cast("OnDamage", given.get("on_damage", "raise")),
    ).options(f"replay {action}.")


def opened(action: str, path: str, reading: ReadOptions) -> EpisodeSource:
    """Opens a dataset or store, and prints which damaged episodes are left out."""
    source = open_source(recorded(action, [path]), **reading)
    _print_skipped(getattr(source, "skipped", []))
    return source


def dataset(action: str, path: str, reading: ReadOptions) -> Dataset:
    """Opens a dataset, or the sealed part of a store, and prints as `opened` does."""
    from robot_rl.data.lerobot.reader import Dataset

    source = Dataset(recorded(action, [path]), **reading)
    _print_skipped(source.skipped)
    return source


def _print_skipped(problems: Sequence[DatasetProblem]) -> None:
    if problems:
        from robot_rl.data.lerobot.damage import left_out

        for line in left_out(problems):
            print(line)


def share(action: str, key: str, text: str) -> float | list[int]:
    """Parses a share, `0.8`, or episodes, `0-9,12`."""
    if "." not in text:
        return spans_of(text, f"replay {action}.{key}")
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"replay {action}.{key}: got {text!r}, allowed: a share such as 0.8, or episodes such as 0-9,12"
        ) from None
