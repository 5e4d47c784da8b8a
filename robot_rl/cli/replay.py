"""`robot-rl replay`: inspects, checks, repairs, seals and edits recorded episodes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from robot_rl.cli import replay_words as words
from robot_rl.cli.command import parser_of
from robot_rl.core.errors import ConfigError, DatasetError, nearest
from robot_rl.data.reading import ReadOptions
from robot_rl.data.store.check import repair, verify
from robot_rl.data.store.journal import segment_numbers
from robot_rl.data.store.layout import is_store
from robot_rl.data.store.reader import StoreReader, open_source, refuse_journal
from robot_rl.data.store.seal import SealOptions, seal
from robot_rl.data.store.sealed import read_info
from robot_rl.data.store.summary import Summary, summarize

if TYPE_CHECKING:
    from robot_rl.data.lerobot.damage import Problem as DatasetProblem

SUMMARY = "inspect, check, repair and edit recorded episodes: info, verify, seal, merge, filter, ..."

_DAMAGED = 1

Result = tuple[int, dict[str, Any]]
"""Exit code, and the object of --json."""


def run(argv: list[str]) -> int:
    """Runs one action; with `--json` the last line is one JSON object."""
    asked = next((word for word in argv if word in words.HELP), None)
    usage = f"robot-rl replay {asked} PATH [key=value ...] [--json]" if asked else None
    parser = parser_of("replay", "" if asked else SUMMARY, words.help_of(asked), usage)
    parser.add_argument("action", help=", ".join(_ACTIONS))
    parser.add_argument("words", nargs="*", metavar="PATH or key=value")
    given = parser.parse_intermixed_args(argv or ["--help"])
    if given.action not in _ACTIONS:
        raise ConfigError(f"replay: no action {given.action!r}.{nearest(given.action, _ACTIONS)}")
    code, result = _ACTIONS[given.action](*words.parsed(given.action, given.words))
    if given.json:
        print(json.dumps(result))
    return code


def _info(paths: Sequence[str], settings: dict[str, str]) -> Result:
    reading = words.reading("info", settings)
    words.allow("info", settings)
    path = words.one_path("info", paths)
    found = summarize(path, words.opened("info", path, reading))
    console = Console(soft_wrap=True)
    task = f" of {found.task!r}" if found.task else ""
    console.print(f"{found.path}: {found.kind}{task}, {found.robot}, {found.control_hz:g} Hz", markup=False)
    console.print(_groups(found))
    shapes = (f"{key} {'x'.join(map(str, shape))}" for key, shape in found.features.items())
    console.print(f"observations: {', '.join(shapes)}; action {found.action}", markup=False)
    more = f" and {len(found.instructions) - 3} more" if len(found.instructions) > 3 else ""
    texts = ", ".join(repr(text) for text in found.instructions[:3])
    console.print(f"instructions: {texts or 'none'}{more}", markup=False)
    if found.starts:
        parts = (
            f"{group.name} {_count(group.episodes, 'episode')}, success "
            f"{_share_of(group.successes / group.episodes)}"
            for group in found.starts
        )
        console.print(f"starts: {'; '.join(parts)}", markup=False)
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
    reading = words.reading("verify", settings)
    words.allow("verify", settings)
    folder = Path(words.recorded("verify", paths))
    console = Console(soft_wrap=True)
    wrong: list[str] = []
    remedies: list[str] = []
    result: dict[str, Any] = {"path": str(folder)}
    if is_store(folder) or segment_numbers(folder / "journal"):
        if reading:
            refuse_journal(StoreReader(folder), reading)
        report = verify(folder)
        console.print(
            f"{folder}/journal: {_count(report.records, 'record')}, {_count(report.episodes, 'episode')}, "
            f"{_count(report.steps, 'step')}, {_count(report.pictures, 'picture')}, "
            f"{_megabytes(report.num_bytes)}" + (", being written now" if report.is_being_written else ""),
            markup=False,
        )
        wrong += [str(problem) for problem in report.problems]
        if wrong:
            remedies.append(f"to repair the journal: robot-rl replay repair {folder}")
        _print_lost(console, report.lost)
        result |= {"journal": dataclasses.asdict(report)}
    is_sealed = (folder / "meta/info.json").is_file() or (folder / "data").is_dir()
    if is_sealed or not result.get("journal"):
        problems, damage = _check_dataset(console, folder, reading)
        remedies += [] if remedies or reading else _sound_episodes(folder, problems)
        wrong += damage
        result |= {"dataset": [dataclasses.asdict(problem) for problem in problems]}
    for problem in wrong:
        console.print(f"  damaged: {problem}", markup=False, style="red")
    console.print(_count(len(wrong), "problem") if wrong else "sound", markup=False)
    for remedy in remedies:
        console.print(f"  {remedy}", markup=False)
    return _DAMAGED if wrong else 0, result | {"sound": not wrong, "problems": wrong}


def _check_dataset(
    console: Console, folder: Path, reading: ReadOptions
) -> tuple[list[DatasetProblem], list[str]]:
    """Reads and decodes all selected data; returns the problems, and a line for each damage."""
    from robot_rl.data.lerobot.damage import check, lines  # reads videos: loaded where there is a dataset
    from robot_rl.data.lerobot.selection import Reading

    chosen = Reading(
        rename=reading.get("rename", {}), episodes=reading.get("episodes"), cameras=reading.get("cameras")
    )
    videos = 0
    with _progress_bar("decoding videos") as update:

        def on_video(done: int, total: int) -> None:
            nonlocal videos
            videos = total
            update(done, total)

        problems = check(folder, reading=chosen, thorough=True, on_video=on_video)
    damage = lines(problem for problem in problems if problem.is_fatal)
    decoded = f"{_count(videos, 'video')} decoded, " if videos else ""
    console.print(f"{folder}: dataset, {decoded}{_count(len(damage), 'problem')}", markup=False)
    for note in lines(problem for problem in problems if not problem.is_fatal):
        console.print(f"  note: {note}", markup=False)
    return problems, damage


def _sound_episodes(folder: Path, problems: Sequence[DatasetProblem]) -> list[str]:
    """Returns the command that keeps the sound episodes, if only single episodes are damaged."""
    fatal = [problem.episode for problem in problems if problem.is_fatal]
    if not fatal or None in fatal:
        return []
    from robot_rl.data.lerobot.damage import spans
    from robot_rl.data.lerobot.reader import Dataset

    numbers, source = Dataset(folder).index.episode, open_source(folder)
    at = [source.sealed(i) if isinstance(source, StoreReader) else i for i in range(len(source))]
    sound = [i for i, place in enumerate(at) if place is None or int(numbers[place]) not in fatal]
    keep = f"to keep the sound episodes: robot-rl replay filter {folder} out=NEW episodes={spans(sound)}"
    return [keep] if sound else []


def _repair(paths: Sequence[str], settings: dict[str, str]) -> Result:
    words.allow("repair", settings)
    folder = words.one_path("repair", paths)
    problems = [str(problem) for problem in repair(folder)]
    for problem in problems:
        print(f"  {problem}")
    found = f"{_count(len(problems), 'problem')} repaired" if problems else "nothing to repair"
    print(f"{folder}: {found}")
    return 0, {"path": folder, "repaired": problems}


def _fetch(paths: Sequence[str], settings: dict[str, str]) -> Result:
    words.allow("fetch", settings)
    run = Path(words.one_path("fetch", paths))
    from robot_rl.train.improve.stay import bring  # seconds: only where a run is fetched

    with _progress_bar("fetching") as update:
        copies, lacking = bring(run, update)
    for folder, octets in copies.items():
        print(f"{folder}: a copy of what its arm recorded, {_megabytes(octets)} sent")
    for name in lacking:
        print(
            f"{name}: no machine that is connected has a recording of it. An agent deletes those that are "
            "older than its keep_days; a copy of a run's folder counts as another run"
        )
    rows = [{"path": str(folder), "sent_bytes": octets} for folder, octets in copies.items()]
    return 1 if lacking else 0, {"path": str(run), "copies": rows, "lacking": lacking}


def _seal(paths: Sequence[str], settings: dict[str, str]) -> Result:
    folder = words.one_path("seal", paths)
    try:
        done = seal(folder, SealOptions(**words.pictures("seal", settings)))
    except KeyboardInterrupt as interrupt:
        interrupt.add_note("Every episode is in the journal or in the dataset; the same command continues.")
        raise
    for reason in done.refused:
        print(f"  not sealed: {reason}")
    print(f"{folder}: {_count(done.episodes, 'episode')} ({_count(done.steps, 'step')}) sealed")
    return _DAMAGED if done.refused else 0, {"path": folder, **dataclasses.asdict(done)}


def _checksum(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.writer import record_checksums

    words.allow("checksum", settings)
    folder = Path(words.recorded("checksum", paths))
    count = record_checksums(folder)
    print(f"{folder}: checksums of {_count(count, 'file')} recorded")
    return 0, {"path": str(folder), "files": count}


def _compact(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.compact import compact

    words.allow("compact", settings)
    folder = Path(words.recorded("compact", paths))
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

    reading, out = words.reading("merge", settings), words.out_of("merge", settings)
    fps = words.rate("merge", settings.pop("fps")) if "fps" in settings else None
    options = words.pictures("merge", settings, "out")
    sources = [words.opened("merge", path, reading) for path in paths]
    return _written([merge(sources, out, fps=fps, **options)], options)


def _upgrade(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.upgrade import upgrade

    reading, out = words.reading("upgrade", settings), words.out_of("upgrade", settings)
    words.allow("upgrade", settings, "out")
    folder = words.recorded("upgrade", paths)
    return _written([upgrade(words.dataset("upgrade", folder, reading) if reading else folder, out)])


def _rename(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.edit import merge

    out = words.out_of("rename", settings)
    folder, names = words.one_path("rename", paths), {o: n for o, n in settings.items() if o != "out"}
    words.refuse_reading("rename", {o: n for o, n in names.items() if not _is_name(Path(folder), o)})
    if not names:
        raise ConfigError("replay rename: no names. Give <name there>=<new name>, for example actions=action")
    return _written([merge([words.opened("rename", folder, {"rename": names})], out)])


def _is_name(folder: Path, name: str) -> bool:
    """Returns whether a dataset has a feature of this name."""
    from robot_rl.data.lerobot.opening import open_index

    return (folder / "meta/info.json").is_file() and name in open_index(folder).features


def _stats(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.amend import recompute_stats

    words.allow("stats", settings)
    folder = words.recorded("stats", paths)
    with _progress_bar("statistics") as update:
        episodes = recompute_stats(folder, update)
    print(f"{folder}: statistics of {_count(episodes, 'episode')} computed again")
    return 0, {"path": folder, "episodes": episodes}


def _tasks(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.amend import rename_tasks, tasks_of_rows

    reading, folder = words.reading("tasks", settings), words.recorded("tasks", paths)
    if settings:
        words.refuse_reading("tasks", {key: "..." for key in reading if key != "rename"})
    numbers = {words.number("tasks", "number", number): text for number, text in settings.items()}
    found = tasks_of_rows(words.dataset("tasks", folder, reading))  # damage is found before anything changes
    if numbers:
        rename_tasks(folder, numbers)
        found |= {number: (text, *found[number][1:]) for number, text in numbers.items()}
    for number, (text, episodes, steps) in found.items():
        print(f"{number}  {text}  ({_count(episodes, 'episode')}, {_count(steps, 'step')})")
    keys = ("number", "task", "episodes", "steps")
    return 0, {"path": folder, "tasks": [dict(zip(keys, (n, *of), strict=True)) for n, of in found.items()]}


def _split(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.edit import split

    source = words.opened("split", words.one_path("split", paths), words.reading("split", settings))
    kept = {key: settings.pop(key) for key in ("images", "codec", "drop") if key in settings}
    if not settings:
        raise ConfigError("replay split: no parts. Give FOLDER=0.8 FOLDER=0.2, or FOLDER=0-79 FOLDER=80-99.")
    parts: dict[str | Path, Sequence[int] | float] = {
        folder: words.share("split", folder, text) for folder, text in settings.items()
    }
    options = words.pictures("split", kept)
    return _written(split(source, parts, **options), options)


def _filter(paths: Sequence[str], settings: dict[str, str]) -> Result:
    from robot_rl.data.lerobot.edit import filter as filter_episodes

    reading = words.reading("filter", settings)
    # A journal can be filtered by episodes= too.
    picked = cast("dict[str, Any]", reading) if reading.keys() == {"episodes"} else {}
    source = words.opened("filter", words.one_path("filter", paths), {} if picked else reading)
    out = words.out_of("filter", settings)
    tests: dict[str, Callable[[str], Any]] = {
        "success": lambda text: words.choice("filter", "success", text, {"true": True, "false": False}),
        "by": lambda text: text.split(","),
        "instruction": str,
        "min_steps": lambda text: words.number("filter", "min_steps", text),
    }
    chosen = picked | {key: read(settings[key]) for key, read in tests.items() if key in settings}
    options = words.pictures("filter", settings, "out", *tests)
    return _written([filter_episodes(source, out, **chosen, **options)], options)


_ACTIONS: dict[str, Callable[[Sequence[str], dict[str, str]], Result]] = {
    "info": _info,
    "verify": _verify,
    "repair": _repair,
    "fetch": _fetch,
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


# --- print ---------------------------------------------------------------------------------------


def _written(folders: Sequence[Path], options: Mapping[str, Any] | None = None) -> Result:
    """Prints the new datasets, and what `drop=` left out."""
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
    """Returns a table of the steps by source, device and policy version."""
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


@contextmanager
def _progress_bar(name: str) -> Generator[Callable[[int, int], None]]:
    """Shows a bar on a terminal; yields what takes the number done and the total."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


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
