"""The calls, from Python, on a run that takes seconds; what they say is what the command line says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import plimsoll
from plimsoll import _native, results
from plimsoll.run_file import RunFile, settings
from shapes import wrong

MIB = 1 << 20
PAPER: RunFile = {"model": {"preset": "smollm2-360m"}, "run": {"devices": "rtx3070"}}


def example(folder: Path, steps: int = 6, line: str = "400MiB") -> RunFile:
    """The built-in example, on one thread."""
    return {
        "train": {"steps": steps, "warmup_steps": 2},
        "run": {"dir": folder, "devices": f"cpu={line}", "threads": 1},
    }


def test_a_plan_has_the_names_and_types_that_are_written_down() -> None:
    one = plimsoll.plan(**PAPER, explain=True)
    assert wrong(one, results.Plan) == []
    assert one["fits"] and one["ladder"]
    team = plimsoll.plan(model={"preset": "llama-3.2-1b"}, run={"devices": "rtx3090,rtx3070,host=64GiB"}, explain=True)
    assert wrong(team, results.Plan) == []
    none = plimsoll.plan(model={"preset": "llama-2-13b"}, run={"devices": "rtx3070"})
    assert wrong(none, results.Plan) == []
    assert not none["fits"]


def test_a_plan_is_the_command_lines(command: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text('[model]\npreset = "smollm2-135m"\n[run]\ndevices = "rtx3070"\n')
    words = [str(command), "plan", str(run_file), "--set", "data.sequence=512", "--json"]
    said = subprocess.run(words, capture_output=True, check=True, timeout=60).stdout
    assert plimsoll.plan(run_file, data={"sequence": 512}) == json.loads(said)


def test_settings_are_toml_whatever_they_hold() -> None:
    given: RunFile = {
        "model": {"path": Path("a \"b\"\\c\u00fc\U0001f600")},
        "data": {"train": ["x.jsonl", Path("y.jsonl")], "pack": False},
        "train": {"learning_rate": 1e-5, "betas": (0.9, 0.95)},
    }
    assert settings(given) == [
        'model.path="a \\"b\\"\\\\cü😀"',
        'data.train=["x.jsonl", "y.jsonl"]',
        "data.pack=false",
        "train.learning_rate=1e-05",
        "train.betas=[0.9, 0.95]",
    ]
    with pytest.raises(plimsoll.InputError, match="a \"b\""):
        plimsoll.plan(**given)


def test_training_tells_its_events_and_leaves_what_the_folder_says(tmp_path: Path) -> None:
    events: list[results.Event] = []
    threads = set()
    beside = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal beside
        while not ended.wait(0.001):
            beside += 1

    def see(event: results.Event) -> None:
        events.append(event)
        threads.add(threading.get_ident())

    counter = threading.Thread(target=count)
    counter.start()
    trained = plimsoll.train(**example(tmp_path / "run"), on_event=see)
    ended.set()
    counter.join()
    assert wrong(trained, results.Trained) == []
    assert trained["result"] == json.loads((tmp_path / "run" / "result.json").read_text())
    assert trained["result"]["status"] == "done" and trained["samples"]
    assert trained["model"] == str(tmp_path / "run" / "model") and trained["folder"] == str(tmp_path / "run")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert events == [json.loads(line) for line in lines]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 7))
    assert threads == {threading.get_ident()}, "events come where the call was made"
    # While it trains, other threads of the interpreter run.
    assert beside > 10


def test_who_answers_false_stops_the_run_and_it_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped = plimsoll.train(**example(folder, steps=400), on_event=lambda event: event["event"] != "step")
    assert stopped["result"]["status"] == "stopped" and stopped["model"] is None
    done = stopped["result"]["steps"]
    assert 1 <= done < 400
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{done}"]
    events: list[results.Event] = []

    def one_step(event: results.Event) -> bool:
        events.append(event)
        return bool(event["event"] != "step")

    again = plimsoll.train(resume=folder, on_event=one_step)
    assert events[0]["event"] == "start" and events[0]["step"] == done + 1
    assert again["result"]["steps"] > done


def test_what_a_callback_raises_comes_out_when_all_is_saved(tmp_path: Path) -> None:
    def fails(event: results.Event) -> None:
        if event["event"] == "step":
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        plimsoll.train(**example(tmp_path / "run", steps=400), on_event=fails)
    assert list((tmp_path / "run" / "checkpoints").iterdir())


INTERRUPTED = """
import signal, sys, plimsoll
# What is started in the background may have been told to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
def see(event):
    if event["event"] == "step": print("step", flush=True)
try:
    plimsoll.train(train={"steps": 100000}, run={"dir": sys.argv[1], "devices": "cpu=400MiB", "threads": 1}, on_event=see)
except KeyboardInterrupt as interrupt:
    print("interrupted:", interrupt, flush=True)
"""


def test_an_interrupt_is_raised_when_all_is_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [sys.executable, "-c", INTERRUPTED, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        process.send_signal(signal.SIGINT)
        last = process.stdout.read().splitlines()[-1]
    assert process.returncode == 0
    assert last == f'interrupted: stopped and saved; it goes on with plimsoll.train(resume="{folder}")'
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert json.loads((folder / "result.json").read_text())["steps"] == int(checkpoint.name.removeprefix("step-"))


def test_failures_are_the_command_lines(command: Path, tmp_path: Path) -> None:
    def said(*words: str | Path) -> tuple[int, str]:
        ended = subprocess.run([command, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        return ended.returncode, ended.stderr.removeprefix("error: ").rstrip("\n")

    with pytest.raises(plimsoll.InputError) as wrong_key:
        plimsoll.plan(model={"preset": "smollm2-135m", "pth": "x"})  # type: ignore[typeddict-unknown-key]
    assert said("plan", "--model", "smollm2-135m", "--set", "model.pth=x") == (2, str(wrong_key.value))
    assert (wrong_key.value.exit_code, wrong_key.value.message, wrong_key.value.hints) == (
        2,
        "command line: unknown key `model.pth`",
        ["did you mean `model.path`?"],
    )
    with pytest.raises(plimsoll.InputError, match="is no run folder"):
        plimsoll.train(resume=tmp_path)
    with pytest.raises(plimsoll.InputError, match="no run is under way here"):
        plimsoll.budget(tmp_path, "1GiB")


def test_what_does_not_fit_comes_with_arguments_that_do(tmp_path: Path) -> None:
    tight: RunFile = {"train": {"steps": 2}, "run": {"dir": tmp_path / "run", "devices": "virtual:a=22MiB@0.5", "fallback": "none"}}
    with pytest.raises(plimsoll.DoesNotFit) as refused:
        plimsoll.train(**tight)
    assert refused.value.exit_code == 3
    assert refused.value.message.startswith("does not fit: the smallest recipe holds ")
    assert not (tmp_path / "run" / "run.toml").exists()
    # What the process holds counts, and it holds more with every try: then the line is named anew.
    for _ in range(3):
        hint = next(hint for hint in refused.value.hints if hint.startswith("it fits from "))
        given: RunFile = eval(f"dict({hint.partition(': ')[2]})")
        try:
            trained = plimsoll.train(train=tight["train"], run={**tight["run"], **given["run"]})
            break
        except plimsoll.DoesNotFit as again:
            refused.value.hints[:] = again.hints
    assert trained["result"]["status"] == "done"


def test_the_line_of_a_run_is_moved(tmp_path: Path) -> None:
    moved: list[results.Moved] = []
    asked = threading.Thread(target=lambda: moved.append(plimsoll.budget(tmp_path / "run", "390MiB")))

    def see(event: results.Event) -> bool:
        if event["event"] == "step" and not asked.ident:
            asked.start()
        return not moved

    plimsoll.train(**example(tmp_path / "run", steps=100_000), on_event=see, save=False)
    asked.join()
    assert moved[0]["budget_bytes"] == 390 * MIB
    assert wrong(moved[0], results.Moved) == []


def test_the_best_batch_is_the_plans() -> None:
    (best,) = plimsoll.best_batch(**PAPER)
    planned = plimsoll.plan(**PAPER)
    assert best["micro_batch"] == planned["recipe"]["micro_batch"]
    assert best["peak_bytes"] == planned["devices"][0]["peak_bytes"] <= best["budget_bytes"]
    team = plimsoll.best_batch(model={"preset": "smollm2-360m"}, run={"devices": "rtx3090,rtx3070"})
    assert [member["device"] for member in team] == ["rtx3090", "rtx3070"]
    assert sum(member["sequences"] for member in team) == 65536 // 1024
    with pytest.raises(plimsoll.DoesNotFit, match="the smallest recipe holds") as refused:
        plimsoll.best_batch(model={"preset": "llama-2-13b"}, run={"devices": "rtx3070"})
    assert any('run={"devices": "rtx3070,host=' in hint for hint in refused.value.hints), refused.value.hints


def test_the_devices_are_this_machines() -> None:
    machine = plimsoll.devices()
    assert wrong(machine, results.Machine) == []
    assert machine["devices"][0]["name"] == "cpu"


def test_a_share_holds_what_it_is_given_and_no_more() -> None:
    hold = _native.Hold(64 * MIB)
    hold.take(40 * MIB)
    assert hold.held_bytes() == 40 * MIB
    with pytest.raises(plimsoll.DoesNotFit, match=r"25.00 MiB were asked for, and 24.00 MiB are left of a share of 64.00 MiB"):
        hold.take(25 * MIB)
    hold.take(24 * MIB)
    hold.release()
    assert hold.held_bytes() == 0


def test_work_is_done_beside_other_threads() -> None:
    began = time.monotonic()
    threads = [threading.Thread(target=_native.product_flops, args=(1, 0.5)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # One after the other they would take as long as both.
    assert time.monotonic() - began < 60
