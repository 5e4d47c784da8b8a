"""Pictures predicted open loop: how wrong they are, whether disagreement tells, and how they look.

Network i goes on from its own codes, with the states of member i (modulo their number) of the model of the
state, as imagined episodes do.
B windows, M networks, C channels over all cameras, h x w cells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from robot_rl.core.errors import DatasetError
from robot_rl.worlds.dynamics import Dynamics
from robot_rl.worlds.fit import MIN_WINDOWS
from robot_rl.worlds.history import Array, History, Window, Windows, window_at
from robot_rl.worlds.images.fit import moments_at
from robot_rl.worlds.images.pictures import Pictures
from robot_rl.worlds.trust import spearman

DEPTHS = (1, 2, 4, 8)
"""Strides after which pictures are compared."""
_MOST_WINDOWS = 240
_FULL = 255.0
_SAME = _FULL * 1e-5
"""A smaller error counts as this one: 100 dB."""


@dataclass(frozen=True)
class PlayedPictures:
    """What open-loop play found at one depth, over networks and windows (N,)."""

    depth: int
    codes: Array
    """(N, C, h, w): predicted."""
    error: Array
    """(N,): of the codes, root of the mean square, in units of the change in a stride."""
    disagreement: Array
    """(N,): of the networks, about the code that follows."""
    rows: Array
    """(N,): of the history, where the true picture is."""
    begun: Array
    """(N,): rows of the last real picture."""


def play_pictures(
    images: Pictures, model: Dynamics, history: History, episodes: Array
) -> list[PlayedPictures]:
    """Plays windows of some episodes and returns what was found at each of `DEPTHS` that they reach.

    Raises:
        DatasetError: too few windows for a quantile at the first depth.
    """
    k, windows, longest = images.stride, None, 0
    for depth in DEPTHS:
        try:
            found = Windows(history, episodes, stride=k, strides=depth)
        except DatasetError:
            break
        if len(found) < MIN_WINDOWS:
            break
        windows, longest = found, depth
    if windows is None:
        raise DatasetError(
            f"pictures: no depth has {MIN_WINDOWS} windows of held-out episodes. Collect more."
        )
    rng = np.random.default_rng(0)
    begun = np.sort(rng.choice(windows.rows, min(_MOST_WINDOWS, len(windows)), replace=False))
    return played_from(images, model, history, begun, [d for d in DEPTHS if d <= longest])


def played_from(
    images: Pictures, model: Dynamics, history: History, begun: Array, depths: list[int]
) -> list[PlayedPictures]:
    """Plays the recorded actions from these rows (B,) of a history; see `PlayedPictures`."""
    members, count, k = images.num_members, len(begun), images.stride
    rows, own = np.tile(begun, members), np.repeat(np.arange(members), count)
    window, steps = window_at(history, rows, k), np.full(len(rows), k)
    rest, played = images.rest.cpu().numpy(), list[PlayedPictures]()
    first = moments_at(images, history, rows, steps, after=window.state)
    now, past = first.now, first.past
    for depth in range(1, max(depths) + 1):
        actions = history.action[rows[:, None] + k * (depth - 1) + np.arange(k)]
        mean = model.predict(window, actions, steps).mean.cpu().numpy()
        after = mean[own % len(mean), np.arange(len(rows))].astype(np.float32)
        at = replace(first, now=now, past=past, state=window.state, after=after, actions=actions)
        codes, disagreement = images.means(at)
        past, now = now, codes[own, np.arange(len(rows))]
        window = Window(
            state=after, past_state=window.state, past_action=actions, has_past=np.ones(len(rows), bool)
        )
        if depth in depths:
            true = rows + k * depth
            error = ((now - images.codes[true]) / rest) ** 2
            size = np.sqrt(error.mean(axis=(1, 2, 3)))
            played.append(PlayedPictures(depth, now, size, disagreement, true, rows))
    return played


def picture_rows(images: Pictures, history: History, played: list[PlayedPictures]) -> list[dict[str, float]]:
    """Returns the table of a trust report: errors of pictures against those of copying the last real one.

    `mae` is in levels of 255; `psnr` in dB, from the mean square over all pictures. One member has no rank.
    """
    rows = list[dict[str, float]]()
    for found in played:
        drawn, numbers = images.decode(found.codes), {"depth": float(found.depth)}
        errors = {"": list[Array](), "_of_copying": list[Array]()}
        for camera, pictures in drawn.items():
            true = history.shown(camera, found.rows).astype(np.float32)
            errors[""].append(pictures - true)
            errors["_of_copying"].append(history.shown(camera, found.begun) - true)
        for name, parts in errors.items():
            error = np.stack(parts)
            numbers[f"mae{name}"] = float(np.abs(error).mean())
            size = max(float(np.sqrt((error**2).mean())), _SAME)
            numbers[f"psnr{name}"] = float(20 * np.log10(_FULL / size))
        if images.num_members > 1:
            numbers["rank_disagreement"] = spearman(found.disagreement, found.error)
        rows.append(numbers)
    return rows


def film_strip(images: Pictures, model: Dynamics, history: History, begun: Array) -> tuple[list[int], Array]:
    """Returns depths, and one picture: for each row of a history real pictures, below them predicted ones.

    Columns are the last real picture and then those of `DEPTHS` that the shortest of the episodes reaches.
    """
    left = (history.last[history.episode[begun]] - begun).min() // images.stride
    depths = [depth for depth in DEPTHS if depth <= left]
    played = played_from(images, model, history, begun, depths)
    strips = list[Array]()
    drawn = [images.decode(found.codes[: len(begun)]) for found in played]
    first = images.decode(images.codes[begun])
    for i, row in enumerate(begun):
        for camera in images.cameras:
            real = history.shown(camera, row + images.stride * np.array([0, *depths]))
            predicted = [first[camera][i], *(part[camera][i] for part in drawn)]
            strips.append(np.concatenate([np.concatenate(part, axis=1) for part in (real, predicted)]))
    return depths, np.concatenate(strips)
