"""Turns bits over in datasets and cuts their files; says what was noticed, harmless, or read wrongly.

    python tests/faults/sealed_campaign.py --flips 400 --cuts 100 --seed 0

Every case damages one file of a copy, chosen first among the files and then among its bytes, reads
everything that the dataset holds, asks `replay verify`, and lets one command of `replay` have it that
makes something of it: all of them in turn. What is read has to be what was recorded, or a message;
`verify` may not say sound. A command refuses and leaves nothing behind, or makes what it makes of the whole
dataset, file for file.

Datasets are sealed ones, and two as others make them (version 3 and 2.1, with annotations and columns that
nobody here knows), whose checksums `replay checksum` has recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from campaign import damage

from robot_rl.cli import replay
from robot_rl.core.errors import RobotRLError
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.lerobot.checksums import MAIN, Checksums
from robot_rl.data.lerobot.compact import compact
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.store.seal import SealOptions, seal
from robot_rl.data.store.writer import StoreWriter
from tests.data.lerobot.conftest import make_episode
from tests.data.lerobot.shapes import annotated, version_21

EPISODES, STEPS = 4, 9
META = EpisodesMeta(
    task="Crash",
    robot="gantry",
    control_hz=20.0,
    instruction="survive",
    state_names=tuple(f"q{i}" for i in range(6)),
    action_names=("dx", "dy"),
)
FEATURES = {
    "state": Feature("float32", (6,)),
    "front.rgb": Feature("uint8", (32, 48, 3)),
    "front.depth": Feature("float32", (8, 12)),
}
NUMBERS = (
    *("action", "base_action", "reward", "terminated", "truncated", "success"),
    *("source", "policy_version", "stamp_ns"),
)
EDITS = {
    "compact": ("compact", "{folder}"),
    "filter": ("filter", "{folder}", "out={out}", "min_steps=2"),
    "merge": ("merge", "{folder}", "{whole}", "out={out}"),
    "split": ("split", "{folder}", f"{{out}}=0-{EPISODES - 1}"),
    "rename": ("rename", "{folder}", "out={out}", "quality=grade"),
    "upgrade": ("upgrade", "{folder}", "out={out}"),
    "stats": ("stats", "{folder}"),
    "tasks": ("tasks", "{folder}", "0=survive longer"),
    "filter anew": ("filter", "{folder}", "out={out}", "min_steps=2", "images=png"),
    "merge anew": ("merge", "{folder}", "{whole}", "out={out}", "images=png"),
    "split anew": ("split", "{folder}", f"{{out}}=0-{EPISODES - 1}", "images=png"),
}
"""Words of `replay`. Files are copied, but `anew`: decoded and recorded again."""
IN_PLACE = ("compact", "stats", "tasks")
OURS = tuple(edit for edit in EDITS if edit not in ("rename", "upgrade"))
OTHERS = ("compact", "filter", "merge", "split", "rename", "stats", "tasks")
OLD = ("upgrade", "filter", "merge", "split", "rename", "stats", "tasks")
BAD = ("read wrongly", "edited wrongly", "tracebacks", "called sound")

Values = dict[str, Any]
"""What a dataset holds, by place; an error that says why it cannot be had."""


def record(folder: Path, images: Any) -> Path:
    """Records episodes into a store and seals them; returns the folder, which holds nothing else."""
    rng = np.random.default_rng(7)
    with StoreWriter(folder, META, FEATURES, flush_s=1e6, picture="png") as writer:
        for episode in range(EPISODES):
            writer.begin_episode()
            seen = [_observation(rng, episode, step) for step in range(STEPS + 1)]
            for step in range(STEPS):
                last = step == STEPS - 1
                writer.append(
                    obs=seen[step],
                    action=rng.normal(size=2).astype(np.float32),
                    base_action=rng.normal(size=2).astype(np.float32),
                    reward=float(step),
                    terminated=last,
                    success=last,
                    final_obs=seen[STEPS] if last else None,
                    stamp_ns=50_000_000 * step,
                    policy_version=step,
                )
    seal(folder, SealOptions(images=images))
    for path in (folder / "journal", folder / "meta/store.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def _observation(rng: np.random.Generator, episode: int, step: int) -> dict[str, Any]:
    rows, columns = np.mgrid[0:32, 0:48]
    wave = 120 + 8 * step + 30 * np.sin(rows / 5 + episode) + 30 * np.cos(columns / 7 - step)
    return {
        "state": rng.normal(size=6).astype(np.float32),
        "front.rgb": np.repeat(wave[..., None], 3, axis=2).clip(0, 255).astype(np.uint8),
        "front.depth": rng.random((8, 12), dtype=np.float32),
    }


def values(folder: Path) -> Values:
    """Reads everything; what a program's mistake ends is a `TRACEBACK`."""
    found: Values = {}

    def take(place: str, read: Callable[[], Any]) -> Any:
        try:
            found[place] = read()
        except RobotRLError as error:
            found[place] = error
        except Exception as error:  # what the campaign is about
            found[place] = f"TRACEBACK {type(error).__name__}: {error}"
        return found[place]

    dataset = take("opened", lambda: Dataset(folder))
    if not isinstance(dataset, Dataset):
        return found
    found["opened"] = (len(dataset), dataset.lengths().tolist(), dataset.meta, dict(dataset.features))
    take("instructions", lambda: dataset.instructions)
    take("stats", lambda: {f"{n} {k}": v.tobytes() for n, of in dataset.stats.items() for k, v in of.items()})
    for number in range(min(len(dataset), EPISODES + 1)):
        episode = take(f"episode {number}", lambda number=number: dataset.read(number))
        if isinstance(episode, RobotRLError | str):
            continue
        take(f"rows {number}", lambda number=number: _bytes_of(dataset.rows(number)))
        found[f"episode {number}"] = {name: getattr(episode, name).tobytes() for name in NUMBERS} | {
            "words": (episode.meta, episode.device),
            "final": _bytes_of(episode.final_obs),
            "stamps": _bytes_of(episode.picture_stamp_ns),
        }
        for key, part in episode.obs.items():
            take(
                f"episode {number}, {key}",
                lambda part=part: b"".join(np.asarray(part[t]).tobytes() for t in range(len(part))),
            )
    return found


def _bytes_of(columns: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(column).tobytes() for name, column in columns.items()}


def judge(got: Values, truth: Values) -> tuple[str, str]:
    """Returns what reading came to, and of what: the worst counts."""
    told = ""
    for place, value in got.items():
        if isinstance(value, str) and value.startswith("TRACEBACK"):
            return "tracebacks", f"{place}: {value}"
        if isinstance(value, RobotRLError):
            told = f"{place}: {value}"
        elif value != truth.get(place):
            return "read wrongly", place
    if told:
        return "told", told
    return ("equal", "") if got.keys() == truth.keys() else ("read wrongly", "episodes that are not there")


def command(*words: str) -> tuple[str, str]:
    """Runs `replay`; returns how it ended, and why."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return ("done" if replay.run(list(words)) == 0 else "told"), ""
    except RobotRLError as error:
        return "told", str(error)
    except Exception as error:  # what the campaign is about
        return "tracebacks", f"{words[0]}: {type(error).__name__}: {error}"


class Template:
    """A sound dataset, what it holds, and what commands make of it."""

    def __init__(self, folder: Path, edits: tuple[str, ...]) -> None:
        self.folder = folder
        self.edits = edits
        sums = Checksums(folder)
        names = sorted(contents(folder))
        self.files = [name for name in names if name.startswith(_SUMS) or sums.recorded(name) is not None]
        """Those that can be told from what they were."""
        self.truth = values(folder)
        assert judge(self.truth, self.truth) == ("equal", "")
        assert command("verify", str(folder)) == ("done", "")
        self._made: dict[str, dict[str, bytes]] = {}

    def words(self, edit: str, folder: Path, out: Path) -> list[str]:
        """Returns the words of a command for a copy of the dataset."""
        return [word.format(folder=folder, out=out, whole=self.folder) for word in EDITS[edit]]

    def made(self, edit: str) -> dict[str, bytes]:
        """Returns what a command makes of the whole dataset."""
        if edit not in self._made:
            copy, out = self.folder.with_name("copy"), self.folder.with_name("whole")
            shutil.copytree(self.folder, copy)
            assert command(*self.words(edit, copy, out)) == ("done", "")
            new = copy if edit in IN_PLACE else out
            assert command("verify", str(new)) == ("done", "")
            self._made[edit] = contents(new)
            for path in (copy, out):
                shutil.rmtree(path, ignore_errors=True)
        return self._made[edit]


_SUMS = MAIN.removesuffix(".json")


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files below a folder, if it is there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edited(edit: str, template: Template, folder: Path, damaged: str) -> tuple[str, str]:
    """Lets a command have a dataset with a damaged file; returns what came of it, and why."""
    out = folder.with_name("edited")
    shutil.rmtree(out, ignore_errors=True)
    before, beside = contents(folder), set(folder.parent.iterdir())
    ended, why = command(*template.words(edit, folder, out))
    if ended != "done":
        is_left = contents(folder) == before and set(folder.parent.iterdir()) == beside
        return (
            (ended, why) if is_left else ("edited wrongly", f"{edit}: it refused, and left something behind")
        )
    got, whole = contents(folder if edit in IN_PLACE else out), template.made(edit)
    other = [name for name in {**whole, **got} if not is_same(name, whole.get(name), got.get(name))]
    if not other:
        return "equal", ""
    if edit in IN_PLACE and other == [damaged] and command("verify", str(folder))[0] == "told":
        return "told", f"{edit}: {damaged} is left as it is, and named still"
    return "edited wrongly", f"{edit}: {', '.join(other)}"


def is_same(name: str, one: bytes | None, two: bytes | None) -> bool:
    """Whether two files are the same; of JSON, what they say."""
    if one is None or two is None or one == two or not name.endswith(".json"):
        return one == two
    try:
        return json.loads(one) == json.loads(two)
    except ValueError:
        return False


def templates(folder: Path) -> Iterator[Template]:
    """Yields datasets of several shapes: video and PNG, a file for each episode, and joined; of others."""
    for name, images in (("video", "video"), ("png", "png"), ("joined", "video")):
        made = record(folder / name, images)
        if name == "joined":
            compact(made)
        found = Template(made, OURS)
        assert found.files == sorted(contents(made)), "a file of ours has no checksum"
        yield found
    for name, make, edits in (("others", annotated, OTHERS), ("old", version_21, OLD)):
        made = make(folder / name, make_episode)
        assert command("checksum", str(made)) == ("done", "")
        yield Template(made, edits)


def run(what: str, count: int, seed: int, folder: Path, made: list[Template]) -> Counter[str]:
    """Damages copies; returns how the cases ended."""
    counts: Counter[str] = Counter(dict.fromkeys((*BAD, "told", "equal", "refused by the edit"), 0))
    turns = [(template, edit) for template in made for edit in template.edits]
    order = np.random.default_rng((seed, what == "flips")).permutation(len(turns))
    for case in range(count):
        rng = np.random.default_rng((seed + case, what == "flips"))
        template, edit = turns[order[case % len(turns)]]
        file = template.files[int(rng.integers(len(template.files)))]
        store = folder / "damaged"
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(template.folder, store)
        byte = int(rng.integers((store / file).stat().st_size))
        bit = 1 << int(rng.integers(8)) if what == "flips" else 0
        damage(store / file, byte, bit)
        at = f"{what} {case}, seed {seed}: {template.folder.name}/{file}, byte {byte}, bit {bit}"
        ended = judge(values(store), template.truth)
        verdict = command("verify", str(store))
        if verdict[0] == "done":
            verdict = ("called sound", "")
        result = edited(edit, template, store, file)
        for number, (name, why) in enumerate((ended, verdict, result)):
            if name in BAD:
                print(f"  {at}: {name} {why[:150]}", flush=True)
            if number == 0 or name in BAD:
                counts[name] += 1
            elif number == 2 and name == "told":
                counts["refused by the edit"] += 1
    return counts


def main(words: list[str] | None = None) -> int:
    """Runs the campaign; returns 1 if anything was read wrongly, called sound, or ended in a traceback."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=400)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="robot-rl-sealed-"))
    is_good = True
    try:
        made = list(templates(folder))
        for what, count in (("flips", given.flips), ("cuts", given.cuts)):
            began = time.monotonic()
            counts = run(what, count, given.seed, folder, made)
            is_good &= not any(counts[name] for name in BAD)
            said = ", ".join(f"{number:,} {name}" for name, number in counts.items())
            print(f"{count:,} {what} of datasets: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    finally:
        shutil.rmtree(folder)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
