"""Connects the ranks of a process group, through the job that ringrun started or through torch's store."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from ringtrain import _core, _world

_KEY = "ringtrain/rendezvous"
# The maximum time in seconds until all ranks are connected. This time is longer than any host takes to start its ranks. If the
# process group has a shorter timeout, that timeout is the limit.
_START_SECONDS_MAX = 300.0


@dataclass(frozen=True)
class Membership:
    """The rank of this process in a process group, and the properties of the group."""

    rank: int
    size: int
    timeout: float
    """The timeout of operations, in seconds."""
    started_by_ringrun: bool
    """Whether ringrun started all members of the group. Members that ringrun started know the secret of ringrun's job."""


def is_started_by_ringrun(rank: int, size: int) -> bool:
    """Returns whether this process is rank `rank` of a job of `size` ranks. Until this process has joined a job, checks the job
    for which ringrun started the process, if any."""
    if _world.is_joined():
        world = _world.current_world().core
        return (world.rank, world.size) == (rank, size)
    return (os.environ.get("RING_RANK"), os.environ.get("RING_WORLD_SIZE")) == (str(rank), str(size))


def join_through_store(store: Any, member: Membership) -> _core.Group:
    """Forms a new job of the ranks of a process group, and returns the group of all ranks of this job. The ranks find
    each other through torch's store: group rank 0 runs a rendezvous server and writes the server's address to the
    store.

    If ringrun started all ranks, the new job uses the secret of ringrun's job. If ringrun did not start all ranks,
    group rank 0 writes a new secret to the store. Torch's stores have no authentication, so every process that can
    read the store can read this new secret and join. Raises `ringtrain.StartError` if a rank does not join in time.
    """
    location = {"host": _host_id(), "address": _own_address_towards(_store_host(store))}
    store.set(f"{_KEY}/{member.rank}", json.dumps(location))
    start_timeout = min(member.timeout, _START_SECONDS_MAX)
    server, invitation = _start_server(store, member, start_timeout) if member.rank == 0 else (None, json.loads(store.get(_KEY)))
    group = _core.join(
        rank=member.rank,
        size=member.size,
        rendezvous=invitation["rendezvous"],
        job_id=invitation["job_id"],
        secret=invitation["secret"] or _job_secret(),
        start_timeout=start_timeout,
        timeout=member.timeout,
    )
    del server
    # All ranks have read the invitation. Delete it before a rank can start another rendezvous in the same store.
    if member.rank == 0:
        _delete_keys(store, [_KEY])
    group.barrier()
    return group


def _start_server(store: Any, member: Membership, start_timeout: float) -> tuple[_core.Rendezvous, dict[str, Any]]:
    """Starts the rendezvous server and writes an invitation, with the address of the server, to the store."""
    keys = [f"{_KEY}/{rank}" for rank in range(member.size)]
    locations = [json.loads(store.get(key)) for key in keys]
    # No rank writes its key again before it has read the invitation.
    _delete_keys(store, keys)
    job_id = secrets.token_hex(16)
    secret = _job_secret() if member.started_by_ringrun else secrets.token_hex(32)
    server = _core.Rendezvous(member.size, secret, job_id, _rendezvous_server_host(locations), start_timeout)
    invitation = {"rendezvous": server.address, "job_id": job_id, "secret": None if member.started_by_ringrun else secret}
    store.set(_KEY, json.dumps(invitation))
    return server, invitation


def _delete_keys(store: Any, keys: list[str]) -> None:
    """Deletes keys from the store, if this kind of store supports that."""
    for key in keys:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            store.delete_key(key)


def _job_secret() -> str:
    secret = os.environ.get("RING_SECRET")
    if not secret:
        raise _core.StartError(
            "ringrun started group rank 0 but not this process, so this process does not have the job's secret; "
            "start all ranks with ringrun"
        )
    return secret


def _host_id() -> str:
    """Returns an identifier of this process's host: the boot id of the kernel and the network namespace. Processes for which this
    function returns the same identifier can reach each other at 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _rendezvous_server_host(locations: list[dict[str, str]]) -> str:
    """Returns the address of the rendezvous server: the variable `RINGTRAIN_HOST` if it is set, 127.0.0.1 if all
    ranks are on one host, otherwise the address of the interface from which group rank 0 reaches another host."""
    chosen = os.environ.get("RINGTRAIN_HOST")
    if chosen:
        return chosen
    mine = locations[0]
    remote = [location["address"] for location in locations if location["host"] != mine["host"]]
    return _own_address_towards(remote[0]) if remote else "127.0.0.1"


def _store_host(store: Any) -> str | None:
    """Returns the host that serves the store, or `None` if it is unknown, for example because the store is a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")


def _own_address_towards(host: str | None) -> str:
    """Returns this host's address on the route to `host`, or on the default route if `host` is this host or unknown. Sends
    nothing: connecting a datagram socket only looks up the route."""
    for target in (host, "192.0.2.1"):
        if not target:
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                address = probe.getsockname()[0]
        except OSError:
            continue
        if not address.startswith("127."):
            return address
    return "127.0.0.1"
