"""`robot-rl worlds`: fits world models to recorded episodes, and says how far they can be believed."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robot_rl.cli.command import Outcome, run_command
from robot_rl.core.errors import ConfigError, DatasetError, nearest, require
from robot_rl.core.files import at_home, read_json, write_json
from robot_rl.core.machine import check_device
from robot_rl.core.room import check_room
from robot_rl.sim.config import EnvConfig
from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.worlds.config import ServedConfig, WorldSettings

if TYPE_CHECKING:
    from robot_rl.telemetry.progress import ProgressDisplay
    from robot_rl.worlds.build import RealEnv
    from robot_rl.worlds.calibration import Played
    from robot_rl.worlds.curve import Needed
    from robot_rl.worlds.history import History
    from robot_rl.worlds.saved import World

SUMMARY = "fit a world model to recorded episodes, and measure how far it can be believed"

_SETTINGS = "fit.json"
"""Settings of an unfinished fit, in its folder."""
_STRIPS = 4
"""Episodes in pictures.png."""
_HELP = """\
Usage: robot-rl worlds fit data=<dataset>[,<dataset>...] out=<folder> [env.<setting>=...] [model.members=5]
                           [model.stride=4] [fit.updates=6000] [outcome=predicate|classifier]
                           [curve=false] [curve_error=1.0]
                           [images.cameras=<name>,...] [images.updates=2000] [images.codec_updates=2000]
                           [seed=0] [device=cpu] [torch_threads=1] [lease_wait_s=0] [--json]
       robot-rl worlds fit data=<dataset> out=<folder> served.id=<module>:<function> [served.python=<path>]
                           [served.settings.<name>=...] [served.timeout_s=60] [served.rows=256]
                           [images.cameras=<name>,...]
       robot-rl worlds audit world=<folder> [data=<newer dataset>,...] [--json]
       robot-rl worlds imagine world=<folder> policy=<run or policy> [episodes=100] [video=2] [seed=0]
                               [settings.<name>=...] [device=cpu] [--json]
       robot-rl worlds report world=<folder> [--json]

fit      learns how the state of an env goes on from recorded episodes: of `robot-rl collect`, or of a run's
         `experience`. 70 % of the episodes are learned from, 15 % calibrate, 15 % only judge. Failures and
         exploration must be among them: a model of successes alone expects success. The folder is a device
         of kind `world` (robot-rl devices), which gives no lease while the model is not believed. The same
         command goes on after a kill. curve=true draws the error against the number of episodes first, also
         of too few for a fit, and says how many an error of curve_error needs.
         images.cameras= learns pictures too, of 64 or 128 pixels: imagined episodes then show them, and
         pictures.png has held-out episodes, real and predicted. What a policy sees of the state is given as
         it was collected: env.state=joint,tool.
         With served.id= nothing is learned: a model of others, in a process of its own Python, is calibrated
         and judged in the same way, and then imagines as ours do; with images.cameras= its pictures, too.
         docs/worlds.md shows one of 15 lines.
audit    measures the model again; with data=, whether it is surprised by newer real episodes.
imagine  plays a policy in the model and in the env that it imitates, from the same starts, and notes the
         difference. video= films that many episodes of both, next to each other.
report   prints what is known, and draws calibration.png; agreement.png has the policies that were imagined.
         Of each version of the model: the real control steps behind it, the imagined ones in it, and who
         made them.

Learn in the model with any recipe, evaluated in the real env:
  robot-rl train recipe=reinflow env.kind=world env.id=<folder> demos.path=<dataset>
                 bc.policy=<run>/policy/base

Examples:
  robot-rl collect task=push_cube episodes=300 bias_m=0.02 noise_m=0.02 out=demos/push
  robot-rl worlds fit data=demos/push out=worlds/push
  robot-rl worlds imagine world=worlds/push policy=runs/<folder> video=2
  robot-rl collect task=push_cube episodes=300 bias_m=0.02 noise_m=0.02 state=joint,tool cameras=left
                   image_size=64,64 out=demos/seen
  robot-rl worlds fit data=demos/seen out=worlds/seen env.state=joint,tool images.cameras=left
"""


@dataclass(frozen=True, kw_only=True)
class FitCommand(WorldSettings):
    """Settings of `worlds fit`."""

    data: tuple[str, ...]
    """Folders of datasets."""
    out: str
    """New folder."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """What the episodes were recorded in; task and robot are those of the dataset."""
    served: ServedConfig = field(default_factory=ServedConfig)
    """A model of others, to be measured in the place of a fit."""
    curve: bool = False
    """Whether to fit models of fewer episodes first, and draw the curve; also of too few for a fit."""
    curve_error: float = 1.0
    """Error whose number of episodes is read off the curve: after fit.ahead strides, in deviations of what
    changes in a stride."""
    seed: int = 0
    torch_threads: int = 1
    device: str = "cpu"
    lease_wait_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.data), "data", list(self.data), "folders of datasets")
        if self.served.id is not None:
            require(not self.curve, "curve", self.curve, "false with served.id: nothing is fitted")
        require(self.curve_error > 0, "curve_error", self.curve_error, "above 0")
        require(self.torch_threads >= 1, "torch_threads", self.torch_threads, "1 or more")
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2147483647")
        check_device(self.device)


@dataclass(frozen=True, kw_only=True)
class ShowCommand:
    """Settings of `worlds audit`, `imagine` and `report`."""

    world: str
    """Folder of the model."""
    data: tuple[str, ...] = ()
    """Of `audit`: newer real episodes."""
    policy: str | None = None
    """Of `imagine`: a run folder, or that of a policy."""
    episodes: int = 100
    video: int = 0
    """Of `imagine`: episodes to film."""
    settings: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Of `imagine`: those of imagined episodes, as `env.settings` of a run."""
    seed: int = 0
    torch_threads: int = 1
    device: str = "cpu"
    """Where the model's networks compute."""
    lease_wait_s: float = 0.0

    def __post_init__(self) -> None:
        check_device(self.device)
        where = self.settings.get("device")
        require(where is None, "settings.device", where, f"left out. Say device={where}")
        require(1 <= self.episodes <= 10_000, "episodes", self.episodes, "1 to 10000")
        require(0 <= self.video <= 16, "video", self.video, "0 to 16")
        require(0 <= self.seed < 100_000, "seed", self.seed, "0 to 99999")


def run(argv: list[str]) -> int:
    """Runs a sub-command and prints what it found."""
    return run_command(argv or ["--help"], _HELP, _run)


def _run(words: list[str]) -> Outcome:
    commands = {"fit": _fit, "audit": _audit, "imagine": _imagine, "report": _report}
    if words[0] not in commands:
        raise ConfigError(
            f"worlds: no sub-command {words[0]!r}.{nearest(words[0], commands)} `robot-rl worlds --help`"
        )
    return commands[words[0]](words[1:])


def _fit(words: list[str]) -> Outcome:
    from robot_rl.config import load  # Hydra and torch: not for --help

    options = load(FitCommand, words, config_name="worlds-fit")
    out = Path(at_home(options.out))
    if (out / "world.json").exists():
        raise DatasetError(
            f"out: {str(out)!r} has a world model already. Choose another folder, or remove it."
        )
    check_room(out, at="out")
    import torch

    from robot_rl.telemetry.progress import ProgressDisplay
    from robot_rl.worlds.build import adopted, read_history
    from robot_rl.worlds.fit import check_enough
    from robot_rl.worlds.inventory import enter
    from robot_rl.worlds.plots import draw_calibration

    torch.set_num_threads(options.torch_threads)
    real, needed = _real_env(options), None
    _refuse_other_settings(out, options)
    with ProgressDisplay() as display:
        cameras = options.images.cameras
        history = read_history(options.data, real.meta, display.message, cameras=cameras)
        display.message(
            f"{history.num_episodes} episodes of {real.meta.task} on {real.meta.robot}, {history.steps:,} "
            f"control steps, {history.solved().mean():.0%} solved"
        )
        if options.curve:
            needed = _curve(history, real, options, out, display)
        if options.served.id is not None:
            display.message(f"measures {options.served.id}, in a process of its own")
            world, played = adopted(history, real, options, options.served, seed=options.seed)
        else:
            check_enough(history, options.model.stride, curve=needed and needed.words())
            _keep_settings(out, options)
            world, played = _learned(history, real, options, out, display)
    world.save(out)
    enter(out)
    draw_calibration(out / "calibration.png", str(out), world.report.depths, world.calibration, played)
    if world.images is not None:
        _draw_strips(out / "pictures.png", world)
    return 0, _print(out, world) | ({} if needed is None else {"needed": asdict(needed)})


def _curve(
    history: History, real: RealEnv, options: FitCommand, out: Path, display: ProgressDisplay
) -> Needed:
    """Draws the error against the number of episodes; returns how many `curve_error` needs.

    An unfinished fit keeps its curve: the same command does not measure it again.
    """
    from robot_rl.worlds.curve import curve_counts, episodes_needed, keep_curve, kept_curve, learning_curve
    from robot_rl.worlds.plots import draw_curve

    path, counts = out / "curve.json", curve_counts(history, options)
    rows = kept_curve(path, counts) if (out / _SETTINGS).is_file() else None
    if rows is None:
        how: dict[str, Any] = {"seed": options.seed, "device": options.device}
        with display.phase("curve", len(counts), unit="models") as progress:
            rows = learning_curve(history, real, options, shown=progress.update, **how)
    needed = episodes_needed(rows, options.curve_error)
    out.mkdir(parents=True, exist_ok=True)
    draw_curve(out / "curve.png", real.meta.task, rows, needed.error)
    keep_curve(path, rows, needed)
    display.message(f"{out / 'curve.png'}: {needed.words()}")
    return needed


def _draw_strips(path: Path, world: World) -> None:
    """Draws held-out episodes, predicted open loop from their first pictures."""
    import numpy as np

    from robot_rl.worlds.history import AUDIT
    from robot_rl.worlds.images.play import film_strip
    from robot_rl.worlds.plots import draw_strips

    assert world.images is not None
    history, k = world.history, world.model.config.stride
    lengths = history.last - history.first
    chosen = [e for e in history.split(AUDIT) if lengths[e] >= 2 * k][:_STRIPS]
    begun = history.first[np.array(chosen, int)]
    depths, strips = film_strip(world.images, world.model, history, begun)
    draw_strips(path, strips, depths, k)
    print(f"{path}: real pictures, and below each row the predicted ones")


def _learned(
    history: History, real: RealEnv, options: FitCommand, out: Path, display: ProgressDisplay
) -> tuple[World, list[Played]]:
    from robot_rl.worlds.build import fitted, pictures_fitted

    images = None
    if options.images.cameras:
        total = options.images.codec_updates + options.images.updates
        with display.phase("pictures", total, unit="updates") as progress:
            images = pictures_fitted(
                history,
                options,
                seed=options.seed,
                folder=out,
                device=options.device,
                shown=lambda done, found: progress.update(done, note=f"error {found['held_out_error']:.3f}"),
            )
            progress.update(total)  # also where an earlier command had taken them all
    with display.phase("fit", options.fit.updates, unit="updates") as progress:

        def shown(done: int, found: Mapping[str, float]) -> None:
            progress.update(done, note=f"error {found['held_out_error']:.3f}")
            if done == options.fit.updates:
                display.message("then: what success looks like, calibration, replays of held-out episodes")

        found = fitted(
            history,
            real,
            options,
            seed=options.seed,
            images=images,
            folder=out,
            device=options.device,
            shown=shown,
        )
        progress.update(options.fit.updates)
        return found


def _refuse_other_settings(out: Path, options: FitCommand) -> None:
    """Refuses to go on with a fit of other settings; a setting that an earlier version lacked is no other."""
    from robot_rl.config import plain

    path, settings = out / _SETTINGS, plain(options)
    del settings["curve_error"]  # it changes no model
    if path.is_file():
        differs = _differing(settings, read_json(path, DatasetError, f"Remove {out}."))
        if differs:
            raise DatasetError(
                f"out: {str(out)!r} has an unfinished fit with other settings ({', '.join(differs)}). "
                "Give the same command to go on with it, or remove the folder."
            )


def _differing(settings: Mapping[str, Any], before: Mapping[str, Any], at: str = "") -> list[str]:
    """Returns the names, in both, whose values differ; of nested settings `outer.inner`."""
    names = list[str]()
    for name in sorted(settings.keys() & before.keys()):
        now, then = settings[name], before[name]
        if isinstance(now, dict) and isinstance(then, dict):
            names += _differing(now, then, f"{at}{name}.")
        elif now != then:
            names.append(at + name)
    return names


def _keep_settings(out: Path, options: FitCommand) -> None:
    """Makes the folder of a fit."""
    from robot_rl.config import plain

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / _SETTINGS, plain(options), is_checked=True)


def _real_env(options: FitCommand) -> RealEnv:
    """Returns what the episodes of the datasets are of; cameras draw in the size of the recorded pictures."""
    from robot_rl.data.demos import open_demonstrations
    from robot_rl.rollout.envs import simulation
    from robot_rl.sched.opened import opened
    from robot_rl.worlds.build import RealEnv
    from robot_rl.worlds.saved import imitated

    dataset, meta = open_demonstrations(options.data[0])
    env = options.env
    if env.kind == "sim":
        env = replace(env, task=meta.task, robot=env.robot or meta.robot)
    for camera in options.images.cameras[:1]:
        recorded = dataset.features.get(f"{camera}.rgb")
        if recorded is not None:
            env = replace(env, image_size=recorded.shape[:2])
    env = imitated(env, options.images.cameras)
    with opened(simulation(env, 1), holder=f"worlds {meta.task}", wait_s=options.lease_wait_s) as found:
        return RealEnv.of(env, found)


def _audit(words: list[str]) -> Outcome:
    options, folder, world = _shown(words)
    from robot_rl.worlds.audit import judged, shift_of
    from robot_rl.worlds.build import read_history

    report = world.report
    if options.data:
        newer = read_history(options.data, world.meta, print)
        report = replace(report, shift=shift_of(world, newer))
    world.save_report(folder, judged(world, report))
    return 0, _print(folder, world)


def _imagine(words: list[str]) -> Outcome:
    options, folder, world = _shown(words)
    if options.policy is None:
        raise ConfigError("policy: missing, `worlds imagine` needs it: policy=<run folder>.")
    from robot_rl.core.seeding import quick_eval_seeds
    from robot_rl.data.episodes import EpisodesMeta
    from robot_rl.train.collect import open_policy
    from robot_rl.train.imagine import judge_in_both
    from robot_rl.worlds.agreement import keep_policy
    from robot_rl.worlds.audit import judged
    from robot_rl.worlds.env import ImaginedConfig

    policy, meta, _ = open_policy(options.policy)
    shown = {name: getattr(meta, name) for name in EpisodesMeta.__dataclass_fields__}
    world.check(EpisodesMeta(**shown), at="policy")
    seeds = quick_eval_seeds(options.seed, options.episodes)
    settings = ImaginedConfig.of({"gate": False, **options.settings})
    with (
        _simulations(world, min(50, options.episodes), options.lease_wait_s) as real,
        _film(world, options) as film,
    ):
        if film is not None:
            film.begin(seeds)
        watch = None if film is None else film.watch
        how: dict[str, Any] = {"seeds": seeds, "n_exec": meta.n_exec, "settings": settings, "watch": watch}
        both = judge_in_both(world, real, policy, **how)
    report = replace(world.report, imagined_success=both.imagined.rate, real_success=both.real.rate)
    success: dict[str, Any] = {"imagined": both.imagined.rate, "real": both.real.rate}
    judged_by = {name: value for name, value in asdict(settings).items() if name != "device"}
    how = {"settings": judged_by, "seed": options.seed, "episodes": options.episodes}
    keep_policy(folder, options.policy, version=report.version, **how, **success)
    films = [] if film is None else _write_films(folder, film, world.meta.control_hz)
    for name, found in (("imagined", both.imagined), ("real", both.real)):
        low, high = found.interval
        print(f"{name}: {found.rate:.1%} success ({low:.1%} to {high:.1%}) of {options.episodes} episodes")
    print(
        f"bias {both.imagined.rate - both.real.rate:+.1%}; the gate would cut {both.cut:.0%} of the episodes"
    )
    world.save_report(folder, judged(world, report))
    facts = {
        "imagined": both.imagined.to_json(),
        "real": both.real.to_json(),
        "cut": both.cut,
        "films": films,
    }
    return 0, {**_print(folder, world), **facts}


@contextmanager
def _simulations(world: World, num_envs: int, wait_s: float) -> Generator[Any]:
    """Opens the env that a model imitates, under a lease."""
    from robot_rl.rollout.envs import simulation
    from robot_rl.sched.opened import opened

    with opened(simulation(world.env, num_envs), holder=f"worlds {world.meta.task}", wait_s=wait_s) as env:
        yield env


@contextmanager
def _film(world: World, options: ShowCommand) -> Generator[Any]:
    """Yields what films, with simulations of its own; None if no film is wanted."""
    from robot_rl.train.imagine import CameraFilm, Film

    if not options.video:
        yield None
        return
    if world.images is not None:
        yield CameraFilm(world.images.cameras[0], options.video)
        return
    require(world.env.kind == "sim", "video", options.video, "0 but with a task of ours")
    with _simulations(world, options.video, options.lease_wait_s) as env:
        yield Film(env.env, options.video)


def _write_films(folder: Path, film: Any, hz: float) -> list[str]:
    """Writes one film for each episode, the real one left."""
    import numpy as np

    from robot_rl.telemetry.video import write_video
    from robot_rl.worlds.plots import draw_side_by_side

    written = list[str]()
    for number, (real, imagined) in enumerate(zip(film.frames["real"], film.frames["imagined"], strict=True)):
        path = folder / f"imagined-{number}.mp4"
        write_video(path, draw_side_by_side(np.stack(real), np.stack(imagined)), hz)
        written.append(str(path))
        print(f"{path}: the real episode left, the imagined one right")
    return written


def _report(words: list[str]) -> Outcome:
    _, folder, world = _shown(words)
    from robot_rl.worlds.agreement import alike, numbers_of, policies_of
    from robot_rl.worlds.bill import bills_of
    from robot_rl.worlds.calibration import played_by_depth
    from robot_rl.worlds.history import AUDIT, Windows
    from robot_rl.worlds.plots import draw_agreement, draw_calibration

    windows = Windows(world.history, world.history.split(AUDIT), stride=world.model.config.stride)
    played = played_by_depth(world.model, windows, seed=1)
    path = folder / "calibration.png"
    draw_calibration(path, str(folder), world.report.depths, world.calibration, played)
    print(path)
    kept, version = policies_of(folder), world.report.version
    rows = alike(kept, version)
    numbers = numbers_of(rows)
    if rows:
        path, shown = folder / "agreement.png", ", ".join(f"{name} {x:.2f}" for name, x in numbers.items())
        title = f"{folder}: {len(rows)} policies in both worlds"
        draw_agreement(path, title, [{**row, "kind": f"version {version}"} for row in rows], numbers)
        print(f"{path}: {len(rows)} policies, {shown}")
    if others := len(kept) - len(rows):
        print(f"left out: {others} judged in another version, or with other settings, seed or episodes")
    bills, facts = bills_of(folder), _print(folder, world)
    for bill in bills:
        print(bill.words())
    return 0, {**facts, "agreement": numbers, "policies": rows, "bills": [asdict(bill) for bill in bills]}


def _shown(words: list[str]) -> tuple[ShowCommand, Path, World]:
    from robot_rl.config import load

    options = load(ShowCommand, words, config_name="worlds")
    import torch

    from robot_rl.worlds.inventory import enter
    from robot_rl.worlds.saved import load_world

    torch.set_num_threads(options.torch_threads)
    folder = Path(at_home(options.world))
    world = load_world(folder, device=options.device)
    enter(folder)
    return options, folder, world


def _print(folder: Path, world: World) -> dict[str, Any]:
    """Prints what is known of a model; returns it for --json."""
    from rich.console import Console

    from robot_rl.cli.tables import table_of
    from robot_rl.worlds.inventory import world_spec

    report, spec = world.report, world_spec(folder)
    rows = [{name: f"{value:.3g}" for name, value in row.items()} for row in report.depths]
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(
        table_of(
            rows, f"{folder}: {world.meta.task} on {world.meta.robot}, by strides ahead, on the third split"
        )
    )
    if report.pictures:
        rows = [{name: f"{value:.3g}" for name, value in row.items()} for row in report.pictures]
        console.print(table_of(rows, "pictures, likewise: mean absolute error in levels of 255, PSNR in dB"))
    if world.images is not None and world.images.num_members == 1:
        print("pictures have one member, so none disagree: states alone say where imagined episodes are cut")
    failures, successes = report.replayed
    size = world.model.config
    print(
        f"version {report.version}, {report.episodes} episodes, {report.real_steps:,} real control steps; "
        f"{size.members} members, strides of {size.stride} control steps, success by {world.outcome.kind}"
    )
    for what, share, number in (
        ("failures that succeed", report.false_success, failures),
        ("successes that fail", report.missed_success, successes),
    ):
        if share is not None:
            low, high = wilson_interval(share * number, number)
            print(f"replayed real {what}: {share:.0%} of {number} (95 % interval {low:.0%} to {high:.0%})")
    if report.shift is not None:
        print(f"disagreement about newer episodes: {report.shift:.2f} times that of the third split")
    print(f"device {spec.name}: {spec.labels['trust']}")
    for reason in report.reasons[1:]:
        print(f"  and: {reason}")
    return {"world": str(folder), "device": spec.name, "outcome": world.outcome.kind, **asdict(report)}
