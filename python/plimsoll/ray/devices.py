"""What a machine gives a cluster: one raylet for each GPU, else one for the processor; or the devices that somebody names."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, cast

from plimsoll import _native, api
from plimsoll.errors import InputError
from plimsoll.run_file import settings

MIB = 1 << 20
#: Bytes for a person, as the other commands say them.
readable = _native.readable
#: Ray's store of objects takes this part of a raylet's memory, within bounds: tensors do not go through it.
STORE_SHARE, STORE_LEAST, STORE_MOST = 0.1, 128 * MIB, 1024 * MIB


class Said(TypedDict):
    """What a word of ``run.devices`` says of a device. What it does not say, its host knows, or the run."""

    #: All of it, as run files write it.
    word: str
    #: The host that it is on, where that is named.
    host: str | None
    #: As that host names it; ``ray`` is every device of a cluster.
    device: str
    #: Its load line: an amount, or a share.
    line: str | None
    #: The pace of a simulated device, in cores.
    pace: float | None


def said(text: str) -> list[Said]:
    """What a list as in ``run.devices`` says of each device that it names."""
    return cast("list[Said]", json.loads(_native.named(text)))


@dataclass(frozen=True)
class Device:
    """A device that a raylet's workers compute on."""

    #: On its machine: ``cuda:1``.
    name: str
    kind: Literal["cpu", "virtual", "cuda"]
    #: What its maker calls it.
    model: str
    #: The load line: what may be held of its memory.
    line_bytes: int
    #: How a worker of that raylet, which sees no other GPU, names it in ``run.devices``.
    worker_name: str
    #: What ``CUDA_VISIBLE_DEVICES`` is for them.
    visible: str | None = None

    @property
    def simulated(self) -> bool:
        """Whether what is said of it comes from a simulation."""
        return self.kind == "virtual"


def of_this_machine(named: str | None = None) -> list[Device]:
    """The devices that are here; with ``named``, the text of ``run.devices``, those that it names."""
    machine = api.devices()["devices"]
    cpu, gpus = machine[0], [found for found in machine[1:] if not found.get("gpu", {}).get("unusable")]
    cards = [
        Device(found["name"], "cuda", found["model"], found["takes"]["budget_bytes"], "cuda:0", _visible(found["gpu"]["uuid"]))
        for found in gpus
    ]
    line = cpu["takes"]["budget_bytes"]
    processor = Device("cpu", "cpu", cpu["model"], line, f"cpu={line // MIB}MiB")
    if named is None:
        return cards or [processor]
    given: list[Device] = []
    words = {one["device"]: one["word"] for one in said(named)}
    # Without their rates: see `measure`.
    for spec in json.loads(_native.named_lines(settings({"run": {"devices": named}}))):
        name, kind, budget = spec["name"], spec["kind"], spec["budget"]
        if kind == "cuda":
            given += [replace(card, line_bytes=budget) for card in cards if card.name == name]
        elif kind == "cpu":
            given.append(Device(name, "cpu", cpu["model"], budget, f"cpu={budget // MIB}MiB"))
        elif kind == "virtual":
            given.append(Device(name, "virtual", f"part of {cpu['model']}", budget, words[name]))
        else:
            raise InputError(f"--devices: `{name}` is a device on paper: nothing runs on it")
    return given


def measure(devices: list[Device]) -> None:
    """Sees to it that the rates of the processor, and of what it simulates, are known: a worker that has to measure them
    does so before each run, and where its line leaves little, with less than it takes. Those of a GPU are measured there."""
    if words := [device.worker_name for device in devices if device.kind != "cuda"]:
        print("measuring what the processor can do, unless that is known (20 s)", file=sys.stderr)
        _native.named_devices(settings({"run": {"devices": ",".join(words)}}))


def _visible(uuid: str) -> str:
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


@dataclass(frozen=True)
class Given:
    """What a raylet is told that it has."""

    cpus: int
    gpus: int
    #: For workers, the store left out.
    memory_bytes: int
    store_bytes: int
    #: A device's own memory, in whole MiB; none where that is the machine's.
    vram_mib: int | None
    labels: dict[str, str]


def share_out(devices: list[Device]) -> list[Given]:
    """What each device's raylet has of the machine: cores and memory are shared evenly; what simulated devices and the
    processor hold of the memory is theirs."""
    cpu = api.devices()["devices"][0]
    count = len(devices)
    free = cpu["takes"]["budget_bytes"]
    left = max(free - sum(device.line_bytes for device in devices if device.kind == "virtual"), 0)
    # A processor that is named without an amount would have what simulated devices hold, too.
    processor = min(sum(device.line_bytes for device in devices if device.kind == "cpu"), left)
    rest = (left - processor) // max(sum(device.kind != "cpu" for device in devices), 1)
    given = []
    for number, device in enumerate(devices):
        memory = processor if device.kind == "cpu" else rest
        store = int(min(max(memory * STORE_SHARE, STORE_LEAST), STORE_MOST))
        # At least one core each, and the first ones have what is left over.
        cpus = max(cpu["threads"] // count + (number < cpu["threads"] % count), 1)
        given.append(
            Given(
                cpus=cpus,
                gpus=int(device.kind == "cuda"),
                memory_bytes=max(memory - store, STORE_LEAST),
                store_bytes=store,
                vram_mib=None if device.kind == "cpu" else device.line_bytes // MIB,
                labels={
                    "plimsoll-device": label(device.name),
                    "plimsoll-model": label(device.model),
                    "plimsoll-simulated": str(device.simulated).lower(),
                },
            )
        )
    return given


def label(text: str) -> str:
    """A text as labels of Ray may be: letters, digits, and ``-_.`` between them, 63 at most."""
    return re.sub(r"[^A-Za-z0-9]+$", "", re.sub(r"[^A-Za-z0-9_.]+", "-", text).lstrip("-_.")[:63])
