"""Settings of training runs as plain data: earlier versions, and settings that a run does not read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from robot_rl.core.registry import TABLE

FOREIGN_ENV = ("kind", "id", "settings", "expert", "num_threads")
"""What is read of `env` where it is no task of ours."""
OTHER_PYTHON = ("python", "workers", "timeout_s")
"""What is read of `env` where it is in other processes, in addition."""
OF_FEW = ("formula", "control_hz", "missing_cameras", "gripper_steps")
"""What of `env` is read where it is given alone."""
OF_CURRICULUM = ("assist_n", "scale", "step", "window", "widen_above", "narrow_below")
"""What is read of `env.domain` with a curriculum alone."""
OF_BANK = ("mix", "rows", "retry", "learnability", "evaluate")
"""What is read of `env.resets` with a bank alone."""


def renewed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of an earlier version under the keys of today; those of today as they are.

    Until commit 77bb428 `method` was a name, and the settings of every method had a section of that name;
    those of a plug-in's method were in `settings`.
    """
    found, kind = dict(settings), settings.get("method")
    if not isinstance(kind, str):
        return found
    section = _part(found, kind if kind in TABLE["method"] else "settings")
    for name in (*TABLE["method"], "settings"):
        found.pop(name, None)
    return {**found, "method": {"kind": kind, **section}}


def used(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a training run, nested plain data, without those that it does not read.

    Left out are the sections of a person, a cluster or a hub that is not there, what is for arms or other
    processes, of a base that is made in another way, and of a filter or a dataset that is not used, the
    number of envs where each source has its own, a formula, a control rate and missing cameras that are not
    given, what belongs to a curriculum or a start bank that is not there, and what says something of our
    tasks where the env is another. Settings of anything else are returned as they are.
    """
    found = renewed(settings)
    if not isinstance(found.get("method"), Mapping):
        return found
    stages = found.get("stages")
    is_finetuned = isinstance(stages, Collection) and "finetune" in stages
    for name in ("policy", "bc") if is_finetuned else ("finetune",):
        found.pop(name, None)
    if found.get("sources"):
        found.pop("num_envs", None)
    else:
        found.pop("sources", None)
    if found.get("transport") != "ray":
        found.pop("ray", None)
    acting = [found, *_part(found, "sources").values()]
    if not any(_part(source, "needs").get("node") for source in acting):
        found.pop("hub", None)
    has_arm = any(source.get("station") or source.get("real_time") for source in acting)
    if not any(source.get("station") for source in acting):
        for name in ("needs", "priority", "preempt_s", "turn_s"):
            found.pop(name, None)
    if not has_arm and found.get("transport") == "inline":
        for name in ("restarts", "silence_s"):
            found.pop(name, None)
    if not has_arm and _part(found, "human").get("input") == "none":
        del found["human"]
    env, demos = _part(found, "env"), dict(_part(found, "demos"))
    if env:
        kind = env.get("kind", "sim")
        read = {*env} - {"expert"} if kind == "sim" else {*FOREIGN_ENV}
        read -= {*OTHER_PYTHON}
        read -= {name for name in OF_FEW if not env.get(name)}
        read |= {*(OTHER_PYTHON if kind == "process" else ())}
        if not _part(env, "domain").get("curriculum"):
            env = _without(env, "domain", OF_CURRICULUM)
        if _part(env, "resets").get("bank") is None:
            env = _without(env, "resets", OF_BANK)
        found["env"] = {name: value for name, value in env.items() if name in read}
    if demos and not _part(demos, "filter").get("updates"):
        demos.pop("filter", None)
    if env.get("kind", "sim") != "sim":
        for name in ("bias_m", "noise_m"):
            demos.pop(name, None)
    if demos and demos.get("path") is None:
        for name in ("read", "by"):
            demos.pop(name, None)
    return {**found, "demos": demos} if demos else found


def _without(settings: Mapping[str, Any], name: str, keys: Collection[str]) -> Mapping[str, Any]:
    """Returns settings whose section `name`, if there is one, lacks `keys`."""
    if name not in settings:
        return settings
    return {**settings, name: {k: value for k, value in _part(settings, name).items() if k not in keys}}


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a section, or nothing of what is none."""
    found = settings.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
