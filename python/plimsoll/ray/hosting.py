"""What stands between a run and Ray: finds the devices that a run file names, has Ray place a worker on each in bytes, and
carries requests there and back. The run starts this as a process of its own (``crates/plimsoll-train/src/run/far/ray.rs`` is
its end of the pipe), and when it goes, so do the workers: Ray ends what a driver has started.

What tensors say to each other does not pass through here, nor through Ray: workers meet over wires of their own.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, Any

from plimsoll import _native
from plimsoll.errors import Bug, DoesNotFit, InputError, PlimsollError
from plimsoll.ray import ports
from plimsoll.ray.cluster import Node, connected, nodes

MIB = 1 << 20
#: How long a worker may take to start: Ray has to start a process for it.
START_SECONDS = 60.0
#: How often whoever waits for that looks whether its node is there.
LOOK_SECONDS = 1.0
#: Behind names of workers and of what is kept for them: Ray gives no name again while somebody has a handle, of the dead, too.
NUMBERS = itertools.count(1)


@dataclass
class Asked:
    """A device of the run."""

    #: ``beta/virtual:b``.
    name: str
    #: What stands behind that in ``run.devices``: ``=200MiB@0.3``.
    rest: str
    node: Node
    #: What Ray keeps for its worker.
    bundle: dict[str, float]
    #: Where that is, for Ray.
    place: Any = None


class Worker:
    """The process on a device. Its memory is the device's own, and everything in it is Rust's doing."""

    def __init__(self) -> None:
        import ray

        gpu = 0 if os.environ.get("PLIMSOLL_RAY_DEVICE", "").startswith("cuda") else None
        self.host = _native.Host(ray.util.get_node_ip_address(), ports.of_wires(), gpu)

    def device(self) -> str:
        """What this node gives, as its processes name it."""
        return os.environ.get("PLIMSOLL_RAY_DEVICE", "")

    def answer(self, request: bytes) -> bytes:
        """Answers the run."""
        return self.host.answer(request)


#: What is free on each node, as Ray counts it.
Free = Mapping[str, Mapping[str, float]]


def find(words: list[str], budget_bytes: int | None, there: list[Node], free: Free) -> list[Asked]:
    """What the words of ``run.devices`` mean on these nodes; ``ray`` is all of them. ``budget_bytes`` is the most that a device
    may hold which is named without a load line."""
    asked: list[Asked] = []

    def take(node: Node, name: str, rest: str) -> None:
        asked.append(_of(node, name, rest, budget_bytes, free, asked))

    for word in words:
        if word == "ray":
            for every in there:
                take(every, _name(every), "")
            continue
        word = word.removeprefix("ray:")
        name = re.split("[=@]", word)[0]
        named = {_name(node): node for node in there}
        # A simulated device that is none of the cluster's is made up by the run: a part of its host's memory.
        hosts = {_name(node).partition("/")[0]: node for node in there if "/virtual:" in name and name != word}
        node = named.get(name) or hosts.get(name.partition("/")[0])
        if node is None:
            raise InputError(f"run.devices: no node of the cluster is called {name}", [f"there is: {', '.join(named)}"])
        take(node, name, word.removeprefix(name))
    return asked


def _name(node: Node) -> str:
    """What a node's device is called in run files. A node that was not joined with ``plimsoll join`` may have any name."""
    if "/" in node["name"]:
        return node["name"]
    return f"{node['name']}/{'cpu' if node['vram_mib'] is None else 'cuda:0'}"


def _of(node: Node, name: str, rest: str, budget_bytes: int | None, free: Free, before: list[Asked]) -> Asked:
    """A device on a node, with as much of it as is asked for, else as those before it leave free; whole MiB."""
    kind = "vram_mib" if node["vram_mib"] is not None and name == _name(node) else "memory"
    unit = MIB if kind == "vram_mib" else 1
    has = int(free.get(node["id"], {}).get(kind, 0.0)) * unit
    left = has - int(sum(one.bundle.get(kind, 0.0) for one in before if one.node["id"] == node["id"])) * unit
    value, at, behind = rest.removeprefix("=").partition("@") if rest.startswith("=") else ("", *rest.partition("@")[1:])
    line = (_native.amount(value, has) if value else min(left, budget_bytes or left)) // MIB
    if line == 0 or line * MIB > left:
        hint = "see what runs there: plimsoll cluster"
        raise DoesNotFit(f"{name}: {line} MiB would be kept, and {left // MIB} MiB are free", [hint])
    return Asked(name, f"={line}MiB{at}{behind}", node, {kind: line * MIB // unit})


class Hosting:
    """The workers of a run."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        import ray
        from ray._private import state  # What is free on each node is public in sum only.

        there = [node for node in nodes() if node["alive"]]
        self.asked = find(wanted["devices"], wanted["budget_bytes"], there, state.available_resources_per_node())
        self.workers: dict[str, Any] = {}
        #: Devices whose worker is being started anew.
        self.starting: set[str] = set()
        self.one_at_a_time = threading.Lock()
        if not self.asked:
            raise InputError("the cluster has no devices")
        kept = _keep(self.asked)
        if kept is None:
            raise DoesNotFit("the cluster does not keep what the run needs", ["see what runs there: plimsoll cluster"])
        for one, place in zip(self.asked, kept):
            one.place = place
            self.workers[one.name] = _start(one)
        for one in self.asked:
            try:
                own = ray.get(self.workers[one.name].device.remote(), timeout=START_SECONDS)
            except Exception as error:
                raise InputError(f"no worker starts on {one.name}: {_last_line(error)}") from error
            if own.startswith("virtual:") and "@" not in one.rest:
                # Its pace, and perhaps links, are those that it joined the cluster with.
                one.rest += own[own.index("@") :] if "@" in own else ""

    def placed(self) -> dict[str, Any]:
        """What the run is told: its devices, by words that say all of them."""
        import ray

        return {"devices": [one.name + one.rest for one in self.asked], "ip": ray.util.get_node_ip_address()}

    def answer(self, device: str, aside: bool, request: bytes) -> bytes:
        """Carries a request to a worker, and its answer back. One that is gone is started anew, for whoever asks later."""
        import ray

        worker = self.workers[device]
        method = worker.answer.options(concurrency_group="aside") if aside else worker.answer
        try:
            return bytes(ray.get(method.remote(request)))
        except ray.exceptions.ActorDiedError:
            with self.one_at_a_time:
                if worker is self.workers[device] and device not in self.starting:
                    self.starting.add(device)
                    threading.Thread(target=self._start_anew, args=(device,), daemon=True).start()
            raise

    def _start_anew(self, device: str) -> None:
        """A worker in the place of one that is gone, where its node is there, or has joined again."""
        import ray
        from ray.util.placement_group import remove_placement_group

        (one,) = [one for one in self.asked if one.name == device]
        worker = None
        try:
            there = next((node for node in nodes() if node["alive"] and node["name"] == one.node["name"]), None)
            if there is None:
                return
            if there["id"] != one.node["id"]:
                # What was kept is gone with the node that it was kept on.
                again = replace(one, node=there)
                kept = _keep([again])
                if kept is None:
                    return
                before, one.node, one.place = one.place, there, kept[0]
                if all(other.place.placement_group.id != before.placement_group.id for other in self.asked):
                    remove_placement_group(before.placement_group)
            worker = _start(one)
            ready = worker.device.remote()
            if _comes([one], lambda: bool(ray.wait([ready], timeout=LOOK_SECONDS)[0])):
                ray.get(ready)
                self.workers[device], worker = worker, None
            else:
                print(f"{device}: no worker starts there", file=sys.stderr)
        except Exception as error:  # It is tried again as long as somebody asks.
            print(f"{device}: {_last_line(error)}", file=sys.stderr)
        finally:
            if worker is not None:
                ray.kill(worker)
            self.starting.discard(device)


def _keep(asked: list[Asked]) -> list[Any] | None:
    """Has Ray keep the bytes of these devices, all or none: where each worker is placed, and none where there is no room."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group(
        [one.bundle for one in asked],
        bundle_label_selector=[{"ray.io/node-id": one.node["id"]} for one in asked],
        name=f"plimsoll train ({os.getpid()}, {next(NUMBERS)})",
    )
    if not _comes(asked, lambda: bool(group.wait(LOOK_SECONDS))):
        remove_placement_group(group)
        return None
    return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number) for number in range(len(asked))]


def _comes(asked: list[Asked], has_come: Callable[[], bool]) -> bool:
    """Whether what nodes are asked for comes while all of them are there, and in time. It is not said of a node at once that it
    is gone."""
    patience = time.monotonic() + START_SECONDS
    while not has_come():
        alive = {node["id"] for node in nodes() if node["alive"]}
        if time.monotonic() > patience or any(one.node["id"] not in alive for one in asked):
            return False
    return True


def _start(one: Asked) -> Any:
    """A worker on a device, in what is kept of it."""
    import ray

    # That it starts anew is known here, and not behind a handle that waits for it.
    worker = ray.remote(max_restarts=0, max_concurrency=1, concurrency_groups={"aside": 4})(Worker)
    return worker.options(
        num_cpus=0,
        memory=one.bundle.get("memory"),
        resources={name: amount for name, amount in one.bundle.items() if name != "memory"},
        name=f"{one.name} of a run ({os.getpid()}, {next(NUMBERS)})",
        scheduling_strategy=one.place,
    ).remote()


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _send(to: IO[bytes], *parts: bytes) -> None:
    to.write(sum(map(len, parts)).to_bytes(8, "little"))
    for part in parts:
        to.write(part)
    to.flush()


def _receive(come: IO[bytes]) -> bytes | None:
    """The next that was sent; none at the end."""
    length = come.read(8)
    return come.read(int.from_bytes(length, "little")) if len(length) == 8 else None


def carry(hosting: Hosting, come: IO[bytes], to: IO[bytes]) -> None:
    """Carries requests until the run ends. Each waits on a thread of its own: a device that hangs holds up no other."""
    one_at_a_time = threading.Lock()

    def errand(words: dict[str, Any], request: bytes) -> None:
        failed, answer = None, b""
        try:
            answer = hosting.answer(words["device"], words["aside"], request)
        except Exception as error:  # That it failed, and why, is the answer.
            failed = _last_line(error)
        back = json.dumps({"number": words["number"], "failed": failed}).encode()
        with one_at_a_time:
            _send(to, len(back).to_bytes(8, "little"), back, answer)

    threads = ThreadPoolExecutor(max_workers=8 * len(hosting.workers), thread_name_prefix="errand")
    while (said := _receive(come)) is not None:
        behind = 8 + int.from_bytes(said[:8], "little")
        threads.submit(errand, json.loads(said[8:behind]), said[behind:])


def main() -> None:
    """Serves one run, which speaks over standard input and output."""
    come, to = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Nobody else's words get in between.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    wanted = json.loads(_receive(come) or b"{}")
    try:
        with connected():
            hosting = Hosting(wanted)
            _send(to, json.dumps(hosting.placed()).encode())
            carry(hosting, come, to)
            # Threads that still wait for a worker end with this process, and the workers with it.
    except PlimsollError as error:
        failed = error
    except Exception as error:
        failed = Bug(f"{_last_line(error)}", traceback.format_exc().splitlines()[-3:])
    else:
        os._exit(0)
    _send(to, json.dumps({"exit": failed.exit_code, "message": failed.message, "hints": failed.hints}).encode())
    os._exit(failed.exit_code)


if __name__ == "__main__":
    main()
