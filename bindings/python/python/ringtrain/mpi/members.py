"""Groups that only their members form, without the other ranks of the communicator: `Create_group`.

ringtrain's groups are formed by all ranks of the group that they come from. So the members meet as a job of their own, at a
place that the first of them opens and tells the others of.
"""

import json
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .. import _core
from .errors import translated

_TAG_FIRST = 2**31
"""Messages between communicators have tags from here on; those of programs have lower ones."""


def form_group(control: Any, members: Sequence[int], own: int, tag: int) -> _core.Group:
    """The group of `members`, ranks of the job in this order, of whom this process is `own`. Each of them calls it."""
    try:
        if len(members) == 1:
            return _core.solo()
        if own == members[0]:
            return _host_of(control, members, tag)
        said, _, _ = control.receive_bytes(members[0], _TAG_FIRST + tag)
        place = json.loads(said)
        return _core.join(rank=list(members).index(own), size=len(members), **place)
    except _core.Error as error:
        raise translated(error) from error


def _host_of(control: Any, members: Sequence[int], tag: int) -> _core.Group:
    secret, job_id = secrets.token_hex(32), secrets.token_hex(16)
    meeting = _core.Rendezvous(len(members), secret, job_id, _address())
    place = {"rendezvous": meeting.address, "secret": secret, "job_id": job_id}
    for member in members[1:]:
        control.send_bytes(json.dumps(place).encode(), member, _TAG_FIRST + tag)
    return _core.join(rank=0, size=len(members), **place)


def _address() -> str:
    """This host's address as others reach it; loopback where it has no name that leads elsewhere."""
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
