"""Arrays of two kinds: numpy on a CPU and on robot computers, torch tensors where a simulator has them.

Code that serves both takes its functions from `namespace(array)` and keeps to the array API standard,
to `fmax` and `fmin`, and to indexing by ids and masks, which both kinds share. Sums, products and
quotients are then equal bit for bit. Matrix products, `solve`, roots, sines, tangents and logarithms
are not: their kernels round otherwise, in the last bit or two.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""A numpy array or a torch tensor, all of one kind in a call; type checkers see numpy's, whose operators
tensors have."""
Kind = Literal["numpy", "torch"]


def namespace(array: Any) -> Any:
    """Returns the array API functions for an array of its kind; torch is not loaded for numpy's."""
    return np if isinstance(array, np.ndarray) else namespace_of("torch")


def namespace_of(kind: Kind) -> Any:
    """Returns the array API functions of a kind."""
    return np if kind == "numpy" else importlib.import_module("array_api_compat.torch")


def like(values: Any, array: Array) -> Array:
    """Returns values as an array of another's kind, type of number and device."""
    return namespace(array).asarray(values, dtype=array.dtype, device=array.device)


def assign(target: Array, index: Any, values: Any) -> None:
    """Writes values to the elements of `target` that an index names, as numbers of its type.

    Torch refuses to write float64 by arrays of indices into float32.
    """
    target[index] = like(values, target)


def copied(array: Array) -> Array:
    """Returns a copy that belongs to the caller."""
    return namespace(array).asarray(array, copy=True)


def norm(vectors: Array) -> Array:
    """Returns the lengths (...) of short vectors (..., n): a sum over the last axis takes twice the time."""
    squares = vectors * vectors
    total = squares[..., 0]
    for i in range(1, squares.shape[-1]):
        total = total + squares[..., i]
    return namespace(vectors).sqrt(total)


def solve(matrices: Array, values: Array) -> Array:
    """Returns x (..., n, m) of matrices (..., n, n) x = values (..., n, m).

    Nothing is read back from a tensor's device: where a matrix is singular, the result is not finite.

    Raises:
        numpy.linalg.LinAlgError: a matrix is singular, of numpy.
    """
    xp = namespace(matrices)
    return np.linalg.solve(matrices, values) if xp is np else xp.linalg.solve_ex(matrices, values).result


def to_numpy(array: Any) -> NDArray[Any]:
    """Returns a numpy array on the host: the array itself, or the memory that a tensor of a CPU has."""
    return array if isinstance(array, np.ndarray) else array.numpy(force=True)


def is_array(value: object) -> bool:
    """Returns whether a value is an array of either kind."""
    return hasattr(value, "__dlpack__")


def multiplies_bfloat16() -> bool:
    """Returns whether the processor multiplies bfloat16 in hardware; emulation is slower than float32."""
    torch: Any = importlib.import_module("torch")
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))
