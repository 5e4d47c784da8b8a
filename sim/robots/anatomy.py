"""Finds the arm, the fingers and the tool in a model that nobody has described yet.

What is found is read from the model: which joints are in a row, where the chain divides, what is coupled,
where the shapes end. Names count in two places only: a last joint that is called a finger is one, and a frame
that is called tcp, tool0 or flange carries the tool of an arm without fingers. Numbers of bodies and joints
are those of the compiled model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import mujoco

from robot_rl.core.errors import ModelError, nearest

_SINGLE = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)
_FEWEST = 2
"""Fewest joints in a row that are an arm."""
_APART_M = 0.01
"""Of two arms' bases, along y, so that one is the left."""
_FINGER_CHAIN = 2
"""Most joints in a row of one finger that nothing couples."""
_FINGER_JOINT = re.compile("finger|jaw|grip|claw|knuckle|thumb", re.IGNORECASE)
_FINGER_BODY = re.compile("finger|jaw|claw|knuckle|thumb", re.IGNORECASE)
TOOL_FRAMES = ("tcp", "tool0", "tool", "ee", "eef", "end_effector", "flange", "tip")
"""Words in names of frames, best first, that people put where the tool is."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """What an arm consists of."""

    root: int
    """Body at which the arm begins; of an arm alone the top-level body."""
    arm: tuple[int, ...]
    """Joints of the arm, base to tool."""
    hand: int
    """Body that carries the fingers; without them the one that carries the tool."""
    fingers: tuple[int, ...]
    """Joints that the gripper's one servo moves; empty without a gripper."""
    why_hand: str
    """Why it is that body."""


class Skeleton:
    """The bodies and joints of a compiled model as a tree."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self.model = model
        bodies = range(model.nbody)
        self.children = [[child for child in bodies[1:] if model.body_parentid[child] == b] for b in bodies]

    def name(self, body: int) -> str:
        return self.model.body(body).name

    def joint_name(self, joint: int) -> str:
        return self.model.joint(joint).name

    def joints(self, body: int) -> list[int]:
        first = int(self.model.body_jntadr[body])
        return list(range(first, first + int(self.model.body_jntnum[body])))

    def below(self, body: int) -> Iterator[int]:
        """Yields a body and all below it, depth first."""
        yield body
        for child in self.children[body]:
            yield from self.below(child)

    def joints_below(self, body: int) -> list[int]:
        return [joint for each in self.below(body) for joint in self.joints(each)]

    def branches(self, body: int) -> list[int]:
        """Returns the nearest bodies below one that have joints of their own."""
        found: list[int] = []
        for child in self.children[body]:
            found += [child] if self.joints(child) else self.branches(child)
        return found

    def depth(self, body: int, ignored: set[int]) -> int:
        """Returns the most joints in a row from a body on, without those that are ignored."""
        own = len([joint for joint in self.joints(body) if joint not in ignored])
        return own + max((self.depth(child, ignored) for child in self.children[body]), default=0)

    def followers(self) -> dict[int, int]:
        """Returns joints that an equality couples to another: the follower and its leader."""
        model = self.model
        rows = [i for i in range(model.neq) if model.eq_type[i] == mujoco.mjtEq.mjEQ_JOINT]
        pairs = {int(model.eq_obj1id[i]): int(model.eq_obj2id[i]) for i in rows}
        return {follower: leader for follower, leader in pairs.items() if leader >= 0}


def find_anatomies(
    model: mujoco.MjModel,
    at: str,
    *,
    keep: tuple[str, ...] = (),
    tool: tuple[str, ...] = (),
    fingers: tuple[str, ...] | None = None,
) -> tuple[Anatomy, ...]:
    """Returns the parts of the one arm in a model, or of its left arm and its right one.

    Args:
        model: as its file has it.
        at: begins the message of an error.
        keep: top-level body of the arm, where there are several; two bodies, on which the left arm and the
            right one hang, where it cannot be found which is which.
        tool: bodies that carry the tools, where they cannot be found.
        fingers: joints of the grippers, where they cannot be found; empty for none.

    Raises:
        ModelError: no arm, more than two, or what is at the end of one is no gripper of one servo; the
            message says which setting decides.
    """
    bones = Skeleton(model)
    roots = _roots(bones, keep, at)
    for root in roots:
        _check_joints(bones, root, at)
    if tool and len(tool) != len(roots):
        raise ModelError(f"{at}: tool: got {len(tool)} bodies for {len(roots)} arms. Give one for each arm.")
    found: list[Anatomy] = []
    for number, root in enumerate(roots):
        others = {bones.joint_name(j) for other in roots if other != root for j in bones.joints_below(other)}
        own = None if fingers is None else tuple(name for name in fingers if name not in others)
        found.append(_anatomy(bones, root, tool[number] if tool else None, own, at))
    return tuple(found)


def _anatomy(
    bones: Skeleton, root: int, tool: str | None, fingers: tuple[str, ...] | None, at: str
) -> Anatomy:
    """Returns the parts of the arm that begins at a body."""
    model = bones.model
    chain, ends = _chain(bones, root)
    found = _fingers(bones, chain, ends, fingers, at)
    inner = {joint for end in ends for joint in bones.joints_below(end)}
    arm = tuple(joint for joint in chain if joint not in found and joint not in inner)
    if len(arm) < _FEWEST:
        raise ModelError(f"{at}: {_no_chain(bones, root)}")
    last = int(model.jnt_bodyid[arm[-1]])
    hand, why = _hand(bones, last, found, tool, at)
    return Anatomy(root=root, arm=arm, hand=hand, fingers=found, why_hand=why)


def _roots(bones: Skeleton, keep: tuple[str, ...], at: str) -> tuple[int, ...]:
    """Returns the body at which the one arm begins, or those of the left arm and the right one."""
    tops = {bones.name(body): body for body in bones.children[0]}
    coupled = set(bones.followers())
    arms = [name for name, body in tops.items() if bones.depth(body, coupled) >= _FEWEST]
    if len(keep) > 1:
        return _given_pair(bones, keep, at)
    if keep:
        if keep[0] not in arms:
            raise ModelError(f"{at}: keep: no arm hangs on {keep[0]!r}.{nearest(keep[0], arms or tops)}")
        arms = list(keep)
    if not arms:
        raise ModelError(f"{at}: {_no_chain(bones, 0)}")
    if len(arms) > 1:
        raise ModelError(
            f"{at}: it holds {len(arms)} arms, on {', '.join(arms)}. Choose one: keep={arms[0]}. Two that "
            "stand apart become one robot by a file each, and one that places them: docs/tasks.md, Two arms."
        )
    return _halves(bones, tops[arms[0]], at) or (tops[arms[0]],)


def _given_pair(bones: Skeleton, keep: tuple[str, ...], at: str) -> tuple[int, ...]:
    """Returns the bodies that somebody says carry the left arm and the right one."""
    named = {bones.name(body): body for body in range(1, bones.model.nbody)}
    coupled = set(bones.followers())
    known = [name for name, body in named.items() if bones.depth(body, coupled) >= _FEWEST]
    for name in keep:
        if name not in known:
            raise ModelError(f"{at}: keep: no arm hangs on {name!r}.{nearest(name, known)}")
    roots = tuple(named[name] for name in keep)
    below = [set(bones.below(root)) for root in roots]
    tops = {int(bones.model.body_rootid[root]) for root in roots}
    if len(roots) > 2 or len(tops) > 1 or below[0] & below[1]:
        raise ModelError(
            f"{at}: keep: got {', '.join(keep)}, allowed: one arm, or two on one base of which neither hangs "
            "on the other."
        )
    return roots


def _halves(bones: Skeleton, top: int, at: str) -> tuple[int, ...]:
    """Returns where the left arm and the right one begin on a base that stands; nothing if it has not two."""
    if bones.joints(top):
        return ()
    coupled, ends = set(bones.followers()), bones.branches(top)
    arms = [end for end in ends if bones.depth(end, coupled) >= _FEWEST]
    if len(arms) < 2:
        return ()
    names = ", ".join(map(bones.name, arms))
    if len(arms) > 2:
        raise ModelError(
            f"{at}: {len(arms)} arms, or fingers of many joints, hang on {bones.name(top)!r}: {names}. One "
            "arm fits, or two. Take the others out of the model."
        )
    if loose := [
        bones.joint_name(joint) for end in ends if end not in arms for joint in bones.joints_below(end)
    ]:
        raise ModelError(
            f"{at}: {', '.join(loose)} is of neither of the arms at {names}, and nothing would move it. Take "
            "it out of the model."
        )
    data = mujoco.MjData(bones.model)
    mujoco.mj_kinematics(bones.model, data)
    y_m = [float(data.xanchor[bones.joints(arm)[0], 1]) for arm in arms]
    if abs(y_m[0] - y_m[1]) < _APART_M:
        raise ModelError(
            f"{at}: two arms begin at {names}, and neither is farther to the left, which is towards y. Say "
            f"which is left, first: keep={','.join(map(bones.name, arms))}"
        )
    return tuple(arms) if y_m[0] > y_m[1] else (arms[1], arms[0])


def _no_chain(bones: Skeleton, body: int) -> str:
    names = [bones.joint_name(joint) for joint in bones.joints_below(body)]
    return (
        f"no serial chain: an arm has {_FEWEST} hinges or slides or more in a row, before its fingers. The "
        f"model's joints: {', '.join(names) or 'none'}. Give the file of an arm."
    )


def _check_joints(bones: Skeleton, root: int, at: str) -> None:
    """Refuses a base that moves freely, balls, and joints without a name."""
    for joint in bones.joints_below(root):
        kind, body = int(bones.model.jnt_type[joint]), bones.name(int(bones.model.jnt_bodyid[joint]))
        if kind not in _SINGLE:
            what = "moves freely" if kind == mujoco.mjtJoint.mjJNT_FREE else "is a ball"
            raise ModelError(
                f"{at}: joint {bones.joint_name(joint)!r} of body {body!r} {what}, and an arm has hinges and "
                "slides on a base that stands. Take the joint out."
            )
        if not bones.joint_name(joint):
            raise ModelError(f"{at}: the joint of body {body!r} has no name. Give it one in the model.")


def _chain(bones: Skeleton, root: int) -> tuple[list[int], list[int]]:
    """Returns the joints in a row from the base on, and the bodies into which the chain divides then."""
    chain = bones.joints(root)
    ends = bones.branches(root)
    while len(ends) == 1:
        chain += bones.joints(ends[0])
        ends = bones.branches(ends[0])
    return chain, ends


def _fingers(
    bones: Skeleton, chain: list[int], ends: list[int], given: tuple[str, ...] | None, at: str
) -> tuple[int, ...]:
    """Returns the joints that the gripper's servo moves."""
    inner = [joint for end in ends for joint in bones.joints_below(end)]
    if given is not None:
        names = {bones.joint_name(joint): joint for joint in [*chain, *inner]}
        for name in given:
            if name not in names:
                raise ModelError(f"{at}: fingers: no joint {name!r}.{nearest(name, names)}")
        if not given and inner:
            others = ", ".join(map(bones.joint_name, inner))
            raise ModelError(
                f"{at}: fingers: got none, but {others} hang on the end of the arm, and nothing would move "
                "them. Take them out of the model."
            )
        return tuple(names[name] for name in given)
    if ends:
        return _of_branches(bones, ends, at)
    last = chain[-1:]
    body = bones.name(int(bones.model.jnt_bodyid[last[0]])) if last else ""
    is_finger = bool(last) and bool(
        _FINGER_JOINT.search(_own(bones.joint_name(last[0]))) or _FINGER_BODY.search(_own(body))
    )
    return tuple(last) if is_finger else ()


def _own(name: str) -> str:
    """Returns a name without what is put before all names of a model."""
    return name.rpartition("/")[2]


def _of_branches(bones: Skeleton, ends: list[int], at: str) -> tuple[int, ...]:
    """Returns the fingers of a hand into whose branches the chain divides."""
    model, followers = bones.model, bones.followers()
    where = bones.name(int(model.body_parentid[ends[0]]))
    long = [bones.name(end) for end in ends if bones.depth(end, set(followers)) > _FINGER_CHAIN]
    if long:
        raise ModelError(
            f"{at}: the chain divides at {where!r} into {', '.join(map(bones.name, ends))}, and "
            f"{', '.join(long)} has more than {_FINGER_CHAIN} joints in a row: several arms, or a hand of "
            "many joints. One arm fits, with a gripper that one servo moves, or two whose base has no joint. "
            "Take the others out."
        )
    hands = {bones.name(int(model.body_parentid[end])): end for end in ends if _leads(bones, end, followers)}
    if len(hands) > 1:
        raise ModelError(
            f"{at}: several hands: fingers hang on {', '.join(hands)}. One servo moves one gripper. Take the "
            "other hands out of the model."
        )
    joints = [joint for end in ends for joint in bones.joints_below(end)]
    leaders = [joint for joint in joints if joint not in followers]
    kinds = {int(model.jnt_type[joint]) for joint in leaders}
    if not 1 <= len(leaders) <= 2 or len(kinds) > 1:
        names = ", ".join(bones.joint_name(joint) for joint in leaders) or "none"
        raise ModelError(
            f"{at}: joints at the end of the arm that nothing couples: {names}. A gripper has one or two of "
            "a kind, and the others follow them (<mimic> of a URDF, <equality> of an MJCF). Couple them, or "
            "take them out of the model."
        )
    if kinds == {int(mujoco.mjtJoint.mjJNT_SLIDE)}:  # the robot file couples fingers that slide
        slides = [j for j in joints if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_SLIDE]
        return tuple(sorted(slides, key=lambda joint: joint in followers))
    return tuple(leaders)


def _leads(bones: Skeleton, end: int, followers: dict[int, int]) -> bool:
    return any(joint not in followers for joint in bones.joints_below(end))


def _hand(bones: Skeleton, last: int, fingers: tuple[int, ...], tool: str | None, at: str) -> tuple[int, str]:
    """Returns the body that carries the tool, and why it is that one.

    Args:
        bones: the model.
        last: the body that the arm's last joint moves.
        fingers: joints of the gripper.
        tool: the body's name, if somebody says it.
        at: begins the message of an error.
    """
    model = bones.model
    moved = {int(model.jnt_bodyid[joint]) for joint in fingers}
    still = [body for body in bones.below(last) if not moved & {body, *_above(model, body, last)}]
    names = {bones.name(body): body for body in still if bones.name(body)}
    if tool is not None:
        if tool not in names:
            raise ModelError(f"{at}: tool: no body {tool!r} on the end of the arm.{nearest(tool, names)}")
        return names[tool], "you say so"
    if fingers:
        return int(model.body_parentid[model.jnt_bodyid[fingers[0]]]), "the fingers hang on it"
    leaves = [name for name, body in names.items() if not bones.children[body]]
    for word in TOOL_FRAMES:
        called = [name for name in names if re.search(rf"(^|[_/.-]){word}($|[_/.-])", name, re.IGNORECASE)]
        if len(called) == 1:
            return names[called[0]], f"it is called {called[0]!r}"
    if len(leaves) > 1:
        raise ModelError(
            f"{at}: several places for the tool: {', '.join(leaves)}. Choose the body at the arm's end: "
            f"tool={leaves[0]}"
        )
    if not leaves:
        raise ModelError(f"{at}: the body that the last joint moves has no name. Give it one in the model.")
    return names[leaves[0]], "it is the last one"


def _above(model: mujoco.MjModel, body: int, top: int) -> Iterator[int]:
    """Yields the bodies between one and another above it."""
    while body not in (top, 0):
        body = int(model.body_parentid[body])
        yield body
