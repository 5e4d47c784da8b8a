"""Components are found by name, and wrong names are answered with the right one."""

import importlib

import pytest

from robot_rl.core import registry
from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import UnknownComponentError
from robot_rl.core.registry import TABLE, plugins, resolve, table

ENTRIES = [(kind, name) for kind, names in TABLE.items() for name in names]


class _Point:
    """An entry point of another package."""

    name = "task.fold_towel"
    value = "robot_rl.core.clock:ManualClock"


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_entry_of_the_table_exists(kind: str, name: str) -> None:
    module, attribute = TABLE[kind][name].split(":")
    assert hasattr(importlib.import_module(module), attribute)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownComponentError) as caught:
        resolve("task", "reech", at="env.task")
    assert str(caught.value) == (
        "env.task: no task named 'reech'. Did you mean 'reach'? "
        f"`robot-rl doctor --list task` shows all {len(table('task'))}."
    )


def test_a_wrong_kind_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownComponentError, match=r"registry: no kind 'taks'\. Did you mean 'task'\?"):
        table("taks")


def test_other_packages_add_components(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [_Point()])
    plugins.cache_clear()
    try:
        assert "fold_towel" in table("task")
        assert "fold_towel" not in table("robot")
        assert resolve("task", "fold_towel") is ManualClock
    finally:
        plugins.cache_clear()
