"""What can go wrong, as exceptions: each has the exit code, the message and the hints of the command line."""

from __future__ import annotations


class PlimsollError(Exception):
    """Something failed. ``str()`` of it is what the command line prints."""

    #: What the command line exits with.
    exit_code = 1

    def __init__(self, message: str, hints: list[str] | None = None) -> None:
        super().__init__(message, hints or [])
        #: What is wrong, and where.
        self.message = message
        #: What to do about it.
        self.hints = hints or []

    def __str__(self) -> str:
        return "".join([self.message, *(f"\n  hint: {hint}" for hint in self.hints)])


class Bug(PlimsollError):
    """A bug of Plimsoll's."""


class InputError(PlimsollError):
    """The run file, an argument, the model, the data or the machine is not what it should be."""

    exit_code = 2


class DoesNotFit(PlimsollError):
    """It does not fit under the load line; the hints say what would."""

    exit_code = 3


class Stopped(PlimsollError):
    """A run ended early and can go on, with ``plimsoll.train(resume=...)``."""

    exit_code = 4


def of(exit_code: int, message: str, hints: list[str]) -> PlimsollError:
    """The exception of an exit code."""
    kinds = {kind.exit_code: kind for kind in (Bug, InputError, DoesNotFit, Stopped)}
    return kinds.get(exit_code, Bug)(message, hints)
