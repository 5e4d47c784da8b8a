"""Counts what a machine with a GPU would wait for: values of tensors that code on the host reads.

Without a GPU nothing waits, but the same calls are made. Copies to numpy share memory on a CPU; they count
as the copies that they are elsewhere. So does `to` where the call itself writes `cpu`, as `to("cpu")` and
`to(torch.device("cpu"))` do, with `copy` and `non_blocking` or without: on a CPU the device and the host have
one name, and `to(device)` leads to the device. A module's `to` counts once for each of its tensors.

From another device, every `to` and `copy_` into memory of the host counts. Without one these are not seen:
`to(device)` and `to(other)` where that is the host by value alone, and `copy_` into a tensor of the host.
Nowhere seen are reads by others' compiled code, and waiting itself, as for a stream.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from inspect import getframeinfo
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_VALUES = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "_unique2",
    "_linalg_check_errors",
)
"""Operators whose result, or its size, is a value that the host waits for."""
_PROJECT = Path(__file__).parents[1]
_PASSED = (Path(__file__), _PROJECT / "robot_rl" / "core" / "arrays.py")
_TO_HOST = ("numpy", "cpu", "tolist", "__array__", "to")


class _Values(TorchDispatchMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _VALUES or _counts_a_mask(name, args) or _leaves_its_device(name, args, kwargs or {}):
            self._reads.append(f"{name} at {_caller()}")
        return func(*args, **(kwargs or {}))


@contextmanager
def reads_back() -> Generator[list[str]]:
    """Collects the reads of the block, each with the place in the project that makes it."""
    found = list[str]()

    def counted(name: str) -> Any:
        own = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any, **how: Any) -> Any:
            if name == "to" and not _names_the_host(args, how):
                return own(tensor, *args, **how)
            found.append(f"{name} at {_caller()}")
            with _disable_current_modes():
                return own(tensor, *args, **how)

        return call

    patches = [patch.object(Tensor, name, counted(name)) for name in _TO_HOST]
    for each in patches:
        each.start()
    try:
        with _Values(found):
            yield found
    finally:
        for each in patches:
            each.stop()


def outside_of_simulation(reads: Sequence[str]) -> list[str]:
    """Returns the reads that neither the simulator nor its safety envelope makes."""
    return [read for read in reads if not any(part in read for part in ("robot_rl/sim/", "hal/safety.py"))]


def _counts_a_mask(name: str, args: Sequence[Any]) -> bool:
    """Whether an index is a mask whose rows are counted; a single value is written without counting them."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    is_mask = any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
    return is_mask and (name == "index" or args[2].numel() != 1)


def _leaves_its_device(name: str, args: Sequence[Any], how: Mapping[str, Any]) -> bool:
    """Whether an operator copies from another device into memory of the host."""
    if name not in ("_to_copy", "copy_"):
        return False
    source, target = (args[0], how.get("device")) if name == "_to_copy" else (args[1], args[0].device)
    return target is not None and source.device.type != "cpu" and torch.device(target).type == "cpu"


def _names_the_host(args: Sequence[Any], how: Mapping[str, Any]) -> bool:
    """Whether a call of `to`, which leads to the host, writes so."""
    target = how.get("device", args[0] if args else None)
    if not isinstance(target, str | torch.device) or torch.device(target).type != "cpu":
        return False
    frame = _frame()
    return frame is not None and "cpu" in _call_in(frame)


def _call_in(frame: FrameType) -> str:
    """Returns the source of the call that a frame is in."""
    at = getframeinfo(frame, context=0).positions
    assert at is not None
    assert None not in at
    first, last, begin, end = (number or 0 for number in at)
    lines = linecache.getlines(frame.f_code.co_filename)[first - 1 : last]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return "".join(lines)


def _caller() -> str:
    frame = _frame()
    if frame is None:
        return "elsewhere"
    place = Path(frame.f_code.co_filename).relative_to(_PROJECT)
    return f"{place}:{frame.f_lineno} {frame.f_code.co_name}"


def _frame() -> FrameType | None:
    """Returns the innermost place in the project that is neither this file nor `core.arrays`."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_ours = path.is_relative_to(_PROJECT) and "site-packages" not in path.parts
        if is_ours and path not in _PASSED:
            return frame
        frame = frame.f_back
    return None
