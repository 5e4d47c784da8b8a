# Everything starts from a Python and make: `make train` and `make test` set up what they need.

.DEFAULT_GOAL := help
.PHONY: help setup train test test-faults slow interop-peer browser check format bench clean

VENV := .venv
READY := $(VENV)/.ready
PEER := build/interop/fastdds_peer
# PYTHON=/path/to/python overrides the search for one.
PYTHON ?=
QUICK ?=
# Where it is set, as in many containers, each of some hundred Python processes compiles torch and the tests anew.
unexport PYTHONDONTWRITEBYTECODE
# They share fixtures with the tests, which no package installs.
FAULTS := PYTHONPATH="$(CURDIR)" $(VENV)/bin/python tests/faults

# What a machine without GPU and robot can run; speed claims are for `make bench`.
USUAL := not benchmark and not gpu and not hardware

help:
	@echo "make setup    make $(VENV) and install everything (train and test do this by themselves)"
	@echo "make train    a Panda arm learns to lift a cube; the last line is one JSON object"
	@echo "make test     the test suite (make slow: its long tests too)"
	@echo "make test-faults  damage stores and disks, nothing flushed may be lost; break every part of a deployment"
	@echo "                  in every command mode 10 times, the arm has to stop within its limits (an hour);"
	@echo "                  with QUICK=1 a sample of that, in under 5 minutes"
	@echo "make interop-peer  build the C++ peer on Fast DDS that the ROS 2 tests of make slow talk to"
	@echo "make browser  install the Chromium that make slow looks at the fleet page with"
	@echo "make check    lint, types, import layers"
	@echo "make format   format the code"
	@echo "make bench    measure this machine: simulator, policy, learner, physics; hold the speed claims"
	@echo "make clean    remove caches and $(VENV); run folders stay"

setup: $(READY)

$(READY): pyproject.toml .ci/setup
	@PYTHON="$(PYTHON)" VENV="$(VENV)" .ci/setup
	@touch $@

train: $(READY)
	$(VENV)/bin/robot-rl train recipe=pick_cube --json

test: $(READY)
	$(VENV)/bin/python -m pytest -n auto -m "$(USUAL) and not slow and not alone"
	$(VENV)/bin/python -m pytest -m "$(USUAL) and not slow and alone"

test-faults: $(READY)
ifeq ($(QUICK),)
	$(FAULTS)/campaign.py --kills 200 --truncations 200 --flips 200
	$(FAULTS)/flip_runs.py --run-flips 500 --finetune-flips 200 --store-flips 400 --cuts 100
	$(FAULTS)/sealed_campaign.py --flips 400 --cuts 100
	$(FAULTS)/storage_campaign.py
	$(FAULTS)/lease_campaign.py
	$(FAULTS)/preempt_campaign.py
	$(FAULTS)/node_campaign.py
	$(FAULTS)/arm_campaign.py --repeats 10 --jobs 2
else
	$(FAULTS)/campaign.py --kills 5 --truncations 10 --flips 10
	$(FAULTS)/flip_runs.py --run-flips 20 --finetune-flips 0 --store-flips 20 --cuts 5
	$(FAULTS)/sealed_campaign.py --flips 12 --cuts 6
	$(FAULTS)/storage_campaign.py --quick
	$(FAULTS)/lease_campaign.py --races 300
	$(FAULTS)/preempt_campaign.py --races 200
	$(FAULTS)/node_campaign.py --faults 6
	$(FAULTS)/arm_campaign.py --quick --jobs 2
endif

slow: $(READY)
	$(VENV)/bin/python -m pytest -n auto -m "$(USUAL) and slow and not alone"
	$(VENV)/bin/python -m pytest -m "$(USUAL) and slow and alone"

interop-peer: $(PEER)

# Debian's packages; the test of the fleet page is skipped where they are missing, except in CI.
browser:
	@command -v chromedriver >/dev/null && command -v chromium >/dev/null || \
	    { apt-get update -qq && apt-get install -qq --no-install-recommends chromium chromium-driver >/dev/null; }

$(PEER): tests/interop/fastdds/build.sh tests/interop/fastdds/peer.cpp tests/interop/fastdds/ros_types.idl
	tests/interop/fastdds/build.sh $(@D)

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports --no-logo

format: $(READY)
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .

bench: $(READY)
	for name in sim policy learner physics; do $(VENV)/bin/robot-rl bench $$name || exit 1; done
	$(VENV)/bin/python -m pytest -m benchmark

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
