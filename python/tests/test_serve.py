"""The server of ``plimsoll watch --serve``, read by Prometheus' own parser."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from test_schemas import SMALL_RUN, TIMEOUT_SECONDS, Say, errors, say

__all__ = ["say"]


@pytest.fixture
def address(command: Path, say: Say, tmp_path: Path) -> Iterator[str]:
    """The address at which a finished run is served."""
    say("train", "--quiet", "--set", "run.dir=run", "--devices", "virtual:a=400MiB", *SMALL_RUN)
    words: list[str | Path] = [command, "watch", "run", "--serve", "127.0.0.1:0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[1]
        server.terminate()
    assert server.returncode == 0


def read(address: str, path: str) -> str:
    with urllib.request.urlopen(address + path, timeout=TIMEOUT_SECONDS) as response:
        text: str = response.read().decode()
        return text


def test_metrics_parse_and_equal_snapshot(address: str) -> None:
    snapshot: dict[str, Any] = json.loads(read(address, "/api/snapshot"))
    assert errors("snapshot", snapshot) == []
    parsed = text_string_to_metric_families(read(address, "/metrics"))  # type: ignore[no-untyped-call]
    families = {family.name: family.samples for family in parsed}
    assert all(name.startswith("plimsoll_") for name in families)
    assert [sample.value for sample in families["plimsoll_run_loss"]] == [snapshot["run"]["loss"]]
    planned = {sample.labels["category"]: sample.value for sample in families["plimsoll_device_planned_bytes"]}
    assert planned == snapshot["devices"][0]["by_category"]
    measured = {sample.labels["category"]: sample.value for sample in families["plimsoll_device_measured_bytes"]}
    assert measured == snapshot["devices"][0]["measured_by_category"] == planned
    assert "plimsoll_run_eta_seconds" not in families
