"""What the page of a hub is shown of the arms of an agent's machine, when it asks: pictures and scenes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DeviceError
from robot_rl.fleet.feeds import CAMERA_IDLE_S, CAMERAS, SCENE, SCENE_IDLE_S, Feeds
from robot_rl.fleet.state import FleetState
from robot_rl.fleet.tunnel import Streams

Json = dict[str, Any]


class ShownArms:
    """Answers the hub; a process for each arm looks at it, while somebody asks."""

    kinds = frozenset({"picture", "scene", "seen", "open", "octets", "shut"})
    """Of messages that are for it."""

    def __init__(self, state: FleetState, send: Callable[[str, Json], Awaitable[bool]]) -> None:
        """Takes what it asks.

        Args:
            state: knows the arms that are up.
            send: sends a message, kind and body, to the hub; False if that is gone.
        """
        self._state, self._send = state, send
        self._pictures = Feeds(CAMERAS, idle_s=CAMERA_IDLE_S)
        self._scenes = Feeds(SCENE, idle_s=SCENE_IDLE_S)
        self._streams = Streams(send)

    def take(self, kind: str, body: Json) -> Coroutine[Any, Any, None] | None:
        """Takes a message; returns what is still to be done."""
        if kind in ("octets", "shut"):
            self._streams.take(kind, body)
            return None
        device = str(body["device"])
        if kind == "seen":
            return self._touch(device)
        number = int(body["number"])
        if kind == "open":
            self._streams.expect(number)
            return self._open(number, device)
        if kind == "scene":
            return self._answer(number, self._scene(device))
        return self._answer(number, self._picture(device, str(body["camera"])))

    def leave(self) -> None:
        """Ends all streams: the hub is gone."""
        self._streams.close()

    async def close(self) -> None:
        """Ends all processes that look."""
        await asyncio.gather(self._pictures.close(), self._scenes.close())

    async def _answer(self, number: int, asked: Coroutine[Any, Any, Json]) -> None:
        """Answers a question of the hub, or says why there is no answer."""
        try:
            answer = await asked
        except DeviceError as error:
            answer = {"refusal": str(error)}
        await self._send("done", {"number": number, "refusal": "", **answer})

    async def _picture(self, device: str, camera: str) -> Json:
        seen = self._pictures.newest(await self._folder(device, camera), camera)
        return {"jpeg": seen.content, "age_s": seen.age_s}

    async def _scene(self, device: str) -> Json:
        """Says whether the viewer of an arm's scene is there; the first question begins it."""
        return {"is_there": self._scenes.socket(await self._folder(device)) is not None}

    async def _touch(self, device: str) -> None:
        with contextlib.suppress(DeviceError):
            self._scenes.touch(await self._folder(device))

    async def _open(self, number: int, device: str) -> None:
        """Connects a stream with the viewer of an arm's scene."""
        try:
            path = self._scenes.socket(await self._folder(device))
            if path is None:
                raise DeviceError("the viewer is not there yet")
            ends = await asyncio.open_unix_connection(path)
        except (DeviceError, OSError):  # the answer to `scene` says why
            await self._streams.refuse(number)
        else:
            await self._streams.carry(number, *ends)

    async def _folder(self, device: str, camera: str | None = None) -> Path:
        return await asyncio.to_thread(self._state.require_folder, device, camera)
