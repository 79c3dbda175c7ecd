"""The raylets that this machine has started: their record in the state folder, and their processes.

``plimsoll leave`` ends exactly these processes and never another Ray. Each raylet is a ``ray start --block`` in a session of
its own. The session leader is identified by its pid and its start time. All processes that a raylet starts, workers included,
belong to its session.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from plimsoll.errors import InputError
from plimsoll.ray import ports
from plimsoll.ray.failures import describe

#: Seconds after which raylets that were asked to end are killed.
STOP_TIMEOUT_SECONDS = 15.0
#: Names of the files in the state folder.
STATE_FILES = re.compile(r"joining|joined\.json(\.part)?|token|\d+\.log")


@dataclass(frozen=True)
class Raylet:
    """A raylet that this machine has started."""

    #: Node name in the cluster: ``alpha/cuda:0``.
    name: str
    #: The device that its workers compute on, in the notation of ``run.devices`` on this machine.
    device: str
    #: Process id of the session leader.
    pid: int
    #: Start time of the session leader, in clock ticks since boot.
    start_ticks: int
    #: Id of the boot in which it was started. After a reboot, the pid may belong to another process.
    boot_id: str = field(default_factory=lambda: boot_id())


@dataclass
class Membership:
    """The cluster that this machine has joined, and the raylets that it started for it."""

    #: Address of the head: ``192.168.1.10:7300``.
    address: str
    #: Address of this machine.
    ip: str
    head: bool
    raylets: list[Raylet] = field(default_factory=list)
    #: The command that joined, without the token.
    command: str = "plimsoll join"
    base_port: int = ports.BASE


def state_folder() -> Path:
    """Returns the folder with the membership record, the token and Ray's start logs."""
    given = os.environ.get("PLIMSOLL_RAY_STATE")
    if given:
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "plimsoll" / "ray" / socket.gethostname()


def token_path() -> Path:
    """Returns the path of the file with the cluster's token."""
    return state_folder() / "token"


def make_private_folder(folder: Path, hint: str) -> None:
    """Creates a folder that only this user can enter, or withdraws an existing one from other users.

    ``hint`` tells how to name another folder. Raises :class:`plimsoll.InputError` if another user owns the folder.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        link, here = folder.lstat(), folder.stat()
        if {link.st_uid, here.st_uid} != {os.getuid()}:
            raise InputError(f"{folder} belongs to another user", [hint])
        if here.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            folder.chmod(0o700)
    except OSError as error:
        raise InputError(f"{folder} cannot be created: {describe(error)}", [hint]) from error


def make_state_folder() -> Path:
    """Creates the state folder with its missing parents, for this user only. Returns its path.

    Raises :class:`plimsoll.InputError` for a folder that cannot be made private, or should not be, because others may use it.
    """
    folder, hint = state_folder(), "name a folder that only you use: PLIMSOLL_RAY_STATE=FOLDER"
    with contextlib.suppress(OSError):  # Reported for the folder itself.
        for parent in reversed(folder.parents):
            parent.mkdir(mode=0o700, exist_ok=True)
        mode = folder.stat().st_mode
        is_shared = mode & stat.S_ISVTX or not all(map(STATE_FILES.fullmatch, os.listdir(folder)))
        if is_shared and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InputError(f"{folder} is open to other users, and not only Plimsoll uses it", [hint])
    make_private_folder(folder, hint)
    return folder


def save_token(token: str) -> None:
    """Writes the token to a file that only this user can read."""
    make_state_folder()
    path = token_path()
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)


@contextlib.contextmanager
def join_lock() -> Iterator[None]:
    """Excludes a second ``plimsoll join`` on this machine. If both ran, a failing one would delete the record of the other."""
    # Child processes do not inherit the file, and the lock ends with this process.
    with (make_state_folder() / "joining").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError("another `plimsoll join` is running on this machine", ["wait until it has ended"]) from error
        yield


def save_membership(membership: Membership) -> None:
    """Writes the membership record."""
    folder = make_state_folder()
    partial = folder / "joined.json.part"
    partial.write_text(json.dumps(asdict(membership), indent=2))
    partial.rename(folder / "joined.json")


def load_membership() -> Membership | None:
    """Reads the membership record; ``None`` if this machine has joined no cluster or has left it. The raylets may have ended."""
    path = state_folder() / "joined.json"
    try:
        read = json.loads(path.read_text())
        return Membership(**{**read, "raylets": [Raylet(**raylet) for raylet in read["raylets"]]})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        hint = "if another version of Plimsoll wrote it, leave with that version, or end the processes that it names and delete it"
        raise InputError(f"{path} cannot be read: {type(error).__name__}: {error}", [hint]) from error


def delete_membership() -> None:
    """Deletes the membership record and the token."""
    for name in ("joined.json", "token"):
        (state_folder() / name).unlink(missing_ok=True)


def boot_id() -> str:
    """Returns the id of the current boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Returns the start time of a process in clock ticks since boot; ``None`` if there is no such process."""
    stat = _stat(pid)
    return int(stat[19]) if stat else None


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of ``/proc/PID/stat`` from the third on; ``None`` for a zombie or a missing process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the name in parentheses, which may contain any character.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


def session_pids(raylet: Raylet) -> list[int]:
    """Returns the process ids of the running processes in a raylet's session."""
    leader_ticks = start_ticks(raylet.pid)
    if raylet.boot_id != boot_id() or (leader_ticks is not None and leader_ticks != raylet.start_ticks):
        # The pid belongs to another process now. The system reuses a pid only after its session has no processes left.
        return []
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    stats = [(pid, _stat(pid)) for pid in pids]
    return [pid for pid, stat in stats if stat and int(stat[3]) == raylet.pid]


def is_leader_running(raylet: Raylet) -> bool:
    """Returns whether the session leader of a raylet is running."""
    return raylet.boot_id == boot_id() and start_ticks(raylet.pid) == raylet.start_ticks


def is_raylet_running(raylet: Raylet) -> bool:
    """Returns whether Ray's ``raylet`` process is running. It ends if it loses the head, while its session leader stays."""
    return any(_process_name(pid) == "raylet" for pid in session_pids(raylet))


def ended_raylets(membership: Membership) -> list[int]:
    """Returns the indices, in the membership record, of the raylets that are not running any more."""
    return [index for index, raylet in enumerate(membership.raylets) if not is_raylet_running(raylet)]


def _process_name(pid: int) -> str | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return None


def stop(raylets: list[Raylet]) -> int:
    """Ends raylets with all processes of their sessions. Returns the number of processes that were running."""
    process_count = sum(len(session_pids(raylet)) for raylet in raylets)
    # The leader ends its child processes in order.
    for raylet in filter(is_leader_running, raylets):
        _signal(raylet.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while any(map(is_leader_running, raylets)) and time.monotonic() < deadline:
        time.sleep(0.1)
    # A leader kills a raylet that cannot deregister at the head, but not the processes that the raylet has started.
    for raylet in raylets:
        while remaining := session_pids(raylet):
            for pid in remaining:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.05)
    return process_count


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
