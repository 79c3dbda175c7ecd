"""The JSON that the command line writes, validated against the schemas of ``docs/schema``."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest

SCHEMAS = Path(__file__).parents[2] / "docs" / "schema"
TIMEOUT_SECONDS = 120.0
#: Words of a run of the built-in example that takes seconds.
SMALL_RUN = ["--set", "train.steps=4", "--set", "train.eval_every=2", "--set", "train.save_every=3", "--set", "run.threads=1"]
#: A team of two simulated devices.
TEAM = ["--devices", "virtual:a=280MiB@0.4,virtual:b=280MiB@0.2", "--set", "run.parallelism=all"]

#: Runs a command in the folder of a test and returns its output.
Say = Callable[..., str]


@pytest.fixture
def say(command: Path, tmp_path: Path) -> Say:
    def run(*words: str, code: int = 0) -> str:
        ended = subprocess.run([command, *words], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=tmp_path)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout

    return run


def closed(schema: Any) -> Any:
    """Returns a schema that permits no other keys. The published one does, because later versions may add keys."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {key: closed(one) for key, one in schema.items()}
    return {**inside, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else inside


def errors(name: str, value: object) -> list[str]:
    """Returns the differences between a value and its schema."""
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found: Iterator[jsonschema.ValidationError] = jsonschema.Draft202012Validator(closed(schema)).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[Any]]]:
    """Yields the URL of a server, and the JSON that it has received."""
    received: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook", received
        server.shutdown()


def test_undeclared_key_and_wrong_type_are_errors() -> None:
    assert errors("budget", {"budget_bytes": 1, "message": "moved"}) == []
    assert len(errors("budget", {"budget_bytes": "1", "message": "moved", "more": 1})) == 2
    assert errors("budget", {"budget_bytes": 1}) == ["$: 'message' is a required property"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--model", "smollm2-360m", "--devices", "rtx3070", "--explain"], 0),
        (["--model", "llama-3.2-1b", "--devices", "rtx3090,rtx3070,host=64GiB", "--explain"], 0),
        (["--model", "llama-2-13b", "--devices", "rtx3070"], 3),
    ],
)
def test_plans_match_schema(say: Say, words: list[str], code: int) -> None:
    assert errors("plan", json.loads(say("plan", *words, "--json", code=code))) == []


@pytest.mark.parametrize("words", [["--devices", "virtual:a=400MiB", "--inject-oom", "2:backward"], TEAM])
def test_files_of_run_match_schemas(say: Say, tmp_path: Path, words: list[str]) -> None:
    folder = tmp_path / "run"
    *events, result = map(json.loads, say("train", "--json", "--set", f"run.dir={folder}", *SMALL_RUN, *words).splitlines())
    assert [line for event in events for line in errors("events", event)] == []
    assert {"start", "step", "evaluation", "checkpoint", "end"} <= {event["event"] for event in events}
    assert ("recovery" in {event["event"] for event in events}) == ("--inject-oom" in words)
    assert errors("result", result) == []
    assert result == json.loads((folder / "result.json").read_text())
    assert errors("plan", json.loads((folder / "plan.json").read_text())) == []
    assert errors("report", json.loads(say("report", "run", "--json"))) == []
    assert errors("runs", json.loads(say("runs", ".", "--json"))) == []
    champions = json.loads(say("runs", ".", "--champions", "--json"))
    assert errors("champions", champions) == [] and champions == json.loads((tmp_path / "champions.json").read_text())


def test_evaluation_and_generation_match_schemas(say: Say, tmp_path: Path) -> None:
    say("train", "--quiet", "--set", f"run.dir={tmp_path / 'run'}", "--devices", "cpu=400MiB", *SMALL_RUN)
    data = ["--data", "run/example/eval.jsonl", "--format", "tokens"]
    assert errors("evaluation", json.loads(say("eval", "run/model", *data, "--json"))) == []
    assert errors("generation", json.loads(say("generate", "run/model", "--prompt", "1 + 1 =", "--max-tokens", "8", "--json"))) == []


def test_sweep_matches_schema(say: Say, tmp_path: Path) -> None:
    say("sweep", "--dir", "sweep", "--devices", "virtual:a=400MiB", "--set", "train.seed=1,2", *SMALL_RUN)
    report = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert errors("sweep", report) == []
    assert [run["state"] for run in report["runs"]] == ["done", "done"]


def test_benchmarks_match_schemas(say: Say, tmp_path: Path) -> None:
    shapes = ["--layers", "1", "--hidden", "64", "--heads", "2", "--kv-heads", "2", "--ffn", "64", "--vocab", "64"]
    assert errors("bench-step", json.loads(say("bench", "step", *shapes, "--sequence", "16", "--batch", "1"))) == []
    # A model that fits and one that does not.
    say("bench", "models", "smollm2-135m", "llama-2-13b", "--devices", "rtx3070", "--json", "models.json")
    assert errors("bench-models", json.loads((tmp_path / "models.json").read_text())) == []
    say("bench", "devices", "--duration", "5s", "--json", "rates.json")
    assert errors("bench-devices", json.loads((tmp_path / "rates.json").read_text())) == []


def test_devices_match_schema(say: Say) -> None:
    assert errors("devices", json.loads(say("devices", "--json"))) == []


def test_model_list_matches_schema(say: Say) -> None:
    # A time that suffices for some of the models only.
    listed = json.loads(say("models", "--devices", "rtx3070=2GiB,host=4GiB", "--time", "3s", "--json"))
    assert errors("models", listed) == []
    assert {"fits", "does_not_fit"} <= {model["fit"] for model in listed["models"]}


def test_findings_match_schema(say: Say, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nstepz = 5\n")
    report = json.loads(say("doctor", "run.toml", "--json", code=2))
    assert errors("doctor", report) == []
    assert "run-invalid" in [finding["id"] for finding in report["findings"]]


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--devices", "virtual:a=400MiB", "--inject-oom", "2:backward"], 0, ["start", "recovery", "end"]),
        ([*TEAM, "--inject-loss", "virtual:b:2"], 0, ["start", "device_lost", "end"]),
        (["--set", "train.learning_rate=1e30", "--set", "train.warmup_steps=0"], 4, ["start", "failure"]),
    ],
)
def test_webhook_messages_match_schema(
    say: Say, webhook: tuple[str, list[Any]], words: list[str], code: int, expected: list[str]
) -> None:
    url, received = webhook
    say("train", "--quiet", "--set", "run.dir=secret/name", "--set", f"watch.webhook={url}", *SMALL_RUN, *words, code=code)
    assert [message["event"] for message in received] == expected
    assert [line for message in received for line in errors("webhook", message)] == []
    assert all(message["run"] == "name" and message["text"].startswith("name: ") for message in received)
    assert not any("secret" in json.dumps(message) for message in received)
