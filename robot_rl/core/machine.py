"""What this process may use of the machine."""

import os

from robot_rl.core.errors import ConfigError


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_device(device: str, *, at: str = "device") -> None:
    """Refuses a device that torch does not know or this machine does not have.

    Raises:
        ConfigError: `at` is the setting that names it.
    """
    if device == "cpu":
        return
    import torch  # seconds: only where there is something to ask it

    allowed = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    try:
        kind = torch.device(device)
        found = kind.type if kind.type == "cpu" else f"{kind.type}:{kind.index or 0}"
    except RuntimeError:
        found = None
    if found not in allowed:
        raise ConfigError(
            f"{at}: got {device!r}, allowed on this machine: {', '.join(allowed)}. Use {at}=cpu."
        )
