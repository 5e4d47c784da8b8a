"""Finds a way to draw without a display, and opens one OpenGL context of it.

MuJoCo chooses its OpenGL loader by the environment variable MUJOCO_GL, in C when the first
drawing context is made and in Python when `mujoco` is imported; every module here imports mujoco,
so the choice is made here instead, before the first context.
"""

import ctypes
import ctypes.util
import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Protocol

from robot_rl.core.errors import ConfigError, RenderError

BACKENDS = ("egl", "osmesa")
"""In the order they are tried: EGL also finds a GPU, and Mesa dropped OSMesa in version 25.1."""

_ON, _OFF = ("enable", "enabled", "on", "true", "1"), ("disable", "disabled", "off", "false", "0")
_OF_SYSTEM = {"linux": (*BACKENDS, "glx"), "darwin": ("cgl",), "win32": ("wgl",)}
KNOWN = (*_OF_SYSTEM.get(sys.platform, ()), "", "glfw", *_ON, *_OFF)
"""What MUJOCO_GL may be; with another word `import mujoco` fails."""

OSMESA_WHEEL = "lavavu_osmesa"
"""A wheel that carries OSMesa and LLVM (84 MB): drawing where nobody may install system packages."""

_PROBE = "import sys; from robot_rl.sim import gl; gl.probe(sys.argv[1])"
_PROBE_TIMEOUT_S = 60
_GL_RGBA, _GL_UNSIGNED_BYTE = 0x1908, 0x1401  # from the OpenGL registry


class GlContext(Protocol):
    """An OpenGL context of one thread."""

    def make_current(self) -> None: ...

    def release(self) -> None:
        """Leaves the context to other threads."""
        ...

    def free(self) -> None: ...


def find_backend() -> str:
    """Returns `egl` or `osmesa`, whichever draws first; MUJOCO_GL, if set to one, narrows the search.

    Each is tried in a process of its own, because a failed load of OpenGL leaves its libraries
    half loaded. The search takes about a second, once in a process.

    Raises:
        ConfigError: MUJOCO_GL is no word that MuJoCo knows.
        RenderError: neither draws; the message says why and what to install.
    """
    check_environment()
    backend, reasons = _search()
    if backend is None:
        raise RenderError(no_renderer_message(reasons))
    return backend


def check_environment() -> None:
    """Raises `ConfigError` if MUJOCO_GL keeps MuJoCo from being imported."""
    if os.environ.get("MUJOCO_GL", "").strip().lower() not in KNOWN:
        raise mistaken_environment()


def mistaken_environment() -> ConfigError:
    """Returns the error for an unknown value of MUJOCO_GL."""
    given = os.environ.get("MUJOCO_GL")
    return ConfigError(
        f"MUJOCO_GL: the environment variable is {given!r}, allowed: egl, osmesa, or not set: "
        "`unset MUJOCO_GL`."
    )


def open_context() -> GlContext:
    """Opens a context of the back end that `find_backend` returns."""
    return _open(find_backend())


def probe(backend: str) -> None:
    """Draws one pixel or raises; runs in a process of its own."""
    import mujoco

    context = _open(backend)
    context.make_current()
    drawing = mujoco.MjrContext(mujoco.MjSpec().compile(), mujoco.mjtFontScale.mjFONTSCALE_50.value)
    drawing.free()
    context.free()


def no_renderer_message(reasons: dict[str, str]) -> str:
    """Returns what was tried, why it failed, and what to install."""
    tried = "; ".join(f"{backend} ({reason})" for backend, reason in reasons.items())
    return (
        f"cameras: nothing here can draw without a display. Tried {tried}. Install one of: EGL by the Debian "
        "packages libegl1 and libgl1-mesa-dri; OSMesa by libosmesa6; without root, OSMesa by "
        f"`pip install --no-deps {OSMESA_WHEEL.replace('_', '-')}`. Training from states needs none of them, "
        "it only makes no videos."
    )


@cache
def _search() -> tuple[str | None, dict[str, str]]:
    """Returns the first back end that draws, and why those before it do not."""
    wanted = os.environ.get("MUJOCO_GL", "").strip().lower()
    reasons: dict[str, str] = {}
    for backend in (wanted,) if wanted in BACKENDS else BACKENDS:
        reason = _why_not(backend)
        if reason is None:
            return backend, reasons
        reasons[backend] = reason
    return None, reasons


def _why_not(backend: str) -> str | None:
    """Returns why a back end does not draw; None if it draws."""
    command = [sys.executable, "-c", _PROBE, backend]
    # "disable" keeps `import mujoco` from loading a library of its choice; `_open` loads the one to try.
    env = {**os.environ, "MUJOCO_GL": "disable"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    last_line = done.stderr.strip().rpartition("\n")[2]
    return last_line.partition(": ")[2] or last_line or f"ended with code {done.returncode}"


def _open(backend: str) -> GlContext:
    os.environ["MUJOCO_GL"] = backend
    # Mesa's threads share one picture: of 64 x 64 it takes half the time without them, of 640 x 480 with
    # shadows 1.7 times as long. `Renderers` draw several pictures at once instead.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    if backend == "osmesa":
        return OsmesaContext()
    os.environ.setdefault("PYOPENGL_PLATFORM", "egl")
    return EglContext()


class EglContext:
    """MuJoCo's own EGL context, which a thread can give up."""

    def __init__(self) -> None:
        from mujoco import egl

        self._egl = egl
        self._context = egl.GLContext(1, 1)  # the size means nothing: MuJoCo has its own framebuffer

    def make_current(self) -> None:
        self._context.make_current()

    def release(self) -> None:
        egl, none = self._egl.EGL, self._egl.EGL.EGL_NO_SURFACE
        egl.eglMakeCurrent(self._egl.EGL_DISPLAY, none, none, egl.EGL_NO_CONTEXT)

    def free(self) -> None:
        self._context.free()


class OsmesaContext:
    """Software OpenGL of the system's libOSMesa, or else of the wheel's.

    MuJoCo's own OSMesa context goes through PyOpenGL, which finds the system's library only.
    """

    def __init__(self) -> None:
        self._library = _load_osmesa()
        self._context = self._library.OSMesaCreateContextExt(_GL_RGBA, 24, 8, 0, None)
        if not self._context:
            raise RenderError("cameras: OSMesa made no context")
        self._pixel = (ctypes.c_ubyte * 4)()

    def make_current(self) -> None:
        if not self._library.OSMesaMakeCurrent(self._context, self._pixel, _GL_UNSIGNED_BYTE, 1, 1):
            raise RenderError("cameras: OSMesa's context cannot be used by this thread")

    def release(self) -> None:
        self._library.OSMesaMakeCurrent(None, None, 0, 0, 0)

    def free(self) -> None:
        if self._context:
            self._library.OSMesaDestroyContext(self._context)
        self._context = None


@cache
def _load_osmesa() -> ctypes.CDLL:
    """Loads libOSMesa with global symbols, where MuJoCo looks for them."""
    name = ctypes.util.find_library("OSMesa")
    library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL) if name is not None else _load_wheel()
    library.OSMesaCreateContextExt.restype = ctypes.c_void_p
    library.OSMesaCreateContextExt.argtypes = [ctypes.c_uint, *[ctypes.c_int] * 3, ctypes.c_void_p]
    library.OSMesaMakeCurrent.restype = ctypes.c_ubyte
    library.OSMesaMakeCurrent.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
        *[ctypes.c_int] * 2,
    ]
    library.OSMesaDestroyContext.restype = None
    library.OSMesaDestroyContext.argtypes = [ctypes.c_void_p]
    return library


def _load_wheel() -> ctypes.CDLL:
    """Loads the OSMesa of the wheel after the libraries it needs, in an order that works."""
    found = importlib.util.find_spec("lavavu")
    places = list(found.submodule_search_locations or []) if found else []
    waiting = [
        path for place in places for path in sorted(Path(place).parent.glob(f"{OSMESA_WHEEL}.libs/*.so*"))
    ]
    loaded: dict[str, ctypes.CDLL] = {}
    while waiting:
        blocked = [path for path in waiting if not _load_into(loaded, path)]
        if len(blocked) == len(waiting):
            break  # what is left needs something this machine lacks
        waiting = blocked
    for name, library in loaded.items():
        if name.startswith("libOSMesa"):
            return library
    raise RenderError("libOSMesa is not installed")


def _load_into(loaded: dict[str, ctypes.CDLL], path: Path) -> bool:
    try:
        loaded[path.name] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
