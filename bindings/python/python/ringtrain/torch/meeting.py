"""How the ranks of a torch process group become a group of ours: through the job's own, or through torch's store."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from ringtrain import _core, _world

_KEY = "ringtrain/meeting"
# Longer than any host takes to start its ranks; torch's own limit applies where it is shorter.
_START_SECONDS_MAX = 300.0


@dataclass(frozen=True)
class Place:
    """This process's seat in a process group."""

    rank: int
    size: int
    timeout: float
    """Seconds that an operation may take."""
    of_launcher: bool
    """Whether ringrun started every process of the group, so that all know the launcher's secret."""


def launched(rank: int, size: int) -> bool:
    """Whether this process belongs to a job of ours, already joined or made by ringrun, in which it has this rank among so
    many."""
    if _world.is_joined():
        world = _world.current().core
        return (world.rank, world.size) == (rank, size)
    return (os.environ.get("RING_RANK"), os.environ.get("RING_WORLD_SIZE")) == (str(rank), str(size))


def join_launched(timeout: float) -> _core.Group:
    """A group of the job's ranks with messages and collectives of its own, so that `ringtrain` and torch do not disturb each
    other."""
    world = _world.current() if _world.is_joined() else _world.join()
    group = world.core.duplicate()
    group.timeout = timeout
    return group


def meet(store: Any, place: Place) -> _core.Group:
    """Meets the other ranks at a place that group rank 0 serves and names in the store.

    Under ringrun the launcher's secret is the group's. Elsewhere the store passes a fresh one on: torch's stores ask nobody who
    they are, so whoever can read the store can also join. Raises `ringtrain.StartError` if some rank does not come.
    """
    seat = {"host": _host_id(), "address": _address_towards(_store_host(store))}
    store.set(f"{_KEY}/{place.rank}", json.dumps(seat))
    start_timeout = min(place.timeout, _START_SECONDS_MAX)
    served, invitation = _invite(store, place, start_timeout) if place.rank == 0 else (None, json.loads(store.get(_KEY)))
    group = _core.join(
        rank=place.rank,
        size=place.size,
        rendezvous=invitation["rendezvous"],
        job_id=invitation["job_id"],
        secret=invitation["secret"] or _launchers_secret(),
        start_timeout=start_timeout,
        timeout=place.timeout,
    )
    del served
    # All have read the invitation. It must be gone before anybody can come back for another meeting in the same store.
    if place.rank == 0:
        _forget(store, [_KEY])
    group.barrier()
    return group


def _invite(store: Any, place: Place, start_timeout: float) -> tuple[_core.Rendezvous, dict[str, Any]]:
    """Serves the place where all meet, and says in the store where it is."""
    keys = [f"{_KEY}/{rank}" for rank in range(place.size)]
    seats = [json.loads(store.get(key)) for key in keys]
    # Nobody writes them again before having got the invitation.
    _forget(store, keys)
    job_id = secrets.token_hex(16)
    secret = _launchers_secret() if place.of_launcher else secrets.token_hex(32)
    served = _core.Rendezvous(place.size, secret, job_id, _serving_host(seats), start_timeout)
    invitation = {"rendezvous": served.address, "job_id": job_id, "secret": None if place.of_launcher else secret}
    store.set(_KEY, json.dumps(invitation))
    return served, invitation


def _forget(store: Any, keys: list[str]) -> None:
    """Deletes keys from the store, where the kind of store can."""
    for key in keys:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            store.delete_key(key)


def _launchers_secret() -> str:
    secret = os.environ.get("RING_SECRET")
    if not secret:
        raise _core.StartError(
            "group rank 0 was started by ringrun and this process was not, so it does not know the job's secret"
        )
    return secret


def _host_id() -> str:
    """The same for processes that reach each other through 127.0.0.1: one kernel, one network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _serving_host(seats: list[dict[str, str]]) -> str:
    """The address at which group rank 0 serves: the loopback on one host, else that of the interface from which others are
    reached. `RINGTRAIN_HOST` overrides it."""
    chosen = os.environ.get("RINGTRAIN_HOST")
    if chosen:
        return chosen
    mine = seats[0]
    elsewhere = [seat["address"] for seat in seats if seat["host"] != mine["host"]]
    if not elsewhere:
        return "127.0.0.1"
    return _address_towards(elsewhere[0])


def _store_host(store: Any) -> str | None:
    """The host that serves the store, where it is served."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")


def _address_towards(host: str | None) -> str:
    """This host's address on the way to another; on the default route where that is itself. Sends nothing: connecting a datagram
    socket only looks up the route."""
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
