"""Fixtures of all tests: a cache for the session, and the shared cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

import hosts
from hosts import Host


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.setdefault("PLIMSOLL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def command() -> Path:
    """The command line that the wheel has installed."""
    path = Path(sys.executable).parent / "plimsoll"
    assert path.is_file(), f"{path} is missing: the tests need the installed wheel (cargo xtask wheel, pip install)"
    return path


@pytest.fixture(scope="session")
def shared_pair() -> Iterator[tuple[Host, Host]]:
    """The cluster of all tests. Tests leave it unchanged, except those that disrupt it, which run last and repair it."""
    pytest.importorskip("ray", reason="no Ray: pip install 'plimsoll-train[ray]'")
    if missing := hosts.missing_requirement():
        pytest.skip(missing)
    with hosts.cluster() as (alpha, beta):
        yield alpha, beta


#: Whether a test has failed.
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Records a failure for the fixtures of the test, and shows it at once: a later test may hang and end the session."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        terminal: pytest.TerminalReporter | None = item.config.pluginmanager.get_plugin("terminalreporter")
        assert terminal is not None
        terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext}")
    return report


@pytest.fixture
def pair(request: pytest.FixtureRequest, shared_pair: tuple[Host, Host]) -> Iterator[tuple[Host, Host]]:
    """The hosts of the shared cluster. After a test, its runs are ended; after a failed test, the cluster is repaired."""
    yield shared_pair
    for host in shared_pair:
        host.end_started()
    if request.node.stash.get(FAILED, False):
        hosts.repair_cluster(shared_pair)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs tests that disrupt the cluster last."""
    items.sort(key=lambda item: item.get_closest_marker("disrupts_cluster") is not None)
