"""Turns bits over in sealed datasets and cuts their files; says what was noticed, harmless, or read wrongly.

    python tests/faults/sealed_campaign.py --flips 400 --cuts 100 --seed 0

Every case damages one file of a copy, chosen first among the files and then among its bytes, reads
everything that the dataset holds, asks `replay verify`, and lets one of compact, filter, merge and
split have it. What is read has to be what was recorded, or a message; `verify` may not say sound.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from campaign import damage

from robot_rl.cli import replay
from robot_rl.core.errors import RobotRLError
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.lerobot.compact import compact
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.store.seal import SealOptions, seal
from robot_rl.data.store.writer import StoreWriter

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
EDITS = ("compact", "filter", "merge", "split")
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
        found[f"episode {number}"] = {name: getattr(episode, name).tobytes() for name in NUMBERS} | {
            "words": (episode.meta, episode.device),
            "final": {key: np.asarray(value).tobytes() for key, value in episode.final_obs.items()},
            "stamps": {key: value.tobytes() for key, value in episode.picture_stamp_ns.items()},
        }
        for key, part in episode.obs.items():
            take(
                f"episode {number}, {key}",
                lambda part=part: b"".join(np.asarray(part[t]).tobytes() for t in range(len(part))),
            )
    return found


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


def edited(edit: str, folder: Path, truth: Values) -> tuple[str, str]:
    """Lets a command have the damaged dataset; what it makes of it has to be what was recorded."""
    out = folder.with_name("edited")
    shutil.rmtree(out, ignore_errors=True)
    words = {
        "compact": ("compact", str(folder)),
        "filter": ("filter", str(folder), f"out={out}", "images=png", "min_steps=1"),
        "merge": ("merge", str(folder), f"out={out}", "images=png"),
        "split": ("split", str(folder), f"{out}=0-{EPISODES - 1}", "images=png"),
    }[edit]
    ended, why = command(*words)
    if ended != "done":
        return ended, why
    result, why = judge(values(folder if edit == "compact" else out), truth)
    if result == "told":  # a result that cannot be read
        return "edited wrongly", f"{edit}: {why}"
    return ("edited wrongly" if result == "read wrongly" else result), f"{edit}: {why}"


class Template:
    """A sound dataset, what it holds, and what its edited copies hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        self.truth = values(folder)
        copy = Path(shutil.copytree(folder, folder.with_name("copy")))
        assert command("verify", str(copy)) == ("done", "")
        self.edited: dict[str, Values] = {}
        for edit in reversed(EDITS):
            out = folder.with_name("edited")
            assert edited(edit, copy, {})[0] == "edited wrongly"
            self.edited[edit] = values(copy if edit == "compact" else out)
        shutil.rmtree(copy)


def templates(folder: Path) -> Iterator[Template]:
    """Yields datasets of several shapes: video and PNG, a file for each episode, and joined."""
    for name, images in (("video", "video"), ("png", "png"), ("joined", "video")):
        made = record(folder / name, images)
        if name == "joined":
            compact(made)
        yield Template(made)


def run(what: str, count: int, seed: int, folder: Path, made: list[Template]) -> Counter[str]:
    """Damages copies; returns how the cases ended."""
    counts: Counter[str] = Counter(dict.fromkeys((*BAD, "told", "equal", "refused by the edit"), 0))
    for case in range(count):
        rng = np.random.default_rng((seed + case, what == "flips"))
        template = made[case % len(made)]
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
        edit = EDITS[case // len(made) % len(EDITS)]
        result = edited(edit, store, template.edited[edit])
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
            print(
                f"{count:,} {what} of sealed datasets: {said} ({time.monotonic() - began:.0f} s)", flush=True
            )
    finally:
        shutil.rmtree(folder)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
