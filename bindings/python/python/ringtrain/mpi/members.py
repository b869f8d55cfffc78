"""Forms groups that only their members form, without the other ranks of the communicator: `Create_group`.

In ringtrain, all ranks of a group take part when a subgroup is formed. So the members form a job of their own instead. The
first member starts a rendezvous server, and sends the address of the server to the other members."""

import json
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .. import _core
from .errors import to_mpi_exception

_TAG_FIRST = 2**31
"""The messages of this module have tags from this number on. The messages of MPI programs have lower tags."""


def form_group(control: Any, members: Sequence[int], own: int, tag: int) -> _core.Group:
    """Returns the group of `members`, which are ranks in the job. `own` is the rank of this process in the job. All members
    must call this function."""
    try:
        if len(members) == 1:
            return _core.solo()
        if own == members[0]:
            return _start_rendezvous_and_join(control, members, tag)
        said, _, _ = control.receive_bytes(members[0], _TAG_FIRST + tag)
        place = json.loads(said)
        return _core.join(rank=list(members).index(own), size=len(members), **place)
    except _core.Error as error:
        raise to_mpi_exception(error) from error


def _start_rendezvous_and_join(control: Any, members: Sequence[int], tag: int) -> _core.Group:
    secret, job_id = secrets.token_hex(32), secrets.token_hex(16)
    meeting = _core.Rendezvous(len(members), secret, job_id, _address())
    place = {"rendezvous": meeting.address, "secret": secret, "job_id": job_id}
    for member in members[1:]:
        control.send_bytes(json.dumps(place).encode(), member, _TAG_FIRST + tag)
    return _core.join(rank=0, size=len(members), **place)


def _address() -> str:
    """Returns the address at which other hosts reach this host, or 127.0.0.1 if the name of this host has no address."""
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
