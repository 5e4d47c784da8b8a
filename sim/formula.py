"""Formulas of `env.formula`: what an episode has to do, in order, and what must never happen.

    formula   = sequence, with `avoid(condition)` before or after it, all separated by ;
    sequence  = stage { then stage }
    stage     = condition  |  hold(condition, seconds)
    condition = names of predicates, joined by not, and, or (in this order of precedence) and parentheses

A fragment of signal temporal logic: sequences of "eventually", "always for a time", and "always not". TGPO
(arXiv 2510.00225) also makes subgoals, constraints and a reward by stage of a formula. Deviations: no nested
time operators and no time intervals, the episode's horizon is the one deadline. Text alone is read here;
`sim/monitor.py` follows a formula over arrays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from robot_rl.core.errors import ConfigError, nearest

_AT = "env.formula"
_WORDS = ("then", "hold", "avoid", "and", "or", "not")
_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<sign>[(),;])|(?P<other>\S))"
)
_CONDITION = "the name of a predicate, not or ("
_MOST_OPEN = 50
"""Parentheses and `not` inside of each other."""


@dataclass(frozen=True)
class Predicate:
    """The name of what a task can tell of a state."""

    name: str

    def names(self) -> Iterator[str]:
        yield self.name

    def holds(self, value_of: Callable[[str], Any]) -> Any:
        """Returns whether the condition holds, in whatever `value_of` gives: bool arrays (B,)."""
        return value_of(self.name)


@dataclass(frozen=True)
class Not:
    """Holds where the inner condition does not."""

    inner: Condition

    def names(self) -> Iterator[str]:
        return self.inner.names()

    def holds(self, value_of: Callable[[str], Any]) -> Any:
        return ~self.inner.holds(value_of)


@dataclass(frozen=True)
class Both:
    """Holds where both conditions do."""

    left: Condition
    right: Condition

    def names(self) -> Iterator[str]:
        yield from self.left.names()
        yield from self.right.names()

    def holds(self, value_of: Callable[[str], Any]) -> Any:
        return self.left.holds(value_of) & self.right.holds(value_of)


@dataclass(frozen=True)
class Either:
    """Holds where one condition does, or both."""

    left: Condition
    right: Condition

    def names(self) -> Iterator[str]:
        yield from self.left.names()
        yield from self.right.names()

    def holds(self, value_of: Callable[[str], Any]) -> Any:
        return self.left.holds(value_of) | self.right.holds(value_of)


Condition = Predicate | Not | Both | Either


@dataclass(frozen=True)
class Stage:
    """One part of the sequence: it ends when its condition has held for long enough without a break."""

    condition: Condition
    hold_s: float = 0.0
    """0: one control step."""

    def steps(self, control_hz: float) -> int:
        """Returns how many control steps in a row the condition has to hold: `hold_s` or a little longer."""
        return max(1, math.ceil(self.hold_s * control_hz - 1e-9))


@dataclass(frozen=True)
class Formula:
    """What an episode has to do: the stages, in this order, and nothing of `avoid`."""

    stages: tuple[Stage, ...]
    avoid: tuple[Condition, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Returns the predicates that it names, each once."""
        conditions = (*(stage.condition for stage in self.stages), *self.avoid)
        return tuple(dict.fromkeys(name for each in conditions for name in each.names()))

    def check_names(self, allowed: tuple[str, ...], *, task: str) -> None:
        """Refuses predicates that the task does not have."""
        for name in self.names():
            if name not in allowed:
                near = nearest(name, allowed)
                known = "" if near.startswith(" Known") else f" Known: {', '.join(sorted(allowed))}."
                raise ConfigError(f"{_AT}: {task} has no predicate {name!r}.{near}{known}")


def parse(text: str) -> Formula:
    """Returns the formula that a text means.

    Raises:
        ConfigError: it means none; the message has the position, counted from 1.
    """
    return _Parser(text).formula()


class _Parser:
    """Reads a text from left to right, by one token of foresight."""

    def __init__(self, text: str) -> None:
        self._text, self._next, self._open = text, 0, 0
        self._tokens = [
            (match.lastgroup or "", match[match.lastgroup or 0], match.start(match.lastgroup or 0) + 1)
            for match in _TOKEN.finditer(text)
        ]

    def formula(self) -> Formula:
        stages, avoided = tuple[Stage, ...](), list[Condition]()
        while True:
            if self._take("avoid"):
                self._need("(")
                avoided.append(self._condition())
                self._need(")")
            elif stages:
                self._refuse("avoid(...): one sequence is enough, join its stages by then")
            else:
                stages = self._sequence()
            if not self._take(";"):
                break
        if self._word:
            self._refuse("the end, ; then, and or or")
        if not stages:
            self._refuse("; and what has to be done, such as solved: avoid alone is never complete")
        return Formula(stages, tuple(avoided))

    def _sequence(self) -> tuple[Stage, ...]:
        stages = [self._stage()]
        while self._take("then"):
            stages.append(self._stage())
        return tuple(stages)

    def _stage(self) -> Stage:
        if not self._take("hold"):
            return Stage(self._condition(f"{_CONDITION}, or hold("))
        self._need("(")
        condition = self._condition()
        self._need(",")
        if self._kind != "number" or float(self._word) == 0.0:
            self._refuse("seconds above 0, such as 0.5")
        seconds = float(self._advance())
        self._need(")")
        return Stage(condition, seconds)

    def _condition(self, allowed: str = _CONDITION) -> Condition:
        found = self._all_of(allowed)
        while self._take("or"):
            found = Either(found, self._all_of())
        return found

    def _all_of(self, allowed: str = _CONDITION) -> Condition:
        found = self._single(allowed)
        while self._take("and"):
            found = Both(found, self._single())
        return found

    def _single(self, allowed: str = _CONDITION) -> Condition:
        self._open += 1
        if self._open > _MOST_OPEN:
            self._refuse(f"at most {_MOST_OPEN} parentheses and not inside of each other")
        if self._take("not"):
            found: Condition = Not(self._single())
        elif self._take("("):
            found = self._condition()
            self._need(")")
        elif self._kind == "name" and self._word not in _WORDS:
            found = Predicate(self._advance())
        else:
            self._refuse(allowed)
        self._open -= 1
        return found

    @property
    def _kind(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    @property
    def _word(self) -> str:
        """The next token, empty at the end."""
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def _advance(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1][1]

    def _take(self, word: str) -> bool:
        """Returns whether the next token is `word`, and goes past it."""
        found = self._word == word
        self._next += found
        return found

    def _need(self, word: str) -> None:
        if not self._take(word):
            self._refuse(word)

    def _refuse(self, allowed: str) -> NoReturn:
        is_end = self._next >= len(self._tokens)
        at = len(self._text) + 1 if is_end else self._tokens[self._next][2]
        got = "the end" if is_end else repr(self._word)
        raise ConfigError(f"{_AT}: {self._text!r}, at character {at}: got {got}, need {allowed}")
