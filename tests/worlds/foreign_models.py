"""Models of others for `test_served.py`, which copies this file into a working folder."""

import os
import sys
import time

import numpy as np

STATE, ACTION = ("x", "y", "goal.0", "goal.1"), ("vx", "vy")


class Point:
    """A point that moves a little more than SPEED times its action, the more, the higher its member."""

    members, stride, version = 3, 4, "1"
    state_names, action_names = STATE, ACTION

    def __init__(self, fault="", speed=0.05):
        self.fault, self.speed = fault, speed

    def predict(self, state, past_state, past_action, has_past, actions, steps):
        if self.fault == "dies":
            os.write(2, b"out of memory")
            os._exit(3)
        if self.fault == "sleeps":
            time.sleep(60)
        if self.fault == "raises":
            raise ValueError("no such scene")
        known = (np.arange(self.stride) < steps[:, None])[..., None]
        moved = self.speed * (actions * known).sum(axis=1)
        mean = np.repeat(state[None], self.members, axis=0)
        for member in range(self.members):
            mean[member, :, :2] += moved * (1.0 + 0.01 * member)
        if self.fault == "flat":
            mean = mean[0]
        if self.fault == "nan":
            mean[0, 0, 0] = np.nan
        return mean, np.full_like(mean, -0.001 if self.fault == "below" else 0.001)


def point(fault="", version="1", **own):
    model = Point(fault)
    model.version = version
    for name, value in own.items():
        setattr(model, name, value)
    return model


def nothing():
    return object()


def pid_of(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    assert not {"robot_rl", "torch", "gymnasium"} & set(sys.modules)
    return Point()


class Saved:
    """A world model of ours, as a model of others."""

    def __init__(self, folder, root):
        sys.path.insert(0, root)
        from robot_rl.worlds.history import Window
        from robot_rl.worlds.saved import load_world

        world = load_world(folder)
        self.model, self.window, self.version = world.model, Window, str(world.report.version)
        self.members, self.stride = self.model.config.members, self.model.config.stride
        self.state_names, self.action_names = world.meta.state_names, world.meta.action_names

    def predict(self, state, past_state, past_action, has_past, actions, steps):
        window = self.window(state=state, past_state=past_state, past_action=past_action, has_past=has_past)
        found = self.model.predict(window, actions, steps)
        return found.mean.numpy(), found.std.numpy()
