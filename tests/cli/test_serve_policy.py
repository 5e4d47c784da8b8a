"""`robot-rl serve-policy`: what it refuses before it loads a policy."""

import pytest

from robot_rl.cli import main as cli

OF_HARNESS = ["serve-policy", "run=/no/such", "protocol=vla-eval"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*OF_HARNESS, "host=0.0.0.0"],
         "host: 0.0.0.0 is not this computer's loopback, and protocol=vla-eval has neither TLS nor a token. "
         "Listen at 127.0.0.1, whose network vla-eval's containers share; from another computer, forward the "
         "port: ssh -L 8000:127.0.0.1:8000 <this computer>."),
        ([*OF_HARNESS, "token_file=x"],
         "token_file: got 'x', allowed: left out with protocol=vla-eval, which has neither TLS nor a token"),
        ([*OF_HARNESS, "port=70000"], "port: got 70000, allowed: 0 to 65535"),
        (OF_HARNESS, "run: /no/such holds no policy 'final'"),
        (["serve-policy", "run=/no/such", "token_file=x", "cameras.front=side"],
         "cameras: got {'front': 'side'}, allowed: left out but with protocol=vla-eval"),
    ],
)  # fmt: skip
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert cli.main(words) == 2
    assert text in capsys.readouterr().err


def test_a_missing_harness_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from robot_rl.cli import serve_policy

    run = tmp_path_factory.mktemp("run")
    (run / "policy" / "final").mkdir(parents=True)
    monkeypatch.setattr(serve_policy, "find_spec", lambda name: None)
    assert cli.main(["serve-policy", f"run={run}", "protocol=vla-eval"]) == 2
    assert "protocol: vla-eval is not installed: pip install -e '.[harness]'" in capsys.readouterr().err
