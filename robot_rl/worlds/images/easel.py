"""The pictures of imagined episodes: the codes that each env goes on from, and what is drawn of them.

A picture is drawn when it is looked at. B envs, C channels over all cameras, h x w cells.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from robot_rl.core.seeding import EpisodeRng, Stream
from robot_rl.worlds.history import Array, History, stride_before
from robot_rl.worlds.images.model import Images
from robot_rl.worlds.images.pictures import Moments, Pictures


class Easel:
    """Codes and pictures of B envs; see the module."""

    def __init__(self, images: Pictures, num_envs: int, *, noise: float) -> None:
        """Args: noise: share of the flow's noise with which codes are drawn; 0: the code that is expected.

        A model of others draws none: noise is in the state that its next picture follows from.
        """
        self.images, self._noise = images, noise
        shape = (num_envs, *images.codes.shape[1:])
        self._reference, self._past, self._now = (np.zeros(shape, np.float32) for _ in range(3))
        self._drawn = {camera: np.zeros((num_envs, *images.size, 3), np.uint8) for camera in images.cameras}
        self._is_drawn = np.zeros(num_envs, bool)

    @property
    def columns(self) -> tuple[Array, ...]:
        """The arrays that determine what comes, (B, C, h, w) each; `touched` when they change."""
        return (self._reference, self._past, self._now)

    def touched(self, ids: Array) -> None:
        """Notes that the pictures of these envs (n,) are no longer those that were drawn."""
        self._is_drawn[ids] = False

    def begin(self, ids: Array, history: History, rows: Array) -> None:
        """Puts envs (n,) into recorded moments, rows (n,) of the history behind the model."""
        first, codes = history.first[history.episode[rows]], self.images.codes
        past, _ = stride_before(history, rows, self.images.stride)
        self._reference[ids], self._past[ids], self._now[ids] = codes[first], codes[past], codes[rows]
        self.touched(ids)

    def put(self, ids: Array, codes: Array) -> None:
        """Begins episodes of envs (n,) with first pictures of these codes (n, C, h, w)."""
        self._reference[ids] = self._past[ids] = self._now[ids] = codes
        self.touched(ids)

    def advance(self, ids: Array, facts: Mapping[str, Array], key: tuple[Array, Array, Array]) -> Array:
        """Goes on to the next codes of envs (n,); returns the networks' disagreement (n,).

        Args:
            facts: `state`, `after`, `actions` and `steps` of `Moments`, (n, ...).
            key: member, seed and episode (n,) of each env: an episode keeps its network and its noise.
        """
        member, seed, episode = key
        at, own = self._at(ids, facts), member % self.images.num_members
        codes, disagreement = self.images.means(at)
        if self._noise and isinstance(self.images, Images):
            drawn = EpisodeRng(seed, episode, stream=Stream.PICTURES).normal(at.now[0].size)
            after = self.images.drawn(at, own, (self._noise * drawn).reshape(at.now.shape))
        else:
            after = codes[own, np.arange(len(ids))]
        self._past[ids], self._now[ids] = at.now, after
        self.touched(ids)
        return disagreement

    def _at(self, ids: Array, facts: Mapping[str, Array]) -> Moments:
        codes = {"now": self._now[ids], "past": self._past[ids], "reference": self._reference[ids]}
        return Moments(**codes, **{name: np.asarray(value) for name, value in facts.items()})

    def codes(self, ids: Array) -> Array:
        """Returns the present codes (n, C, h, w) of envs."""
        return self._now[ids]

    def show(self, ids: Array, facts: Mapping[str, Array], member: Array) -> None:
        """Draws the pictures of envs (n,) that are not drawn yet; within a stride the one that is expected.

        Args:
            facts: of all B envs, as in `advance`; `steps` is 0 where the codes are those of now.
            member: (B,)
        """
        due = ids[~self._is_drawn[ids]]
        if not len(due):
            return
        codes, within = self._now[due], facts["steps"][due] > 0
        if within.any():
            some = due[within]
            means, _ = self.images.means(self._at(some, {name: value[some] for name, value in facts.items()}))
            codes[within] = means[member[some] % len(means), np.arange(len(some))]
        for camera, pictures in self.images.decode(codes).items():
            self._drawn[camera][due] = pictures
        self._is_drawn[due] = True

    def pictures(self) -> dict[str, Array]:
        """Returns what was drawn last: `<camera>.rgb` -> (B, height, width, 3) uint8."""
        return {f"{camera}.rgb": drawn.copy() for camera, drawn in self._drawn.items()}
