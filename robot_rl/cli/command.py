"""What commands share: help, the JSON line, the word `resume=`, signals, and the source of a module."""

from __future__ import annotations

import ast
import json
import signal
import threading
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from robot_rl.core.errors import ConfigError
from robot_rl.core.files import at_home

Outcome = tuple[int, Mapping[str, Any]]
"""Exit code, and what --json prints."""


def run_command(argv: list[str], help_text: str, work: Callable[[list[str]], Outcome]) -> int:
    """Prints the help if asked, else runs `work` on the other words; with `--json` prints its result last."""
    if {"-h", "--help"} & set(argv):
        print(help_text, end="")
        return 0
    code, result = work([word for word in argv if word != "--json"])
    if "--json" in argv:
        print(json.dumps(result))
    return code


def parser_of(name: str, summary: str, epilog: str = "", usage: str | None = None) -> ArgumentParser:
    """Returns the parser of a command whose words are not Hydra's, with `--json`."""
    parser = ArgumentParser(
        f"robot-rl {name}", usage, summary, epilog, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser


def resumed(words: list[str]) -> Path | None:
    """Returns the folder of `resume=<folder>`, or None without it.

    Raises:
        ConfigError: there are other words too.
    """
    found = [word.split("=", 1)[1] for word in words if word.startswith("resume=")]
    if not found:
        return None
    if len(words) > 1:
        others = " ".join(word for word in words if not word.startswith("resume="))
        raise ConfigError(
            f"resume: got other settings with it ({others}), allowed: none. A resumed run keeps its "
            "config.yaml; start a new run to change settings."
        )
    return Path(at_home(found[0]))


@contextmanager
def stopped_by_signals() -> Generator[threading.Event]:
    """Yields an event that Ctrl-C and SIGTERM set, so that a server can print its last line."""
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def source_of(module: str) -> ast.Module | None:
    """Returns the parsed source of a module without importing it; None if there is no such file."""
    try:
        spec = find_spec(module)
    except ImportError:  # its package is incomplete
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
