"""What this machine has started: kept in a folder, so that ``leave`` stops exactly that and never another Ray.

Each raylet is a ``ray start --block`` in a session of its own. A session is known by the process that leads it: its number and
the moment it started. All that it starts, workers too, is in that session.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from plimsoll.errors import InputError
from plimsoll.ray import ports

#: How long a leader that is asked to end may take, with all that it has started, before they are killed.
PATIENCE_SECONDS = 15.0


@dataclass(frozen=True)
class Raylet:
    """A raylet that was started here."""

    #: As ``cluster`` names it: ``alpha/cuda:0``.
    name: str
    #: The device that its workers compute on, as ``run.devices`` names it there.
    device: str
    #: The leader of its session.
    pid: int
    #: When that started, in ticks since the machine did.
    started: int
    #: Which start of the machine that was: after another one the number may be anybody's.
    boot: str = field(default_factory=lambda: boot())


@dataclass
class Joined:
    """What this machine is part of."""

    #: Of the head: ``192.168.1.10:7300``.
    address: str
    #: Of this machine.
    ip: str
    head: bool
    raylets: list[Raylet] = field(default_factory=list)
    #: What it joined with, without the token.
    words: str = "plimsoll join"
    #: The first of its ports.
    base: int = ports.BASE


def folder() -> Path:
    """Where this machine's part is written down, with the token and Ray's logs of starting."""
    given = os.environ.get("PLIMSOLL_RAY_STATE")
    if given:
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "plimsoll" / "ray" / socket.gethostname()


def token_path() -> Path:
    """The file with the cluster's token."""
    return folder() / "token"


def keep_token(token: str) -> None:
    """Writes the token where only this user reads it."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    path = token_path()
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While this lasts nobody else joins here: one that fails forgets what the other has written down."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    # What is started meanwhile does not inherit it, and whoever ends lets go of it.
    with (folder() / "joining").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError("another `plimsoll join` is at work on this machine", ["wait until it is done"]) from error
        yield


def keep(joined: Joined) -> None:
    """Writes down what was started."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = folder() / "joined.json.part"
    aside.write_text(json.dumps(asdict(joined), indent=2))
    aside.rename(folder() / "joined.json")


def known() -> Joined | None:
    """What was started here and not left since, whether it still runs or not."""
    path = folder() / "joined.json"
    try:
        read = json.loads(path.read_text())
        return Joined(**{**read, "raylets": [Raylet(**raylet) for raylet in read["raylets"]]})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        hint = "has another version written it? leave with that one, or remove it after what it names has ended"
        raise InputError(f"{path} cannot be read: {type(error).__name__}: {error}", [hint]) from error


def forget() -> None:
    """Nothing is started here any more."""
    for name in ("joined.json", "token"):
        (folder() / name).unlink(missing_ok=True)


def boot() -> str:
    """Which start of the machine this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; none where there is no such process."""
    stat = _stat(pid)
    return int(stat[19]) if stat else None


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` from the third on: the name before them may hold anything. A zombie is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


def members(raylet: Raylet) -> list[int]:
    """The processes of a raylet's session that are there now."""
    leads = started(raylet.pid)
    if raylet.boot != boot() or (leads is not None and leads != raylet.started):
        # The number has been given to another process, which the system does not do while the session has members.
        return []
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    of_session = [(pid, _stat(pid)) for pid in pids]
    return [pid for pid, stat in of_session if stat and int(stat[3]) == raylet.pid]


def runs(raylet: Raylet) -> bool:
    """Whether a raylet is there."""
    return raylet.boot == boot() and started(raylet.pid) == raylet.started


def serves(raylet: Raylet) -> bool:
    """Whether a raylet is part of its cluster still: one that finds no head any more ends, and its leader stays."""
    return any(_name(pid) == "raylet" for pid in members(raylet))


def ended(joined: Joined) -> list[int]:
    """The numbers of a machine's raylets that are part of its cluster no more."""
    return [number for number, raylet in enumerate(joined.raylets) if not serves(raylet)]


def _name(pid: int) -> str | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return None


def stop(raylets: list[Raylet]) -> int:
    """Ends raylets with all that they have started, and says how many processes that were."""
    ended = sum(len(members(raylet)) for raylet in raylets)
    # The leader first: it takes its own down in order.
    for raylet in filter(runs, raylets):
        _signal(raylet.pid, signal.SIGTERM)
    patience = time.monotonic() + PATIENCE_SECONDS
    while any(map(runs, raylets)) and time.monotonic() < patience:
        time.sleep(0.1)
    # What is there after it nobody asks to end: it kills a raylet that finds no head to take its leave of, not what that has started.
    for raylet in raylets:
        while left := members(raylet):
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.05)
    return ended


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
