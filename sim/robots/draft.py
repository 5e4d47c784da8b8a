"""Writes a robot file for a model that nobody has described yet, and says why each number is what it is.

Joints, limits and efforts are read from the model; the tool and the fingers are measured on its shapes;
home is found by inverse kinematics, and servos follow from the masses. What no model holds, such as
accelerations, is chosen, and marked as that. n arm joints.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import yaml
from numpy.typing import NDArray

from robot_rl.core.errors import ModelError
from robot_rl.sim.backends.model_index import ModelIndex
from robot_rl.sim.robots.anatomy import Anatomy, find_anatomies
from robot_rl.sim.robots.draft_text import Finding, Source, robot_text
from robot_rl.sim.robots.hand_shape import HandRuler, HandShape
from robot_rl.sim.robots.home import PLACES_M, find_home
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.robot_file import read_model, read_robot
from robot_rl.sim.robots.servo_block import (
    SLIDING_GRIPPER,
    STIFFNESS,
    TURNING_GRIPPER,
    least_armature,
    servos_block,
)
from robot_rl.sim.robots.two_arms import SIDES, read_two_arms
from robot_rl.sim.robots.urdf import parse

Array = NDArray[Any]
_SPEED = {True: 2.0, False: 0.5}
"""Of a hinge in rad/s, and of a slide in m/s, where the model has none: the shipped arms' order."""
_RISE_S = 0.3
"""Time to full speed that chosen accelerations are for, as those of the shipped ViperX."""
_POSES = 64
"""Random postures in which a joint's largest load is looked for."""
_LEAD = 0.1
"""Lead of a servo, in rad or m, that a chosen effort is for."""
_TOOL_SITES = ("tool", "tool_point", "robot_rl_tool")
"""Names for the tool's site; the first that the model does not use."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A robot file that is not written yet."""

    name: str
    text: str
    robot: Robot
    """What the text describes."""
    findings: list[Finding]

    @property
    def decided(self) -> list[Finding]:
        """What the model, its shapes or its masses say."""
        return [finding for finding in self.findings if finding.source != "chosen"]

    @property
    def chosen(self) -> list[Finding]:
        """What could not be decided: values that the owner of the arm should replace."""
        return [finding for finding in self.findings if finding.source == "chosen"]


def draft_robot(
    model: Path,
    out: Path,
    *,
    name: str,
    keep: tuple[str, ...] = (),
    tool: tuple[str, ...] = (),
    fingers: tuple[str, ...] | None = None,
) -> Draft:
    """Returns a robot file for an MJCF or a URDF of one arm, or of two on one base; writes nothing.

    Args:
        model: the MJCF or URDF.
        out: where the file will be: its paths are relative to its folder.
        name: of the robot.
        keep: top-level body of the arm, where the model holds several; two bodies on which the left arm and
            the right one hang, where it cannot be found which is which.
        tool: bodies that carry the tools, where they cannot be found.
        fingers: joints of the grippers, where they cannot be found; empty for none.

    Raises:
        ModelError: the model cannot be read, or it holds no arm with at most one gripper of one servo.
    """
    at = f"robot {name}: {model}"
    if not model.is_file():
        raise ModelError(f"{at}: there is no such file.")
    spec = read_model(model, name)
    try:
        compiled = spec.compile()
    except ValueError as error:
        raise ModelError(f"{at}: MuJoCo cannot compile it: {error}") from error
    arms = find_anatomies(compiled, at, keep=keep, tool=tool, fingers=fingers)
    sides = ("",) if len(arms) == 1 else SIDES
    parts = [
        _Drafting(model, out, name, spec, compiled, found, side)
        for found, side in zip(arms, sides, strict=True)
    ]
    for part in parts:
        part.look(is_scene=bool(keep) or model.suffix != ".urdf")
        part.decide_limits()
        part.decide_gripper()
        part.decide_home()
        part.decide_servos()
    if len(parts) == 1:
        content, findings, robot = parts[0].content, parts[0].findings, read_robot(out, parts[0].content)
    else:
        content, findings = _of_two(parts)
        robot = read_two_arms(out, content, load=_no_other)
    text = robot_text(content, findings, model, out)
    assert yaml.safe_load(text) == content, "the text is not the content"
    robot.build()  # it loads
    return Draft(name=name, text=text, robot=robot, findings=findings)


def _of_two(parts: Sequence[_Drafting]) -> tuple[dict[str, Any], list[Finding]]:
    """Returns the content of the file of two arms, and the reasons."""
    shared, sides, findings = dict[str, Any](), dict[str, Any](), list[Finding]()
    for side, part in zip(SIDES, parts, strict=True):
        mine = {key: value for key, value in part.content.items() if key != "name"}
        model = mine["model"]
        shared = {key: model[key] for key in ("file", "keep") if key in model}
        sides[side] = mine | {"model": {key: model[key] for key in model if key not in shared}}
        kept = "model.keep"  # of both
        findings += [
            each if each.field == kept else each._replace(field=f"{side}.{each.field}")
            for each in part.findings
            if each.field != kept or side == SIDES[0]
        ]
    return {"name": parts[0].content["name"], "model": shared, **sides}, findings


def _no_other(name: str) -> Robot:
    raise AssertionError(f"a draft names no other robot, {name!r}")


class _Drafting:
    """What the file says about an arm as it grows, and the reasons."""

    def __init__(
        self,
        path: Path,
        out: Path,
        name: str,
        spec: mujoco.MjSpec,
        model: mujoco.MjModel,
        found: Anatomy,
        side: str,
    ) -> None:
        self._path, self._out, self._at = path, out, f"robot {name}: {path}"
        self._is_urdf = path.suffix == ".urdf"
        self._spec, self._model, self._found, self._side = spec, model, found, side
        self._top = int(model.body_rootid[found.root])
        self._shape = HandRuler(model, found, self._at).shape()
        self.findings: list[Finding] = []
        self.content: dict[str, Any] = {"name": name, "model": {"file": _file(path, out)}}

    def look(self, *, is_scene: bool) -> None:
        """Names the joints of the arm; of a scene, keeps the top-level body that carries it."""
        model, found = self._model, self._found
        if is_scene:
            self._isolate()
        self._joints = [self._short(model.joint(joint).name) for joint in found.arm]
        names = ", ".join(self._joints)
        root = model.body(found.root).name
        self._note("arm_joints", names, "model", f"the {len(found.arm)} joints in a row on {root!r}")
        taken = {self._short(site.name) for site in self._spec.sites}
        names = (self._own(name) for name in _TOOL_SITES)
        site = next(name for name in names if name not in taken)
        self.content |= {"arm_joints": self._joints, "arm_actuators": self._joints, "tool_site": site}

    def _isolate(self) -> None:
        """Keeps the arm of a scene; takes what is before all names of an arm alone off."""
        source, found, spec = self.content["model"], self._found, self._spec
        root = self._model.body(self._top).name
        if not root:
            return  # an arm alone, whose base nobody named
        source["keep"] = root
        self._note("model.keep", root, "model", "scene, lights, cameras and other things are left out")
        if self._side:
            return  # names of the left arm and the right one stay apart
        joints = [self._model.joint(joint).name for joint in (*found.arm, *found.fingers)]
        before, slash, _ = joints[0].rpartition("/")
        prefix = before + slash
        if prefix and all(name.startswith(prefix) for name in joints) and not spec.tendons:
            source["prefix"] = prefix
            self._note("model.prefix", prefix, "model", "all names of the arm begin so; it is taken off")

    def decide_limits(self) -> None:
        """Reads limits of the model; chooses those that it does not have."""
        model, arm = self._model, list(self._found.arm)
        hinges = model.jnt_type[arm] == mujoco.mjtJoint.mjJNT_HINGE
        endless = (model.jnt_limited[arm] == 0) | (model.jnt_range[arm, 0] == model.jnt_range[arm, 1])
        turn = np.where(hinges, math.pi, 1.0)
        low, high = (np.where(endless, sign * turn, model.jnt_range[arm, i]) for i, sign in ((0, -1), (1, 1)))
        self._limits = limits = {"position_low_rad": _floats(low, 5), "position_high_rad": _floats(high, 5)}
        none = "the model gives no end: half a turn to each side, or 1 m"
        self._noted_rows("position_low_rad", endless, "these and position_high_rad: the joints' ranges", none)
        speed = self._urdf_limits("velocity")
        unknown = speed <= 0.0
        speed = np.where(unknown, np.where(hinges, _SPEED[True], _SPEED[False]), speed)
        limits["velocity_rad_s"] = _floats(speed, 4)
        none = "the model has none: those of a slow arm; take the maker's"
        self._noted_rows("velocity_rad_s", unknown, "the URDF's <limit velocity>", none)
        limits["acceleration_rad_s2"] = _floats(speed / _RISE_S, 1)
        why = f"full speed in {_RISE_S:g} s: no model has accelerations; the maker may publish them"
        self._noted_rows("acceleration_rad_s2", np.full(len(arm), True), "", why)
        effort = self._model_efforts()
        unknown = effort <= 0.0
        limits["effort_n_m"] = _floats(np.where(unknown, self._needed_efforts(), effort), 3)
        none = f"the model has none: twice the largest weight, and a servo's force for a lead of {_LEAD:g}"
        self._noted_rows("effort_n_m", unknown, "what limits the joint's force", none)
        self.content["limits"] = limits

    def _noted_rows(self, key: str, chosen: Array, read: str, why: str) -> None:
        """Notes a row of numbers, of which the model has some."""
        value = str(self._limits[key])
        if not chosen.any():
            self._note(f"limits.{key}", value, "model", read)
            return
        which = [name for name, is_chosen in zip(self._joints, chosen, strict=True) if is_chosen]
        of = "" if chosen.all() else f"{', '.join(which)}: "
        self._note(f"limits.{key}", value, "chosen", f"{of}{why}")

    def _urdf_limits(self, key: str) -> Array:
        """Returns a number of each joint's <limit>; 0 where there is none."""
        if not self._is_urdf:
            return np.zeros(len(self._joints))
        found: dict[str, float] = {}
        for joint in parse(self._path, self._at).findall("joint"):
            limit = joint.find("limit")
            name, text = joint.get("name", ""), "0" if limit is None else limit.get(key, "0")
            try:
                found[name] = float(text)
            except ValueError as error:
                raise ModelError(
                    f"{self._at}: joint {name!r}: <limit {key}={text!r}> is no number. Expand a xacro first."
                ) from error
        return np.array([found[name] for name in self._joints])

    def _model_efforts(self) -> Array:
        """Returns the largest force of each joint that the model has; 0 where there is none."""
        return np.array([_effort(self._model, joint) for joint in self._found.arm])

    def _needed_efforts(self) -> Array:
        """Returns twice the largest weight on each joint, and what its servo needs for a usual lead."""
        model, arm = self._model, list(self._found.arm)
        data, qpos, dof = mujoco.MjData(model), model.jnt_qposadr[arm], model.jnt_dofadr[arm]
        low, high = (np.array(self._limits[f"position_{end}_rad"]) for end in ("low", "high"))
        most, whole = np.zeros(len(arm)), np.zeros((model.nv, model.nv))
        for pose in np.random.default_rng(0).uniform(low, high, (_POSES, len(arm))):
            data.qpos[qpos] = pose
            mujoco.mj_forward(model, data)
            mujoco.mj_fullM(model, data, whole)
            inertia = np.diag(whole)[dof] + least_armature(np.diag(whole)[dof])
            most = np.maximum(most, 2.0 * np.abs(data.qfrc_bias[dof]) + _LEAD * STIFFNESS * inertia)
        return np.array([_two_digits_up(value) for value in most])

    def decide_gripper(self) -> None:
        """Names the gripper's joints and its open and closed ends."""
        fingers, shape = self._found.fingers, self._shape
        if not fingers:
            why = "no joint is left at the arm's end. A hand in a file of its own: model.hand (docs/tasks.md)"
            self._note("gripper_actuator", "none", "model", why)
            return
        names = [self._short(self._model.joint(finger).name) for finger in fingers]
        slides = self._model.jnt_type[fingers[0]] == mujoco.mjtJoint.mjJNT_SLIDE
        self.content |= {
            "gripper_actuator": self._own("gripper"),
            "gripper_open": round(shape.opened, 4),
            "gripper_closed": round(shape.closed, 4),
            "gripper_home": round(shape.opened, 4),
            "finger_joints": names,
        }
        self._note("finger_joints", ", ".join(names), "model", "the joints at the arm's end")
        how = (
            "m of each finger, from where they touch"
            if slides
            else "rad: the tips are 10 cm apart, or its end"
        )
        self._note("gripper_open", f"{shape.opened:.4g}", "shapes", how)
        if not slides and shape.opened < shape.closed:
            why = "the joint grows as it closes, and scripted experts read more as wider: they will not grasp"
            self._note("gripper_closed", f"{shape.closed:.4g}", "chosen", why)

    def decide_home(self) -> None:
        """Chooses the opening axis whose home is best, and takes that home."""
        shape, source = self._shape, self.content["model"]
        low, high = (np.array(self._limits[f"position_{end}_rad"]) for end in ("low", "high"))
        start = np.clip(np.zeros(len(low)), low, high)
        base_m = self._base_m()
        self.content["home_rad"] = _floats(start, 4)
        source["servos"] = self._unmeasured_servos()
        body = self._short(self._model.body(self._found.hand).name)
        best: tuple[tuple[float, float], Array, Sequence[float]] | None = None
        for opening in shape.openings:
            source["tool"] = _tool(body, shape, opening)
            robot = self._robot()
            home = find_home(robot, base_m)
            if home is None:
                continue
            away_m = float(np.linalg.norm(_tool_at(robot, home) - base_m - PLACES_M[0]))
            score = (round(away_m, 2), round(float(np.linalg.norm(np.array(home) - start)), 2))
            if best is None or score < best[0]:
                best = score, opening, home
        opening = shape.openings[0] if best is None else best[1]
        source["tool"] = _tool(body, shape, opening)
        self._note("model.tool", f"on {body}", "shapes", f"{self._found.why_hand}; {shape.why}")
        if best is None:
            why = (
                "none was found with the tool pointing down; correct approach_axis, or tool= at another body"
            )
            self._note("home_rad", str(self.content["home_rad"]), "chosen", why)
            return
        self.content["home_rad"] = list(best[2])
        at = _tool_at(self._robot(), best[2])
        where = f"the tool is at ({', '.join(f'{value + 0.0:.2f}' for value in at)}) m, pointing down"
        self._note("home_rad", str(list(best[2])), "computed", where)

    def decide_servos(self) -> None:
        """Computes the servos' gains from the masses at home."""
        robot = self._robot()
        block = yaml.safe_load(textwrap.dedent(servos_block(robot, robot.build().compile())))["servos"]
        if self._shape.gap_m:
            block["gripper_gap_m"] = self._shape.gap_m
        self.content["model"]["servos"] = block
        why = "kp = 400 M and kd = 40 M of each joint's inertia M at home: critically damped, 0.1 s behind"
        self._note("model.servos", f"kp {block['kp']}", "computed", why)
        if self._found.fingers and not _effort(self._model, self._found.fingers[0]):
            why = "the model limits no finger's force: raise it if things slip, lower it if they break"
            self._note("model.servos.gripper_effort", f"{block['gripper_effort']:g}", "chosen", why)

    def _base_m(self) -> Array:
        """Returns from where places for the tool are counted (3,): the origin, or one of two arms' base."""
        if not self._side:
            return np.zeros(3)
        data = mujoco.MjData(self._model)
        mujoco.mj_kinematics(self._model, data)
        first = data.xanchor[self._found.arm[0]]
        if "keep" in self.content["model"]:  # which brings it to the origin
            first = first - self._model.body_pos[self._top]
        return np.array([first[0], first[1], 0.0])

    def _robot(self) -> Robot:
        return read_robot(self._out, self.content)

    def _unmeasured_servos(self) -> dict[str, Any]:
        """Returns servos that leave the model's armatures as they are, so that masses can be measured."""
        model, fingers = self._model, self._found.fingers
        dof = model.jnt_dofadr[list(self._found.arm)]
        ones = [1.0] * len(dof)
        servos: dict[str, Any] = {"kp": ones, "kd": ones, "armature_kg_m2": model.dof_armature[dof].tolist()}
        if fingers:
            slides = model.jnt_type[fingers[0]] == mujoco.mjtJoint.mjJNT_SLIDE
            usual = SLIDING_GRIPPER if slides else TURNING_GRIPPER
            servos |= {
                "gripper_kp": 1.0,
                "gripper_kd": 1.0,
                "gripper_effort": _effort(model, fingers[0]) or usual[2],
                "gripper_armature": float(model.dof_armature[model.jnt_dofadr[fingers[0]]]),
            }
            if self._shape.gap_m:
                servos["gripper_gap_m"] = self._shape.gap_m
        return servos

    def _own(self, name: str) -> str:
        """Returns a name with the side before it, where there are two."""
        return f"{self._side}_{name}" if self._side else name

    def _short(self, name: str) -> str:
        """Returns a name as the loader leaves it."""
        return name.removeprefix(self.content["model"].get("prefix", ""))

    def _note(self, field: str, value: str, source: Source, why: str) -> None:
        self.findings.append(Finding(field, value, source, why))


def _tool(body: str, shape: HandShape, opening: Array) -> dict[str, Any]:
    return {
        "body": body,
        "pos_m": _floats(shape.pos_m, 4),
        "approach_axis": _floats(shape.approach, 8),
        "opening_axis": _floats(opening, 8),
    }


def _tool_at(robot: Robot, position: Sequence[float]) -> Array:
    """Returns where the tool is (3,) in a posture."""
    model = robot.build().compile()
    data = mujoco.MjData(model)
    data.qpos[ModelIndex(model, robot).arm_qpos] = position
    mujoco.mj_kinematics(model, data)
    return data.site(robot.tool_site).xpos.copy()


def _effort(model: mujoco.MjModel, joint: int) -> float:
    """Returns the largest force of a joint that the model has: its own, or its actuator's; 0 if none."""
    if model.jnt_actfrclimited[joint]:
        return float(model.jnt_actfrcrange[joint, 1])
    joints = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
    own = np.flatnonzero(joints & (model.actuator_trnid[:, 0] == joint) & (model.actuator_forcelimited > 0))
    gear = np.abs(model.actuator_gear[own, 0])
    return float((gear * model.actuator_forcerange[own, 1]).max(initial=0.0))


def _file(model: Path, out: Path) -> str:
    """Returns the model's path for the robot file: relative if it is below the file's folder, else whole."""
    folder, whole = out.resolve().parent, model.resolve()
    return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else str(whole)


def _floats(values: Sequence[float] | Array, digits: int) -> list[float]:
    """Returns numbers for a file: rounded, without minus zero."""
    return [round(float(value), digits) + 0.0 for value in values]


def _two_digits_up(value: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(max(value, 1e-3))) - 1)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.2g}")
