"""The logs of runs, read by the programs that they are for: TensorBoard and W&B."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import plimsoll
from plimsoll.run_file import RunFile, RunSection

#: The documentation of the logs.
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "logging.md"

#: The processor, with one thread. Runs on it are deterministic here, so that nothing is measured before they start.
DEVICES = "cpu=1GiB"

#: The built-in example, shorter.
RUN_FILE = f"""
[model]
path = "example:sums"
init = "random"
[data]
train = "example:sums"
eval = "example:sums"
format = "tokens"
sequence = 12
pack = false
[train]
steps = 12
batch_tokens = 1536
eval_every = 5
[run]
devices = "{DEVICES}"
deterministic = true
threads = 1
"""


def to_f32(number: float) -> float:
    """Rounds a number to the 32 bits that TensorBoard stores."""
    return cast(float, struct.unpack("<f", struct.pack("<f", number))[0])


def run_with(folder: Path, steps: int = 12) -> list[dict[str, Any]]:
    """Trains in a folder and returns the events."""
    sections: RunFile = {
        "train": {"steps": steps, "eval_every": 5, "save_every": 4},
        "run": {"dir": folder, "devices": DEVICES, "threads": 1, "deterministic": True},
        "watch": {"tensorboard": True},
    }
    plimsoll.train(**sections)
    return events(folder)


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Reads all event files of a run with TensorBoard: for each name its steps, numbers and times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    read = {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}
    return {tag: [(point.step, point.value, point.wall_time) for point in points] for tag, points in read.items()}


def test_tensorboard_reads_the_numbers_of_the_events(tmp_path: Path) -> None:
    log = run_with(tmp_path / "run")
    read = scalars(tmp_path / "run")
    steps = [event for event in log if event["event"] == "step"]
    assert len(steps) == 12
    for tag, key in [("train/loss", "loss"), ("train/grad_norm", "norm"), ("train/learning_rate", "learning_rate")]:
        assert read[tag] == [(event["step"], to_f32(event[key]), event["time"]) for event in steps], tag
    rates = [to_f32(event["tokens"] / event["seconds"]) for event in steps]
    assert [value for _, value, _ in read["train/train_tokens_per_second"]] == rates
    evaluations = [event for event in log if event["event"] == "evaluation"]
    assert len(evaluations) == 3
    for tag, key in [("eval/loss", "loss"), ("eval/runtime", "seconds"), ("eval/exact_match", "exact_match")]:
        assert [point[:2] for point in read[tag]] == [(event["step"], to_f32(event[key])) for event in evaluations], tag


def test_tensorboard_reads_epochs_and_memory(tmp_path: Path) -> None:
    log = run_with(tmp_path / "run")
    read = scalars(tmp_path / "run")
    checkpoint = json.loads(next((tmp_path / "run/checkpoints").glob("step-12/checkpoint.json")).read_text())
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    batch = plan["planned_for"]["batch_tokens"] // plan["planned_for"]["sequence"]
    epochs = [(step, to_f32(step * batch / checkpoint["rows"])) for step in range(1, 13)]
    for (step, value), (read_step, read_value, _) in zip(epochs, read["train/epoch"], strict=True):
        assert step == read_step and value == pytest.approx(read_value, rel=1e-6)
    measured = [event for event in log if event["event"] == "step" and event.get("memory")]
    assert measured
    for planned in plan["devices"]:
        name = planned["name"]
        held = [(event["step"], to_f32(memory["held_bytes"]))
                for event in measured for memory in event["memory"] if memory["device"] == name]
        assert [point[:2] for point in read[f"memory/{name}/held_bytes"]] == held
        for tag, key in [("predicted_peak_bytes", "peak_bytes"), ("load_line_bytes", "budget_bytes")]:
            assert {value for _, value, _ in read[f"memory/{name}/{tag}"]} == {to_f32(planned[key])}


def test_resumed_run_repeats_no_step_in_tensorboard(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run_with(folder)
    # As after a kill at step 12, when the newest checkpoint was that of step 8.
    for name in ["result.json", "model", "checkpoints/step-12"]:
        path = folder / name
        path.unlink() if path.is_file() else subprocess.run(["rm", "-r", str(path)], check=True)
    plimsoll.train(resume=folder)
    log = events(folder)
    assert [event["step"] for event in log[len(first):] if event["event"] == "step"] == [9, 10, 11, 12]
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert [step for step, _, _ in scalars(folder)["train/loss"]] == list(range(1, 13))


def test_cut_event_file_is_read_up_to_the_cut(tmp_path: Path) -> None:
    run_with(tmp_path / "run")
    file = next((tmp_path / "run/tensorboard").iterdir())
    whole = file.read_bytes()
    losses = scalars(tmp_path / "run")["train/loss"]
    for kept in range(len(whole) // 2, len(whole), 97):
        file.write_bytes(whole[:kept])
        read = scalars(tmp_path / "run")["train/loss"]
        assert 0 < len(read) <= 12 and read == losses[:len(read)], kept


def test_warnings_of_logs_reach_on_event(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tensorboard").write_text("no folder")
    seen: list[str] = []

    def on_event(event: Any) -> None:
        if event["event"] == "warning":
            seen.append(event["message"])

    run: RunSection = {"dir": folder, "devices": DEVICES, "threads": 1, "deterministic": True}
    plimsoll.train(on_event=on_event, train={"steps": 3}, run=run, watch={"tensorboard": True})
    assert [message for message in seen if "without TensorBoard's event files" in message] == seen[-1:]
    assert not any("TensorBoard" in line for line in (folder / "events.jsonl").read_text().splitlines())


def wandb_records(file: Path) -> Iterator[Any]:
    """Reads the records of an offline run of W&B: a log in the format of LevelDB, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7:place + 7 + length]
        place += 7 + length
        # Kinds: 1 whole, 2 first, 3 middle, 4 last part of a record.
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def documented_hook() -> str:
    """Returns the code for W&B in the documentation."""
    section = DOCUMENTATION.read_text().split("## Weights & Biases")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found
    return textwrap.dedent(found[1])


def test_documented_hook_logs_to_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in [("MODE", "offline"), ("SILENT", "true"), ("DIR", str(tmp_path)), ("CONSOLE", "off")]:
        monkeypatch.setenv(f"WANDB_{name}", value)
    Path("run.toml").write_text(RUN_FILE)
    exec(compile(documented_hook(), str(DOCUMENTATION), "exec"), {})
    import wandb

    # Ends the process of W&B, which writes the file.
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = [record.history for record in wandb_records(file) if record.HasField("history")]
    logged = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]
    log = events(tmp_path / "runs/run")
    steps = {event["step"]: event for event in log if event["event"] == "step"}
    trained = [row for row in logged if "train/loss" in row]
    assert [row["train/global_step"] for row in trained] == list(range(1, 13))
    for row in trained:
        event = steps[row["train/global_step"]]
        assert (row["train/loss"], row["train/grad_norm"]) == (event["loss"], event["norm"])
        assert row["train/learning_rate"] == event["learning_rate"]
        assert row["train/train_tokens_per_second"] == event["tokens"] / event["seconds"]
    losses = {event["step"]: event["loss"] for event in log if event["event"] == "evaluation"}
    assert {row["train/global_step"]: row["eval/loss"] for row in logged if "eval/loss" in row} == losses

