import json

import pytest

from robot_rl.cli.report import run
from robot_rl.core.errors import ConfigError, StorageError


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "2026-01-01-smoke-seed0"
    folder.mkdir()
    summary = {
        "task": "reach",
        "recipe": "smoke",
        "seed": 0,
        "base_success": 0.5,
        "final_success": 1.0,
        "episodes": 20,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_the_page_is_written_into_the_run_folder(folder, capsys):
    assert run([f"run={folder}", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"report: {folder / 'report.html'} (1 run)"
    assert "  missing: config.yaml: not there, so there is no table of settings" in lines
    found = json.loads(lines[-1])
    assert found["report"] == str(folder / "report.html")
    assert found["runs"] == [str(folder)]
    assert len(found["missing"]) == len(lines) - 3
    assert "50.0 %" in (folder / "report.html").read_text()


def test_several_runs_and_another_place(folder, tmp_path, capsys):
    assert run([f"run={folder}", f"run={folder}", f"out={tmp_path / 'both.html'}"]) == 0
    said = capsys.readouterr().out
    assert "(1 run)" in said
    assert "2026-01-01-smoke-seed0 was given twice; it counts once" in said
    assert (tmp_path / "both.html").is_file()


def test_settings_have_a_line_each(folder, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    summary = json.loads((folder / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps({**summary, "task": "push_cube", "final_success": 0.75}))
    assert run([f"run={folder}", f"run={other}", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "  reach: 50.0 % before, 100.0 % after, seed 0",
        "  push_cube: 50.0 % before, 75.0 % after, seed 0",
    ]
    assert [row["after"] for row in json.loads(lines[-1])["settings"]] == [1.0, 0.75]


def test_a_place_that_cannot_be_written_is_told_before_the_page_is_drawn(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"report\.out: '.*page\.html' cannot be written"):
        run([f"run={folder}", f"out={tmp_path / 'file' / 'page.html'}"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"report\.run: no run folder was given\. Usage: robot-rl report run="),
        (["rum=x"], r"report: no setting 'rum'\. Did you mean 'run'\?"),
        (["run="], r"report\.run: got 'run=', allowed is run=<path>\."),
        (["run=/no/such"], r"report\.run: there is no folder '/no/such'\."),
        (["run=x", "out=page.pdf"], r"report\.out: got 'page\.pdf', allowed is a file that ends in \.html"),
    ],
)
def test_mistakes_are_explained(words, message):
    with pytest.raises(ConfigError, match=message):
        run(words)


def test_paths_as_people_type_them(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    folder.rename(tmp_path / "L\xe4ufe (neu), a=b")
    assert run(["run=~/L\xe4ufe (neu), a=b", "out=~/Seite (1), \xfc=x.html", "--json"]) == 0
    assert (tmp_path / "Seite (1), \xfc=x.html").is_file()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["runs"] == [str(tmp_path / "L\xe4ufe (neu), a=b")]
    (tmp_path / "work" / "~nobody").mkdir()  # of this name there is no user
    with pytest.raises(ConfigError, match="~nobody"):
        run(["run=~/L\xe4ufe (neu), a=b", "out=~nobody"])
    assert list((tmp_path / "work").iterdir()) == [tmp_path / "work" / "~nobody"]
