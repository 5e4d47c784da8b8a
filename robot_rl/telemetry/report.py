"""report.html: one page with the results of a run, of several seeds, or of several settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np

from robot_rl import __version__
from robot_rl.core.errors import ConfigError
from robot_rl.core.files import replace_file
from robot_rl.telemetry import figures, finetune, page
from robot_rl.telemetry.figures import percent
from robot_rl.telemetry.runs import Moment, Outcome, RunRecord, flatten, load_run
from robot_rl.telemetry.settings import Setting, differing, grouped, outcome_of

_MOMENTS: tuple[Moment, Moment] = ("base", "final")
_FINETUNED = ("policy/", "act/")
"""Metrics of the learners of fine-tuning."""
MAX_PANELS = 18
MAX_PICTURES = 24


@dataclass(frozen=True)
class Report:
    """The page, and what is missing in it."""

    path: Path
    missing: tuple[str, ...]
    settings: tuple[Setting, ...]
    """Runs that differ only in their seed are one setting."""
    notes: tuple[str, ...]
    """Names runs that were not counted twice."""


def write_report(folders: Sequence[Path], out: Path | None = None) -> Report:
    """Writes the page of one run, of several seeds, or of several settings.

    Only episodes of runs that differ only in their seed are counted together.

    Args:
        folders: run folders.
        out: the file; if None, `report.html` in the run's folder, or next to the folders of several runs.

    Raises:
        ConfigError: a folder is no run folder, or one of several is of `robot-rl finetune`.
    """
    loaded = [load_run(folder) for folder in folders]
    is_finetuned = any(map(finetune.is_finetuning, loaded))
    if is_finetuned:
        _check_single(loaded)
    settings, notes = grouped(loaded)
    runs = [run for setting in settings for run in setting.runs]
    missing: list[str] = [
        f"{run.label}: {part}" if len(runs) > 1 else part for run in runs for part in run.missing
    ]
    title, chosen, name = _title, _SECTIONS, f"{_task(runs)}, {_recipe(runs)}"
    if len(settings) > 1:
        title, name = _title_of_several, f"{len(settings)} settings"
    if is_finetuned:
        title, chosen, name = finetune.title, _FINETUNE_SECTIONS, f"finetune, {runs[0].folder.name}"
    sections = [section(runs, missing) for section in chosen]
    above = [page.paragraph(note, "note") for note in notes] + ([page.missing(missing)] if missing else [])
    body = [title(runs), *above, *filter(None, sections), _footer()]
    path = out or (runs[0].folder if len(runs) == 1 else runs[0].folder.parent) / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.page(name, body))
    return Report(path, tuple(missing), tuple(settings), tuple(notes))


# Sections: each returns HTML, or "" and adds to `missing` what it needs.


def _title(runs: Sequence[RunRecord]) -> str:
    before, after = outcome_of(runs, "base"), outcome_of(runs, "final")
    known = before is not None or after is not None
    scores = _score(before), _score(after)
    if _counts_returns(runs):
        scores = tuple((_shown(runs, moment), "mean return of held-out episodes") for moment in _MOMENTS)
    parts = [
        f'<p class="eyebrow">{page.escape(_eyebrow(runs))}</p>',
        f"<h1>{page.escape(_task(runs))}</h1>",
        page.paragraph(_sentence(runs, before, after), "lead"),
        *([page.scores(("Before: base policy", *scores[0]), ("After", *scores[1]))] if known else []),
        page.tiles(_tiles(runs, after or before)),
    ]
    return "\n".join(parts)


def _learning(runs: Sequence[RunRecord], missing: list[str]) -> str:
    if _counts_returns(runs) and (svg := figures.return_curve(runs)) is not None:
        caption = "Mean return over control steps of reinforcement learning, of few episodes each."
        return page.heading("Learning") + page.drawing(svg, "return over control steps", caption)
    settings, robots = _settings_of(runs), _robots(runs)
    over, last = "Success over control steps of reinforcement learning", "last point"
    if len(settings) > 1:
        svg, last = figures.learning_curves(settings), "diamond"
        over += ": the mean of a setting's seeds, single seeds thinly"
    elif robots:
        svg, last = figures.learning_curves(robots), "diamond"
        over = "Success of each robot over the control steps of all robots"
    else:
        svg = figures.learning_curve(runs)
        if len(runs) > 1:
            over += "; the band goes from the lowest to the highest run, thin lines are single runs"
        else:
            over += "; the band is the 95 % interval of each evaluation"
    if svg is None:
        missing.append("learning curve: no rows with eval/success and eval/episodes")
        return ""
    caption = (
        f"{over}. Evaluations during training play few episodes; the {last} is the evaluation on held-out "
        "episodes."
    )
    return page.heading("Learning") + page.drawing(svg, "success over control steps", caption)


def _success(runs: Sequence[RunRecord], missing: list[str]) -> str:
    if _counts_returns(runs):
        return ""
    settings, robots = _settings_of(runs), _robots(runs)
    title, alternative = "Success before and after", "success before and after"
    caption = "Share of held-out episodes solved, with 95 % Wilson intervals; every started episode counts."
    shown = [*robots, Setting("together", tuple(runs))] if robots else runs
    if len(settings) > 1:
        title, alternative, shown = "Success", "success of every setting", settings
        caption = "Share of held-out episodes solved, all seeds together, with 95 % Wilson intervals."
    svg = figures.before_after(shown)
    if svg is None:
        missing.append("success before and after: summary.json lacks base_success, final_success or episodes")
        return ""
    parts = [page.heading(title), page.drawing(svg, alternative, caption)]
    if len(runs) > 1:
        header = ["run", "before", "after", "episodes", "control steps", "minutes"]
        parts.append(page.table(header, [_run_row(run) for run in runs]))
    return "".join(parts)


def _title_of_several(runs: Sequence[RunRecord]) -> str:
    settings = _settings_of(runs)
    tasks = dict.fromkeys(run.task or "unknown task" for run in runs)
    text = "Episodes are counted together only for runs that differ only in their seed."
    where = f"robot-rl - {len(settings)} settings - {len(runs)} runs"
    return "\n".join(
        [
            f'<p class="eyebrow">{page.escape(where)}</p>',
            f"<h1>{page.escape(', '.join(tasks))}</h1>",
            page.paragraph(text, "lead"),
            page.table(_SETTING_HEADER, [_setting_row(setting) for setting in settings]),
        ]
    )


def _metrics(runs: Sequence[RunRecord], missing: list[str]) -> str:
    """Draws the metrics of the base first, then critics, actors and all others."""
    names = list(dict.fromkeys(name for run in runs for name in run.names()))
    left_out = ("eval/", "eval.", "heldout/")
    drawn = [name for name in names if not name.startswith(left_out) and any(r.drawn(name) for r in runs)]
    how, prefixes = "Behaviour cloning", ("bc/",)
    if any(run.summary.get("finetune") for run in runs):
        how, prefixes = "Fine-tuning", _FINETUNED
    base = [name for name in drawn if name.startswith(prefixes)]
    learning = sorted((name for name in drawn if not name.startswith(prefixes)), key=_rank)
    parts = []
    for title, chosen in ((how, base), ("Reinforcement learning", learning)):
        svg = figures.metric_grid(runs, chosen[:MAX_PANELS])
        if svg is None:
            missing.append(f"curves of {title.lower()}: no such metrics in metrics.jsonl")
            continue
        parts += [page.heading(title), page.drawing(svg, f"metrics of {title.lower()}", _left_out(chosen))]
    return "".join(parts)


def _failures(runs: Sequence[RunRecord], missing: list[str]) -> str:
    found = [(run, failure) for run in runs for failure in run.failures]
    if not found and _counts_returns(runs):
        return ""
    if not found:
        after = outcome_of(runs, "final")
        if after is None or after.successes < after.episodes:
            missing.append(
                "failure gallery: no failures/index.json (does `robot-rl doctor` find a renderer?)"
            )
            return ""
        return page.heading("Failures") + page.paragraph("No held-out episode failed after training.")
    several = len(runs) > 1
    pictures = [(f.path, f"{run.label}, {f.caption}" if several else f.caption) for run, f in found]
    text = "Evaluation episodes that did not reach the goal."
    if len(pictures) > MAX_PICTURES:
        text += f" {len(pictures) - MAX_PICTURES} more are in the run folders."
    return page.heading("Failures") + page.paragraph(text, "note") + page.gallery(pictures[:MAX_PICTURES])


def _safety(runs: Sequence[RunRecord], missing: list[str]) -> str:
    kinds = (
        ("safety_clamps", "actions limited by the safety envelope", False),
        ("nan_resets", "simulations reset because they diverged", True),
    )
    rows = []
    for key, text, cumulative in kinds:
        counts = [run.counted(key, cumulative=cumulative) for run in runs]
        if all(count is None for count in counts):
            missing.append(f"{text}: no {key} in summary.json or metrics.jsonl")
        else:
            rows.append([text, *["-" if count is None else f"{count:,}" for count in counts]])
    header = ["", *[run.label for run in runs]]
    return page.heading("Safety and numerical faults") + page.table(header, rows) if rows else ""


def _time(runs: Sequence[RunRecord], missing: list[str]) -> str:
    timings = [run.summary["timing"] for run in runs if isinstance(run.summary.get("timing"), Mapping)]
    known = [{str(stage): s for stage, s in t.items() if isinstance(s, int | float)} for t in timings]
    stages = dict.fromkeys(stage for timing in known for stage in timing)
    means = {stage: float(np.mean([timing.get(stage, 0.0) for timing in known])) for stage in stages}
    svg = figures.stage_bars(means)
    if svg is None:
        missing.append("time per stage: summary.json has no timing")
        return ""
    caption = "Mean over the runs." if len(timings) > 1 else ""
    return page.heading("Where the time went") + page.drawing(svg, "seconds per stage", caption)


def _reproduce(runs: Sequence[RunRecord], missing: list[str]) -> str:
    lines = [str(run.summary.get("command") or _command(run)) for run in runs]
    return page.heading("Reproduce") + page.command("\n".join(dict.fromkeys(lines)))


def _machine(runs: Sequence[RunRecord], missing: list[str]) -> str:
    parts = []
    for key, title in (("machine", "Machine"), ("versions", "Versions")):
        found = [run.summary[key] for run in runs if run.summary.get(key)]
        if not found:
            missing.append(f"{key}: not in summary.json")
            continue
        first = found[0]
        pairs = flatten(first) if isinstance(first, Mapping) else {key: first}
        values = [(name, _text(value)) for name, value in pairs.items()]
        parts += [page.heading(title), page.name_values(values)]
        if any(other != first for other in found):
            parts.append(page.paragraph("The runs differ here; the first run's is shown.", "note"))
    return "".join(parts)


def _settings(runs: Sequence[RunRecord], missing: list[str]) -> str:
    configs = [run.config for run in runs if run.config]
    if not configs:
        return ""
    parts = [page.heading("Settings")]
    firsts = [setting.runs[0] for setting in _settings_of(runs)]
    if len(firsts) > 1:
        keys = differing(firsts)
        rows = [[key, *[_text(run.config.get(key)) for run in firsts]] for key in keys]
        parts.append(page.paragraph("Settings that differ, except seeds:", "note"))
        parts.append(page.table(["", *[run.setting for run in firsts]], rows))
        parts.append(page.paragraph(f"All settings of {firsts[0].setting}:", "note"))
    parts.append(page.name_values([(key, _text(value)) for key, value in configs[0].items()]))
    return "".join(parts)


def _finetuning(runs: Sequence[RunRecord], missing: list[str]) -> str:
    """Shows the held-out errors of a single run that fine-tuned its base."""
    finetuned = runs[0].summary.get("finetune")
    if len(runs) > 1 or not isinstance(finetuned, Mapping):
        return ""
    run = replace(runs[0], summary=cast("Mapping[str, Any]", finetuned))
    text = finetune.verdict_text(run)
    parts = [section([run], missing) for section in (finetune.errors, finetune.predictors, finetune.joints)]
    return "".join([page.heading("Fine-tuning"), page.paragraph(text), *parts])


_SECTIONS: tuple[Callable[[Sequence[RunRecord], list[str]], str], ...] = (
    _learning,
    _success,
    _finetuning,
    _failures,
    _metrics,
    _safety,
    _time,
    _reproduce,
    _machine,
    _settings,
)


def _curves(runs: Sequence[RunRecord], missing: list[str]) -> str:
    """Draws the metrics of a fine-tuning run."""
    names = [name for name in runs[0].names() if name.startswith(_FINETUNED)]
    svg = figures.metric_grid(runs, names[:MAX_PANELS])
    if svg is None:
        missing.append("curves of learning: no such metrics in metrics.jsonl")
        return ""
    return page.heading("Learning") + page.drawing(svg, "metrics of learning", _left_out(names))


_FINETUNE_SECTIONS: tuple[Callable[[Sequence[RunRecord], list[str]], str], ...] = (
    finetune.errors,
    finetune.predictors,
    finetune.joints,
    finetune.baselines,
    _curves,
    _time,
    _reproduce,
    _machine,
    _settings,
)


# Words and numbers


def _settings_of(runs: Sequence[RunRecord]) -> list[Setting]:
    """Returns the settings that `grouped` found."""
    labels = dict.fromkeys(run.setting for run in runs)
    return [Setting(label, tuple(run for run in runs if run.setting == label)) for label in labels]


def _robots(runs: Sequence[RunRecord]) -> list[Setting]:
    """Returns the robots that learn together in every run, each with its evaluations; empty for one robot."""
    names = runs[0].sources
    if any(run.sources != names for run in runs):
        return []
    return [Setting(name, tuple(run.of_source(name) for run in runs)) for name in names]


def _check_single(runs: Sequence[RunRecord]) -> None:
    if len(runs) > 1:
        raise ConfigError(
            f"report.run: got {len(runs)} runs, allowed: one where a run is of `robot-rl finetune`. "
            "Write one report for each."
        )


def _task(runs: Sequence[RunRecord]) -> str:
    return next((run.task for run in runs if run.task), runs[0].folder.name)


def _recipe(runs: Sequence[RunRecord]) -> str:
    return next((run.recipe for run in runs if run.recipe), "unknown recipe")


def _eyebrow(runs: Sequence[RunRecord]) -> str:
    where = runs[0].folder.name if len(runs) == 1 else f"{len(runs)} runs"
    return f"robot-rl  \u00b7  recipe {_recipe(runs)}  \u00b7  {where}"


def _counts_returns(runs: Sequence[RunRecord]) -> bool:
    return all(run.counts_returns for run in runs)


def _shown(runs: Sequence[RunRecord], moment: Moment) -> str:
    """Returns the success over all runs, or their mean return if the env reports no success."""
    if not _counts_returns(runs):
        outcome = outcome_of(runs, moment)
        return percent(outcome.share) if outcome else "-"
    known = [value for run in runs if (value := run.number(f"{moment}_return")) is not None]
    return f"{np.mean(known):,.1f}" if known else "-"


def _sentence(runs: Sequence[RunRecord], before: Outcome | None, after: Outcome | None) -> str:
    if _counts_returns(runs):
        first, last = (_shown(runs, moment) for moment in _MOMENTS)
        return f"Mean return of held-out episodes: {first} before, {last} after. The env reports no success."
    if before is None and after is not None:
        low, high = after.interval
        return f"Success on held-out episodes is {percent(after.share)} ({100 * low:.1f} to {percent(high)})."
    if before is None or after is None:
        return "This run has no evaluation before and after reinforcement learning to compare."
    moved = "rose" if after.share > before.share else "fell" if after.share < before.share else "stayed"
    text = (
        f"Success on held-out episodes {moved} from {percent(before.share)} to {percent(after.share)} "
        f"({100 * (after.share - before.share):+.1f} points)."
    )
    if len(runs) == 1:
        return text
    finals = [outcome.share for run in runs if (outcome := run.outcome("final")) is not None]
    extremes = f"between {percent(min(finals))} and {percent(max(finals))}"
    return f"{text} All episodes of {len(finals)} seeds together; single seeds end {extremes}."


def _score(outcome: Outcome | None) -> tuple[str, str]:
    if outcome is None:
        return "-", "not evaluated"
    low, high = outcome.interval
    return percent(outcome.share), f"95 % interval {100 * low:.1f} to {percent(high)}"


def _tiles(runs: Sequence[RunRecord], outcome: Outcome | None) -> list[tuple[str, str]]:
    each = " a run" if len(runs) > 1 else ""
    return [
        ("Held-out episodes", f"{outcome.episodes:,}" if outcome else "-"),
        (f"Control steps{each}", _range([run.number("env_steps") for run in runs], ",.0f")),
        (f"Minutes of training{each}", _range([run.number("train_minutes") for run in runs], ".1f")),
        ("Seeds" if len(runs) > 1 else "Seed", ", ".join(_text(run.seed) for run in runs)),
    ]


def _run_row(run: RunRecord) -> list[str]:
    before, after = run.outcome("base"), run.outcome("final")
    return [
        run.label,
        *(_shown([run], moment) for moment in _MOMENTS),
        f"{(after or before).episodes:,}" if after or before else "-",  # pyright: ignore[reportOptionalMemberAccess]
        _range([run.number("env_steps")], ",.0f"),
        _range([run.number("train_minutes")], ".1f"),
    ]


_SETTING_HEADER = ["setting", "seeds", "before", "after", "95 % interval", "episodes", "steps", "minutes"]


def _setting_row(setting: Setting) -> list[str]:
    after = setting.outcome("final")
    low, high = after.interval if after else (0.0, 0.0)
    is_share = after is not None and not _counts_returns(setting.runs)
    return [
        setting.label,
        ", ".join(_text(run.seed) for run in setting.runs),
        *(_shown(setting.runs, moment) for moment in _MOMENTS),
        f"{100 * low:.1f} to {percent(high)}" if is_share else "-",
        f"{after.episodes:,}" if after else "-",
        _range([run.number("env_steps") for run in setting.runs], ",.0f"),
        _range([run.number("train_minutes") for run in setting.runs], ".1f"),
    ]


def _range(values: Sequence[float | None], style: str) -> str:
    """Returns `a`, or `a to b` where the runs differ."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    low, high = format(known[0], style), format(known[-1], style)
    return low if low == high else f"{low} to {high}"


def _rank(name: str) -> tuple[int, str]:
    groups = ("critic", "actor", "residual", "policy")
    group = name.split("/")[0]
    return (groups.index(group) if group in groups else len(groups), group)


def _left_out(names: Sequence[str]) -> str:
    return f"Not drawn: {', '.join(names[MAX_PANELS:])}." if len(names) > MAX_PANELS else ""


def _command(run: RunRecord) -> str:
    seed = f" seed={run.seed}" if run.seed is not None else ""
    return f"robot-rl train recipe={run.recipe or 'custom'}{seed}"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _footer() -> str:
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"<footer>Written by robot-rl {__version__} on {written}.</footer>"
