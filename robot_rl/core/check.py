"""One line of a report: what was checked, the result, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: State
    detail: str
    remedy: str = ""
