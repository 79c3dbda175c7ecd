"""Error messages for people: exceptions of Python, the system and Ray in plain words."""

from __future__ import annotations

import errno
import os
import re
import socket
import traceback

from plimsoll.errors import Bug, InputError, PlimsollError, Stopped

#: Messages for system errors of network calls.
NETWORK_ERRORS = {
    errno.EHOSTUNREACH: "no network route leads there",
    errno.ENETUNREACH: "no network route leads there",
    errno.ENETDOWN: "the network is down",
    errno.ECONNREFUSED: "no program listens there",
    errno.ECONNRESET: "the connection was cut",
    errno.EPIPE: "the connection was cut",
    errno.EADDRINUSE: "another program uses it",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}

#: Messages for Ray's exceptions by class name. Ray's own texts describe its internals.
RAY_ERRORS = {
    "AuthenticationError": "the token is refused",
    "OutOfMemoryError": "its machine ran out of memory, and Ray ended it",
    "RuntimeEnvSetupError": "its process cannot be started",
    "ActorUnschedulableError": "its node is lost, or has no free memory",
    "ActorDiedError": "its process has ended, or cannot be reached",
    "ActorUnavailableError": "it cannot be reached",
    "RayActorError": "its process has ended, or cannot be reached",
    "WorkerCrashedError": "its process has ended",
    "LocalRayletDiedError": "Ray has ended on this machine",
    "NodeDiedError": "its node is lost",
    "TaskUnschedulableError": "its node is lost, or has no free memory",
    "OwnerDiedError": "the process that requested it has ended",
    "ObjectLostError": "its response is lost with its node",
    "GetTimeoutError": "it does not answer",
    "RaySystemError": "Ray does not answer",
    "RpcError": "Ray does not answer",
}


def version_mismatch(output: str) -> str | None:
    """Returns a message if Ray's output says that versions of Ray or Python differ, else ``None``.

    Ray requires equal patch versions.
    """
    found = re.findall(r"Ray: (\S+)\s+Python: (\S+)", output)
    if len(found) != 2:
        return None
    theirs, own = (f"Ray {ray} and Python {python}" for ray, python in found)
    return f"the cluster has {theirs}, and this machine {own}"


def to_plimsoll_error(error: BaseException) -> PlimsollError:
    """Converts any exception to the error of a command. Errors of the system and of Ray are input errors, all others bugs."""
    if isinstance(error, PlimsollError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Stopped("interrupted")
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename is not None else ""
        return InputError(f"{path}{describe(error)}")
    if _is_ray_error(error):
        return InputError(describe(error))
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    hint = "please report it: https://github.com/plimsoll/plimsoll/issues"
    return Bug(f"this is a bug in plimsoll: {describe(error)}{location}", [hint])


def describe(error: BaseException) -> str:
    """Returns the cause of an exception in one line."""
    if mismatch := version_mismatch(str(error)):
        return mismatch
    if _is_ray_error(error):
        return _describe_ray_error(error)
    if isinstance(error, PlimsollError):
        return error.message
    if isinstance(error, socket.gaierror):
        return "no machine of that name is known"
    if isinstance(error, TimeoutError):
        return "no response"
    if isinstance(error, OSError) and error.errno is not None:
        return NETWORK_ERRORS.get(error.errno) or os.strerror(error.errno).lower()
    text = last_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_ray_error(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "ray"


def _describe_ray_error(error: BaseException) -> str:
    # A failure in another process carries its own exception. If the process failed at its start, only the text is known.
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException) and cause is not error:
        return describe(cause)
    if getattr(error, "actor_init_failed", False):
        return re.sub(r"^[\w.]+: ", "", last_line(error))
    for kind in type(error).__mro__:
        if kind.__name__ in RAY_ERRORS:
            return RAY_ERRORS[kind.__name__]
    return f"Ray failed: {last_line(error)}"


def last_line(error: BaseException) -> str:
    """Returns the last line of an exception's text. Texts of Ray's exceptions have many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else ""
