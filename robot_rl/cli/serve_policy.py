"""`robot-rl serve-policy`: serves a policy over the network."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from robot_rl.cli.command import Outcome, run_command, stopped_by_signals
from robot_rl.core.errors import CheckpointError
from robot_rl.real.remote import DoorConfig, read_token

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

Examples:
  openssl rand -hex 32 > token; chmod 600 token
  robot-rl serve-policy run=runs/<folder> token_file=token            for a robot on this computer
  robot-rl serve-policy run=runs/<folder> host=0.0.0.0 cert=gpu.pem key=gpu.key token_file=token
  robot-rl deploy run=runs/<folder> station=sim_arm policy=tls://gpu.lab:7710 \\
    remote.ca=lab.pem remote.token_file=token
"""


@dataclass(frozen=True, kw_only=True)
class ServePolicyConfig(DoorConfig):
    """The policy, the address, and the clients that may connect."""

    run: str
    """Run folder."""
    which: Literal["final", "base"] = "final"
    device: str | None = None
    """cuda if there is one, else cpu, if None."""
    torch_threads: int = 1


def run(argv: list[str]) -> int:
    """Serves until Ctrl-C."""
    return run_command(argv, _HELP, _serve)


def _serve(words: list[str]) -> Outcome:
    from robot_rl.config import load  # Hydra: not for --help

    config = load(ServePolicyConfig, words, config_name="serve-policy")
    folder = Path(config.run) / "policy" / config.which
    if not folder.is_dir():
        raise CheckpointError(f"run: {config.run} holds no policy {config.which!r}. Give a run folder.")
    if config.token_file is not None:
        read_token(config.token_file)
    import torch  # seconds: not for --help

    from robot_rl.policies.checkpoint import load_policy
    from robot_rl.train.serve import PolicyServer

    torch.set_num_threads(config.torch_threads)
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
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
