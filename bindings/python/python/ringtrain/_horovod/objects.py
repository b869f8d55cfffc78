"""Horovod's functions that send Python objects between ranks. Objects are sent as pickles. Only processes that know the job's
secret can join the job and send pickles."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from ringtrain._horovod import gathering
from ringtrain._horovod.process_sets import ProcessSet, global_process_set


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the root's object on every rank."""
    members = process_set.members()
    is_root = members.rank_in_group(root_rank) == members.group.rank
    # Only the root contributes bytes to this all-gather.
    data = pickle.dumps(obj) if is_root else b""
    gathered = members.named.all_gather_bytes(members.tensor_name("broadcast_object", name), data).wait()
    return obj if is_root else pickle.loads(gathered)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns every rank's object, in rank order."""
    members = process_set.members()
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    handle = gathering.gather_parts(members, members.tensor_name("allgather_object", name), "", data)
    return [pickle.loads(part.tobytes()) for _, part in gathering.split_parts(handle.wait())]
