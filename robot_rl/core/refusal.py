"""What the disk or the memory refuses, as an error that says where it was and what to do."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

from robot_rl.core.errors import RobotRLError

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=RobotRLError)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk."""


@contextlib.contextmanager
def refusals(kind: type[RobotRLError], at: object, kept: str = "", *, sure: bool = False) -> Generator[None]:
    """Turns what the disk or the memory refuses into an error that says where, what, and what to do.

    Args:
        kind: of the error.
        at: where, such as a folder.
        kept: a sentence about the older content that is still whole.
        sure: only errors that are certainly refusals, for a block that does more than read and write.
    """
    try:
        yield
    except (OSError, MemoryError) as error:
        if sure and not is_refusal(error):
            raise
        raise refusal(error, kind, at, kept) from error


def is_refusal(error: BaseException) -> bool:
    """Returns whether the disk or the memory refused something, as opposed to a mistake of a program."""
    if isinstance(error, OSError):
        return error.errno in (*NO_SPACE, errno.ENOMEM, errno.EIO, errno.EROFS)
    return isinstance(error, MemoryError)


def refusing(
    kind: type[RobotRLError], kept: str = "", *, also: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function raise by `refusals`; its first argument is a folder, or has one as `folder`.

    Args:
        kind: of the error.
        kept: as of `refusals`.
        also: errors by which a library says that the disk or the memory refused.
    """

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except (OSError, MemoryError, *also) as error:
                first: Any = args[0] if args else next(iter(kwargs.values()), "")
                raise refusal(error, kind, getattr(first, "folder", first), kept) from error

        return call

    return wrap


def refusal(error: Exception, kind: type[E], at: object, kept: str = "") -> E:
    """Returns what `refusals` raises."""
    what, remedy = _explained(error)
    return kind(" ".join(part for part in (f"{at}: {what}.", kept, remedy) if part))


def _explained(error: Exception) -> tuple[str, str]:
    """Returns what went wrong, and what to do about it."""
    text = str(error) or type(error).__name__
    if not isinstance(error, OSError | MemoryError):
        return f"a library gave up ({text})", "See whether there is enough memory and disk, then do it again."
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM
    match number:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return f"the disk is full ({text})", "Make room, then do it again."
        case errno.ENOMEM:
            return f"there is not enough memory ({text})", "End other programs, then do it again."
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"the right to read or write is missing ({text})", "Give it, or choose another folder."
        case errno.ENOENT:
            return f"a file or folder is not there ({text})", "Choose another, or see who else uses this one."
        case errno.EEXIST | errno.ENOTDIR | errno.EISDIR | errno.ENOTEMPTY:
            return f"another file than expected is there ({text})", "See who else uses the folder."
        case _:
            remedy = "See what the system says of the disk (`dmesg`), then do it again."
            return f"the disk refuses ({text})", remedy
