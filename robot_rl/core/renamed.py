"""Tensors that were saved when parts of a module had other names."""

from typing import Any


def use_present_names(module: Any, state: dict[str, Any], prefix: str = "") -> None:
    """Renames tensors in place, where their names begin with an earlier name of a part of the module.

    A name that is taken already stays, so that loading refuses it.

    Args:
        module: a torch.nn.Module; its class, or that of a module inside, may list `earlier_names`: what
            parts were called, and what they are called now.
        state: tensors by name.
        prefix: what all names of the module begin with.
    """
    for path, inner in module.named_modules():
        at = f"{prefix}{path}." if path else prefix
        for old, new in getattr(inner, "earlier_names", {}).items():
            for name in [name for name in state if name.startswith(f"{at}{old}.")]:
                present = f"{at}{new}{name.removeprefix(at + old)}"
                if present not in state:
                    state[present] = state.pop(name)
