"""Which settings of a training run are read: the others say nothing about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from robot_rl.core.registry import TABLE


def used(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a training run, nested plain data, without those that it does not read.

    Left out are the sections of other methods, of a person who is not there, and of a filter or a
    dataset that is not used. Settings of anything else are returned as they are.
    """
    found, method = dict(settings), settings.get("method")
    if not isinstance(method, str):
        return found
    for name in TABLE["method"].keys() - {method}:
        found.pop(name, None)
    if not found.get("settings"):
        found.pop("settings", None)
    if not (found.get("station") or found.get("real_time")) and _part(found, "human").get("input") == "none":
        del found["human"]
    demos = dict(_part(found, "demos"))
    if demos and not _part(demos, "filter").get("updates"):
        demos.pop("filter", None)
    if demos and demos.get("path") is None:
        demos.pop("read", None)
    return {**found, "demos": demos} if demos else found


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a section, or nothing of what is none."""
    found = settings.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
