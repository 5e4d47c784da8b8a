"""`robot-rl replay`: looks into recorded episodes, checks, repairs, seals and rearranges them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from robot_rl.core.errors import ConfigError, nearest
from robot_rl.data.store.check import repair, verify
from robot_rl.data.store.layout import is_store
from robot_rl.data.store.reader import open_source
from robot_rl.data.store.seal import SealOptions, seal
from robot_rl.data.store.summary import Summary, summarize

SUMMARY = "look into recorded episodes: info, verify, repair, seal, merge, split, filter"

_DAMAGED = 1

_EPILOG = """\
A store is a folder that a robot or a simulator records into (journal/, safe against crashes); what is
sealed in it is a LeRobotDataset v3. Every command but repair and seal also reads plain datasets (v3, v2.1).

  info   PATH               episodes, steps, minutes, success; by source, device and policy; what was lost
  verify PATH               reads everything and compares checksums; exit code 1 if something is damaged
  repair STORE              takes damage out, notes what is lost; damaged files are kept in journal/damaged
  seal   STORE              finished episodes of the journal become part of the dataset
           images=video|png   pictures as video, or without further loss (default video)
           codec=h264|av1
  merge  PATH PATH ...      out=FOLDER: all episodes in one new dataset
  split  PATH               FOLDER=0.8 FOLDER=0.2 (shares), or FOLDER=0-79 FOLDER=80,82-99 (episodes)
  filter PATH               out=FOLDER: a new dataset of the episodes that pass every test:
           success=true|false by=real,human instruction="..." episodes=0-9,12 min_steps=20

Type first:
  robot-rl replay info demos
  robot-rl replay filter demos out=good success=true
  robot-rl replay split good train=0.9 held_out=0.1
"""

Result = tuple[int, dict[str, Any]]
"""Exit code, and what --json prints."""


def run(argv: list[str]) -> int:
    """Runs one action and with `--json` ends on one JSON object."""
    parser = argparse.ArgumentParser(
        prog="robot-rl replay",
        description=SUMMARY,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", help=", ".join(_ACTIONS))
    parser.add_argument("words", nargs="*", metavar="PATH or key=value")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_intermixed_args(argv)
    if given.action not in _ACTIONS:
        raise ConfigError(f"replay: no action {given.action!r}.{nearest(given.action, _ACTIONS)}")
    paths = [word for word in given.words if "=" not in word or Path(word).exists()]
    settings = dict(word.split("=", 1) for word in given.words if word not in paths)
    code, result = _ACTIONS[given.action](paths, settings)
    if given.json:
        print(json.dumps(result))
    return code


def _info(paths: Sequence[str], settings: dict[str, str]) -> Result:
    _allow("info", settings)
    found = summarize(_one("info", paths))
    console = Console(soft_wrap=True)
    task = f" of {found.task!r}" if found.task else ""
    console.print(f"{found.path}: {found.kind}{task}, {found.robot}, {found.control_hz:g} Hz", markup=False)
    console.print(_groups(found))
    where = f"{found.sealed_episodes:,} sealed, {found.journal_episodes:,} in the journal, "
    where = where if found.kind == "store" else ""
    console.print(
        f"{found.episodes:,} episodes ({where}{found.unfinished:,} unfinished), "
        f"{found.steps:,} steps, {found.minutes:,.1f} min, success {_share_of(found.success)}, "
        f"{_megabytes(found.num_bytes)}"
        + (f" ({_megabytes(found.journal_bytes)} journal)" if found.kind == "store" else "")
    )
    _print_lost(console, found.lost)
    result = dataclasses.asdict(found) | {"bytes": found.num_bytes, "lost_steps": found.lost_steps}
    return 0, result


def _verify(paths: Sequence[str], settings: dict[str, str]) -> Result:
    _allow("verify", settings)
    folder = Path(_one("verify", paths))
    console = Console(soft_wrap=True)
    wrong: list[str] = []
    result: dict[str, Any] = {"path": str(folder)}
    if is_store(folder) or (folder / "journal").is_dir():
        report = verify(folder)
        console.print(
            f"{folder}/journal: {report.records:,} records, {report.episodes:,} episodes, "
            f"{report.steps:,} steps, {report.pictures:,} pictures, {_megabytes(report.num_bytes)}"
            + (", being written now" if report.is_being_written else ""),
            markup=False,
        )
        wrong += [str(problem) for problem in report.problems]
        _print_lost(console, report.lost)
        result |= {"journal": dataclasses.asdict(report)}
    if (folder / "meta/info.json").is_file() or not result.get("journal"):
        from robot_rl.data.lerobot.damage import check  # reads videos: loaded where there is a dataset

        source = check(folder)
        fatal = [problem.message for problem in source if problem.is_fatal]
        console.print(f"{folder}: dataset, {len(fatal)} problems", markup=False)
        for problem in source:
            if not problem.is_fatal:
                console.print(f"  note: {problem.message}", markup=False)
        wrong += fatal
        result |= {"dataset": [dataclasses.asdict(problem) for problem in source]}
    for problem in wrong:
        console.print(f"  damaged: {problem}", markup=False, style="red")
    console.print(
        "sound" if not wrong else f"{len(wrong)} problems; `robot-rl replay repair` mends a journal"
    )
    return _DAMAGED if wrong else 0, result | {"sound": not wrong, "problems": wrong}


def _repair(paths: Sequence[str], settings: dict[str, str]) -> Result:
    _allow("repair", settings)
    folder = _one("repair", paths)
    problems = [str(problem) for problem in repair(folder)]
    for problem in problems:
        print(f"  {problem}")
    print(f"{folder}: {len(problems)} problems repaired" if problems else f"{folder}: nothing to repair")
    return 0, {"path": folder, "repaired": problems}


def _seal(paths: Sequence[str], settings: dict[str, str]) -> Result:
    folder = _one("seal", paths)
    done = seal(folder, SealOptions(**_pictures("seal", settings)))
    for reason in done.refused:
        print(f"  not sealed: {reason}")
    print(f"{folder}: {done.episodes} episodes ({done.steps:,} steps) sealed")
    return _DAMAGED if done.refused else 0, {"path": folder, **dataclasses.asdict(done)}


def _merge(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.edit import merge

    out = _out("merge", settings)
    options = _pictures("merge", settings, "out")
    return _written([merge([open_source(path) for path in paths], out, **options)])


def _split(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.edit import split

    source = open_source(_one("split", paths))
    kept = {key: settings.pop(key) for key in ("images", "codec") if key in settings}
    if not settings:
        raise ConfigError("replay split: no parts. Say FOLDER=0.8 FOLDER=0.2, or FOLDER=0-79 FOLDER=80-99.")
    parts: dict[str | Path, Sequence[int] | float] = {
        folder: _share("split", folder, text) for folder, text in settings.items()
    }
    return _written(split(source, parts, **_pictures("split", kept)))


def _filter(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.edit import filter as filter_episodes

    source = open_source(_one("filter", paths))
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
    return _written([filter_episodes(source, out, **chosen, **options)])


_ACTIONS: dict[str, Callable[[Sequence[str], dict[str, str]], Result]] = {
    "info": _info,
    "verify": _verify,
    "repair": _repair,
    "seal": _seal,
    "merge": _merge,
    "split": _split,
    "filter": _filter,
}


# --- words ---------------------------------------------------------------------------------------


def _one(action: str, paths: Sequence[str]) -> str:
    if len(paths) != 1:
        raise ConfigError(
            f"replay {action}: got {len(paths)} paths, allowed: one. Usage: robot-rl replay {action} PATH"
        )
    return paths[0]


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
    """Returns how pictures are to be written, and refuses settings that are unknown."""
    _allow(action, settings, "images", "codec", *also)
    choices = {"images": ("video", "png"), "codec": ("h264", "av1")}
    return {
        key: _choice(action, key, settings[key], {name: name for name in names})
        for key, names in choices.items()
        if key in settings
    }


def _choice(action: str, key: str, text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ConfigError(f"replay {action}.{key}: got {text!r}, allowed: {', '.join(choices)}")
    return choices[text]


def _number(action: str, key: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"replay {action}.{key}: got {text!r}, allowed: a whole number")
    return int(text)


def _episodes(action: str, key: str, text: str) -> list[int]:
    """Reads `0-9,12`."""
    episodes: list[int] = []
    for span in text.split(","):
        first, _, last = span.partition("-")
        begin = _number(action, key, first)
        episodes += range(begin, (_number(action, key, last) if last else begin) + 1)
    return episodes


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


def _written(folders: Sequence[Path]) -> Result:
    """Says what was written."""
    rows: list[dict[str, Any]] = []
    for folder in folders:
        source = open_source(folder)
        rows.append({"path": str(folder), "episodes": len(source), "steps": int(source.lengths().sum())})
        print(f"{folder}: {len(source):,} episodes, {rows[-1]['steps']:,} steps")
    return 0, {"written": rows}


def _groups(found: Summary) -> Table:
    """Lays out who made the steps, on what, with which policies."""
    table = Table()
    for column in ("source", "device", "policy version", "episodes", "steps", "minutes", "success"):
        table.add_column(column, justify="left" if column in ("source", "device") else "right")
    for group in found.groups:
        first, last = group.first_version, group.last_version
        table.add_row(
            group.source,
            group.device or "-",
            f"{first}" if first == last else f"{first} to {last}",
            f"{group.episodes:,}",
            f"{group.steps:,}",
            f"{group.minutes:,.1f}",
            _share_of(None if found.success is None else group.successes / max(1, group.episodes)),
        )
    return table


def _print_lost(console: Console, lost: Sequence[object]) -> None:
    for problem in lost:
        console.print(f"  lost earlier: {problem}", markup=False)


def _share_of(success: float | None) -> str:
    return "not judged" if success is None else f"{success:.0%}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
