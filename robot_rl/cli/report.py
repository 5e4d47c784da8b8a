"""`robot-rl report`: one self-contained page of a run, or of the seeds of one recipe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from robot_rl.core.errors import ConfigError, nearest
from robot_rl.telemetry.report import write_report

SUMMARY: str = "write report.html of a run, or of several seeds together"

_KEYS = ("run", "out")
_USAGE = "Usage: robot-rl report run=runs/<folder> [run=<folder> ...] [out=<file>.html]"


def run(argv: list[str]) -> int:
    """Writes the page and says where it is."""
    parser = argparse.ArgumentParser(prog="robot-rl report", description=SUMMARY, epilog=_USAGE)
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="run=<folder> for each seed; out=<file>"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_intermixed_args(argv)
    folders, out = _read(given.words)
    report = write_report(folders, out)
    print(f"report: {report.path} ({len(folders)} run{'s'[: len(folders) != 1]})")
    for part in report.missing:
        print(f"  missing: {part}")
    if given.json:
        found = {"report": str(report.path), "runs": [str(folder) for folder in folders]}
        print(json.dumps({**found, "missing": list(report.missing)}))
    return 0


def _read(words: list[str]) -> tuple[list[Path], Path | None]:
    """Returns the run folders and the file to write."""
    folders: list[Path] = []
    out: Path | None = None
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _KEYS:
            raise ConfigError(f"report: no setting {key!r}.{nearest(key, _KEYS)} {_USAGE}")
        if not equals or not value:
            raise ConfigError(f"report.{key}: got {word!r}, allowed is {key}=<path>. {_USAGE}")
        if key == "run":
            folders.append(Path(value))
        else:
            out = Path(value)
    if not folders:
        raise ConfigError(f"report.run: no run folder was given. {_USAGE}")
    if out is not None and (out.is_dir() or out.suffix != ".html"):
        raise ConfigError(f"report.out: got {str(out)!r}, allowed is a file that ends in .html")
    return folders, out
