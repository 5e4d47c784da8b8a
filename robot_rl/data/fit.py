"""Whether recorded episodes fit the robot they are wanted for; if not, which joints differ."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import EpisodeSource, Feature
from robot_rl.data.episodes import EpisodesMeta


def misfit(got: EpisodesMeta, want: EpisodesMeta) -> str | None:
    """Returns what differs between recorded episodes and what they are wanted for, or None."""
    for what, names, wanted in (
        ("joints (action)", got.action_names, want.action_names),
        ("state elements", got.state_names, want.state_names),
    ):
        if names == wanted:
            continue
        extra = [name for name in names if name not in wanted]
        lacking = [name for name in wanted if name not in names]
        if not extra and not lacking:
            moved = [name for name, other in zip(names, wanted, strict=False) if name != other]
            return f"its {what} are in another order: {_few(moved)}"
        parts = [f"has {_few(extra)}"] * bool(extra) + [f"lacks {_few(lacking)}"] * bool(lacking)
        return f"its {what} differ: it {' and '.join(parts)}"
    if got.control_hz != want.control_hz:
        return f"it was recorded at {got.control_hz:g} Hz, not {want.control_hz:g} Hz"
    return None


def common_features(sources: Sequence[EpisodeSource], keys: Collection[str] | None) -> dict[str, Feature]:
    """Returns the observations `keys` (None: all) that the sources share.

    Raises:
        DatasetError: a source that lacks one, or is of another robot than the first.
    """
    first = sources[0]
    for missing in sorted(set(keys or ()) - set(first.features)):
        raise DatasetError(
            f"pool: no observation {missing!r} is recorded, there are {sorted(first.features)}."
        )
    features = {key: first.features[key] for key in first.features if keys is None or key in keys}
    for index, source in enumerate(sources[1:], 1):
        problem = misfit(source.meta, first.meta)
        for key, feature in features.items():
            if problem is None and source.features.get(key) != feature:
                problem = f"observation {key!r} is {source.features.get(key)}, not {feature}"
        if problem is not None:
            raise DatasetError(
                f"pool: source {index} does not fit source 0: {problem}. Make one pool of each."
            )
    return features


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
