"""Plimsoll: train language models under a memory limit, from a plan that is exact to the byte.

>>> import plimsoll
>>> plan = plimsoll.plan(model={"preset": "smollm2-360m"}, run={"devices": "rtx3070"})
>>> plan["fits"], plan["recipe"]["micro_batch"]
(True, 2)

Every call takes a run file, its sections as keyword arguments, or both. Results are dictionaries with the keys of the files
that the command line writes.
"""

from plimsoll._native import VERSION as __version__
from plimsoll.api import best_batch, budget, devices, plan, train
from plimsoll.errors import Bug, DoesNotFit, InputError, PlimsollError, Stopped

__all__ = [
    "Bug",
    "DoesNotFit",
    "InputError",
    "PlimsollError",
    "Stopped",
    "__version__",
    "best_batch",
    "budget",
    "devices",
    "plan",
    "train",
]
