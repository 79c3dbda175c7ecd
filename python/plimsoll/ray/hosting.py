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
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, Any

from plimsoll import _native
from plimsoll.errors import Bug, DoesNotFit, InputError, PlimsollError, Stopped
from plimsoll.ray import ours, ports
from plimsoll.ray.cluster import Free, Node, alive, available, connected, nodes, whole_bytes
from plimsoll.ray.devices import Said, said
from plimsoll.ray.reasons import reason

MIB = 1 << 20
#: How long a worker may take to start: Ray has to start a process for it.
START_SECONDS = 60.0
#: How often whoever waits for that looks whether its node is there.
LOOK_SECONDS = 1.0
#: How long bytes that somebody has given back are waited for: Ray is behind with its books. Of a sweep, that its runs stop, too.
BOOKS_SECONDS, SWEEP_SECONDS = 5.0, 20.0
#: How long Ray is waited for as what a run had is given back: it does so by itself when this process is gone.
RELEASE_SECONDS = 5.0
#: How long the runs of a sweep that is gone may take to stop: a step and a checkpoint.
LEFT_SECONDS = 600.0
#: Names, for a run of a sweep, what that has kept of its device (``run/far/ray.rs`` knows it by the same name).
KEPT = "PLIMSOLL_RAY_KEPT"
#: Behind names of workers and of what is kept for them: Ray gives no name again while somebody has a handle, of the dead, too.
#: Other machines may have a process of the same number.
MARK, NUMBERS = f"{os.getpid()}-{secrets.token_hex(3)}", itertools.count(1)


@dataclass
class Asked:
    """A device of the run."""

    #: ``beta/virtual:b``.
    name: str
    #: How the run file names it: ``ray:beta/virtual:b@0.3``.
    asked_as: str
    #: The load line that is kept for it: ``200MiB``.
    line: str
    node: Node
    #: What Ray keeps for its worker.
    bundle: dict[str, float]
    #: What its node joined the cluster with, where it did so with `plimsoll join`.
    joined_as: str | None = None
    #: Where that is, for Ray, and the name of it.
    place: Any = None
    kept: str = ""

    @property
    def word(self) -> str:
        """All that there is to say of it: ``beta/virtual:b=200MiB@0.3``."""
        return _native.placed(self.asked_as, self.line, self.joined_as)


class Worker:
    """The process on a device. Its memory is the device's own, and everything in it is Rust's doing."""

    def __init__(self, alone: bool) -> None:
        import ray

        gpu = 0 if os.environ.get("PLIMSOLL_RAY_DEVICE", "").startswith("cuda") else None
        # Whom nobody has to meet leaves the ports that a firewall knows to others.
        self.host = _native.Host(ray.util.get_node_ip_address(), [0] if alone else ports.of_wires(), gpu)

    def device(self) -> str | None:
        """What this node gives, as its processes name it."""
        return os.environ.get("PLIMSOLL_RAY_DEVICE")

    def answer(self, request: bytes) -> bytes:
        """Answers the run."""
        return self.host.answer(request)


def find(words: list[str], budget: str | None, every: list[Node], free: Free) -> list[Asked]:
    """What the words of ``run.devices`` mean on these nodes; ``ray`` is all that are there. ``budget`` is the most that a device may
    hold which is named without a load line: an amount, or a share of what is free."""
    there = alive(every)
    asked: list[Asked] = []

    def take(node: Node, name: str, of_it: Said) -> None:
        if any(one.name == name for one in asked):
            raise InputError(f"run.devices: {name} is named twice")
        asked.append(_of(node, name, of_it, budget, free, asked))

    for of_it in itertools.chain.from_iterable(map(said, words)):
        if of_it["host"] is None:
            for node in there:
                _check_name(_name(node))
                take(node, _name(node), {**of_it, "word": f"ray:{_name(node)}"})
            continue
        name = f"{of_it['host']}/{of_it['device']}"
        named = {_name(node): node for node in there}
        # A part of its host's memory: a processor beside other devices, and a simulated device that the run makes up.
        of_host = re.match("cpu$|virtual:", of_it["device"]) and of_it["line"]
        # Of several nodes of a host the one with the most of it: the last that is put there.
        by_memory = sorted(there, key=lambda node: free.get(node["id"], {}).get("memory", 0.0))
        hosts = {_name(node).partition("/")[0]: node for node in by_memory if of_host}
        found = named.get(name) or hosts.get(name.partition("/")[0])
        if found is None:
            raise _nobody(name, of_it, every)
        take(found, name, of_it)
    return asked


def _nobody(name: str, of_it: Said, every: list[Node]) -> InputError:
    """Why no node has this device."""
    host, names = name.partition("/")[0], [_name(node) for node in alive(every)]
    of_host = [node for node in every if _name(node).partition("/")[0] == host]
    if of_host and not alive(of_host) or any(_name(node) == name for node in of_host):
        return InputError(f"run.devices: {name} is gone", ["what brings it back is said on its machine by: plimsoll cluster"])
    hints = [f"there is: {', '.join(names)}"] if names else ["nobody is there: see plimsoll cluster"]
    if of_host and re.match("cpu$|virtual:", of_it["device"]):
        hints.insert(0, f"what no node gives is made of its host's memory, and needs a load line: ray:{name}=600MiB")
    return InputError(f"run.devices: no node of the cluster is called {name}", hints)


def _check_name(name: str) -> None:
    """That run files can name a device: what a node is called is for whoever has started it to say."""
    try:
        said(f"ray:{name}")
    except InputError:
        hint = "a node's name is HOST/DEVICE, of letters, digits and `.-_`, such as alpha/cuda:0: plimsoll cluster shows them"
        raise InputError(f"run.devices: the cluster has a device called `{name}`, which no run can name", [hint]) from None


def _name(node: Node) -> str:
    """What a node's device is called in run files. A node that was not joined with ``plimsoll join`` may have any name."""
    if "/" in node["name"]:
        return node["name"]
    return f"{node['name']}/{'cpu' if node['vram_mib'] is None else 'cuda:0'}"


def _of(node: Node, name: str, of_it: Said, budget: str | None, free: Free, before: list[Asked]) -> Asked:
    """A device on a node, with as much of it as is asked for, else as those before it leave free; whole MiB."""
    kind = "vram_mib" if node["vram_mib"] is not None and name == _name(node) else "memory"
    unit = MIB if kind == "vram_mib" else 1
    has = int(free.get(node["id"], {}).get(kind, 0.0)) * unit
    left = has - int(sum(one.bundle.get(kind, 0.0) for one in before if one.node["id"] == node["id"])) * unit
    given = of_it["line"]
    line = (_native.amount(given, has) if given else min(left, _native.amount(budget or "100%", left))) // MIB
    if line == 0 or line * MIB > left:
        whole = whole_bytes(node) if kind == "vram_mib" else node["memory_bytes"]
        left_over = f"{left // MIB} of its {whole // MIB} MiB are free"
        kept = [kept for kept in node["kept"] if kept["resource"] == kind]
        who = [f"{one['bytes'] // MIB} MiB are kept for {one['what']}" for one in kept]
        more = [f"its node joined with {whole // MIB} MiB; to give more: plimsoll leave there, and join again with --devices"]
        hints = [*who, *(more if line * MIB > whole else []), "see what runs there: plimsoll cluster"]
        raise DoesNotFit(f"{name}: {line} MiB are asked for, and {left_over}" if line else f"{name}: {left_over}", hints)
    return Asked(name, of_it["word"], f"{line}MiB", node, {kind: line * MIB // unit})


class Hosting:
    """The workers of a run; or what is kept for those of a sweep."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        import ray

        every = nodes()
        self.whose = _whose(wanted["run"], alive(every))
        promised = None if wanted["for_runs"] else os.environ.get(KEPT)
        if promised is not None:
            self.asked = _promised(promised, wanted["devices"], every)
        else:
            self.asked = _found(wanted, every)
            if not self.asked:
                raise InputError("the cluster has no devices")
            # A sweep loses its devices one by one.
            for together in [[one] for one in self.asked] if wanted["for_runs"] else [self.asked]:
                if not _keep(together, self.whose):
                    if gone := _gone(together):
                        hints = ["see who is there: plimsoll cluster"]
                        raise InputError(f"run.devices: {' and '.join(gone)} cannot be reached any more", hints)
                    raise DoesNotFit("the cluster does not keep what the run needs", ["see what runs there: plimsoll cluster"])
        # Whoever asks for all is told who is not among them.
        self.missed = [node["name"] for node in nodes() if not node["alive"]] if "ray" in wanted["devices"] else []
        # A run of a sweep has one device and meets nobody.
        self.alone = promised is not None
        self.workers = dict[str, Any]()
        #: Devices whose worker is being started anew.
        self.starting: set[str] = set()
        self.one_at_a_time, self.over = threading.Lock(), False
        try:
            self._begin()
        except BaseException:
            self.release()
            raise

    def _begin(self) -> None:
        """Starts the workers."""
        for one in self.asked:
            self.workers[one.name] = _start(one, self.alone, self.whose)
        for one in self.asked:
            ready = self.workers[one.name].device.remote()
            try:
                one.joined_as = _answer(one, ready)
            except Exception as error:
                raise InputError(f"no worker starts on {one.name}: {reason(error)}") from error

    def placed(self) -> dict[str, Any]:
        """What the run is told: its devices, by words that say all of them."""
        import ray

        ip, joined = ray.util.get_node_ip_address(), ours.known()
        # Devices of this machine that the run has itself are met where a worker of it would be, which a firewall knows.
        at = ports.of_raylet(joined.base, 0) if joined and joined.ip == ip else None
        wires = list(range(at.wires_first, at.wires_last + 1)) if at else [0]
        return {"devices": [one.word for one in self.asked], "ip": ip, "ports": wires, "missed": self.missed}

    def there(self) -> dict[str, str]:
        """The devices that are there, each with what is kept of it, by its name: the runs of a sweep are placed in that. From now
        on it is theirs, and this process has no workers any more."""
        import ray

        while self.workers:
            ray.kill(self.workers.popitem()[1])
        by_name = {node["name"]: node for node in alive(nodes())}
        there = [(one, by_name[one.node["name"]]) for one in self.asked if one.node["name"] in by_name]
        for one, node in there:
            if node["id"] != one.node["id"]:
                # It takes its time, and others are asked for meanwhile.
                self._once(one.name, self._keep_anew, one, node)
        return {one.name: one.kept for one, node in there if node["id"] == one.node["id"]}

    def give_back(self) -> None:
        """Waits until the runs of a sweep have given back what they had: they stop when it is gone, and save first."""
        patience = time.monotonic() + LEFT_SECONDS
        while time.monotonic() < patience and any(_holds(one, available()) for one in self.asked):
            time.sleep(LOOK_SECONDS)

    def release(self) -> None:
        """Ends the workers and gives back what is kept for them. Ray would do it when it misses this process, which takes a moment
        in which another run would be refused."""
        import ray
        from ray.util.placement_group import remove_placement_group

        # From now on none is started anew.
        self.over = True
        for worker in list(self.workers.values()):
            ray.kill(worker)
        if not self.alone:
            for group in {one.place.placement_group.id: one.place.placement_group for one in self.asked}.values():
                remove_placement_group(group)

    def answer(self, device: str, aside: bool, request: bytes) -> bytes:
        """Carries a request to a worker, and its answer back. One that is gone is started anew, for whoever asks later."""
        import ray

        worker = self.workers[device]
        method = worker.answer.options(concurrency_group="aside") if aside else worker.answer
        try:
            return bytes(ray.get(method.remote(request)))
        except (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError):
            if worker is self.workers[device]:
                (one,) = [one for one in self.asked if one.name == device]
                self._once(device, self._start_anew, one, worker)
            raise

    def _once(self, device: str, what: Callable[[Asked, Any], object], one: Asked, other: Any) -> None:
        """Does something for a device beside all else, unless that is being done."""

        def work() -> None:
            try:
                what(one, other)
            except Exception as error:  # It is tried again as long as somebody asks.
                print(f"{device}: {reason(error)}", file=sys.stderr)
            finally:
                self.starting.discard(device)

        with self.one_at_a_time:
            if device not in self.starting and not self.over:
                self.starting.add(device)
                threading.Thread(target=work, daemon=True).start()

    def _start_anew(self, one: Asked, gone: Any) -> None:
        """A worker in the place of one that is gone, where its node is there, or has joined again."""
        import ray

        if self.workers[one.name] is not gone:
            return
        there = next((node for node in alive(nodes()) if node["name"] == one.node["name"]), None)
        if there is None or not self._keep_anew(one, there):
            return
        worker = _start(one, self.alone, self.whose)
        try:
            _answer(one, worker.device.remote())
        except BaseException:
            ray.kill(worker)
            raise
        self.workers[one.name] = worker

    def _keep_anew(self, one: Asked, node: Node) -> bool:
        """Whether the bytes of a device are kept on this node; where that is another than before, what was kept is gone with it."""
        from ray.util.placement_group import remove_placement_group

        if node["id"] == one.node["id"]:
            return True
        again = replace(one, node=node)
        if not _keep([again], self.whose):
            return False
        before, one.node, one.place, one.kept = one.place, node, again.place, again.kept
        if all(other.place.placement_group.id != before.placement_group.id for other in self.asked):
            remove_placement_group(before.placement_group)
        return True


def _found(wanted: dict[str, Any], every: list[Node]) -> list[Asked]:
    """The devices that are wanted. What is kept of one although nobody is at work on it has just been given back, or is about to
    be: it is looked again for some seconds, so that nobody is given what is left beside it. A sweep waits for others' runs, too,
    where it would be given nothing."""
    began = time.monotonic()
    while True:
        free, there = available(), alive(every)
        found, failed = list[Asked](), None
        try:
            found = find(wanted["devices"], wanted["budget"], every, free)
            # What others have is not waited for.
            there = [one.node for one in found]
        except DoesNotFit as error:
            failed = error
        comes = any(_unbooked(node, free) or node["kept"] and not node["runs"] for node in there)
        comes = comes or failed is not None and wanted["for_runs"] and any(node["kept"] for node in there)
        patience = SWEEP_SECONDS if failed and wanted["for_runs"] else BOOKS_SECONDS
        if comes and time.monotonic() - began < patience:
            time.sleep(LOOK_SECONDS / 2)
            every = nodes()
        elif failed:
            raise failed
        else:
            return found


def _unbooked(node: Node, free: Free) -> bool:
    """Whether bytes of a node are neither free nor kept for anybody: they are being given back."""

    def lacks(resource: str, whole: int, unit: int) -> bool:
        left = int(free.get(node["id"], {}).get(resource, 0.0)) * unit
        return left + sum(one["bytes"] for one in node["kept"] if one["resource"] == resource) < whole

    return lacks("memory", node["memory_bytes"], 1) or lacks("vram_mib", (node["vram_mib"] or 0) * MIB, MIB)


def _whose(run: str | None, there: list[Node]) -> str:
    """What others know a run by, or a sweep."""
    import ray

    own = ray.util.get_node_ip_address()
    host = next((node["name"].partition("/")[0] for node in there if node["ip"] == own), own)
    return f"{host}:{run}" if run else f"a sweep of {host}"


def _promised(kept: str, words: list[str], every: list[Node]) -> list[Asked]:
    """The device of a run that a sweep gives a part of what it has kept, by the name of that. Ray has the run wait until those
    before it have given theirs back."""
    from ray.util.placement_group import get_placement_group, placement_group_table

    try:
        group = get_placement_group(kept)
        known = placement_group_table(group)
        (one,) = find(words, None, every, {known["bundles_to_node_id"][0]: known["bundles"][0]})
    except (KeyError, ValueError) as error:
        raise InputError(f"{', '.join(words)} is not there any more: what was kept of it is gone") from error
    one.place = _place(group, 0)
    return [one]


def _keep(asked: list[Asked], whose: str) -> bool:
    """Has Ray keep the bytes of these devices, all or none. Whether there is room."""
    from ray.util.placement_group import placement_group, remove_placement_group

    name = f"{whose} ({MARK}-{next(NUMBERS)})"
    selectors = [{"ray.io/node-id": one.node["id"]} for one in asked]
    group = placement_group([one.bundle for one in asked], bundle_label_selector=selectors, name=name)
    if not _comes(asked, lambda: bool(group.wait(LOOK_SECONDS))):
        remove_placement_group(group)
        return False
    for number, one in enumerate(asked):
        one.place, one.kept = _place(group, number), name
    return True


def _place(group: Any, number: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)


def _comes(asked: list[Asked], has_come: Callable[[], bool]) -> bool:
    """Whether what nodes are asked for comes while all of them are there, and in time. It is not said of a node at once that it
    is gone."""
    patience = time.monotonic() + START_SECONDS
    while not has_come():
        if time.monotonic() > patience or _gone(asked):
            return False
    return True


def _gone(asked: list[Asked]) -> list[str]:
    """Those of these devices whose nodes are not there any more."""
    there = {node["id"] for node in alive(nodes())}
    return [one.name for one in asked if one.node["id"] not in there]


def _holds(one: Asked, free: Free) -> bool:
    """Whether something of what is kept of a device is in use."""
    group, (kind, amount) = one.place.placement_group, *one.bundle.items()
    left = free.get(one.node["id"], {}).get(f"{kind}_group_{one.place.placement_group_bundle_index}_{group.id.hex()}", 0.0)
    return one.node["id"] in free and left < amount


def _answer(one: Asked, asked: Any) -> Any:
    """What a worker that is starting on a device says, while that is there."""
    import ray

    if not _comes([one], lambda: bool(ray.wait([asked], timeout=LOOK_SECONDS)[0])):
        raise InputError("its node is gone, or takes too long")
    return ray.get(asked)


def _start(one: Asked, alone: bool, whose: str) -> Any:
    """A worker on a device, in what is kept of it."""
    import ray

    # That it starts anew is known here, and not behind a handle that waits for it.
    worker = ray.remote(max_restarts=0, max_concurrency=1, concurrency_groups={"aside": 4})(Worker)
    return worker.options(
        num_cpus=0,
        memory=one.bundle.get("memory"),
        resources={name: amount for name, amount in one.bundle.items() if name != "memory"},
        name=f"{whose} ({MARK}-{next(NUMBERS)})",
        scheduling_strategy=one.place,
    ).remote(alone)


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
            if words["device"] is None:
                answer = json.dumps(hosting.there()).encode()
            else:
                answer = hosting.answer(words["device"], words["aside"], request)
        except Exception as error:  # That it failed, and why, is the answer.
            failed = reason(error)
        back = json.dumps({"number": words["number"], "failed": failed}).encode()
        with one_at_a_time:
            _send(to, len(back).to_bytes(8, "little"), back, answer)

    threads = ThreadPoolExecutor(max_workers=8 * len(hosting.asked), thread_name_prefix="errand")
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
            if wanted["for_runs"]:
                hosting.give_back()
            # Without a head nobody answers to it. Threads that still wait for a worker end with this process.
            releases = threading.Thread(target=hosting.release, daemon=True)
            releases.start()
            releases.join(RELEASE_SECONDS)
    except PlimsollError as error:
        failed = error
    except Exception as error:
        failed = Bug(reason(error), traceback.format_exc().splitlines()[-3:])
    else:
        os._exit(0)
    if KEPT in os.environ and not wanted["for_runs"]:
        # What a sweep has kept for this run was there a moment ago: it may go on later.
        failed = Stopped(failed.message, failed.hints)
    _send(to, json.dumps({"exit": failed.exit_code, "message": failed.message, "hints": failed.hints}).encode())
    os._exit(failed.exit_code)


if __name__ == "__main__":
    main()
