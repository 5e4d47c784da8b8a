import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from robot_rl.telemetry import figures
from robot_rl.telemetry.figures import MAX_POINTS, shorten
from robot_rl.telemetry.report import write_report
from robot_rl.telemetry.runs import Curve, load_run
from robot_rl.telemetry.settings import grouped

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def make_run(root, seed, *, base=0.4, final=0.97, **changes):
    """Writes a small whole run folder."""
    folder = root / f"run-seed{seed}"
    (folder / "failures").mkdir(parents=True)
    summary = {
        "task": "pick_cube",
        "recipe": "pick_cube",
        "seed": seed,
        "base_success": base,
        "final_success": final,
        "episodes": 200,
        "env_steps": 1000,
        "train_minutes": 2.5,
        "timing": {"update": 90.0, "sim": 45.0, "other": 15.0},
        "machine": {"cpu": "Test <CPU>", "cores": 2},
        "versions": {"torch": "2.11"},
        "nan_resets": 3,
        **changes,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"step": 0, "updates": 50 * i, "phase": "bc", "wall_s": i, "bc/loss": 1 / (i + 1)} for i in range(4)
    ]
    rows += [
        {
            "step": 250 * i,
            "phase": "residual",
            "wall_s": 10 + i,
            "eval/success": base + (final - base) * i / 4,
            "eval/episodes": 50,
            "critic/loss": 0.1 / (i + 1),
            "collect/safety_clamps": 2,
        }
        for i in range(5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        f"recipe: pick_cube\nseed: {seed}\nmethod:\n  kind: residual\n  scale: 0.2\n"
    )
    (folder / "failures" / "a.png").write_bytes(PNG)
    index = [{"file": "a.png", "seed": 2147483648, "phase": "final", "caption": "cube <slipped>"}]
    (folder / "failures" / "index.json").write_text(json.dumps(index))
    return folder


def text_of(path) -> str:
    """Returns the words of a page, with single spaces."""

    class Words(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.parts: list[str] = []
            self.hidden = False

        def handle_starttag(self, tag, attrs):
            self.hidden = tag == "style"

        def handle_data(self, data):
            if not self.hidden:
                self.parts.append(data)

    words = Words()
    words.feed(path.read_text())
    return " ".join(" ".join(words.parts).split())


def drawings(path) -> dict[str, str]:
    """Returns alternative text -> SVG of every drawing in a page."""
    found = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]*)">', path.read_text())
    return {alternative: base64.b64decode(source).decode() for source, alternative in found}


def test_a_page_of_one_run_says_what_happened(tmp_path):
    report = write_report([make_run(tmp_path, 3)])
    assert report.path == tmp_path / "run-seed3" / "report.html"
    assert report.missing == ()
    words = text_of(report.path)
    # 80 of 200, 194 of 200; the Wilson intervals of both.
    assert "Before: base policy 40.0 % 95 % interval 33.5 to 46.9 %" in words
    assert "After 97.0 % 95 % interval 93.6 to 98.6 %" in words
    assert "rose from 40.0 % to 97.0 % (+57.0 points)" in words
    assert "Held-out episodes 200 Control steps 1,000 Minutes of training 2.5 Seed 3" in words
    assert "robot-rl train recipe=pick_cube seed=3" in words
    assert "final, episode seed 2147483648, cube <slipped>" in words
    assert "cpu Test <CPU>" in words
    assert "method.scale 0.2" in words
    # Five rows of 2 clamps; the summary's 3 resets.
    assert "actions limited by the safety envelope 10 simulations reset because they diverged 3" in words


def test_a_page_needs_nothing_from_outside_and_no_scripts(tmp_path):
    text = write_report([make_run(tmp_path, 0)]).path.read_text()
    assert "<script" not in text
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    assert "url(" not in text
    assert "@import" not in text


def test_every_drawing_is_an_svg_and_the_same_run_gives_the_same(tmp_path):
    folder = make_run(tmp_path, 0)
    found = drawings(write_report([folder]).path)
    assert list(found) == [
        "success over control steps",
        "success before and after",
        "metrics of behaviour cloning",
        "metrics of reinforcement learning",
        "seconds per stage",
    ]
    for svg in found.values():
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert drawings(write_report([folder]).path) == found


def test_seeds_are_pooled_and_their_spread_is_said(tmp_path):
    folders = [make_run(tmp_path, seed, final=final) for seed, final in ((1, 0.95), (0, 0.99))]
    report = write_report(folders, tmp_path / "pages" / "both.html")
    assert report.path == tmp_path / "pages" / "both.html"
    words = text_of(report.path)
    # (190 + 198) of 400.
    assert "After 97.0 %" in words
    assert "All episodes of 2 seeds together; single seeds end between 95.0 % and 99.0 %." in words
    assert "Seeds 0, 1" in words
    assert "seed 0 40.0 % 99.0 % 200 1,000 2.5 seed 1 40.0 % 95.0 % 200 1,000 2.5" in words


def change(folder, **settings):
    """Gives a run other settings."""
    lines = "".join(f"  {key}: {value}\n" for key, value in settings.items())
    seed = json.loads((folder / "summary.json").read_text())["seed"]
    (folder / "config.yaml").write_text(
        f"recipe: pick_cube\nseed: {seed}\nmethod:\n  kind: residual\n{lines}"
    )
    return folder


def test_one_curve_for_each_setting(tmp_path, monkeypatch):
    first = [make_run(tmp_path, seed, final=final) for seed, final in ((0, 0.56), (1, 0.72))]
    second = change(make_run(tmp_path / "other", 0, final=0.96), scale=0.4)
    settings, _ = grouped([load_run(folder) for folder in (*first, second)])
    figure = Figure()
    monkeypatch.setattr(figures, "render", lambda draw, height_in: draw(figure))
    figures.learning_curves(settings)
    (axes,) = figure.axes
    curves = {str(line.get_label()): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    assert list(curves) == ["method.scale=0.2", "method.scale=0.4"]
    narrow, wide = curves.values()
    # From 0.4 to 0.56 and 0.72, so to 0.64 in the mean, in four steps of 250; the other to 0.96.
    assert narrow.get_xdata() == pytest.approx([0, 250, 500, 750, 1000])
    assert narrow.get_ydata() == pytest.approx([0.4, 0.46, 0.52, 0.58, 0.64])
    assert wide.get_ydata() == pytest.approx([0.4, 0.54, 0.68, 0.82, 0.96])
    assert narrow.get_color() != wide.get_color()
    # Two seeds are thin lines of their setting's colour; one seed is its own curve.
    thin = [line for line in axes.lines if line.get_linewidth() < 1]
    assert [line.get_color() for line in thin] == [narrow.get_color()] * 2
    assert sorted(float(np.asarray(line.get_ydata())[-1]) for line in thin) == pytest.approx([0.56, 0.72])
    ends = [line for line in axes.lines if line.get_marker() == "D"]
    assert [float(np.asarray(line.get_ydata())[0]) for line in ends] == pytest.approx([0.64, 0.96])


def test_settings_that_differ_beyond_the_seed_are_counted_apart(tmp_path):
    first = [make_run(tmp_path, seed, final=final) for seed, final in ((0, 0.6), (1, 0.7))]
    second = change(make_run(tmp_path / "other", 0, final=0.9), scale=0.4)
    report = write_report([first[0], second, first[1]], tmp_path / "page.html")
    assert [setting.label for setting in report.settings] == ["method.scale=0.2", "method.scale=0.4"]
    words = text_of(report.path)
    # 120 + 140 of 400 and 180 of 200; all three together would be 73.3 %, which is nobody's success.
    assert "method.scale=0.2 0, 1 40.0 % 65.0 % 60.2 to 69.5 % 400 1,000 2.5" in words
    assert "method.scale=0.4 0 40.0 % 90.0 % 85.1 to 93.4 % 200 1,000 2.5" in words
    assert "73.3 %" not in words
    assert "method.scale=0.4, seed 0 40.0 % 90.0 % 200" in words
    assert (
        "Settings that differ, except seeds: method.scale=0.2 method.scale=0.4 method.scale 0.2 0.4" in words
    )
    assert "success of every setting" in drawings(report.path)


def test_the_same_run_twice_counts_once(tmp_path):
    folder = make_run(tmp_path, 0, final=0.6)
    again = make_run(tmp_path / "again", 0, final=0.6)
    report = write_report([folder, folder / ".." / folder.name, again])
    assert report.path == folder / "report.html"
    words = text_of(report.path)
    assert "Held-out episodes 200" in words
    assert "run-seed0 was given twice; it counts once" in words
    assert "run-seed0 has the settings and the seed of run-seed0; its episodes are the same" in words


def test_other_tasks_and_recipes_stand_side_by_side(tmp_path):
    runs = [make_run(tmp_path, 0), make_run(tmp_path, 1, task="reach"), make_run(tmp_path, 2, recipe="smoke")]
    for run in runs[1:]:
        (run / "config.yaml").unlink()
    report = write_report(runs)
    assert [setting.label for setting in report.settings] == [
        "pick_cube, pick_cube",
        "reach, pick_cube",
        "pick_cube, smoke",
    ]
    assert "3 settings" in text_of(report.path)


def test_metrics_without_a_number_have_no_panel_and_other_methods_no_settings(tmp_path):
    folder = make_run(tmp_path, 0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1001, "phase": "x", "wall_s": 20, "actor/empty": null, "actor/once": 2.0}\n')
    settings = "method: residual\nresidual: {scale: 0.2}\nppo: {clip: 0.3}\ngrpo: {group: 8}\n"
    (folder / "config.yaml").write_text(f"recipe: pick_cube\nseed: 0\n{settings}")
    report = write_report([folder])
    words = text_of(report.path)
    assert "method.scale 0.2" in words
    assert "clip" not in words
    assert "group 8" not in words
    svg = drawings(report.path)["metrics of reinforcement learning"]
    assert "actor/empty" not in svg
    assert "actor/once" in svg


def test_what_is_missing_is_named_in_the_page(tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "config.yaml").write_text("recipe: smoke\nseed: 1\nenv: {task: reach}\n")
    report = write_report([folder])
    words = text_of(report.path)
    for part in (
        "summary.json: not there (the run did not finish, or is still running)",
        "metrics.jsonl: not there or empty",
        "learning curve: no rows with eval/success",
        "success before and after: summary.json lacks",
        "time per stage: summary.json has no timing",
        "machine: not in summary.json",
        "versions: not in summary.json",
        "failure gallery: no failures/index.json",
        "curves of behaviour cloning: no such metrics",
    ):
        assert part in words
        assert any(missing.startswith(part) for missing in report.missing)
    assert "no evaluation before and after" in words


def test_a_run_without_failures_says_so(tmp_path):
    folder = make_run(tmp_path, 0, final=1.0)
    (folder / "failures" / "index.json").unlink()
    report = write_report([folder])
    assert "No held-out episode failed after training." in text_of(report.path)
    assert report.missing == ()


def test_strange_numbers_are_no_crash(tmp_path):
    folder = make_run(tmp_path, 0, final=1.5, timing={"update": "long"}, machine="a laptop", env_steps=None)
    rows = '{"step": 1, "phase": "residual", "wall_s": 1, "critic/loss": null, "collect/nan_resets": null}\n'
    (folder / "metrics.jsonl").write_text(rows)
    words = text_of(write_report([folder]).path)
    assert "After - not evaluated" in words
    assert "machine a laptop" in words


def test_long_curves_are_shown_by_means(tmp_path):
    rows = [{"step": i, "phase": "x", "wall_s": 0, "critic/loss": i % 2} for i in range(MAX_POINTS * 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = shorten(load_run(tmp_path).curve("critic/loss"))
    # Pieces of four: the mean of 0, 1, 0, 1, at steps 0 to 3 and so on.
    assert len(short.x) == MAX_POINTS
    assert short.x[:2].tolist() == [1.5, 5.5]
    assert set(short.y) == {0.5}
    assert isinstance(short, Curve)
