"""Environments of others, one after the other, in any Python that has Gymnasium and numpy.

`Envs` makes them and writes their observations into arrays. As a program, in another Python, it serves them
to `process.Workers`: so this file imports nothing of robot_rl, and runs on Python 3.9 and Gymnasium 0.29.
B environments, A action dim, D elements of the state.
"""

from __future__ import annotations

import copy
import importlib
import json
import mmap
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # in the place of this folder, whose `gym.py` would hide the package

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, flatdim, flatten
from gymnasium.wrappers import TimeLimit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]
    Layout = dict[str, tuple[tuple[int, ...], str]]

STEP, RESET, ADVISE = b"s", b"r", b"a"
PICTURE = "image"
"""Name of the camera where the whole observation is one picture."""
_EXPERTS = (
    "Allowed: module:function, or module:class with get_action or __call__; either takes the environment's "
    "own observation and returns its action. Modules are those of the environment's Python, or in the "
    "working folder."
)


class EnvError(Exception):
    """What is wrong with an environment."""

    def __init__(self, kind: str, message: str) -> None:
        """Args: kind: `config`: another setting would do; `env`: the environment; `render`: drawing."""
        super().__init__(kind, message)
        self.kind, self.message = kind, message


class Envs:
    """Environments of one kind, and arrays with a row for each."""

    may_lose = False
    first = 0
    """Number of the first one among those of all workers, for messages."""

    def __init__(self, env_id: str, num: int, settings: Mapping[str, Any], expert: str | None = None) -> None:
        """Makes them.

        Args:
            env_id: as `gymnasium.make` takes it, `package:Name-v0` too; or `module:function`, a function that
                returns one.
            num: B.
            settings: keyword arguments of either, `max_episode_steps` among them.
            expert: who demonstrates; see `_maker_of`.

        Raises:
            EnvError: it cannot be made, or no policy can serve its spaces.
        """
        settings = dict(settings)
        self._name = env_id
        self._make_expert = None if expert is None else _maker_of(expert)
        self._experts: list[Callable[[Any], Any] | None] = [None] * num
        self._seen: list[Any] = [None] * num
        self._envs = [_make_first(env_id, settings), *(_make(env_id, settings) for _ in range(num - 1))]
        first = self._envs[0]
        if first.render_mode == "rgb_array":
            for env in self._envs:
                _draw_without_shadows(env)
        paths = dict(_parts(first.observation_space))
        self._parts = {"/".join(path) or PICTURE: (path, part) for path, part in paths.items()}
        self._cameras = _camera_names([path for path, part in paths.items() if is_picture(part)])
        action = self._checked_action(first.action_space)
        self._low, self._high, self._action_shape = action.low, action.high, action.shape
        self.spec = self._described(first, settings.get("max_episode_steps"))
        own = layout(self.spec, num)
        self.arrays: Arrays = placed(own, bytearray(size_of(own)))
        """What it reads and writes, as `layout` names it; a row for each environment."""

    def _checked_action(self, space: Any) -> Box:
        if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
            raise EnvError("config", f"{self._name}: actions are {space}, allowed: a Box of real numbers.")
        if not space.is_bounded():
            raise EnvError(
                "config",
                f"{self._name}: actions have no bounds: {space}. Ours lie in [-1, 1]: register it within "
                "gymnasium.wrappers.RescaleAction, or with bounds.",
            )
        return space

    def _described(self, first: Any, steps: int | None) -> dict[str, Any]:
        """Returns what the host has to know, as JSON could hold it."""
        steps = steps or getattr(first.spec, "max_episode_steps", None)
        if steps is None:
            raise EnvError(
                "config", f"{self._name}: nothing ends its episodes. Give max_episode_steps in settings."
            )
        try:
            sizes = {
                name: flatdim(part) for name, (_, part) in self._parts.items() if name not in self._cameras
            }
        except (ValueError, NotImplementedError) as error:
            shown = first.observation_space
            raise EnvError("config", f"{self._name}: observations are {shown}: {error}") from error
        stem = "{name}_{i}" if isinstance(first.observation_space, Dict) else "state_{i}"
        dt, about = getattr(first.unwrapped, "dt", None), first.metadata or {}  # robosuite's is None
        return {
            "horizon": int(steps),
            "control_hz": float(1.0 / dt if dt else about.get("render_fps") or 1.0),
            "render_mode": first.render_mode,
            "render_modes": list(about.get("render_modes") or ()),
            "render_fps": about.get("render_fps"),
            "actions": flatdim(first.action_space),
            "state_names": [stem.format(name=n, i=i) for n, size in sizes.items() for i in range(size)],
            "pictures": {of: list(self._parts[name][1].shape) for name, of in self._cameras.items()},
            "repeats": self._repeats(first),
        }

    def _repeats(self, env: Any) -> bool:
        """Returns whether its seed decides how an episode begins, whatever was played before.

        An environment that takes long to begin can say so itself: `repeats` in its metadata.
        """
        if (says := (env.metadata or {}).get("repeats")) is not None:
            return bool(says)
        seen, _, again = (copy.deepcopy(env.reset(seed=seed)[0]) for seed in (1, 2, 1))
        paths = [path for path, _ in self._parts.values()]
        return all(np.array_equal(_at(seen, path), _at(again, path)) for path in paths)

    def reset(self, rows: Iterable[int]) -> Sequence[int]:
        """Begins episodes with the seeds in `seed`, and writes their first observations.

        Returns:
            The rows whose episodes were lost: none here.

        Raises:
            EnvError: an observation is not finite.
        """
        for i in rows:
            self._experts[i] = self._make_expert() if self._make_expert else None
            self._write(i, self._envs[i].reset(seed=int(self.arrays["seed"][i]))[0])
        return ()

    def step(self, rows: Iterable[int]) -> Sequence[int]:
        """Takes a control step with the actions in `action`; writes observation, reward, ends, success.

        `success` is -1 where the environment says nothing.

        Returns:
            The rows whose episodes were lost: none here.

        Raises:
            EnvError: an observation or a reward is not finite.
        """
        to = self.arrays
        for i in rows:
            share = (to["action"][i].reshape(self._action_shape).astype(np.float64) + 1.0) / 2.0
            scaled = self._low + share * (self._high - self._low)  # which may round beyond an end
            scaled = np.clip(scaled.astype(self._low.dtype), self._low, self._high)
            seen, reward, terminated, truncated, info = self._envs[i].step(scaled)
            success = info.get("is_success", info.get("success"))
            to["reward"][i], to["terminated"][i] = reward, terminated
            to["truncated"][i] = truncated and not terminated
            to["success"][i] = -1 if success is None else bool(success)
            self._write(i, seen)
            if not np.isfinite(to["reward"][i]):
                raise EnvError(
                    "env",
                    f"{self._name}: env {self.first + i}: the reward is {reward}. Look at the environment.",
                )
        return ()

    def advise(self, rows: Iterable[int]) -> Sequence[int]:
        """Writes what the expert would do now into `action`, within the bounds.

        Returns:
            The rows whose episodes were lost: none here.

        Raises:
            EnvError: that is no action.
        """
        span = np.where(self._high > self._low, self._high - self._low, 1.0)
        for i in rows:
            expert = self._experts[i]
            assert expert is not None, "there is no expert"
            action = np.asarray(expert(self._seen[i]), np.float64)
            if action.shape != self._action_shape or not np.isfinite(action).all():
                raise EnvError(
                    "env",
                    f"{self._name}: env {self.first + i}: the expert's action is {action}, allowed: "
                    f"{self._action_shape} finite numbers. Look at env.expert.",
                )
            shares = np.clip((action - self._low) / span, 0.0, 1.0)
            self.arrays["action"][i] = (2.0 * shares - 1.0).ravel()
        return ()

    def _write(self, i: int, seen: Any) -> None:
        """Writes what an environment showed into row i."""
        self._seen[i] = seen
        state, at = self.arrays["state"][i], 0
        for name, (path, part) in self._parts.items():
            value = _at(seen, path)
            if name in self._cameras:
                self.arrays[f"{self._cameras[name]}.rgb"][i] = value
            else:
                flat = np.asarray(flatten(part, value))
                state[at : at + len(flat)] = flat
                at += len(flat)
        if not np.isfinite(state).all():
            name = self.spec["state_names"][int(np.flatnonzero(~np.isfinite(state))[0])]
            raise EnvError(
                "env", f"{self._name}: env {self.first + i}: {name} is not finite. Look at the environment."
            )

    def picture(self, i: int) -> NDArray[Any]:
        """Returns an RGB image (height, width, 3), of the size that the environment gives it.

        Raises:
            EnvError: it cannot draw, or what it draws is no such image.
        """
        try:
            image = np.asarray(self._envs[i].render())
        except Exception as error:  # whatever the environment draws with
            raise EnvError(
                "render", f"{self._name}: it cannot draw here: {str(error) or repr(error)}."
            ) from error
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise EnvError(
                "render",
                f"{self._name}: a picture is {image.dtype} {image.shape}, need uint8 (height, width, 3).",
            )
        return image

    def close(self) -> None:
        for env in self._envs:
            env.close()


def layout(spec: Mapping[str, Any], num: int) -> Layout:
    """Returns shape and dtype of each array of `num` environments; the first are observations."""
    shown: dict[str, tuple[Sequence[int], str]] = {"state": ([len(spec["state_names"])], "f4")}
    shown |= {f"{name}.rgb": (shape, "u1") for name, shape in spec["pictures"].items()}
    rest: dict[str, tuple[Sequence[int], str]] = {
        "action": ([spec["actions"]], "f4"),
        "seed": ([], "u8"),
        "reward": ([], "f8"),
        **{name: ([], "?") for name in ("terminated", "truncated", "asked")},
        "success": ([], "i1"),
    }
    return {name: ((num, *shape), dtype) for name, (shape, dtype) in {**shown, **rest}.items()}


def size_of(arrays: Layout) -> int:
    """Returns the bytes of these arrays, each aligned to 64."""
    return sum(_bytes(shape, dtype) for shape, dtype in arrays.values())


def placed(arrays: Layout, buffer: Any) -> Arrays:
    """Returns the arrays, one after the other in `buffer`."""
    views, at = {}, 0
    for name, (shape, dtype) in arrays.items():
        views[name] = np.ndarray(shape, dtype, buffer=buffer, offset=at)
        at += _bytes(shape, dtype)
    return views


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64


def _at(seen: Any, path: tuple[str, ...]) -> Any:
    """Returns the part of an observation to which the keys lead."""
    for key in path:
        seen = seen[key]
    return seen


def _camera_names(paths: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """Returns a name for each picture: its last key, or all keys where two pictures have that in common."""
    last = [path[-1:] for path in paths]
    return {
        "/".join(path) or PICTURE: "_".join(path[-1:] if last.count(path[-1:]) == 1 else path) or PICTURE
        for path in paths
    }


def is_picture(space: Any) -> bool:
    """Returns whether a space is one of RGB images (height, width, 3)."""
    return isinstance(space, Box) and space.dtype == np.uint8 and space.shape[2:] == (3,)


def _parts(space: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the keys that lead to each part of a space, and the part."""
    if not isinstance(space, Dict):
        yield path, space
        return
    for key, part in space.spaces.items():
        yield from _parts(part, (*path, key))


def _make_first(env_id: str, settings: dict[str, Any]) -> Any:
    """Returns an environment; takes `render_mode` out of the settings if it is to draw and cannot."""
    if settings.get("render_mode") != "rgb_array":
        return _make(env_id, settings)
    mode = settings.pop("render_mode")
    env = _make(env_id, settings)
    if mode not in ((env.metadata or {}).get("render_modes") or ()):
        return env
    env.close()
    settings["render_mode"] = mode
    return _make(env_id, settings)


def _make(env_id: str, settings: Mapping[str, Any]) -> Any:
    module, _, name = env_id.partition(":")
    try:
        function = getattr(importlib.import_module(module), name, None) if name else None
        if not callable(function):
            return gymnasium.make(env_id, **settings)
        rest = dict(settings)
        steps = rest.pop("max_episode_steps", None)
        env: Any = function(**rest)
        return env if steps is None else TimeLimit(env, steps)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise _not_made(env_id, error) from error


def _maker_of(expert: str) -> Callable[[], Callable[[Any], Any]]:
    """Returns what makes the expert of an episode: a function of the environment's own observation.

    Args:
        expert: `module:function`, that function; or `module:class`, an object of which is made for each
            episode without arguments, and acts by `get_action(observation)`, or as a function itself.

    Raises:
        EnvError: there is none.
    """
    module, _, name = expert.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise EnvError("config", f"env.expert: {expert!r}: {error}. {_EXPERTS}") from error
    if isinstance(found, type):
        acts = next((name for name in ("get_action", "__call__") if hasattr(found, name)), None)
        if acts is not None:
            return lambda: getattr(found(), acts)
    elif callable(found):
        return lambda: found
    raise EnvError("config", f"env.expert: got {expert!r}, which is {found!r}. {_EXPERTS}")


def check_id(env_id: str) -> None:
    """Raises `EnvError` for an environment that nobody registered; `package:Name-v0` is found when made."""
    if ":" not in env_id:
        try:
            gymnasium.spec(env_id)
        except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
            raise _not_made(env_id, error) from error
        except gymnasium.error.Error:  # a name without its version, which `make` adds
            pass


def _not_made(env_id: str, error: Exception) -> EnvError:
    return EnvError(
        "config",
        f"env {env_id!r}: {str(error).rstrip('.')}. Write package:Name-v0 where a package registers it on "
        "import, and install what is missing (`uv pip install 'gymnasium[mujoco]'` for MuJoCo's).",
    )


def _draw_without_shadows(env: Any) -> None:
    """Turns off shadows and smoothing of MuJoCo: most of the time of a picture without a GPU."""
    look = getattr(getattr(env.unwrapped, "model", None), "vis", None)
    if look is not None:
        look.quality.shadowsize = look.quality.offsamples = 0


def serve(host: Connection, memory: int) -> None:
    """Makes the environments that the host asks for, and does what it says until it leaves.

    Args: memory: file descriptor of the arrays of all workers.
    """
    env_id, count, settings, expert = json.loads(host.recv_bytes())
    envs = Envs(env_id, count, settings, expert)
    host.send_bytes(json.dumps({"spec": envs.spec}).encode())
    num, first = json.loads(host.recv_bytes())
    buffer = mmap.mmap(memory, 0)
    rows = slice(first, first + count)
    arrays = {name: array[rows] for name, array in placed(layout(envs.spec, num), buffer).items()}
    envs.arrays, envs.first = arrays, first
    host.send_bytes(b"")
    while True:
        request = host.recv_bytes()
        does = {STEP: envs.step, RESET: envs.reset, ADVISE: envs.advise}.get(request)
        if does is not None:
            does(np.flatnonzero(arrays["asked"]).tolist())
        else:
            try:
                picture = envs.picture(int(request))
            except EnvError as error:  # there is no picture; the episodes go on
                host.send_bytes(_refused(error))
                continue
            host.send_bytes(json.dumps({"shape": picture.shape}).encode())
            host.send_bytes(picture.tobytes())
            continue
        host.send_bytes(b"")


def _refused(error: EnvError) -> bytes:
    return json.dumps({"error": error.args}).encode()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's
    host = Connection(int(sys.argv[1]))
    try:
        serve(host, int(sys.argv[2]))
    except EOFError:
        pass  # the host has left
    except EnvError as error:
        host.send_bytes(_refused(error))
    except Exception as error:
        traceback.print_exc()
        host.send_bytes(_refused(EnvError("env", f"it raised {type(error).__name__}: {error}")))


if __name__ == "__main__":
    _main()
