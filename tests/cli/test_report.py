import json

import pytest

from robot_rl.cli.report import run
from robot_rl.core.errors import ConfigError


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
    assert len(found["missing"]) == len(lines) - 2
    assert "50.0 %" in (folder / "report.html").read_text()


def test_several_runs_and_another_place(folder, tmp_path, capsys):
    assert run([f"run={folder}", f"run={folder}", f"out={tmp_path / 'both.html'}"]) == 0
    assert "(2 runs)" in capsys.readouterr().out
    assert (tmp_path / "both.html").is_file()


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
