"""`robot-rl serve-policy`: serves a policy over the network."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from robot_rl.cli.command import Outcome, run_command, stopped_by_signals
from robot_rl.core.errors import CheckpointError, ConfigError, require
from robot_rl.policies.saved import HEAD
from robot_rl.real.remote import DoorConfig, is_loopback, read_token

SUMMARY = "serve a policy over the network, for robots elsewhere"

_HELP = """\
Usage: robot-rl serve-policy run=<folder> token_file=<file> [key=value ...] [--json]

Computes the policy of a run for `robot-rl deploy policy=tls://<this computer>:<port>` on other computers.
Connections use TLS 1.3. A client needs a token or a certificate. Ctrl-C ends the server: a robot holds
when its chunk ends, and continues when the server is back.

  which=final|base       the policy after RL, or the cloned base
  device=cuda            cpu, cuda, cuda:1; cuda if there is a GPU
  host=127.0.0.1         0.0.0.0 listens on every network; port=7710
  token_file=<file>      clients must have its first line: openssl rand -hex 32 > <file>
  cert=<pem> key=<pem>   for TLS; needed unless host=127.0.0.1
  client_ca=<pem>        clients must have a certificate that this authority signed
  torch_threads=1        threads of one computation

protocol=vla-eval serves the evaluation harness vla-eval instead, whose suites run in containers. That has
neither TLS nor a token, so the server listens at 127.0.0.1 only. The containers share that network.

  port=8000              where vla-eval asks unless its server.url says otherwise
  cameras.front=<name>   the suite's name of the policy's camera `front`; the same name if left out
  n_exec=<steps>         control steps executed of each chunk; the policy's own number if left out

Examples:
  openssl rand -hex 32 > token; chmod 600 token
  robot-rl serve-policy run=runs/<folder> token_file=token            for a robot on this computer
  robot-rl serve-policy run=runs/<folder> host=0.0.0.0 cert=gpu.pem key=gpu.key token_file=token
  robot-rl deploy run=runs/<folder> station=sim_arm policy=tls://gpu.lab:7710 \\
    remote.ca=lab.pem remote.token_file=token
  robot-rl serve-policy run=runs/<folder> protocol=vla-eval port=8000
"""
_OF_DOOR = ("token_file", "cert", "key", "client_ca")
_OF_HARNESS = ("cameras", "n_exec")


@dataclass(frozen=True, kw_only=True)
class ServePolicyConfig(DoorConfig):
    """The policy, the address, and the clients that may connect."""

    run: str
    """Run folder."""
    which: Literal["final", "base"] = "final"
    device: str | None = None
    """cuda if there is one, else cpu, if None."""
    torch_threads: int = 1
    protocol: Literal["robot-rl", "vla-eval"] = "robot-rl"
    """Who asks: our robots, or the evaluation harness vla-eval."""
    cameras: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Of vla-eval: cameras of the policy that the suite calls by another name -> that name."""
    n_exec: int | None = None
    """Of vla-eval: control steps executed of each chunk; the policy's own number if None."""

    def __post_init__(self) -> None:
        require(self.torch_threads >= 1, "torch_threads", self.torch_threads, "1 or more")
        if self.protocol == "robot-rl":
            super().__post_init__()
            for name in _OF_HARNESS:
                require(
                    not getattr(self, name), name, getattr(self, name), "left out but with protocol=vla-eval"
                )
            return
        for name in _OF_DOOR:
            got = getattr(self, name)
            require(
                got is None, name, got, "left out with protocol=vla-eval, which has neither TLS nor a token"
            )
        require(0 <= self.port < 65536, "port", self.port, "0 to 65535")
        if not is_loopback(self.host):
            raise ConfigError(
                f"host: {self.host} is not this computer's loopback, and protocol=vla-eval has neither TLS "
                "nor a token. Listen at 127.0.0.1, whose network vla-eval's containers share; from another "
                "computer, forward the port: ssh -L 8000:127.0.0.1:8000 <this computer>."
            )


def run(argv: list[str]) -> int:
    """Serves until Ctrl-C."""
    return run_command(argv, _HELP, _serve)


def _serve(words: list[str]) -> Outcome:
    from robot_rl.config import load  # Hydra: not for --help

    config = load(ServePolicyConfig, words, config_name="serve-policy")
    folder = _folder(config)
    if config.token_file is not None:
        read_token(config.token_file)
    if config.protocol == "vla-eval" and find_spec("vla_eval") is None:
        raise ConfigError("protocol: vla-eval is not installed: pip install -e '.[harness]'")
    import torch  # seconds: not for --help

    torch.set_num_threads(config.torch_threads)
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    serve = _serve_robots if config.protocol == "robot-rl" else _serve_harness
    return serve(config, folder, device)


def _folder(config: ServePolicyConfig) -> Path:
    """Returns where the policy is saved; a `finetune` run has one."""
    folder = Path(config.run) / "policy" / config.which
    if folder.is_dir():
        return folder
    if config.which == "final" and (folder.parent / HEAD).is_file():
        return folder.parent
    raise CheckpointError(f"run: {config.run} holds no policy {config.which!r}. Give a run folder.")


def _serve_robots(config: ServePolicyConfig, folder: Path, device: str) -> Outcome:
    from robot_rl.policies.checkpoint import load_policy
    from robot_rl.train.serve import PolicyServer

    policy, meta = load_policy(folder)
    server = PolicyServer(policy, meta, config, device=device)
    with stopped_by_signals() as stop:
        print(f"{server.address}: {folder} for {meta.robot}, {meta.task}, on {device}", file=sys.stderr)
        server.run(stop)
    counts = asdict(server.counts)
    print(
        f"{counts['clients']} clients, {counts['refused']} refused; {counts['chunks']} chunks, "
        f"{counts['refined']} refinements, {counts['errors']} errors"
    )
    return 0, {"address": server.address, **counts}


def _serve_harness(config: ServePolicyConfig, folder: Path, device: str) -> Outcome:
    from robot_rl.train.collect import open_policy
    from robot_rl.train.harness import HarnessServer

    policy, meta, shown = open_policy(str(folder))
    server = HarnessServer(policy, meta, shown, cameras=config.cameras, n_exec=config.n_exec, device=device)
    with stopped_by_signals() as stop, server.listen(config.host, config.port) as handle:
        print(f"{handle.url}: {folder} for {meta.robot}, {meta.task}, on {device}", file=sys.stderr)
        stop.wait()
    counts = asdict(server.counts)
    print(f"{counts['episodes']} episodes, {counts['actions']} actions, {counts['errors']} errors")
    return 0, {"address": handle.url, **counts}
