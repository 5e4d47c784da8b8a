"""The only assembler: sources x policy x algorithm in one loop (layer L4).

`run(config)` trains and returns a `Summary`; `resume(folder)` goes on with a run that was cut short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robot_rl.train.phases import Summary, resume, run

__all__ = ["Summary", "resume", "run"]


def __getattr__(name: str) -> Any:
    """Loads the learner and the simulator only when a run is asked for."""
    if name in __all__:
        from robot_rl.train import phases

        return getattr(phases, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
