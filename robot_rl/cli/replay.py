"""`robot-rl replay`: looks into recorded episodes, checks, repairs, seals and rearranges them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from robot_rl.core.errors import ConfigError, DatasetError, nearest
from robot_rl.data.episode import EpisodeSource
from robot_rl.data.spans import pairs, spans_of, whole_number
from robot_rl.data.store.check import repair, verify
from robot_rl.data.store.layout import is_store
from robot_rl.data.store.reader import StoreReader, open_source
from robot_rl.data.store.seal import SealOptions, seal
from robot_rl.data.store.sealed import read_info
from robot_rl.data.store.summary import Summary, summarize

if TYPE_CHECKING:
    from robot_rl.data.lerobot.damage import Problem as DatasetProblem

SUMMARY = "look into recorded episodes, repair, rearrange: info, verify, seal, merge, filter, upgrade, ..."

_DAMAGED = 1

_ABOUT = """\
A store is a folder that a robot or a simulator records into (journal/, safe against crashes); what is
sealed in it is a LeRobotDataset v3. Every command but repair and seal also reads plain datasets (v3, v2.1).
"""

_HELP = {
    "info": """\
  info    PATH       episodes, steps, time, success; by source, device and policy; what was lost
            episodes=0-9,12 and as of merge""",
    "verify": """\
  verify  PATH       reads everything, compares checksums, decodes every video; exit code 1 if damaged""",
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
            drop=NAME,NAME     columns and files to leave out; what would be lost is refused otherwise
            rename=actions:action,state:observation.state  cameras=front,wrist  on_damage=skip
                               how datasets are read: names that are not LeRobot's, only these cameras,
                               without damaged episodes, which are named""",
    "split": """\
  split   PATH       new datasets of parts of it
            FOLDER=0.8 FOLDER=0.2 (shares), or FOLDER=0-79 FOLDER=80,82-99 (episodes)
            and images=, codec=, drop=, rename=, cameras=, on_damage= as of merge""",
    "filter": """\
  filter  PATH       a new dataset of the episodes that pass every test
            out=FOLDER         and images=, codec=, drop=, rename=, cameras=, on_damage= as of merge
            success=true|false by=real,human instruction="..." episodes=0-9,12 min_steps=20""",
    "rename": """\
  rename  PATH       a new dataset with other names; nothing is encoded again
            out=FOLDER         actions=action state=observation.state ...""",
    "stats": """\
  stats   PATH       computes the statistics again, in place""",
    "tasks": """\
  tasks   PATH       lists the instructions: number, text, episodes, steps
            0="pick up the cube"   gives number 0 another text, in place""",
    "upgrade": """\
  upgrade PATH       a dataset of version 2.1 as version 3; nothing is encoded again
            out=FOLDER""",
}

_EXAMPLES = """
Type first:
  robot-rl replay info demos
  robot-rl replay filter demos out=good success=true
  robot-rl replay split good train=0.9 held_out=0.1
"""

Result = tuple[int, dict[str, Any]]
"""Exit code, and what --json prints."""


def run(argv: list[str]) -> int:
    """Runs one action and with `--json` ends on one JSON object."""
    asked = next((word for word in argv if word in _HELP), None)
    parser = argparse.ArgumentParser(
        prog="robot-rl replay",
        usage=f"robot-rl replay {asked} PATH [key=value ...] [--json]" if asked else None,
        description=None if asked else SUMMARY,
        epilog=_HELP[asked] if asked else "\n".join([_ABOUT, *_HELP.values(), _EXAMPLES]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", help=", ".join(_ACTIONS))
    parser.add_argument("words", nargs="*", metavar="PATH or key=value")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_intermixed_args(argv)
    if given.action not in _ACTIONS:
        raise ConfigError(f"replay: no action {given.action!r}.{nearest(given.action, _ACTIONS)}")
    paths = [word for word in given.words if "=" not in word or os.path.exists(word)]
    settings = dict(word.split("=", 1) for word in given.words if word not in paths)
    code, result = _ACTIONS[given.action](paths, settings)
    if given.json:
        print(json.dumps(result))
    return code


def _info(paths: Sequence[str], settings: dict[str, str]) -> Result:
    reading = _reading("info", settings)
    _allow("info", settings, "rename", "cameras", "on_damage", "episodes")
    path = _one("info", paths)
    found = summarize(path, _open("info", path, reading))
    console = Console(soft_wrap=True)
    task = f" of {found.task!r}" if found.task else ""
    console.print(f"{found.path}: {found.kind}{task}, {found.robot}, {found.control_hz:g} Hz", markup=False)
    console.print(_groups(found))
    shapes = (f"{key} {'x'.join(map(str, shape))}" for key, shape in found.features.items())
    console.print(f"observations: {', '.join(shapes)}; action {found.action}", markup=False)
    more = f" and {len(found.instructions) - 3} more" if len(found.instructions) > 3 else ""
    said = ", ".join(repr(text) for text in found.instructions[:3])
    console.print(f"instructions: {said or 'none'}{more}", markup=False)
    where = f"{found.sealed_episodes:,} sealed, {found.journal_episodes:,} in the journal, "
    where = where if found.kind == "store" else ""
    console.print(
        f"{_count(found.episodes, 'episode')} ({where}{found.unfinished:,} unfinished), "
        f"{_count(found.steps, 'step')}, {_time(found.minutes)}, success {_share_of(found.success)}, "
        f"{_megabytes(found.num_bytes)}"
        + (f" ({_megabytes(found.journal_bytes)} journal)" if found.kind == "store" else "")
    )
    _print_lost(console, found.lost)
    result = dataclasses.asdict(found) | {"bytes": found.num_bytes, "lost_steps": found.lost_steps}
    return 0, result


def _verify(paths: Sequence[str], settings: dict[str, str]) -> Result:
    _allow("verify", settings)
    folder = Path(_recorded("verify", paths))
    console = Console(soft_wrap=True)
    wrong: list[str] = []
    remedies: list[str] = []
    result: dict[str, Any] = {"path": str(folder)}
    if is_store(folder) or (folder / "journal").is_dir():
        report = verify(folder)
        console.print(
            f"{folder}/journal: {_count(report.records, 'record')}, {_count(report.episodes, 'episode')}, "
            f"{_count(report.steps, 'step')}, {_count(report.pictures, 'picture')}, "
            f"{_megabytes(report.num_bytes)}" + (", being written now" if report.is_being_written else ""),
            markup=False,
        )
        wrong += [str(problem) for problem in report.problems]
        if wrong:
            remedies.append(f"mend the journal: robot-rl replay repair {folder}")
        _print_lost(console, report.lost)
        result |= {"journal": dataclasses.asdict(report)}
    if (folder / "meta/info.json").is_file() or not result.get("journal"):
        problems, said = _check_dataset(console, folder)
        remedies += [] if remedies else _sound_episodes(folder, problems)
        wrong += said
        result |= {"dataset": [dataclasses.asdict(problem) for problem in problems]}
    for problem in wrong:
        console.print(f"  damaged: {problem}", markup=False, style="red")
    console.print(_count(len(wrong), "problem") if wrong else "sound", markup=False)
    for remedy in remedies:
        console.print(f"  {remedy}", markup=False)
    return _DAMAGED if wrong else 0, result | {"sound": not wrong, "problems": wrong}


def _check_dataset(console: Console, folder: Path) -> tuple[list[DatasetProblem], list[str]]:
    """Reads and decodes everything; returns what was found, and what to say of damage."""
    from robot_rl.data.lerobot.damage import check, lines  # reads videos: loaded where there is a dataset

    bar = Console(stderr=True)
    with Progress(console=bar, transient=True, disable=not bar.is_terminal) as progress:
        task = progress.add_task("decoding videos", total=None)
        videos = 0

        def on_video(done: int, total: int) -> None:
            nonlocal videos
            videos = total
            progress.update(task, completed=done, total=total)

        problems = check(folder, thorough=True, on_video=on_video)
    said = lines(problem for problem in problems if problem.is_fatal)
    decoded = f"{_count(videos, 'video')} decoded, " if videos else ""
    console.print(f"{folder}: dataset, {decoded}{_count(len(said), 'problem')}", markup=False)
    for note in lines(problem for problem in problems if not problem.is_fatal):
        console.print(f"  note: {note}", markup=False)
    return problems, said


def _sound_episodes(folder: Path, problems: Sequence[DatasetProblem]) -> list[str]:
    """Says how to keep the sound episodes, where the damage is that of single ones."""
    fatal = [problem.episode for problem in problems if problem.is_fatal]
    if not fatal or None in fatal:
        return []
    from robot_rl.data.lerobot.damage import spans
    from robot_rl.data.lerobot.reader import Dataset

    numbers, source = Dataset(folder).index.episode, open_source(folder)
    at = [source.sealed(i) if isinstance(source, StoreReader) else i for i in range(len(source))]
    sound = [i for i, place in enumerate(at) if place is None or int(numbers[place]) not in fatal]
    keep = f"keep what is sound: robot-rl replay filter {folder} out=NEW episodes={spans(sound)}"
    return [keep] if sound else []


def _repair(paths: Sequence[str], settings: dict[str, str]) -> Result:
    _allow("repair", settings)
    folder = _one("repair", paths)
    problems = [str(problem) for problem in repair(folder)]
    for problem in problems:
        print(f"  {problem}")
    print(
        f"{folder}: {_count(len(problems), 'problem')} repaired"
        if problems
        else f"{folder}: nothing to repair"
    )
    return 0, {"path": folder, "repaired": problems}


def _seal(paths: Sequence[str], settings: dict[str, str]) -> Result:
    folder = _one("seal", paths)
    try:
        done = seal(folder, SealOptions(**_pictures("seal", settings)))
    except KeyboardInterrupt as interrupt:
        interrupt.add_note("Every episode is in the journal or in the dataset; the same command goes on.")
        raise
    for reason in done.refused:
        print(f"  not sealed: {reason}")
    print(f"{folder}: {_count(done.episodes, 'episode')} ({_count(done.steps, 'step')}) sealed")
    return _DAMAGED if done.refused else 0, {"path": folder, **dataclasses.asdict(done)}


def _checksum(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.writer import record_checksums

    _allow("checksum", settings)
    folder = Path(_recorded("checksum", paths))
    count = record_checksums(folder)
    print(f"{folder}: checksums of {_count(count, 'file')} recorded")
    return 0, {"path": str(folder), "files": count}


def _compact(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.compact import compact

    _allow("compact", settings)
    folder = Path(_recorded("compact", paths))
    if is_store(folder) and not (read_info(folder) or {}).get("total_episodes"):
        raise DatasetError(
            f"{folder}: nothing is sealed yet, the journal has no files to join. Seal it first: "
            f"robot-rl replay seal {folder}"
        )
    before = _num_files(folder)
    compact(folder)
    after = _num_files(folder)
    print(f"{folder}: {_count(before, 'file')} became {after:,}")
    return 0, {"path": str(folder), "files_before": before, "files": after}


def _merge(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.edit import merge

    reading, out = _reading("merge", settings, episodes=False), _out("merge", settings)
    fps = _rate("merge", settings.pop("fps")) if "fps" in settings else None
    options = _pictures("merge", settings, "out")
    sources = [_open("merge", path, reading) for path in paths]
    return _written([merge(sources, out, fps=fps, **options)], options)


def _upgrade(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.upgrade import upgrade

    folder, out = _recorded("upgrade", paths), _out("upgrade", settings)
    _allow("upgrade", settings, "out")
    return _written([upgrade(folder, out)])


def _rename(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.edit import merge

    out = _out("rename", settings)
    names = {old: new for old, new in settings.items() if old != "out"}
    if not names:
        raise ConfigError("replay rename: no names. Say <name there>=<new name>, for example actions=action")
    return _written([merge([_open("rename", _one("rename", paths), {"rename": names})], out)])


def _stats(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.amend import recompute_stats

    _allow("stats", settings)
    folder = _recorded("stats", paths)
    bar = Console(stderr=True)
    with Progress(console=bar, transient=True, disable=not bar.is_terminal) as progress:
        task = progress.add_task("statistics", total=None)
        episodes = recompute_stats(
            folder, lambda done, total: progress.update(task, completed=done, total=total)
        )
    print(f"{folder}: statistics of {_count(episodes, 'episode')} computed again")
    return 0, {"path": folder, "episodes": episodes}


def _tasks(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.amend import rename_tasks, tasks_of_rows
    from robot_rl.data.lerobot.reader import Dataset

    folder = _recorded("tasks", paths)
    numbers = {_number("tasks", "number", number): text for number, text in settings.items()}
    found = tasks_of_rows(Dataset(folder))  # damage is found before anything is changed
    if numbers:
        rename_tasks(folder, numbers)
        found |= {number: (text, *found[number][1:]) for number, text in numbers.items()}
    for number, (text, episodes, steps) in found.items():
        print(f"{number}  {text}  ({_count(episodes, 'episode')}, {_count(steps, 'step')})")
    keys = ("number", "task", "episodes", "steps")
    return 0, {"path": folder, "tasks": [dict(zip(keys, (n, *of), strict=True)) for n, of in found.items()]}


def _split(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.edit import split

    source = _open("split", _one("split", paths), _reading("split", settings, episodes=False))
    kept = {key: settings.pop(key) for key in ("images", "codec", "drop") if key in settings}
    if not settings:
        raise ConfigError("replay split: no parts. Say FOLDER=0.8 FOLDER=0.2, or FOLDER=0-79 FOLDER=80-99.")
    parts: dict[str | Path, Sequence[int] | float] = {
        folder: _share("split", folder, text) for folder, text in settings.items()
    }
    options = _pictures("split", kept)
    return _written(split(source, parts, **options), options)


def _filter(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.edit import filter as filter_episodes

    source = _open("filter", _one("filter", paths), _reading("filter", settings, episodes=False))
    out = _out("filter", settings)
    tests: dict[str, Callable[[str], Any]] = {
        "success": lambda text: _choice("filter", "success", text, {"true": True, "false": False}),
        "by": lambda text: text.split(","),
        "instruction": str,
        "episodes": lambda text: _episodes("filter", "episodes", text),
        "min_steps": lambda text: _number("filter", "min_steps", text),
    }
    chosen = {key: read(settings[key]) for key, read in tests.items() if key in settings}
    options = _pictures("filter", settings, "out", *tests)
    return _written([filter_episodes(source, out, **chosen, **options)], options)


_ACTIONS: dict[str, Callable[[Sequence[str], dict[str, str]], Result]] = {
    "info": _info,
    "verify": _verify,
    "repair": _repair,
    "seal": _seal,
    "checksum": _checksum,
    "compact": _compact,
    "merge": _merge,
    "split": _split,
    "filter": _filter,
    "rename": _rename,
    "stats": _stats,
    "tasks": _tasks,
    "upgrade": _upgrade,
}


# --- words ---------------------------------------------------------------------------------------


def _one(action: str, paths: Sequence[str]) -> str:
    if len(paths) != 1:
        raise ConfigError(
            f"replay {action}: got {len(paths)} paths, allowed: one. Usage: robot-rl replay {action} PATH"
        )
    return paths[0]


def _recorded(action: str, paths: Sequence[str]) -> str:
    """Returns the one path; of a run folder it says what to look into."""
    path = _one(action, paths)
    folder = Path(path)
    if not folder.is_dir():
        raise DatasetError(f"{folder}: no such folder. Give one that holds a store or a LeRobotDataset.")
    if not (folder / "meta").is_dir() and not (folder / "journal").is_dir():
        inside = [f"{folder / name}" for name in ("experience", "demos") if (folder / name / "meta").is_dir()]
        is_run = "a run folder" if (folder / "config.yaml").is_file() else "no store and no dataset"
        hint = (
            f"What was recorded lies in {' and '.join(inside)}." if inside else "Nothing is recorded in it."
        )
        raise DatasetError(f"{folder}: this is {is_run}. {hint}")
    return path


def _out(action: str, settings: dict[str, str]) -> str:
    if "out" not in settings:
        raise ConfigError(f"replay {action}: out is missing. Say where to write: out=<new folder>")
    return settings["out"]


def _allow(action: str, settings: dict[str, str], *allowed: str) -> None:
    for key in settings:
        if key not in allowed:
            known = nearest(key, allowed) if allowed else " It takes none."
            raise ConfigError(f"replay {action}: no setting {key!r}.{known}")


def _pictures(action: str, settings: dict[str, str], *also: str) -> dict[str, Any]:
    """Returns how pictures are written and what is left out, and refuses settings that are unknown."""
    left_out = () if action == "seal" else ("drop",)
    _allow(action, settings, "images", "codec", *left_out, *also)
    choices = {"images": ("video", "png"), "codec": ("h264", "av1")}
    drop = {"drop": settings["drop"].split(",")} if "drop" in settings else {}
    return drop | {
        key: _choice(action, key, settings[key], {name: name for name in names})
        for key, names in choices.items()
        if key in settings
    }


def _choice(action: str, key: str, text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ConfigError(f"replay {action}.{key}: got {text!r}, allowed: {', '.join(choices)}")
    return choices[text]


def _number(action: str, key: str, text: str) -> int:
    return whole_number(text, f"replay {action}.{key}")


def _rate(action: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ConfigError(f"replay {action}.fps: got {text!r}, allowed: a rate above 0 in Hz")
    return rate


def _episodes(action: str, key: str, text: str) -> list[int]:
    """Reads `0-9,12`."""
    return spans_of(text, f"replay {action}.{key}")


def _reading(action: str, settings: dict[str, str], *, episodes: bool = True) -> dict[str, Any]:
    """Takes out of the settings how datasets are read: names, cameras, damage, and episodes if asked for."""
    readings: dict[str, Callable[[str], Any]] = {
        "rename": lambda text: pairs(text.strip("{}").split(","), f"replay {action}.rename"),
        "cameras": lambda text: text.split(","),
        "on_damage": lambda text: _choice(action, "on_damage", text, {"raise": "raise", "skip": "skip"}),
    }
    if episodes:
        readings["episodes"] = lambda text: _episodes(action, "episodes", text)
    return {key: read(settings.pop(key)) for key, read in readings.items() if key in settings}


def _open(action: str, path: str, reading: dict[str, Any]) -> EpisodeSource:
    """Opens what is read, and says which damaged episodes are left out."""
    source = open_source(_recorded(action, [path]), **reading)
    if reading.get("on_damage") == "skip":
        from robot_rl.data.lerobot.damage import lines
        from robot_rl.data.lerobot.reader import Dataset

        problems = source.skipped if isinstance(source, Dataset) else []
        for line in lines(problem for problem in problems if problem.is_fatal):
            print(f"left out: {line}")
    return source


def _share(action: str, key: str, text: str) -> float | list[int]:
    """Reads a share, `0.8`, or episodes, `0-9,12`."""
    if "." not in text:
        return _episodes(action, key, text)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"replay {action}.{key}: got {text!r}, allowed: a share such as 0.8, or episodes such as 0-9,12"
        ) from None


# --- print ---------------------------------------------------------------------------------------


def _written(folders: Sequence[Path], options: Mapping[str, Any] | None = None) -> Result:
    """Says what was written, and what was left out because somebody asked for it."""
    drop = (options or {}).get("drop", [])
    rows: list[dict[str, Any]] = []
    for folder in folders:
        source = open_source(folder)
        rows.append({"path": str(folder), "episodes": len(source), "steps": int(source.lengths().sum())})
        print(f"{folder}: {_count(len(source), 'episode')}, {_count(rows[-1]['steps'], 'step')}")
    if drop:
        print(f"left out: {', '.join(drop)}")
    return 0, {"written": rows} | ({"left_out": drop} if drop else {})


def _groups(found: Summary) -> Table:
    """Lays out who made the steps, on what, with which policies."""
    table = Table()
    for column in ("source", "device", "policy version", "episodes", "steps", "time", "success"):
        table.add_column(column, justify="left" if column in ("source", "device") else "right")
    for group in found.groups:
        first, last = group.first_version, group.last_version
        table.add_row(
            group.source,
            group.device or "-",
            f"{first}" if first == last else f"{first} to {last}",
            f"{group.episodes:,}",
            f"{group.steps:,}",
            _time(group.minutes),
            _share_of(None if found.success is None else group.successes / max(1, group.episodes)),
        )
    return table


def _print_lost(console: Console, lost: Sequence[object]) -> None:
    for problem in lost:
        console.print(f"  lost earlier: {problem}", markup=False)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _time(minutes: float) -> str:
    """Returns `4.2 s`, `3 min 07 s` or `84.5 min`."""
    if minutes < 1:
        return f"{60 * minutes:.1f} s"
    whole, seconds = divmod(round(60 * minutes), 60)
    return f"{whole} min {seconds:02d} s" if minutes < 10 else f"{minutes:,.1f} min"


def _num_files(folder: Path) -> int:
    return sum(
        path.is_file()
        for kind in ("data", "videos", "final", "arrays", "meta/episodes")
        for path in (folder / kind).rglob("*")
    )


def _share_of(success: float | None) -> str:
    return "not judged" if success is None else f"{success:.0%}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
