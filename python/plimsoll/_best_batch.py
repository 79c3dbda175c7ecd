"""The result of :func:`plimsoll.best_batch`, which this package computes from a plan. All other results are in ``results``."""

from __future__ import annotations

from typing import TypedDict


class BestBatch(TypedDict):
    """The micro-batch of the fastest plan on a device, predicted."""

    device: str
    #: Sequences per forward and backward pass; 0 on a storage-only device.
    micro_batch: int
    #: Sequences of each optimizer step that this device computes.
    sequences: int
    #: Predicted peak of the device: arena and charges.
    peak_bytes: int
    #: Load line of the device.
    budget_bytes: int
