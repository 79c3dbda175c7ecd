"""Why something failed, for a person: exceptions of Python and Ray in plain words."""

from __future__ import annotations

import errno
import os
import re
import socket
import traceback

from plimsoll.errors import Bug, InputError, PlimsollError, Stopped

#: Errors of the system that a network brings.
OF_NETWORKS = {
    errno.EHOSTUNREACH: "no way leads there",
    errno.ENETUNREACH: "no way leads there",
    errno.ENETDOWN: "the network is down",
    errno.ECONNREFUSED: "nobody listens there",
    errno.ECONNRESET: "the connection was cut",
    errno.EPIPE: "the connection was cut",
    errno.EADDRINUSE: "another program has it",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}

#: Ray's exceptions, the first that fits. What they say themselves is about Ray's insides.
OF_RAY = {
    "AuthenticationError": "the token is refused",
    "OutOfMemoryError": "its machine ran out of memory, and Ray ended it",
    "RuntimeEnvSetupError": "its process cannot be started",
    "ActorUnschedulableError": "its node is gone, or has no room",
    "ActorDiedError": "its process has ended, or is cut off",
    "ActorUnavailableError": "it cannot be reached",
    "RayActorError": "its process has ended, or is cut off",
    "WorkerCrashedError": "its process has ended",
    "LocalRayletDiedError": "Ray has ended on this machine",
    "NodeDiedError": "its node is gone",
    "TaskUnschedulableError": "its node is gone, or has no room",
    "OwnerDiedError": "whoever asked for it has ended",
    "ObjectLostError": "its answer is lost with its node",
    "GetTimeoutError": "it does not answer",
    "RaySystemError": "Ray does not answer",
    "RpcError": "Ray does not answer",
}


def versions_differ(said: str) -> str | None:
    """Which versions of Ray and Python do not go together, where that is what Ray has said: it takes no others, to the patch."""
    found = re.findall(r"Ray: (\S+)\s+Python: (\S+)", said)
    if len(found) != 2:
        return None
    theirs, own = (f"Ray {ray} and Python {python}" for ray, python in found)
    return f"the cluster has {theirs}, and this machine {own}"


def failure(error: BaseException) -> PlimsollError:
    """What a command fails with: the system and Ray are no bugs of ours, all else is."""
    if isinstance(error, PlimsollError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Stopped("interrupted")
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename is not None else ""
        return InputError(f"{place}{reason(error)}")
    if _is_of_ray(error):
        return InputError(reason(error))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    hint = "please report it: https://github.com/plimsoll/plimsoll/issues"
    return Bug(f"this is a bug in plimsoll: {reason(error)}{place}", [hint])


def reason(error: BaseException) -> str:
    """Why, in a line."""
    if differ := versions_differ(str(error)):
        return differ
    if _is_of_ray(error):
        return _of_ray(error)
    if isinstance(error, PlimsollError):
        return error.message
    if isinstance(error, socket.gaierror):
        return "no machine of that name is known"
    if isinstance(error, TimeoutError):
        return "nothing comes back"
    if isinstance(error, OSError) and error.errno is not None:
        return OF_NETWORKS.get(error.errno) or os.strerror(error.errno).lower()
    said = last_line(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _is_of_ray(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "ray"


def _of_ray(error: BaseException) -> str:
    # What failed on the other side comes with its own exception, or as its text where that was the start of a process.
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException) and cause is not error:
        return reason(cause)
    if getattr(error, "actor_init_failed", False):
        return re.sub(r"^[\w.]+: ", "", last_line(error))
    for kind in type(error).__mro__:
        if kind.__name__ in OF_RAY:
            return OF_RAY[kind.__name__]
    return f"Ray failed: {last_line(error)}"


def last_line(error: BaseException) -> str:
    """The last of what it says: Ray's exceptions have many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else ""
