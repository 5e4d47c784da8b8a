"""Models of others that show pictures, for `test_served_pictures.py`, which copies this file where it works.

A field of 2 m: a point is a square in red, its goal one in green; the camera `side` is a mirror. The state
has the point alone: red is drawn where the state is, green is what the episode's first picture has.
"""

import os

import numpy as np

PIXELS, SPEED = 32, 0.05


def squares(places):
    """Returns one colour (n, PIXELS, PIXELS) of squares of 6 pixels at places (n, 2)."""
    field = np.full((len(places), PIXELS, PIXELS), 60, np.uint8)
    corners = ((np.asarray(places) + 1.0) * PIXELS / 2).round().astype(int) - 3
    for picture, (x, y) in zip(field, corners.clip(0, PIXELS - 6), strict=True):
        picture[y : y + 6, x : x + 6] = 240
    return field


def seen_by(camera, places):
    return places * np.array([-1.0 if camera == "side" else 1.0, 1.0], np.float32)


def drawn(camera, places, goals):
    """Returns pictures (n, PIXELS, PIXELS, 3) of points and goals (n, 2) each."""
    red, green = (squares(seen_by(camera, part)) for part in (places, goals))
    return np.stack([red, green, np.zeros_like(red)], axis=-1)


class Video:
    """Draws the frames of a point that moves SPEED times its action; codes are pixels.

    Member i of the state moves i % too far; member i of the pictures is i half moves ahead of the state.
    """

    members, stride, version = 2, 4, "1"
    state_names, action_names = ("x", "y"), ("vx", "vy")
    image_size = (PIXELS, PIXELS)

    def __init__(self, cameras=("top",), code_members=3, fault="", **own):
        self.cameras, self.code_members, self.fault = tuple(cameras), code_members, fault
        self.code_shape = (3 * len(self.cameras), PIXELS, PIXELS)
        for name, value in own.items():
            setattr(self, name, value)

    def predict(self, state, past_state, past_action, has_past, actions, steps):
        known = (np.arange(self.stride) < steps[:, None])[..., None]
        moved = SPEED * (actions * known).sum(axis=1)
        mean = np.stack([state + moved * (1.0 + 0.01 * member) for member in range(self.members)])
        return mean, np.full_like(mean, 0.001)

    def encode(self, pictures):
        if self.fault == "code":
            return np.zeros((len(pictures["top"]), 3), np.float32)
        found = np.concatenate([pictures[name].transpose(0, 3, 1, 2) for name in self.cameras], axis=1)
        return found * np.where(found[:, 2:3] > 0, 1e6, 1.0) if self.fault == "glares" else found

    def decode(self, codes):
        levels = codes.round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
        found = dict(zip(self.cameras, np.split(levels, len(self.cameras), axis=3), strict=True))
        if self.fault == "dies":
            os._exit(3)
        if self.fault == "camera":
            return {"back": found["top"]}
        if self.fault == "list":
            return list(found.values())
        if self.fault == "float":
            return {"top": found["top"] / 255.0}
        if self.fault == "size":
            return {"top": found["top"][:, 1:]}
        return found

    def predict_codes(self, now, past, reference, state, after, actions, steps):
        found = np.repeat((now if self.fault == "still" else reference)[None], self.code_members, axis=0)
        if self.fault == "still":
            return found
        for member in range(self.code_members):
            places = after + 0.5 * member * (after - state)
            for number, camera in enumerate(self.cameras):
                found[member, :, 3 * number] = squares(seen_by(camera, places))
        if self.fault == "flat":
            return found[0]
        if self.fault == "nan":
            found[0, 0, 0, 0, 0] = np.nan
        if self.fault == "text":
            return found.astype(str)
        if self.fault == "grain":  # in the blue that nothing has
            found[:, :, 2] += np.arange(self.code_members)[:, None, None, None] * 0.25
        return found


class Echo(Video):
    """Says of what it was asked: codes of one cell."""

    cameras, code_members = ("top",), 1

    def __init__(self):
        super().__init__(code_members=1)
        self.code_shape = (1, 1, 1)

    def predict_codes(self, now, past, reference, state, after, actions, steps):
        facts = state[:, 0] + 10.0 * after[:, 0] + 100.0 * actions[:, 0, 0] + 1000.0 * steps
        return (now + 2.0 * past + 3.0 * reference)[None] + facts[:, None, None, None]


def halfway():
    """Returns a model that names cameras, but shows nothing."""
    model = Video()
    del model.code_members
    return model


def misnamed():
    """Returns a model that names a camera, but no list of them."""
    model = Video()
    vars(model)["cameras"] = "top"
    return model


class Still(Video):
    """A robot that nothing moves, of any state; its codes are coarse pictures of one camera."""

    def __init__(self, **own):
        super().__init__(code_members=1, fault="still", **own)
        self.code_shape = (3, PIXELS // 8, PIXELS // 8)

    def predict(self, state, past_state, past_action, has_past, actions, steps):
        mean = np.stack([state + 0.001 * member for member in range(self.members)])
        return mean, np.full_like(mean, 0.001)

    def encode(self, pictures):
        return super().encode(pictures).reshape(-1, 3, PIXELS // 8, 8, PIXELS // 8, 8).mean(axis=(3, 5))

    def decode(self, codes):
        return super().decode(codes.repeat(8, axis=2).repeat(8, axis=3))


def blind():
    return Video(cameras=())
