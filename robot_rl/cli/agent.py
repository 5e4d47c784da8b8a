"""`robot-rl agent`: joins this machine and its arms to a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

from robot_rl.cli.command import Outcome, run_command
from robot_rl.core.errors import ConfigError

SUMMARY = "join this machine and its arms to the fleet of a hub"

_HELP = """\
Usage: robot-rl agent hub.address=https://<host>:8642 [name=<this machine>] [hub.token_file=<file>]
                      [hub.ca=<file>] [hub.most_mbit_s=<rate>] [runs=runs] [keep_days=14]

Connects this machine to the hub that `robot-rl fleet` serves on another one, and keeps the connection: it is
opened from here, so a machine behind a router needs no open port. The fleet page then shows the devices of
this machine, with buttons that stop its arms, and its newest runs, and runs elsewhere can learn on its arms:

  robot-rl train recipe=online human.input=none station=any needs.node=<this machine> \\
      hub.address=https://<host>:8642

Arms are those that were entered here with `robot-rl devices add=<station>`. Who acts on one has its lease
here, in this machine's lease file, and its steps lie on this machine's disk until the run has them: while the
run or the hub is out of reach the arm acts on for hub.alone_s (60) seconds, then rests, and is free for
others. Ctrl-C brings the arms to rest, then leaves.

hub.token_file=  holds the hub's token: copy fleet.token of the machine where `robot-rl fleet` runs, and
                 `chmod 600` it.
runs=            folder of the run folders of this machine.
hub.ca=          the authority that signed the hub's certificate (PEM), if this system does not know it.
hub.most_mbit_s= most that is sent of the steps of jobs, in megabits per second; any amount if left out.
keep_days=       steps that no run has fetched for so many days are deleted, and recordings that stay here
                 (a run with hub.pictures=stay) so long after the last step.

An agent is no safety device: each arm still needs an e-stop button.
"""


def run(argv: list[str]) -> int:
    """Serves until Ctrl-C."""
    return run_command(argv, _HELP, _agent)


def _agent(words: list[str]) -> Outcome:
    from robot_rl.config import load  # Hydra: not for --help

    try:
        from robot_rl.fleet.agent import Agent, AgentConfig
    except ModuleNotFoundError as error:
        raise ConfigError(f"agent: {error}. Install it: pip install 'robot_rl[fleet]'.") from error
    config = load(AgentConfig, words, config_name="agent")

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Agent(config, say).run())
    return 0, {"name": config.name}
