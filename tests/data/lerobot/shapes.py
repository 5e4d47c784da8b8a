"""Datasets as strangers make them, small, and a plain reading of everything that is in one."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.writer import DatasetWriter
from tests.data.conftest import without_checksums

LENGTHS = (7, 5, 9, 4)
TASKS = ("reach the cube", "lift it", "put it down")
SUBTASKS = ("approach", "grasp", "carry")
CLOCK = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_DATA = "data/chunk-000/file-000.parquet"
_EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def ours(folder: Path, made: Callable[..., Episode], **options: Any) -> Path:
    """Four episodes of two instructions in one data file, and one video for each camera."""
    options = {"size": (16, 24), **options}
    episodes = [made(n, seed=s, instruction=TASKS[s % 2], **options) for s, n in enumerate(LENGTHS)]
    with DatasetWriter(folder, episodes[0].meta, episodes[0].features()) as writer:
        writer.write_all(episodes)
    return folder


def plain(folder: Path, made: Callable[..., Episode]) -> Path:
    """The same with what LeRobot records, and no more: no ends, no rewards, nothing of ours."""
    without_checksums(ours(folder, made, cameras=("front.rgb",)))
    for name in ("final", "meta/robot_rl.json"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    change_info(
        folder, lambda f: {n: f[n] for n in f if n in (*CLOCK, "action") or n.startswith("observation.")}
    )
    change(folder / _DATA, lambda t: t.select([n for n in t.column_names if n in features(folder)]))
    change(folder / _EPISODES, lambda t: t.drop_columns(["device", "store_episode"]))
    return folder


def many_tasks(folder: Path, made: Callable[..., Episode]) -> Path:
    """The instruction changes inside every episode: row r of an episode has number (r // 3) % 3."""
    plain(folder, made)
    table = pq.read_table(folder / _DATA)
    numbers = (table["frame_index"].to_numpy() // 3) % 3
    change(folder / _DATA, lambda t: put(t, "task_index", numbers))
    change(folder / "meta/tasks.parquet", lambda t: words("task", TASKS))
    listed = [list(TASKS[: min(3, -(-length // 3))]) for length in LENGTHS]
    change(folder / _EPISODES, lambda t: put(t, "tasks", pa.array(listed)))
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**info, "total_tasks": 3}))
    return folder


def no_tasks(folder: Path, made: Callable[..., Episode]) -> Path:
    """As LeRobot's convert_image_to_video leaves it: meta/episodes does not list the instructions."""
    plain(folder, made)
    change(folder / _EPISODES, lambda t: t.drop_columns(["tasks"]))
    return folder


def annotated(folder: Path, made: Callable[..., Episode]) -> Path:
    """Subtasks, strings, lists of structs, columns and files that nobody here knows."""
    many_tasks(folder, made)
    rows = sum(LENGTHS)
    language = [
        [{"role": "user", "content": f"row {row}", "timestamp": row / 20}] * (row % 3) for row in range(rows)
    ]
    new = {
        "subtask_index": pa.array(np.arange(rows) % 4 - 1, pa.int64()),  # -1: none
        "note": pa.array([f"note {row}" for row in range(rows)]),
        "observation.comment": pa.array([f"comment {row}" for row in range(rows)]),
        "language_persistent": pa.array(language),
        "quality": pa.array(np.arange(rows) / 7, pa.float64()),
    }
    dtypes = {"subtask_index": "int64", "language_persistent": "language", "quality": "float64"}
    entries = {n: {"dtype": dtypes.get(n, "string"), "shape": [1], "names": None} for n in new}
    change_info(folder, lambda f: {**f, **entries})

    def widened(table: Any) -> Any:
        for name, column in new.items():
            table = table.append_column(name, column)
        return table.append_column("undeclared", pa.array([f"u{row}" for row in range(rows)]))

    change(folder / _DATA, widened)
    change(folder / _EPISODES, lambda t: t.append_column("operator", pa.array(list("abcd"))))
    pq.write_table(words("subtask", SUBTASKS), folder / "meta/subtasks.parquet")
    lines = [json.dumps({"episode_index": e, "text": f"of {e}"}) + "\n" for e in (0, 0, 2, 3)]
    (folder / "meta/annotations.jsonl").write_text("".join(lines))
    pq.write_table(pa.table({"episode_index": [3, 1], "grade": [0.3, 0.1]}), folder / "meta/grades.parquet")
    (folder / "meta/modality.json").write_text('{"state": {"arm": [0, 3]}}')
    (folder / "README.md").write_text("Recorded in Lyon.")
    (folder / "masks").mkdir()
    for episode in range(4):
        (folder / f"masks/episode_{episode:06d}.bin").write_bytes(bytes([episode] * 5))
    return folder


def version_21(folder: Path, made: Callable[..., Episode]) -> Path:
    """Version 2.1 whose episodes are numbered from 5 and rows from 1000; the tasks change within episodes."""
    source = annotated(folder.with_name(f"{folder.name}-v3"), made)
    found = Dataset(source)
    info = json.loads((source / "meta/info.json").read_text()) | {
        "codebase_version": "v2.1",
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "splits": {"train": "5:9"},
    }
    (folder / "meta").mkdir(parents=True)
    table = pq.read_table(source / _DATA)
    table = put(table, "episode_index", table["episode_index"].to_numpy() + 5)
    table = put(table, "index", table["index"].to_numpy() + 1000)
    lines: list[Any] = []
    for number, length in enumerate(LENGTHS):
        path = folder / f"data/chunk-000/episode_{number + 5:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(sum(LENGTHS[:number]), length), path)
        lines.append(
            {"episode_index": number + 5, "tasks": list(TASKS), "length": length, "operator": "abcd"[number]}
        )
        video = folder / f"videos/chunk-000/observation.images.front/episode_{number + 5:06d}.mp4"
        video.parent.mkdir(parents=True, exist_ok=True)
        write_video(video, found.frames("front.rgb", number, range(length)))
    tasks = [{"task_index": number, "task": text} for number, text in enumerate(TASKS)]
    for name, content in (("episodes", lines), ("tasks", tasks)):
        (folder / f"meta/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    marks = [{"episode_index": e + 5, "text": f"of {e}"} for e in (0, 0, 2, 3)]
    (folder / "meta/annotations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in marks))
    (folder / "meta/info.json").write_text(json.dumps(info))
    shutil.copyfile(source / "meta/subtasks.parquet", folder / "meta/subtasks.parquet")
    (folder / "README.md").write_text("Recorded in Lyon.")
    return folder


SHAPES: dict[str, Callable[[Path, Callable[..., Episode]], Path]] = {
    "ours": lambda folder, made: ours(folder, made, depth=True),
    "no cameras": lambda folder, made: ours(folder, made, cameras=()),
    "many tasks": many_tasks,
    "no tasks": no_tasks,
    "annotated": annotated,
    "version 2.1": version_21,
}


# --- a plain reading -------------------------------------------------------------------------------


def contents(folder: Path) -> list[dict[str, Any]]:
    """Returns everything that is known of every episode, read with pyarrow alone but for the pictures."""
    paths = sorted((folder / "data").rglob("*.parquet"))
    table = pa.concat_tables([pq.read_table(path) for path in paths], promote_options="permissive")
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        rows.setdefault(row["episode_index"], []).append(row)
    texts = {"task_index": texts_of(folder, "task"), "subtask_index": texts_of(folder, "subtask")}
    dataset = Dataset(folder)
    found: list[dict[str, Any]] = []
    for place, (number, steps) in enumerate(sorted(rows.items())):
        columns = {
            name: [texts[name].get(s[name], s[name]) if name in texts else s[name] for s in steps]
            for name in table.column_names
            if name not in ("episode_index", "index")
        }
        read = dataset.read(place)
        found.append(
            {
                **columns,
                "pictures": {camera: read.obs[camera][:] for camera in dataset.cameras},
                "depth": np.array(read.obs["front.depth"]) if "front.depth" in read.obs else None,
                "final": read.final_obs,
                "first instruction": read.meta.instruction,
                "operator": row_of_episode(folder, number).get("operator"),
                "annotations": marks_of(folder, number),
                "files": files_of(folder, number),
            }
        )
    return found


def assert_same(got: list[dict[str, Any]], want: Sequence[dict[str, Any]]) -> None:
    assert len(got) == len(want)
    for one, two in zip(got, want, strict=True):
        assert one.keys() == two.keys()
        for name, value in two.items():
            np.testing.assert_equal(one[name], value, name)


def texts_of(folder: Path, name: str) -> dict[int, str]:
    path = folder / f"meta/{name}s.parquet"
    if path.is_file():
        table = pq.read_table(path)
        return dict(zip(table[f"{name}_index"].to_pylist(), table[name].to_pylist(), strict=True))
    path = folder / f"meta/{name}s.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {line[f"{name}_index"]: line[name] for line in lines}


def row_of_episode(folder: Path, number: int) -> dict[str, Any]:
    if (folder / "meta/episodes.jsonl").is_file():
        rows = [json.loads(line) for line in (folder / "meta/episodes.jsonl").read_text().splitlines()]
    else:
        rows = [
            r for p in (folder / "meta/episodes").rglob("*.parquet") for r in pq.read_table(p).to_pylist()
        ]
    return next(row for row in rows if row["episode_index"] == number)


def marks_of(folder: Path, number: int) -> list[Any]:
    found: list[Any] = []
    if (folder / "meta/annotations.jsonl").is_file():
        lines = [json.loads(line) for line in (folder / "meta/annotations.jsonl").read_text().splitlines()]
        found += [line["text"] for line in lines if line["episode_index"] == number]
    if (folder / "meta/grades.parquet").is_file():
        rows = pq.read_table(folder / "meta/grades.parquet").to_pylist()
        found += [row["grade"] for row in rows if row["episode_index"] == number]
    return found


def files_of(folder: Path, number: int) -> list[bytes]:
    paths = [folder / f"masks/episode_{number:06d}.bin", folder / "README.md", folder / "meta/modality.json"]
    return [path.read_bytes() for path in paths if path.is_file()]


# --- small changes ---------------------------------------------------------------------------------


def features(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta/info.json").read_text())["features"]


def change_info(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**info, "features": edit(info["features"])}))


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Writes a parquet file anew with a change, with the row groups it had."""
    pq.write_table(edit(pq.read_table(path)), path)


def put(table: Any, name: str, values: Any) -> Any:
    column = values if isinstance(values, pa.Array) else pa.array(values, table.schema.field(name).type)
    return table.set_column(table.column_names.index(name), name, column)


def words(name: str, texts: Sequence[str]) -> Any:
    """A table of texts as pandas writes it: the text is the index."""
    from robot_rl.data.lerobot.texts import tasks_of

    table = tasks_of(dict(enumerate(texts)))
    renamed = table.rename_columns([f"{name}_index", name])
    metadata = {k: v.replace(b'"task', f'"{name}'.encode()) for k, v in table.schema.metadata.items()}
    return renamed.replace_schema_metadata(metadata)


def write_video(path: Path, pictures: Any) -> None:
    from robot_rl.data.lerobot.encode import VideoCodec, VideoFile

    file = VideoFile(path, pictures.shape[1:], 20, VideoCodec())
    for picture in pictures:
        file.add(picture)
    file.finish()


def odd(folder: Path, made: Callable[..., Episode]) -> Path:
    """Version 2.1 with other names: `actions`, `state`, pictures `cam_high`, and its videos in `video/`."""
    source = version_21(folder.with_name(f"{folder.name}-even"), made)
    names = {"action": "actions", "observation.state": "state", "observation.images.front": "cam_high"}
    shutil.copytree(source, folder)
    change_info(folder, lambda f: {names.get(n, n): entry for n, entry in f.items()})
    for path in (folder / "data").rglob("*.parquet"):
        change(path, lambda t: t.rename_columns([names.get(n, n) for n in t.column_names]))
    (folder / "videos").rename(folder / "video")
    (folder / "video/chunk-000/observation.images.front").rename(folder / "video/chunk-000/cam_high")
    return folder


RENAME = {
    "actions": "action",
    "state": "observation.state",
    "cam_high": "observation.images.cam_high",
    "video": "videos",
}
"""What makes the names of `odd` LeRobot's."""
