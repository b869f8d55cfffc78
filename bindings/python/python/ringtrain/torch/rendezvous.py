"""How the ranks of a process group connect: through the job that ringrun started, or through torch's store."""

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
# Longer than any host takes to start its ranks. A shorter timeout of the process group applies too.
_START_SECONDS_MAX = 300.0


@dataclass(frozen=True)
class Membership:
    """This process's place in a process group."""

    rank: int
    size: int
    timeout: float
    """The timeout of operations, in seconds."""
    of_launcher: bool
    """Whether ringrun started all members of the group, so that they know the job's secret."""


def launched(rank: int, size: int) -> bool:
    """Whether this process has this rank in a job of this size, which it has joined or for which ringrun started it."""
    if _world.is_joined():
        world = _world.current().core
        return (world.rank, world.size) == (rank, size)
    return (os.environ.get("RING_RANK"), os.environ.get("RING_WORLD_SIZE")) == (str(rank), str(size))


def join_launched(timeout: float) -> _core.Group:
    """A group of all ranks of the job. Its operations are separate from those of `ringtrain.world()`."""
    world = _world.current() if _world.is_joined() else _world.join()
    group = world.core.duplicate()
    group.timeout = timeout
    return group


def join_through_store(store: Any, place: Membership) -> _core.Group:
    """Connects the ranks of a group. Group rank 0 serves a rendezvous and writes its address to the store.

    Under ringrun the group's secret is that of the job. Elsewhere the store transmits a new secret; torch's stores have no
    authentication, so that every process that can read the store can join. Raises `ringtrain.StartError` if a rank is missing.
    """
    location = {"host": _host_id(), "address": _address_towards(_store_host(store))}
    store.set(f"{_KEY}/{place.rank}", json.dumps(location))
    start_timeout = min(place.timeout, _START_SECONDS_MAX)
    served, invitation = _invite(store, place, start_timeout) if place.rank == 0 else (None, json.loads(store.get(_KEY)))
    group = _core.join(
        rank=place.rank,
        size=place.size,
        rendezvous=invitation["rendezvous"],
        job_id=invitation["job_id"],
        secret=invitation["secret"] or _job_secret(),
        start_timeout=start_timeout,
        timeout=place.timeout,
    )
    del served
    # All have read the invitation. Delete it before a rank can start another rendezvous in the same store.
    if place.rank == 0:
        _delete(store, [_KEY])
    group.barrier()
    return group


def _invite(store: Any, place: Membership, start_timeout: float) -> tuple[_core.Rendezvous, dict[str, Any]]:
    """Serves the rendezvous and writes its address to the store."""
    keys = [f"{_KEY}/{rank}" for rank in range(place.size)]
    locations = [json.loads(store.get(key)) for key in keys]
    # The ranks do not write these keys again before they have the invitation.
    _delete(store, keys)
    job_id = secrets.token_hex(16)
    secret = _job_secret() if place.of_launcher else secrets.token_hex(32)
    served = _core.Rendezvous(place.size, secret, job_id, _serving_host(locations), start_timeout)
    invitation = {"rendezvous": served.address, "job_id": job_id, "secret": None if place.of_launcher else secret}
    store.set(_KEY, json.dumps(invitation))
    return served, invitation


def _delete(store: Any, keys: list[str]) -> None:
    """Deletes keys from the store, if this kind of store can do it."""
    for key in keys:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            store.delete_key(key)


def _job_secret() -> str:
    secret = os.environ.get("RING_SECRET")
    if not secret:
        raise _core.StartError(
            "ringrun started group rank 0 but not this process, so that it does not have the job's secret; "
            "start all ranks with ringrun"
        )
    return secret


def _host_id() -> str:
    """Equal for processes that reach each other through 127.0.0.1, in one network namespace of one kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _serving_host(locations: list[dict[str, str]]) -> str:
    """The address at which group rank 0 serves: 127.0.0.1 on one host, otherwise that of the interface towards another host.
    The variable `RINGTRAIN_HOST` overrides it."""
    chosen = os.environ.get("RINGTRAIN_HOST")
    if chosen:
        return chosen
    mine = locations[0]
    remote = [location["address"] for location in locations if location["host"] != mine["host"]]
    return _address_towards(remote[0]) if remote else "127.0.0.1"


def _store_host(store: Any) -> str | None:
    """The host that serves the store, if a host serves it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")


def _address_towards(host: str | None) -> str:
    """This host's address on the route to another host, or on the default route if that is this host. Sends nothing: to connect
    a datagram socket only looks up the route."""
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
