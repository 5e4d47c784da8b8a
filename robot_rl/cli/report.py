"""`robot-rl report`: one self-contained page of a run, of several seeds, or of several settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robot_rl.cli.command import parser_of
from robot_rl.core.errors import ConfigError, nearest
from robot_rl.core.files import at_home
from robot_rl.core.room import check_room
from robot_rl.telemetry.figures import percent
from robot_rl.telemetry.report import write_report

if TYPE_CHECKING:
    from robot_rl.telemetry.settings import Setting

SUMMARY = "write report.html of one run, of several seeds, or of several settings"

_KEYS = ("run", "out")
_USAGE = "Usage: robot-rl report run=runs/<folder> [run=<folder> ...] [out=<file>.html]"


def run(argv: list[str]) -> int:
    """Writes the page and prints its path and the results."""
    parser = parser_of("report", SUMMARY, _USAGE)
    parser.add_argument("words", nargs="*", metavar="key=value", help="run=<folder> for each run; out=<file>")
    given = parser.parse_intermixed_args(argv)
    folders, out = _read(given.words)
    report = write_report(folders, out)
    print(f"report: {report.path} ({_count([run for s in report.settings for run in s.runs], 'run')})")
    for row in map(_row, report.settings):
        name = row["setting"] or "success"
        print(
            f"  {name}: {_outcome(row['before'])} before, {_outcome(row['after'])} after, "
            f"seed{'s' * (len(row['seeds']) > 1)} {', '.join(map(str, row['seeds']))}"
        )
    for note in report.notes:
        print(f"  {note}")
    for part in report.missing:
        print(f"  missing: {part}")
    if given.json:
        found = {"report": str(report.path), "runs": [str(folder) for folder in folders]}
        rows = [_row(setting) for setting in report.settings]
        print(json.dumps({**found, "settings": rows, "missing": list(report.missing)}))
    return 0


def _row(setting: Setting) -> dict[str, Any]:
    """Returns the results of a setting; None where nothing was evaluated."""
    before, after = setting.outcome("base"), setting.outcome("final")
    return {
        "setting": setting.label,
        "seeds": [run.seed for run in setting.runs],
        "before": before.share if before else None,
        "after": after.share if after else None,
        "ci": after.interval if after else None,
        "episodes": after.episodes if after else None,
    }


def _outcome(share: float | None) -> str:
    return "-" if share is None else percent(share)


def _count(items: list[Any], name: str) -> str:
    return f"{len(items)} {name}{'s'[: len(items) != 1]}"


def _read(words: list[str]) -> tuple[list[Path], Path | None]:
    """Returns the run folders and the output file."""
    folders: list[Path] = []
    out: Path | None = None
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _KEYS:
            raise ConfigError(f"report: no setting {key!r}.{nearest(key, _KEYS)} {_USAGE}")
        if not equals or not value:
            raise ConfigError(f"report.{key}: got {word!r}, allowed is {key}=<path>. {_USAGE}")
        if key == "run":
            folders.append(Path(at_home(value)))
        else:
            out = Path(at_home(value))
    if not folders:
        raise ConfigError(f"report.run: no run folder was given. {_USAGE}")
    if out is not None and (out.is_dir() or out.suffix != ".html"):
        raise ConfigError(f"report.out: got {str(out)!r}, allowed is a file that ends in .html")
    if out is not None:
        check_room(out, at="report.out")
    return folders, out
