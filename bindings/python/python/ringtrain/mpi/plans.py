"""Plans collectives on buffers. A plan is an operation of ringtrain, its arguments, and a function to call after the operation.

Collectives without a reduction send elements as bytes, so only the lengths of the datatypes must match. ringtrain computes the
reductions that it supports. For other reductions, the ranks gather the elements of all ranks, and this module reduces them from
rank 0 on."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import constants as c
from .buffers import IN_PLACE, Block, Blocks, parse_block, parse_blocks, parse_blocks_w
from .errors import Exception
from .operations import SUM, Op, check_alike, trim_memory


class Plan(NamedTuple):
    """An operation of ringtrain, its arguments, and a function to call after the operation."""

    operation: str
    arguments: tuple
    finish: Callable[[], None] | None = None


def barrier(comm: Any) -> Plan:
    """Waits until all ranks have called this method."""
    return Plan("barrier", ())


def bcast(comm: Any, buf: Any, root: int = 0) -> Plan:
    """Copies the root's buffer to the buffers of all ranks."""
    is_root = _is_root(comm, root)
    block = parse_block(buf, not is_root)
    if is_root:
        place = block.send_memory()
        # Pass a copy of read-only memory. The operation does not change the root's memory.
        return Plan("broadcast", (bytearray(place) if place.readonly else place, root))
    return _receive_plan(block, "broadcast", lambda place: (place, root))


def gather(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
    """Gathers the buffers of all ranks on the root, one after the other."""
    if not _is_root(comm, root):
        return Plan("gather", (None, parse_block(sendbuf, False).send_memory(), root))
    whole, own = _whole_and_own_block(comm, recvbuf)
    sent = bytes(own.send_memory()) if _in_place(sendbuf) else _checked_send_memory(parse_block(sendbuf, False), own)
    return _receive_plan(whole, "gather", lambda place: (place, sent, root))


def gatherv(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
    """Does the same as `Gather`, with a separate length and position for the buffer of each rank."""
    size, rank = comm.size, comm.rank
    nothing = [0] * size
    if not _is_root(comm, root):
        data = parse_block(sendbuf, False).send_memory()
        return Plan("all_to_all", (bytearray(), data, _counts_for_rank(size, root, len(data)), nothing))
    blocks = parse_blocks(recvbuf, True, size)
    data = memoryview(b"") if _in_place(sendbuf) else _checked_send_memory(parse_block(sendbuf, False), blocks[rank])
    if _in_place(sendbuf):
        blocks.counts[rank] = 0
    place = blocks.receive_memory()
    return Plan(
        "all_to_all", (place, data, _counts_for_rank(size, rank, len(data)), blocks.sizes()), lambda: blocks.store_received(place)
    )


def scatter(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
    """Sends part r of the root's buffer to rank r."""
    if not _is_root(comm, root):
        return _receive_plan(parse_block(recvbuf, True), "scatter", lambda place: (place, None, root))
    first = parse_block(sendbuf, False, comm.size)
    own = first.part(comm.rank, first.count)
    data = Block(first.memory, first.offset, first.count * comm.size, first.datatype).send_memory()
    if _in_place(recvbuf):
        return Plan("scatter", (bytearray(own.nbytes), data, root))
    block = parse_block(recvbuf, True)
    _require_room(own.nbytes, block.nbytes)
    return _receive_plan(block, "scatter", lambda place: (place, data, root))


def scatterv(comm: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
    """Does the same as `Scatter`, with a separate length and position for each part."""
    size, rank = comm.size, comm.rank
    nothing = [0] * size
    if not _is_root(comm, root):
        block = parse_block(recvbuf, True)
        expected = _counts_for_rank(size, root, block.nbytes)
        return _receive_plan(block, "all_to_all", lambda place: (place, b"", nothing, expected))
    blocks = parse_blocks(sendbuf, False, size)
    if _in_place(recvbuf):
        blocks.counts[rank] = 0
        return Plan("all_to_all", (bytearray(), blocks.send_memory(), blocks.sizes(), nothing))
    block = parse_block(recvbuf, True)
    _require_room(blocks[rank].nbytes, block.nbytes)
    expected = _counts_for_rank(size, rank, block.nbytes)
    return _receive_plan(block, "all_to_all", lambda place: (place, blocks.send_memory(), blocks.sizes(), expected))


def allgather(comm: Any, sendbuf: Any, recvbuf: Any) -> Plan:
    """Gathers the buffers of all ranks on every rank, one after the other."""
    whole, own = _whole_and_own_block(comm, recvbuf)
    if not _in_place(sendbuf):
        sent = _checked_send_memory(parse_block(sendbuf, False), own)
        return _receive_plan(whole, "all_gather", lambda place: (place, sent))
    if whole.is_flat:
        return Plan("all_gather", (whole.flat(), None))
    sent = own.send_memory()
    return _receive_plan(whole, "all_gather", lambda place: (place, sent))


def allgatherv(comm: Any, sendbuf: Any, recvbuf: Any) -> Plan:
    """Does the same as `Allgather`, with a separate length and position for the buffer of each rank."""
    blocks = parse_blocks(recvbuf, True, comm.size)
    own = blocks[comm.rank]
    sent = memoryview(bytes(own.send_memory())) if _in_place(sendbuf) else _checked_send_memory(parse_block(sendbuf, False), own)
    place = blocks.receive_memory()
    return Plan("all_gather", (place, sent, blocks.sizes()), lambda: blocks.store_received(place))


def alltoall(comm: Any, sendbuf: Any, recvbuf: Any) -> Plan:
    """Sends part r of the buffer to rank r. Receives one part from each rank, and stores the parts one after the other."""
    whole, _ = _whole_and_own_block(comm, recvbuf)
    if _in_place(sendbuf):
        sent = memoryview(bytes(whole.send_memory()))
    else:
        first = parse_block(sendbuf, False, comm.size)
        sent = _checked_send_memory(Block(first.memory, first.offset, first.count * comm.size, first.datatype), whole)
    return _receive_plan(whole, "all_to_all", lambda place: (place, sent))


def alltoallv(comm: Any, sendbuf: Any, recvbuf: Any) -> Plan:
    """Does the same as `Alltoall`, with a separate length and position for each part."""
    received = parse_blocks(recvbuf, True, comm.size)
    return _exchange(
        comm, received if _in_place(sendbuf) else parse_blocks(sendbuf, False, comm.size), received, _in_place(sendbuf)
    )


def alltoallw(comm: Any, sendbuf: Any, recvbuf: Any) -> Plan:
    """Does the same as `Alltoallv`, with a separate datatype for each part."""
    received = parse_blocks_w(recvbuf, True, comm.size)
    return _exchange(
        comm, received if _in_place(sendbuf) else parse_blocks_w(sendbuf, False, comm.size), received, _in_place(sendbuf)
    )


def _exchange(comm: Any, sent: Blocks, received: Blocks, is_in_place: bool) -> Plan:
    _require_room(sent[comm.rank].nbytes, received[comm.rank].nbytes)
    data = sent.send_memory()
    if is_in_place:
        data = memoryview(bytes(data))
    place = received.receive_memory()
    return Plan("all_to_all", (place, data, sent.sizes(), received.sizes()), lambda: received.store_received(place))


def allreduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
    """Reduces the buffers of all ranks, and writes the result on every rank."""
    target = parse_block(recvbuf, True)
    source = _block_to_reduce(sendbuf, target)
    native, output = _native(op, target)
    if native is not None:
        return Plan("all_reduce", (output, native, None if source is None else _numbers(source)))
    parts, gathered = _gather_arguments(comm, source or target)
    return Plan("all_gather", gathered, lambda: _fold_into(op, parts, target))


def reduce(comm: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Plan:
    """Reduces the buffers of all ranks, and writes the result on the root."""
    is_root = _is_root(comm, root)
    if is_root:
        target = parse_block(recvbuf, True)
        source = _block_to_reduce(sendbuf, target)
    else:
        target = source = parse_block(sendbuf, False)
    native, output = _native(op, target)
    if native is not None:
        data = None if source is None else _numbers(source)
        return Plan("reduce", (output if is_root else None, native, root, data))
    parts, (everything, own) = _gather_arguments(comm, source or target)
    if not is_root:
        return Plan("gather", (None, own, root))
    return Plan("gather", (everything, own, root), lambda: _fold_into(op, parts, target))


def reduce_scatter_block(comm: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
    """Reduces the buffers of all ranks, and writes part r of the result on rank r. All parts have the same length."""
    size = comm.size
    if _in_place(sendbuf):
        target = parse_block(recvbuf, True, size)
        first = target
    else:
        target = parse_block(recvbuf, True)
        first = parse_block(sendbuf, False, size)
        check_alike(first, target)
    whole = Block(first.memory, first.offset, first.count * size, first.datatype)
    return _reduce_scatter(comm, whole, target, [target.count] * size, op, _in_place(sendbuf))


def reduce_scatter(comm: Any, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM) -> Plan:
    """Does the same as `Reduce_scatter_block`, with a separate length for each part."""
    target = parse_block(recvbuf, True)
    in_place = _in_place(sendbuf)
    source = target if in_place else parse_block(sendbuf, False)
    if source.count == target.count and _address(source) == _address(target):
        # If the program passes the same buffer twice, the reduction is in place.
        source, in_place = target, True
    counts = comm.allgather(target.count) if recvcounts is None and not in_place else [int(count) for count in recvcounts or ()]
    if len(counts) != comm.size:
        raise ValueError(f"expecting {comm.size} items, got {len(counts)}")
    if not in_place and source.datatype != target.datatype:
        raise ValueError("mismatch in send and receive MPI datatypes")
    if source.count != sum(counts):
        what = "receive" if in_place else "send"
        raise ValueError(f"mismatch in {what} count {source.count} and sum(counts) {sum(counts)}")
    own = counts[comm.rank]
    if not in_place and target.count != own:
        raise ValueError(f"mismatch in receive count {target.count} and counts[{comm.rank}] {own}")
    return _reduce_scatter(comm, source, Block(target.memory, target.offset, own, target.datatype), counts, op, in_place)


def _reduce_scatter(comm: Any, whole: Block, target: Block, counts: list[int], op: Op, in_place: bool) -> Plan:
    native, output = _native(op, target)
    if native is not None:
        data = _numbers(whole)
        width = len(data) // whole.count if whole.count else 1
        lengths = [count * width for count in counts]
        uneven = None if len(set(counts)) == 1 else lengths
        return Plan("reduce_scatter", (output, data.copy() if in_place else data, native, uneven))
    extent = whole.datatype._extent
    data = bytes(trim_memory(whole).memory)
    everything = bytearray(target.count * extent * comm.size)
    parts = [
        Block(memoryview(everything)[at : at + target.count * extent], 0, target.count, target.datatype)
        for at in _part_offsets(target, comm.size)
    ]
    arguments = (everything, data, [count * extent for count in counts], [target.count * extent] * comm.size)
    return Plan("all_to_all", arguments, lambda: _fold_into(op, parts, target))


def scan(comm: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
    """Reduces the buffers of rank 0 to this rank."""
    target = parse_block(recvbuf, True)
    source = _block_to_reduce(sendbuf, target)
    native, output = _native(op, target)
    if native is not None:
        return Plan("scan", (output, native, None if source is None else _numbers(source)))
    parts, gathered = _gather_arguments(comm, source or target)
    return Plan("all_gather", gathered, lambda: _fold_into(op, parts[: comm.rank + 1], target))


def exscan(comm: Any, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
    """Reduces the buffers of the ranks before this rank. On rank 0, the buffer does not change."""
    target = parse_block(recvbuf, True)
    source = _block_to_reduce(sendbuf, target)
    native, output = _native(op, target)
    if native is not None:
        return Plan("exscan", (output, native, None if source is None else _numbers(source)))
    parts, gathered = _gather_arguments(comm, source or target)
    return Plan("all_gather", gathered, lambda: _fold_into(op, parts[: comm.rank], target))


def _in_place(sendbuf: Any) -> bool:
    return sendbuf is IN_PLACE or sendbuf is None


def _address(block: Block) -> int | None:
    """Returns the address of a block's first byte, or `None` if the block is empty."""
    memory = np.frombuffer(block.memory, np.uint8) if block.nbytes else None
    return None if memory is None else memory.ctypes.data + block.offset


def _is_root(comm: Any, root: int) -> bool:
    if not 0 <= root < comm.size:
        raise Exception(c.ERR_ROOT, f"{root} is not a rank of a communicator of size {comm.size}")
    return root == comm.rank


def _receive_plan(block: Block, operation: str, arguments: Callable[[memoryview], tuple]) -> Plan:
    """Returns a plan that receives into `block`."""
    place = block.receive_memory()
    return Plan(operation, arguments(place), None if block.is_flat else lambda: block.store_received(place))


def _whole_and_own_block(comm: Any, recvbuf: Any) -> tuple[Block, Block]:
    """Returns the blocks of all ranks as one block, and the block of this rank."""
    first = parse_block(recvbuf, True, comm.size)
    return Block(first.memory, first.offset, first.count * comm.size, first.datatype), first.part(comm.rank, first.count)


def _checked_send_memory(sent: Block, room: Block) -> memoryview:
    _require_room(sent.nbytes, room.nbytes)
    return sent.send_memory()


def _require_room(sent: int, room: int) -> None:
    if sent > room:
        raise Exception(c.ERR_TRUNCATE, f"this rank sends itself {sent} bytes, but has room for only {room}")
    if sent < room:
        raise Exception(c.ERR_COUNT, f"this rank sends itself {sent} bytes, but expects {room}")


def _counts_for_rank(size: int, rank: int, count: int) -> list[int]:
    counts = [0] * size
    counts[rank] = count
    return counts


def _block_to_reduce(sendbuf: Any, target: Block) -> Block | None:
    """Returns the block to reduce, or `None` if the reduction is in place."""
    if _in_place(sendbuf):
        return None
    source = parse_block(sendbuf, False)
    check_alike(source, target)
    return source


def _native(op: Op, block: Block) -> tuple[str | None, np.ndarray | None]:
    """Returns ringtrain's name for a reduction, and the elements as numbers that ringtrain can reduce. Returns `None` twice if
    ringtrain does not support the reduction."""
    native = op._native_on(block.datatype)
    if native is not None:
        return native, block.array()
    if op is SUM and block.datatype.dtype.char in "FD":
        return "sum", _numbers(block)
    return None, None


def _numbers(block: Block) -> np.ndarray:
    """Returns the elements as numbers that ringtrain can reduce: each complex number becomes two real numbers."""
    array = block.array()
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def _part_offsets(block: Block, size: int) -> range:
    length = block.count * block.datatype._extent
    return range(0, length * size, length) if length else range(0)


def _gather_arguments(comm: Any, block: Block) -> tuple[list[Block], tuple[bytearray, memoryview]]:
    """Allocates memory for the blocks of all ranks. Returns these blocks, and the arguments of an operation that gathers them."""
    source = trim_memory(block)
    length = len(source.memory)
    everything = bytearray(length * comm.size)
    whole = memoryview(everything)
    parts = [Block(whole[rank * length : (rank + 1) * length], 0, block.count, block.datatype) for rank in range(comm.size)]
    # An in-place operation sends the memory of the result. The result is written only after all ranks have the sent elements.
    return parts, (everything, source.memory)


def _fold_into(op: Op, parts: list[Block], target: Block) -> None:
    """Reduces the parts from left to right, and writes the result to `target`."""
    for left, right in itertools.pairwise(parts):
        op._fold(left, right)
    if parts:
        last = parts[-1].memory
        target.memory[target.offset : target.offset + len(last)] = last
