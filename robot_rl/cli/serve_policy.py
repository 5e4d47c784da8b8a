"""`robot-rl serve-policy`: a run's policy for robots that ask over the network."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from robot_rl.core.errors import CheckpointError
from robot_rl.real.remote import DoorConfig, read_token

SUMMARY = "a run's policy on a computer with a GPU, for robots elsewhere"

_HELP = """\
Usage: robot-rl serve-policy run=<folder> token_file=<file> [key=value ...] [--json]

Computes a run's policy here for `robot-rl deploy policy=tls://<this computer>:<port>` elsewhere.
Everything is TLS 1.3; who may ask knows a token, or shows a certificate. Ctrl-C ends it; a robot
holds when its chunk ends, and goes on when the server is back.

  which=final|base       the policy after residual RL, or the cloned one
  device=cuda            where to compute: cpu, cuda, cuda:1; cuda if there is one
  host=127.0.0.1         0.0.0.0 listens on every network; port=7710
  token_file=<file>      its first line must be known to clients: openssl rand -hex 32 > <file>
  cert=<pem> key=<pem>   TLS; needed unless it listens at 127.0.0.1
  client_ca=<pem>        clients must show a certificate signed by this authority
  torch_threads=1        of one computation

Examples:
  openssl rand -hex 32 > token; chmod 600 token
  robot-rl serve-policy run=runs/<folder> token_file=token            for a robot on this computer
  robot-rl serve-policy run=runs/<folder> host=0.0.0.0 cert=gpu.pem key=gpu.key token_file=token
  robot-rl deploy run=runs/<folder> station=sim_arm policy=tls://gpu.lab:7710 \\
    remote.ca=lab.pem remote.token_file=token
"""


@dataclass(frozen=True, kw_only=True)
class ServePolicyConfig(DoorConfig):
    """What to serve, where, and to whom."""

    run: str
    """Run folder."""
    which: Literal["final", "base"] = "final"
    device: str | None = None
    """cuda if there is one, else cpu, if None."""
    torch_threads: int = 1


def run(argv: list[str]) -> int:
    """Serves until it is ended."""
    if {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0
    words = [word for word in argv if word != "--json"]
    from robot_rl.config import load  # Hydra: not for --help

    config = load(ServePolicyConfig, words, config_name="serve-policy")
    folder = Path(config.run) / "policy" / config.which
    if not folder.is_dir():
        raise CheckpointError(f"run: {config.run} holds no policy {config.which!r}. Give a run folder.")
    if config.token_file is not None:
        read_token(config.token_file)
    import torch  # seconds: not for --help

    from robot_rl.cli.signals import stopped_by_signals
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
    if "--json" in argv:
        print(json.dumps({"address": server.address, **counts}))
    return 0
