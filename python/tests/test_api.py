"""The Python functions on runs that take seconds, compared with the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import plimsoll
from plimsoll import _native, results
from plimsoll.run_file import RunFile, settings
from shapes import type_errors

MIB = 1 << 20
PAPER: RunFile = {"model": {"preset": "smollm2-360m"}, "run": {"devices": "rtx3070"}}


def example(folder: Path, steps: int = 6, line: str = "400MiB") -> RunFile:
    """Returns the sections of the built-in example on one thread."""
    return {
        "train": {"steps": steps, "warmup_steps": 2},
        "run": {"dir": folder, "devices": f"cpu={line}", "threads": 1},
    }


def test_plan_matches_its_declared_types() -> None:
    one = plimsoll.plan(**PAPER, explain=True)
    assert type_errors(one, results.Plan) == []
    assert one["fits"] and one["ladder"]
    team = plimsoll.plan(model={"preset": "llama-3.2-1b"}, run={"devices": "rtx3090,rtx3070,host=64GiB"}, explain=True)
    assert type_errors(team, results.Plan) == []
    none = plimsoll.plan(model={"preset": "llama-2-13b"}, run={"devices": "rtx3070"})
    assert type_errors(none, results.Plan) == []
    assert not none["fits"]


def test_plan_equals_command_line_plan(command: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text('[model]\npreset = "smollm2-135m"\n[run]\ndevices = "rtx3070"\n')
    words = [str(command), "plan", str(run_file), "--set", "data.sequence=512", "--json"]
    said = subprocess.run(words, capture_output=True, check=True, timeout=60).stdout
    assert plimsoll.plan(run_file, data={"sequence": 512}) == json.loads(said)


def test_settings_are_written_as_toml() -> None:
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
    mixture: RunFile = {"data": {"source": [{"path": Path("z"), "weight": 0.5}, {"path": ["x", "y"], "weight": 2}]}}
    assert settings(mixture) == [
        'data.source=[{"path" = "z", "weight" = 0.5}, {"path" = ["x", "y"], "weight" = 2}]'
    ]


def test_functions_reward_completions(tmp_path: Path) -> None:
    """A function of a file, and one of the script that trains."""
    plimsoll.train(**example(tmp_path / "first", steps=2))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number}+1=", "answer": "1"}) + "\n" for number in range(8)))
    script = tmp_path / "script.py"
    script.write_text(
        "import plimsoll, sys\n"
        "def starts_with(completions, answer):\n"
        "    return [float(text.startswith(start)) for text, start in zip(completions, answer)]\n"
        "def train():\n"
        "    return plimsoll.train(\n"
        f"        model={{'path': {str(tmp_path / 'first' / 'model')!r}}}, data={{'train': {str(prompts)!r}}},\n"
        "        train={'objective': 'grpo', 'steps': 2, 'learning_rate': 1e-4, 'warmup_steps': 0},\n"
        "        grpo={'rewards': [starts_with], 'num_generations': 4, 'prompts_per_step': 2, 'max_prompt_length': 8,\n"
        "              'max_completion_length': 8},\n"
        "        run={'dir': __file__ + '.run', 'devices': 'cpu=400MiB', 'threads': 1})\n"
        "if __name__ == '__main__' or 'unguarded' in __file__:\n"
        "    print(train()['result']['status'])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr
    lines = [json.loads(line) for line in (tmp_path / "script.py.run" / "rounds" / "round-1.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert [line["rewards"] for line in lines] == [[float(line["completion"].startswith("1"))] for line in lines]

    # A script that trains whenever it is imported would train within itself.
    unguarded = script.rename(tmp_path / "unguarded.py")
    done = subprocess.run([sys.executable, unguarded], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "imported for its reward functions, and trains" in done.stderr, done.stderr

    def inner(completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    for function in (inner, lambda completions: [0.0 for _ in completions], len):
        with pytest.raises(plimsoll.InputError, match="cannot be imported from a file"):
            settings({"grpo": {"rewards": [function]}})


def test_train_delivers_events_and_returns_folder_content(tmp_path: Path) -> None:
    events: list[results.Event] = []
    threads = set()
    count_meanwhile = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal count_meanwhile
        while not ended.wait(0.001):
            count_meanwhile += 1

    def see(event: results.Event) -> None:
        events.append(event)
        threads.add(threading.get_ident())

    counter = threading.Thread(target=count)
    counter.start()
    trained = plimsoll.train(**example(tmp_path / "run"), on_event=see)
    ended.set()
    counter.join()
    assert type_errors(trained, results.Trained) == []
    assert [line for event in events for line in type_errors(event, results.Event)] == []
    assert trained["result"] == json.loads((tmp_path / "run" / "result.json").read_text())
    assert trained["result"]["status"] == "done" and trained["samples"]
    assert trained["model"] == str(tmp_path / "run" / "model") and trained["folder"] == str(tmp_path / "run")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert events == [json.loads(line) for line in lines]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 7))
    assert threads == {threading.get_ident()}, "events are delivered in the calling thread"
    # Other threads of the interpreter run during training.
    assert count_meanwhile > 10


def test_callback_returning_false_stops_run_resumably(tmp_path: Path) -> None:
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


def test_callback_exception_is_raised_after_saving(tmp_path: Path) -> None:
    def fails(event: results.Event) -> None:
        if event["event"] == "step":
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        plimsoll.train(**example(tmp_path / "run", steps=400), on_event=fails)
    assert list((tmp_path / "run" / "checkpoints").iterdir())


INTERRUPTED = """
import signal, sys, plimsoll
# Background processes may ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
def see(event):
    if event["event"] == "step": print("step", flush=True)
try:
    plimsoll.train(train={"steps": 100000}, run={"dir": sys.argv[1], "devices": "cpu=400MiB", "threads": 1}, on_event=see)
except KeyboardInterrupt as interrupt:
    print("interrupted:", interrupt, flush=True)
"""


def test_interrupt_is_raised_after_saving(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [sys.executable, "-c", INTERRUPTED, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        process.send_signal(signal.SIGINT)
        last = process.stdout.read().splitlines()[-1]
    assert process.returncode == 0
    assert last == f'interrupted: stopped and saved; to resume: plimsoll.train(resume="{folder}")'
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert json.loads((folder / "result.json").read_text())["steps"] == int(checkpoint.name.removeprefix("step-"))


def test_failures_match_command_line(command: Path, tmp_path: Path) -> None:
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
    with pytest.raises(plimsoll.InputError, match="no run is active in this folder"):
        plimsoll.budget(tmp_path, "1GiB")


def test_refusal_hints_are_arguments_that_fit(tmp_path: Path) -> None:
    tight: RunFile = {"train": {"steps": 2}, "run": {"dir": tmp_path / "run", "devices": "virtual:a=22MiB@0.5", "fallback": "none"}}
    with pytest.raises(plimsoll.DoesNotFit) as refused:
        plimsoll.train(**tight)
    assert refused.value.exit_code == 3
    assert refused.value.message.startswith("does not fit: the smallest recipe holds ")
    assert not (tmp_path / "run" / "run.toml").exists()
    # The memory of this process counts and may grow with each attempt. Then the new refusal has new hints.
    for _ in range(3):
        hint = next(hint for hint in refused.value.hints if hint.startswith("it fits from "))
        given: RunFile = eval(f"dict({hint.partition(': ')[2]})")
        try:
            trained = plimsoll.train(train=tight["train"], run={**tight["run"], **given["run"]})
            break
        except plimsoll.DoesNotFit as again:
            refused.value.hints[:] = again.hints
    assert trained["result"]["status"] == "done"


def test_budget_changes_load_line_of_running_run(tmp_path: Path) -> None:
    moved: list[results.BudgetChange] = []
    asked = threading.Thread(target=lambda: moved.append(plimsoll.budget(tmp_path / "run", "390MiB")))

    def see(event: results.Event) -> bool:
        if event["event"] == "step" and not asked.ident:
            asked.start()
        return not moved

    plimsoll.train(**example(tmp_path / "run", steps=100_000), on_event=see, save=False)
    asked.join()
    assert moved[0]["budget_bytes"] == 390 * MIB
    assert type_errors(moved[0], results.BudgetChange) == []


def test_best_batch_equals_plan() -> None:
    (best,) = plimsoll.best_batch(**PAPER)
    planned = plimsoll.plan(**PAPER)
    assert best["micro_batch"] == planned["recipe"]["micro_batch"]
    assert best["peak_bytes"] == planned["devices"][0]["peak_bytes"] <= best["budget_bytes"]
    team = plimsoll.best_batch(model={"preset": "smollm2-360m"}, run={"devices": "rtx3090,rtx3070"})
    assert [worker["device"] for worker in team] == ["rtx3090", "rtx3070"]
    assert sum(worker["sequences"] for worker in team) == 65536 // 1024
    with pytest.raises(plimsoll.DoesNotFit, match="the smallest recipe holds") as refused:
        plimsoll.best_batch(model={"preset": "llama-2-13b"}, run={"devices": "rtx3070"})
    assert any('run={"devices": "rtx3070,host=' in hint for hint in refused.value.hints), refused.value.hints


def test_devices_match_their_declared_types() -> None:
    machine = plimsoll.devices()
    assert type_errors(machine, results.Machine) == []
    assert machine["devices"][0]["name"] == "cpu"


def test_memory_hold_refuses_more_than_its_limit() -> None:
    hold = _native.MemoryHold(64 * MIB)
    hold.take(40 * MIB)
    assert hold.held_bytes() == 40 * MIB
    with pytest.raises(plimsoll.DoesNotFit, match=r"25.00 MiB were requested, and 24.00 MiB are left of a limit of 64.00 MiB"):
        hold.take(25 * MIB)
    hold.take(24 * MIB)
    hold.release()
    assert hold.held_bytes() == 0


def test_native_functions_release_the_interpreter_lock() -> None:
    began = time.monotonic()
    threads = [threading.Thread(target=_native.measure_product_flops, args=(1, 0.5)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The limit is generous for a busy machine.
    assert time.monotonic() - began < 60
