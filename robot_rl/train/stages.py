"""The stages of a run, in order: each needs what the stages before it left.

    demos [filter] clone evaluate online [distil] evaluate    the usual list: improves a clone
    demos clone evaluate                                      cloning alone
    demos finetune evaluate online evaluate                   improves a policy that was fine-tuned
    look evaluate online evaluate                             from nothing, with noise to compare with

Without torch, so that a wrong list is refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from robot_rl.core.errors import ConfigError, nearest

BASE, DEMONSTRATIONS, KEPT, OBSERVATIONS = "a base", "demonstrations", "kept frames", "observations"
IMPROVED = "an improved policy"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a run."""

    needs: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


STAGES = {
    "demos": Stage(leaves=(DEMONSTRATIONS, OBSERVATIONS)),
    "look": Stage(leaves=(BASE, OBSERVATIONS)),
    "filter": Stage(needs=(DEMONSTRATIONS,), leaves=(KEPT,)),
    "clone": Stage(needs=(DEMONSTRATIONS,), leaves=(BASE,)),
    "finetune": Stage(needs=(DEMONSTRATIONS,), leaves=(BASE,)),
    "online": Stage(needs=(BASE, OBSERVATIONS), leaves=(IMPROVED,)),
    "distil": Stage(needs=(IMPROVED, DEMONSTRATIONS)),
    "evaluate": Stage(needs=(BASE,)),
}


def check_stages(stages: Sequence[str], online_needs: Sequence[str] = ()) -> None:
    """Refuses a list of stages in which one needs what none before it leaves.

    Args:
        stages: in their order.
        online_needs: what else the run's method needs.

    Raises:
        ConfigError: says which stage, what it needs, and which stages leave that.
    """
    there: set[str] = set()
    for index, name in enumerate(stages):
        if name not in STAGES:
            raise ConfigError(f"stages: got {name!r}.{nearest(name, STAGES)}")
        is_last = index == len(stages) - 1
        if name == "evaluate" and not is_last and IMPROVED in there:
            raise ConfigError("stages: got 'evaluate' behind 'online', allowed: before it, and at the end")
        if name in stages[:index] and not (name == "evaluate" and is_last and IMPROVED in there):
            raise ConfigError(f"stages: got {name!r} twice, allowed: once, 'evaluate' at the end again")
        stage = STAGES[name]
        needs = (*stage.needs, *online_needs) if name == "online" else stage.needs
        for need in needs:
            if need not in there:
                raise ConfigError(
                    f"stages: {name!r} needs {need}, which no stage before it leaves. "
                    f"Put {_leaving(need)} before it."
                )
        there.update(stage.leaves)
    if not stages or stages[-1] != "evaluate":
        raise ConfigError(f"stages: got {list(stages)}, allowed: lists that end with 'evaluate'")


def _leaving(thing: str) -> str:
    return " or ".join(repr(name) for name, stage in STAGES.items() if thing in stage.leaves)
