"""``verify``: the cluster's check of itself. A process on each device takes its share of the bytes, is refused beyond it,
computes, and exchanges with all others; then what was found is judged."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Any, TypedDict

from plimsoll import _native
from plimsoll.errors import DoesNotFit, InputError
from plimsoll.ray import ports
from plimsoll.ray.cluster import Facts, Node, alive, available, available_bytes, columns, facts, nodes, on, whole_bytes
from plimsoll.ray.devices import readable, said
from plimsoll.ray.reasons import reason
from plimsoll.run_file import settings

if TYPE_CHECKING:
    from typing_extensions import NotRequired

#: How long a node may take for what it is asked.
ANSWER_SECONDS = 60.0
#: How long bytes that a run has just given back are waited for, before a device is called busy.
BUSY_SECONDS, LOOK_SECONDS = 3.0, 0.5
#: Clocks further apart than this are told.
CLOCK_SECONDS = 1.0
#: A device that computes at less than this part of what the others of its model do is told.
SLOW = 0.5


class Device(TypedDict):
    """What a device did. Everything is measured."""

    name: str
    model: str
    simulated: bool
    #: Its share, and what was held when it had been taken.
    asked_bytes: int
    held_bytes: int | None
    #: Whether one byte beyond the share was refused.
    refused_beyond: bool
    tflops: float | None
    #: Whether it was not tried because runs have its bytes.
    busy: bool
    #: `ok`, or what is wrong; of a busy device, `busy` and how much is free.
    verdict: str
    facts: NotRequired[Facts]


class Link(TypedDict):
    """One way between two nodes, measured over the wires that runs exchange over."""

    source: str
    target: str
    gigabytes_per_second: float | None
    #: Half of a message there and back.
    latency_seconds: float | None
    why: NotRequired[str]


class Report(TypedDict):
    """What was found."""

    #: Whether every device and every link works.
    right: bool
    devices: list[Device]
    links: list[Link]
    warnings: list[str]


class Prover:
    """The process on a node."""

    def __init__(self) -> None:
        import ray

        #: As ``run.devices`` names it here; on a node that was not joined with ``plimsoll join`` the processor.
        self.device = os.environ.get("PLIMSOLL_RAY_DEVICE", "cpu")
        self.hold: _native.Hold | None = None
        self.meets = _native.Host(ray.util.get_node_ip_address(), ports.of_wires())

    def facts(self) -> Facts:
        """What it says of itself."""
        return facts()

    def take(self, share_bytes: int) -> tuple[int, bool]:
        """Takes its share; what is held then, and whether a byte more is refused."""
        self.hold = _native.Hold(share_bytes, 0 if self.device.startswith("cuda") else None)
        self.hold.take(share_bytes)
        held = self.hold.held_bytes()
        try:
            self.hold.take(1)
        except DoesNotFit:
            return held, True
        return held, False

    def compute(self, seconds: float) -> float:
        """Operations a second of f32 products: of a GPU as its rates were measured, else on one thread now, which a simulated
        device has a part of."""
        if self.device.startswith("cuda"):
            (spec,) = json.loads(_native.named_devices(settings({"run": {"devices": self.device}})))
            return float(spec["rates"]["f32_flops"])
        (it,) = said(self.device)
        return _native.product_flops(1, seconds) * min(it["pace"] or 1.0, 1.0)

    def ping(self) -> None:
        """Answers."""

    def place(self) -> str:
        """Where it is met."""
        return self.meets.place()

    def meet(self, rank: int, places: list[str], secret: str) -> tuple[float, float, float] | None:
        """Measures the link to another that does the same: bytes a second there and back, and how late a byte comes. The
        first of both says it."""
        return self.meets.measure(rank, places, secret)[1 - rank]


def verify(*, share: float, seconds: float) -> Report:
    """Tries all devices at once, then the links one after another."""
    import ray

    every = nodes()
    there = alive(every)
    if not there:
        raise InputError("there is nobody to verify")
    busy = _busy(there, share)
    tried = [node for node in there if node["name"] not in busy]
    prover = ray.remote(max_restarts=0)(Prover)
    name = f"plimsoll verify ({os.getpid()}-{secrets.token_hex(3)})"
    provers = [
        prover.options(name=name.replace("(", f"({number}-"), **_share_of(node, share)).remote() for number, node in enumerate(tried)
    ]
    try:
        # All are there before anything is compared or measured.
        _answers([one.ping.remote() for one in provers])
        told = _answers([one.facts.remote() for one in provers])
        taken = _answers([one.take.remote(_bytes(node, share)) for node, one in zip(tried, provers)])
        computed = _answers([one.compute.remote(seconds) for one in provers])
        judged = {node["name"]: _judge(node, _bytes(node, share), *found) for node, *found in zip(tried, told, taken, computed)}
        devices = [judged.get(node["name"]) or _device(node, _bytes(node, share), busy[node["name"]], busy=True) for node in there]
        able = [(node, one) for node, one, fact in zip(tried, provers, told) if not isinstance(fact, Exception)]
        links = [way for one, other in itertools.combinations(able, 2) for way in _link(one, other)]
    finally:
        for one in provers:
            ray.kill(one)
    right = all(device["verdict"] == "ok" for device in devices) and not any("why" in link for link in links)
    return Report(right=right, devices=devices, links=links, warnings=warnings(every, devices))


def _bytes(node: Node, share: float) -> int:
    """A node's share: of its device's line, else of its memory."""
    # Whole pieces of a GPU's memory are of 2 MiB.
    return int(whole_bytes(node) * share) >> 21 << 21


def _busy(there: list[Node], share: float) -> dict[str, str]:
    """Nodes whose share others have, by their names, with what is free of each: Ray would wait until that is given back."""
    until = time.monotonic() + BUSY_SECONDS
    while True:
        free = available()
        lack = [node for node in there if available_bytes(node, free) < _bytes(node, share)]
        if not lack or time.monotonic() >= until:
            break
        time.sleep(LOOK_SECONDS)
    busy = dict[str, str]()
    for node in lack:
        who = [f"for {kept['what']}" for kept in node["kept"]]
        said = f"busy: {readable(available_bytes(node, free))} of {readable(whole_bytes(node))} are free"
        busy[node["name"]] = f"{said}, the rest is kept {', '.join(who)}" if who else said
    return busy


def _device(
    node: Node,
    asked: int,
    verdict: str,
    held: int | None = None,
    refused: bool = False,
    tflops: float | None = None,
    busy: bool = False,
) -> Device:
    """What is said of a node's device; no more than the verdict of one that was not tried."""
    return Device(
        name=node["name"],
        model=node["model"],
        simulated=node["simulated"],
        asked_bytes=asked,
        held_bytes=held,
        refused_beyond=refused,
        tflops=tflops,
        busy=busy,
        verdict=verdict,
    )


def _share_of(node: Node, share: float) -> dict[str, Any]:
    """What Ray keeps for a prover: the bytes of its share, so that two never have the same ones."""
    wanted = _bytes(node, share)
    kept: dict[str, Any] = {"memory": wanted} if node["vram_mib"] is None else {"resources": {"vram_mib": wanted >> 20}}
    return {**on(node), **kept}


def _answers(asked: list[Any]) -> list[Any]:
    """The answers of all; an exception stands for one that did not come."""
    import ray

    patience = time.monotonic() + ANSWER_SECONDS
    answers: list[Any] = []
    for one in asked:
        try:
            answers.append(ray.get(one, timeout=max(patience - time.monotonic(), 0.1)))
        except Exception as error:  # What keeps one from answering is its verdict.
            answers.append(error)
    return answers


def _judge(node: Node, asked: int, told: Any, taken: Any, flops: Any) -> Device:
    failed = [one for one in (told, taken, flops) if isinstance(one, Exception)]
    held, refused = (None, False) if isinstance(taken, Exception) else taken
    if failed:
        verdict = reason(failed[0])
    elif held != asked:
        verdict = "does not hold its share"
    elif not refused:
        verdict = "takes more than its share"
    else:
        verdict = "ok"
    device = _device(node, asked, verdict, held, refused, None if isinstance(flops, Exception) else flops / 1e12)
    if not isinstance(told, Exception):
        device["facts"] = told
    return device


def _link(one: tuple[Node, Any], other: tuple[Node, Any]) -> list[Link]:
    """Both ways between two nodes."""
    import ray

    ends = (one, other)
    ways = [
        Link(source=source["name"], target=target["name"], gigabytes_per_second=None, latency_seconds=None)
        for (source, _), (target, _) in (ends, ends[::-1])
    ]
    try:
        places = ray.get([prover.place.remote() for _, prover in ends], timeout=ANSWER_SECONDS)
        secret = secrets.token_hex(16)
        found, _ = ray.get([prover.meet.remote(rank, places, secret) for rank, (_, prover) in enumerate(ends)], timeout=ANSWER_SECONDS)
        for way, rate in zip(ways, found):
            way["gigabytes_per_second"], way["latency_seconds"] = rate / 1e9, found[2]
    except Exception as error:  # One link that fails says nothing of the others.
        for way in ways:
            way["why"] = reason(error)
    return ways


def warnings(every: list[Node], devices: list[Device]) -> list[str]:
    """What is no failure and should be known."""
    said = [f"{node['name']} is missing: {node['gone']}" for node in every if "gone" in node]
    told = [(device["name"], device["facts"]) for device in devices if "facts" in device]
    for key, what in (("python", "Python"), ("ray", "Ray"), ("plimsoll", "Plimsoll"), ("driver", "NVIDIA drivers")):
        versions = {name: str(value) for name, fact in told if (value := dict(fact)[key]) is not None}
        if len(set(versions.values())) > 1:
            said.append(f"{what} differs: " + ", ".join(f"{name} has {version}" for name, version in versions.items()))
    clocks = [fact["clock"] for _, fact in told]
    if clocks and max(clocks) - min(clocks) > CLOCK_SECONDS:
        said.append(f"clocks are {max(clocks) - min(clocks):.1f} s apart, or a node is slow to answer")
    cards = {node["ip"]: 0.0 for node in alive(every)}
    for node in every:
        cards[node["ip"]] = cards.get(node["ip"], 0.0) + node["gpus"]
    on_bus = {node["ip"]: fact["cards"] for node in every for name, fact in told if name == node["name"]}
    for ip, count in on_bus.items():
        if count > cards[ip]:
            said.append(f"graphics cards of NVIDIA's in {ip}: {count} there, {cards[ip]:g} used")
    best: dict[str, float] = {}
    for device in devices:
        best[device["model"]] = max(best.get(device["model"], 0.0), device["tflops"] or 0.0)
    for device in devices:
        # Simulated ones are as slow as they were made.
        if device["tflops"] is not None and not device["simulated"] and device["tflops"] < SLOW * best[device["model"]]:
            said.append(f"{device['name']} computes at {device['tflops']:.3f} TFLOP/s, another {device['model']} at {best[device['model']]:.3f}")
    return said


def table(report: Report) -> str:
    """The report for a person."""
    rows = [["device", "asked", "held", "beyond", "TFLOP/s", "verdict"]]
    for device in report["devices"]:
        held = "-" if device["held_bytes"] is None else readable(device["held_bytes"])
        rows.append(
            [
                device["name"] + (" (simulated)" if device["simulated"] else ""),
                "-" if device["busy"] else readable(device["asked_bytes"]),
                held,
                "-" if device["held_bytes"] is None else "refused" if device["refused_beyond"] else "given",
                "-" if device["tflops"] is None else f"{device['tflops']:.3f}",
                device["verdict"],
            ]
        )
    text = columns(rows)
    if report["links"]:
        links = [["from", "to", "GB/s", "latency"]]
        for link in report["links"]:
            rate, late = link["gigabytes_per_second"], link["latency_seconds"]
            rate_said = link.get("why", "-") if rate is None else f"{rate:.3f}"
            links.append([link["source"], link["target"], rate_said, "-" if late is None else span(late)])
        text += "\n\n" + columns(links)
    text += "".join(f"\nwarning: {warning}" for warning in report["warnings"])
    if report["right"]:
        return text + ("\nall that is there works" if report["warnings"] else "\nall of it works")
    untried = all(device["verdict"] == "ok" or device["busy"] for device in report["devices"])
    rest = untried and not any("why" in link for link in report["links"])
    return text + ("\nwhat was tried works; not all could be" if rest else "\nnot all of it works")


def span(seconds: float) -> str:
    """A short time for a person."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
