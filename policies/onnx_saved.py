"""A chunk policy as a graph of ONNX and a short file that says what its inputs are; without torch.

    policy.onnx        any graph from an observation to a chunk (B or 1, H, A)
    onnx_policy.json   {"graph": "policy.onnx", "inputs": {"obs": "state", "image": "front.rgb", "eps": "z"}}

`inputs` maps each input of the graph to an observation, or to `z`, the noise (B, H, A) that a chunk is
decoded from; an input that is named like its observation may be left out. `mean` and `std` (S,) scale the
state for what learns next to the policy; without them it is left as it is.
Pictures of type float are given as (B, 3, height, width) in [0, 1], of type uint8 as (B, height, width, 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.files import at_home, read_json
from robot_rl.core.names import ENVIRONMENT

HEAD = "onnx_policy.json"
NOISE = "z"
"""What `inputs` calls the noise."""
_KNOWN = {"graph", "inputs", "mean", "std"}
_REMEDY = 'It says at least {"graph": "<file>.onnx"}.'


@dataclass(frozen=True, kw_only=True)
class OnnxHead:
    """What the file next to a graph says."""

    graph: Path
    inputs: Mapping[str, str]
    """Input of the graph -> observation, or `z`."""
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Sizes of a graph's inputs and of its chunk."""

    inputs: Mapping[str, str]
    """Every input of the graph -> observation, or `z`."""
    shapes: Mapping[str, tuple[int, ...]]
    """Observation -> shape of one row."""
    floats: tuple[str, ...]
    """Pictures that are given as float."""
    one_row: bool
    """Whether the graph takes one row at a time."""
    horizon: int
    action_dim: int


def onnx_folder(given: str | Path) -> Path | None:
    """Returns the folder if it holds such a policy, or None."""
    path = Path(at_home(str(given)))
    return path if (path / HEAD).is_file() else None


def read_onnx_head(folder: Path) -> OnnxHead:
    """Reads the file next to a graph.

    Raises:
        CheckpointError: it is damaged, or names no graph.
    """
    table = read_json(folder / HEAD, CheckpointError, _REMEDY)
    unknown = sorted(set(table) - _KNOWN)
    graph = folder / str(table.get("graph", ""))
    if unknown or not graph.is_file():
        what = f"no option {unknown[0]!r}" if unknown else f"no graph {graph.name!r} in the folder"
        raise CheckpointError(f"{folder / HEAD}: {what}; known are {', '.join(sorted(_KNOWN))}. {_REMEDY}")
    scale = [None if table.get(name) is None else tuple(map(float, table[name])) for name in ("mean", "std")]
    return OnnxHead(graph=graph, inputs=dict(table.get("inputs", {})), mean=scale[0], std=scale[1])


def read_onnx_folder(folder: Path) -> tuple[OnnxHead, Signature]:
    """Reads what a folder says, and opens its graph; raises what the functions below do."""
    head = read_onnx_head(folder)
    session = open_graph(head.graph.read_bytes(), at=str(head.graph))
    signature = signature_of(session, head.inputs, at=str(folder / HEAD))
    size = signature.shapes["state"][0]
    for name, values in (("mean", head.mean), ("std", head.std)):
        if values is not None and len(values) != size:
            raise CheckpointError(f"{folder / HEAD}: {name} has {len(values)} elements, the state {size}.")
    return head, signature


def open_graph(content: bytes, *, at: str, setting: str = "bc.policy") -> Any:
    """Returns an ONNX Runtime session of one thread; `setting` is the one that gave the graph.

    Raises:
        ConfigError: onnxruntime is not installed.
        CheckpointError: the graph is damaged.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f"{setting}: a graph of ONNX needs onnxruntime: `pip install -e '.[export]'`."
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = 1, 1
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes, derived from Exception alone
        why = str(error).splitlines()[0].rstrip(".")
        raise CheckpointError(f"{at}: ONNX Runtime cannot read it: {why}. Export it again.") from error


def signature_of(session: Any, inputs: Mapping[str, str], *, at: str) -> Signature:
    """Returns the sizes of a graph.

    Raises:
        CheckpointError: an input of unknown meaning or size, or an output that is no chunk.
    """
    entries = {entry.name: entry for entry in session.get_inputs()}
    named = {name: inputs.get(name, name) for name in entries}
    for name in inputs:
        if name not in entries:
            raise CheckpointError(f"{at}: inputs: the graph has no {name!r}; it has {', '.join(entries)}.")
    shapes: dict[str, tuple[int, ...]] = {}
    floats: list[str] = []
    for name, key in named.items():
        shape = entries[name].shape[1:]
        is_picture = key.endswith(".rgb")
        if key not in ("state", ENVIRONMENT, NOISE) and not is_picture:
            raise CheckpointError(
                f"{at}: input {name!r} is no observation. Say what it is, as in inputs={{{name}: state}}; "
                f"allowed are state, {ENVIRONMENT}, <camera>.rgb and {NOISE}."
            )
        if not all(isinstance(size, int) for size in shape):
            raise CheckpointError(f"{at}: input {name!r} has sizes {shape}, allowed: numbers. Export it so.")
        if is_picture and "float" in entries[name].type:
            floats.append(key)
            shape = [*shape[1:], shape[0]]
        shapes[key] = tuple(shape)
    (chunk, *more) = session.get_outputs()
    if more or len(chunk.shape) != 3 or not all(isinstance(size, int) for size in chunk.shape[1:]):
        raise CheckpointError(
            f"{at}: the graph returns {[out.shape for out in session.get_outputs()]}, allowed: one chunk "
            "(B, H, A)."
        )
    if "state" not in shapes:
        raise CheckpointError(
            f"{at}: no input of the graph is the state. Say which: inputs={{<input>: state}}."
        )
    one_row = any(entry.shape[0] == 1 for entry in entries.values())
    return Signature(
        inputs=named,
        shapes=shapes,
        floats=tuple(floats),
        one_row=one_row,
        horizon=chunk.shape[1],
        action_dim=chunk.shape[2],
    )
