"""What `robot-rl replay` is told: its help, and its words as paths, settings, episodes and names."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from robot_rl.core.errors import ConfigError, DatasetError, nearest
from robot_rl.core.files import at_home
from robot_rl.data.episode import EpisodeSource
from robot_rl.data.reading import OnDamage, ReadingConfig, ReadOptions, spans_of, whole_number
from robot_rl.data.store.reader import open_source

if TYPE_CHECKING:
    from robot_rl.data.lerobot.damage import Problem as DatasetProblem
    from robot_rl.data.lerobot.reader import Dataset

ABOUT = """\
A store is a folder that a robot or a simulator records into (journal/, safe against crashes); what is
sealed in it is a LeRobotDataset v3. Plain datasets (v3, v2.1) are read as well: repair and seal are for
stores, compact for v3, upgrade for v2.1.
"""

HELP = {
    "info": """\
  info    PATH       episodes, steps, time, success; by source, device and policy; what was lost
            and READING""",
    "verify": """\
  verify  PATH       reads everything, compares checksums, decodes every video; exit code 1 if damaged
            and episodes=, cameras=, rename= of READING: of these alone""",
    "repair": """\
  repair  STORE      takes damage out, notes what is lost; damaged files stay in journal/damaged""",
    "seal": """\
  seal    STORE      finished episodes of the journal become part of the dataset
            images=video|png   pictures as video, or without further loss (default video)
            codec=h264|av1     of the video""",
    "checksum": """\
  checksum PATH      records every file of a dataset as it is now: after it was changed on purpose""",
    "compact": """\
  compact PATH       joins the files of many episodes into few; nothing is encoded again""",
    "merge": """\
  merge   PATH ...   all episodes in one new dataset
            out=FOLDER         rows, videos and files of others are copied as they are
            images=, codec=    as of seal: records the episodes anew instead
            fps=30             gives datasets of another rate this one: at each instant the newest row, which
                               suits actions that say where to be, not how far to move in one step
            drop=NAME,NAME     columns, files, entries of meta/info.json to leave out; else losses are refused
            and READING, of every PATH""",
    "split": """\
  split   PATH       new datasets of parts of it
            FOLDER=0.8 FOLDER=0.2 (shares), or FOLDER=0-79 FOLDER=80,82-99 (episodes)
            and images=, codec=, drop= as of merge, and READING: parts of what is read, counted from 0""",
    "filter": """\
  filter  PATH       a new dataset of the episodes that pass every test
            out=FOLDER         and images=, codec=, drop= as of merge, and READING
            success=true|false by=real,human instruction="..." min_steps=20""",
    "rename": """\
  rename  PATH       a new dataset with other names; nothing is encoded again
            out=FOLDER         actions=action state=observation.state ...""",
    "stats": """\
  stats   PATH       computes the statistics again, in place""",
    "tasks": """\
  tasks   PATH       lists the instructions: number, text, episodes, steps; and READING
            0="pick up the cube"   gives number 0 another text, in place and in all episodes""",
    "upgrade": """\
  upgrade PATH       a dataset of version 2.1 as version 3; nothing is encoded again
            out=FOLDER         and READING""",
}

READING = """
READING, how a dataset is read:
            episodes=0-9,12    only these, counted from 0
            cameras=front,wrist  only these
            on_damage=skip     without damaged episodes, which are named
            rename=actions:action,state:observation.state   names that are not LeRobot's
"""
_WITHOUT = """\
repair, seal, checksum, compact and stats change all of a folder in place, and every word of rename is a name
of a column: filter writes a part first. Of a journal, filter takes a part by episodes=, split by FOLDER=0-9.
"""
_READING = ("rename", "cameras", "on_damage", "episodes")
_READS = {
    **dict.fromkeys(("info", "merge", "split", "filter", "tasks", "upgrade"), _READING),
    "verify": ("rename", "cameras", "episodes"),
}
"""Which of them an action has a use for."""
_PART = "Write that part into a dataset of its own first: robot-rl replay filter PATH WORD out=NEW"
_WHOLE = {
    "verify": "verify finds damage, and leaves none out. It is left out by robot-rl replay filter PATH WORD "
    "out=NEW",
    "repair": "repair takes the damage out of all of a journal. Choose from what is sealed: robot-rl replay "
    "filter PATH WORD out=NEW",
    "seal": "seal moves all finished episodes into the dataset. Choose from what is sealed: robot-rl replay "
    "filter PATH WORD out=NEW",
    "checksum": "checksum records every file of the dataset, whatever it is called.",
    "compact": f"compact joins all files of the dataset where they are. {_PART}",
    "stats": f"stats computes those of the whole dataset in place, under the names in its files. {_PART}",
    "tasks": f"a text is changed in all episodes. {_PART}",
    "rename": "every word but out= is the name of a column. Both at once: robot-rl replay filter PATH "
    "rename=<name there>:<new name> WORD out=NEW",
}
"""Why an action has no use for the words of `READING`; WORD is what was typed."""
_COPYING = ("images", "codec", "drop")

EXAMPLES = """
Type first:
  robot-rl replay info demos
  robot-rl replay filter demos out=good success=true
  robot-rl replay split good train=0.9 held_out=0.1
"""


def help_of(action: str | None) -> str:
    """Returns the help of one action, or of all."""
    if action is None:
        return "\n".join([ABOUT, *HELP.values(), READING + _WITHOUT, EXAMPLES])
    if action in _READS:
        return f"{HELP[action]}\n{READING}"
    why = _WHOLE[action].replace("WORD", "episodes=0-9")
    return f"{HELP[action]}\n\n{textwrap.fill(f'No episodes=, cameras=, on_damage= and rename=: {why}', 100)}"


def parsed(action: str, typed: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the paths and the settings among the words; `~` at the beginning of a path is the home folder.

    A word with `=` is a path if there is one of that name. The folder of a part may have `=` in its name.
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
    """Returns the one path; of a run folder it says what to look into."""
    path = one_path(action, paths)
    folder = Path(path)
    if not folder.is_dir():
        raise DatasetError(f"{folder}: no such folder. Give one that holds a store or a LeRobotDataset.")
    if not (folder / "meta").is_dir() and not (folder / "journal").is_dir():
        places = [folder / name for name in ("experience", "demos")]
        places += [part for place in places if place.is_dir() for part in sorted(place.iterdir())]
        inside = [f"{place}" for place in places if (place / "meta").is_dir()]
        is_run = "a run folder" if (folder / "config.yaml").is_file() else "no store and no dataset"
        hint = (
            f"What was recorded lies in {' and '.join(inside)}." if inside else "Nothing is recorded in it."
        )
        raise DatasetError(f"{folder}: this is {is_run}. {hint}")
    return path


def out_of(action: str, settings: dict[str, str]) -> str:
    """Returns where to write."""
    if "out" not in settings:
        raise ConfigError(f"replay {action}: out is missing. Say where to write: out=<new folder>")
    return settings["out"]


def allow(action: str, settings: dict[str, str], *allowed: str) -> None:
    """Refuses settings that an action does not know, and says why where it reads no part of a dataset."""
    refuse_reading(action, settings)
    known = (*allowed, *_READS.get(action, ()))
    for key in settings:
        if key not in known:
            raise ConfigError(
                f"replay {action}: no setting {key!r}.{nearest(key, known) if known else ' It takes none.'}"
            )


def refuse_reading(action: str, settings: Mapping[str, str]) -> None:
    """Refuses words of how a dataset is read where they mean nothing."""
    for key, value in settings.items():
        if key in _READING:
            why = _WHOLE[action].replace("WORD", f"{key}={value}")
            raise ConfigError(f"replay {action}: {key}= has no meaning here: {why}")


def pictures(action: str, settings: dict[str, str], *also: str) -> dict[str, Any]:
    """Returns how pictures are written and what is left out, and refuses settings that are unknown."""
    allow(action, settings, *(_COPYING[:-1] if action == "seal" else _COPYING), *also)
    choices = {"images": ("video", "png"), "codec": ("h264", "av1")}
    drop = {"drop": settings["drop"].split(",")} if "drop" in settings else {}
    return drop | {
        key: choice(action, key, settings[key], {name: name for name in names})
        for key, names in choices.items()
        if key in settings
    }


def choice(action: str, key: str, text: str, choices: dict[str, Any]) -> Any:
    """Returns what one of several words stands for."""
    if text not in choices:
        raise ConfigError(f"replay {action}.{key}: got {text!r}, allowed: {', '.join(choices)}")
    return choices[text]


def number(action: str, key: str, text: str) -> int:
    """Reads a whole number."""
    return whole_number(text, f"replay {action}.{key}")


def rate(action: str, text: str) -> float:
    """Reads `fps`."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ConfigError(f"replay {action}.fps: got {text!r}, allowed: a rate above 0 in Hz")
    return rate


def reading(action: str, settings: dict[str, str]) -> ReadOptions:
    """Takes out of the settings how a dataset is read, as far as the action has a use for it."""
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
    """Opens what is read, and says which damaged episodes are left out."""
    source = open_source(recorded(action, [path]), **reading)
    _print_skipped(getattr(source, "skipped", []))
    return source


def dataset(action: str, path: str, reading: ReadOptions) -> Dataset:
    """Opens a dataset, or what is sealed of a store, as `opened` does."""
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
    """Reads a share, `0.8`, or episodes, `0-9,12`."""
    if "." not in text:
        return spans_of(text, f"replay {action}.{key}")
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"replay {action}.{key}: got {text!r}, allowed: a share such as 0.8, or episodes such as 0-9,12"
        ) from None
