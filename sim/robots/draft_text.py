"""The text of a drafted robot file: each value with the reason for it above it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

Source = Literal["model", "shapes", "computed", "chosen"]
"""Whether a value is read, measured, computed, or chosen without knowing."""

_DOCTOR = "# `robot-rl doctor robot={} task=reach` measures what is here."
_WIDTH = 96
"""Characters of a comment."""
_ORDER = (
    "name", "model", "left", "right", "arm_joints", "arm_actuators", "gripper_actuator", "gripper_open",
    "gripper_closed", "gripper_home", "finger_joints", "tool_site", "home_rad", "limits",
)  # fmt: skip
_MODEL_ORDER = ("file", "keep", "prefix", "tool", "servos")


class Finding(NamedTuple):
    """One decision."""

    field: str
    """Of the robot file."""
    value: str
    source: Source
    why: str


def robot_text(content: Mapping[str, Any], findings: Sequence[Finding], model: Path, out: Path) -> str:
    """Returns the file as YAML; `yaml.safe_load` makes `content` of it again.

    Args:
        content: of the file.
        findings: whose reasons stand above the values.
        model: what the robot was drafted from.
        out: where the file will be.
    """
    found = {finding.field: finding for finding in findings}
    lines = [
        f"# {content['name']}, written by `robot-rl new robot` from {model.name}.",
        "# docs/tasks.md explains each key.",
        "# CHOSEN: no model holds this number; replace it by what you know of the arm.",
        *([] if "left" in content else [_DOCTOR.format(out.name)]),
    ]
    lines += _section("", content, found)
    return "\n".join(lines) + "\n"


def _section(at: str, values: Mapping[str, Any], found: Mapping[str, Finding]) -> list[str]:
    indent, lines = "  " * at.count("."), list[str]()
    order = (
        _MODEL_ORDER if at.endswith("model.") else _ORDER if at in ("", "left.", "right.") else tuple(values)
    )
    for key in sorted(values, key=order.index):
        name, value = f"{at}{key}", values[key]
        lines += _reason(found.get(name), indent)
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_section(f"{name}.", value, found)]
        else:
            lines.append(f"{indent}{key}: {_flow(value)}")
    return lines


def _reason(finding: Finding | None, indent: str) -> list[str]:
    if finding is None:
        return []
    mark = "CHOSEN: " if finding.source == "chosen" else ""
    wrapped = textwrap.wrap(f"{mark}{finding.why}", _WIDTH - len(indent), break_on_hyphens=False)
    return [f"{indent}# {line}" for line in wrapped]


def _flow(value: Any) -> str:
    """Returns a value on one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
