"""Checks the results of every collective and message of torch.distributed with the backend "ring", on any number of ranks."""

from __future__ import annotations

import warnings
from datetime import timedelta

import checks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from checks import raised
from torch.distributed import ReduceOp

from ringtrain import _core as core

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
MOVED = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn]


def tensor_of_rank(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    """Returns the tensor that rank `rank` contributes. Every rank can compute the tensors of all ranks. The elements
    are small numbers, so sums are exact in every type.
    """
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) % 7 + rank
    return (numbers % 2 == 0) if dtype is torch.bool else numbers.to(dtype)


def tensors_of_all_ranks(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([tensor_of_rank(rank, dtype) for rank in range(n)])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert torch.equal(found.float(), expected.float()) if not found.is_complex() else torch.equal(found, expected), (
        found,
        expected,
    )


def check_backend_and_ranks(rank: int, n: int) -> None:
    assert dist.get_backend() == "ring"
    assert (dist.get_rank(), dist.get_world_size()) == (rank, n)
    assert dist.group.WORLD.name() == "ring"


def check_all_reduce(rank: int, n: int) -> None:
    for dtype in FLOATS + INTEGERS:
        whole = tensors_of_all_ranks(n, dtype)
        expected = {
            ReduceOp.SUM: whole.sum(0, dtype=dtype),
            ReduceOp.MIN: whole.amin(0),
            ReduceOp.MAX: whole.amax(0),
            ReduceOp.PRODUCT: whole.double().prod(0).to(dtype),
        }
        if dtype in INTEGERS:
            expected |= {ReduceOp.BAND: whole[0], ReduceOp.BOR: whole[0], ReduceOp.BXOR: whole[0]}
            for other in whole[1:]:
                expected[ReduceOp.BAND] = expected[ReduceOp.BAND] & other
                expected[ReduceOp.BOR] = expected[ReduceOp.BOR] | other
                expected[ReduceOp.BXOR] = expected[ReduceOp.BXOR] ^ other
        if dtype in FLOATS:
            expected[ReduceOp.AVG] = (whole.double().sum(0) / n).to(dtype)
        for op, result in expected.items():
            if op is ReduceOp.PRODUCT and result.double().abs().max() > 100:
                continue
            mine = tensor_of_rank(rank, dtype)
            dist.all_reduce(mine, op)
            if op is ReduceOp.AVG:
                torch.testing.assert_close(mine, result, rtol=1e-2, atol=1e-2)
            else:
                assert_close(mine, result)
            mine = tensor_of_rank(rank, dtype)
            work = dist.all_reduce(mine, op, async_op=True)
            work.wait()
            assert work.is_completed()
            torch.testing.assert_close(mine, result, rtol=1e-2, atol=1e-2)


def check_all_reduce_of_other_types_and_layouts(rank: int, n: int) -> None:
    bools = tensor_of_rank(rank, torch.bool)
    dist.all_reduce(bools, ReduceOp.MAX)
    assert_close(bools, tensors_of_all_ranks(n, torch.bool).any(0))
    complexes = tensor_of_rank(rank, torch.complex64) * (1 + 2j)
    dist.all_reduce(complexes)
    assert_close(complexes, tensors_of_all_ranks(n, torch.complex64).sum(0) * (1 + 2j))
    scaled = tensor_of_rank(rank)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert_close(scaled, tensors_of_all_ranks(n).sum(0) * 0.5)
    across = tensor_of_rank(rank).t()
    assert not across.is_contiguous()
    dist.all_reduce(across)
    assert_close(across, tensors_of_all_ranks(n).sum(0).t())
    part = tensor_of_rank(rank, shape=(6, 6))[::2, 1:3]
    dist.all_reduce(part, async_op=True).wait()
    assert_close(part, sum(tensor_of_rank(r, shape=(6, 6))[::2, 1:3] for r in range(n)))
    number = torch.tensor(float(rank))
    dist.all_reduce(number)
    assert number.item() == sum(range(n))
    dist.all_reduce(torch.empty(0))
    large = torch.full((3 << 20,), 1.0 + rank)
    dist.all_reduce(large)
    assert torch.all(large == sum(1.0 + r for r in range(n)))


def sparse_matrix_of_rank(rank: int, dtype: torch.dtype, length: int) -> torch.Tensor:
    """Returns the sparse matrix of a rank. Several ranks have some rows in common, one row appears twice, and rank 1 has no
    rows."""
    rows = [] if rank == 1 else [0, rank, 5, rank]
    values = torch.arange(len(rows) * length).reshape(len(rows), length) % 5 + rank
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values.to(dtype), (15, length))


def check_sparse_all_reduce(rank: int, n: int) -> None:
    for dtype in [*FLOATS, torch.int32, torch.int64]:
        expected = sum(sparse_matrix_of_rank(r, dtype, 3).to_dense() for r in range(n))
        for is_async in (False, True):
            mine = sparse_matrix_of_rank(rank, dtype, 3)
            work = dist.all_reduce(mine, async_op=is_async)
            if work is not None:
                work.wait()
            assert mine.is_sparse
            assert_close(mine.to_dense(), expected)
    mine = sparse_matrix_of_rank(rank, torch.float32, 2)
    dist.all_reduce(mine, ReduceOp.AVG)
    torch.testing.assert_close(mine.to_dense(), sum(sparse_matrix_of_rank(r, torch.float32, 2).to_dense() for r in range(n)) / n)
    points = tensor_of_rank(rank).to_sparse()
    dist.all_reduce(points)
    assert_close(points.to_dense(), tensors_of_all_ranks(n).sum(0))
    empty = torch.sparse_coo_tensor(size=(4, 2))
    dist.all_reduce(empty)
    assert_close(empty.to_dense(), torch.zeros(4, 2))
    if n > 1:
        error = raised(core.InvalidArgument, lambda: dist.all_reduce(torch.eye(3 + rank).to_sparse()))
        assert "rank 0 has torch.float32 (3, 3)" in str(error), error


def check_split_group(rank: int, n: int) -> None:
    evens, odds = list(range(0, n, 2)), list(range(1, n, 2))
    own = evens if rank % 2 == 0 else odds
    part = dist.split_group(split_ranks=[evens, odds] if odds else [evens])
    assert dist.get_process_group_ranks(part) == own
    mine = tensor_of_rank(rank)
    dist.all_reduce(mine, group=part)
    assert_close(mine, sum(tensor_of_rank(r) for r in own))
    # A list gives the order of the ranks in a new group. A rank that is in no list is in no new group.
    backwards = list(reversed(range(n)))[: max(1, n - 1)]
    some = dist.split_group(split_ranks=[backwards], timeout=timedelta(seconds=40), group_desc="some")
    if rank in backwards:
        assert dist.get_rank(some) == backwards.index(rank)
        gathered = [torch.zeros(3, 5) for _ in backwards]
        dist.all_gather(gathered, tensor_of_rank(rank), group=some)
        for index, other in enumerate(backwards):
            assert_close(gathered[index], tensor_of_rank(other))
        assert some.group_desc == "some"
        dist.destroy_process_group(some)
    else:
        assert some is dist.GroupMember.NON_GROUP_MEMBER
    # Splits a subgroup.
    nested = dist.split_group(part, [[index] for index in range(len(own))])
    assert dist.get_process_group_ranks(nested) == [rank]
    dist.destroy_process_group(nested)
    dist.destroy_process_group(part)


def check_profiler_events(rank: int, n: int) -> None:
    mine, whole = torch.ones(n * 2), torch.empty(n * n * 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        works = [dist.all_reduce(mine, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        dist.all_reduce(mine)
        dist.all_reduce(torch.eye(3).to_sparse())
        dist.broadcast(mine, 0)
        dist.reduce(mine, 0)
        dist.all_gather_into_tensor(whole, mine)
        dist.reduce_scatter_tensor(mine, whole)
        dist.all_to_all_single(torch.empty(2 * n), mine)
        dist.barrier()
        sent = dist.isend(mine, (rank + 1) % n)
        dist.recv(torch.empty(2 * n), (rank - 1) % n)
        sent.wait()
    events = profiler.key_averages()
    found = {event.key: event.count for event in events if event.key.startswith("ring:")}
    once = ["broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "send", "recv"]
    assert found == {"ring:all_reduce": 5} | {f"ring:{name}": 1 for name in once}, found
    assert all(event.cpu_time_total > 0 for event in events if event.key in found)


def check_refused_calls(rank: int, n: int) -> None:
    error = raised(core.Unsupported, lambda: dist.all_reduce(tensor_of_rank(rank, torch.float8_e4m3fn)))
    assert "float8" in str(error), error
    error = raised(core.InvalidArgument, lambda: dist.broadcast(tensor_of_rank(rank).to_sparse(), 0))
    assert "to_dense" in str(error), error
    error = raised(core.Unsupported, lambda: dist.all_reduce(tensor_of_rank(rank).to_sparse(), ReduceOp.MAX))
    assert "SUM and AVG" in str(error), error
    error = raised(core.InvalidArgument, lambda: dist.broadcast(torch.empty(3, device="meta"), 0))
    assert "meta" in str(error), error
    raised(core.Unsupported, lambda: dist.all_reduce(tensor_of_rank(rank), ReduceOp.BAND))
    dist.barrier()


def check_broadcast(rank: int, n: int) -> None:
    for dtype in MOVED:
        for root in range(n):
            mine = tensor_of_rank(rank, dtype)
            dist.broadcast(mine, root)
            assert_close(mine, tensor_of_rank(root, dtype))
    mine = tensor_of_rank(rank).t()
    dist.broadcast(mine, 0, async_op=True).wait()
    assert_close(mine, tensor_of_rank(0).t())


def check_reduce(rank: int, n: int) -> None:
    for root in range(n):
        mine = tensor_of_rank(rank)
        dist.reduce(mine, root, ReduceOp.SUM)
        assert_close(mine, tensors_of_all_ranks(n).sum(0) if rank == root else tensor_of_rank(rank))


def check_all_gather(rank: int, n: int) -> None:
    for dtype in MOVED:
        parts = [torch.zeros(3, 5).to(dtype) for _ in range(n)]
        dist.all_gather(parts, tensor_of_rank(rank, dtype))
        for other, part in enumerate(parts):
            assert_close(part, tensor_of_rank(other, dtype))
        into = torch.zeros(3 * n, 5).to(dtype)
        dist.all_gather_into_tensor(into, tensor_of_rank(rank, dtype))
        assert_close(into, torch.cat([tensor_of_rank(other, dtype) for other in range(n)]))
    uneven = [torch.zeros(other + 1, 2) for other in range(n)]
    dist.all_gather(uneven, torch.full((rank + 1, 2), float(rank)), async_op=True).wait()
    for other, part in enumerate(uneven):
        assert_close(part, torch.full((other + 1, 2), float(other)))


def check_reduce_scatter(rank: int, n: int) -> None:
    expected = tensors_of_all_ranks(n)[:, 0].sum(0) + n * torch.tensor(float(rank))
    for asynchronous in (False, True):
        parts = [tensor_of_rank(rank)[0] + part for part in range(n)]
        mine = torch.zeros(5)
        work = dist.reduce_scatter(mine, parts, async_op=asynchronous)
        if work is not None:
            work.wait()
        assert_close(mine, expected)
        work = dist.reduce_scatter_tensor(mine, torch.stack(parts), ReduceOp.AVG, async_op=asynchronous)
        if work is not None:
            work.wait()
        torch.testing.assert_close(mine, expected / n)
        work = dist.reduce_scatter_tensor(mine, torch.stack(parts), dist._make_nccl_premul_sum(2.0))
        assert_close(mine, 2 * expected)


def check_gather_and_scatter(rank: int, n: int) -> None:
    for root in range(n):
        parts = [torch.zeros(3, 5) for _ in range(n)] if rank == root else None
        dist.gather(tensor_of_rank(rank), parts, root)
        if parts is not None:
            assert_close(torch.stack(parts), tensors_of_all_ranks(n))
        given = [tensor_of_rank(other) for other in range(n)] if rank == root else None
        mine = torch.zeros(3, 5)
        dist.scatter(mine, given, root)
        assert_close(mine, tensor_of_rank(rank))


def check_all_to_all(rank: int, n: int) -> None:
    received = [torch.zeros(3, 5) for _ in range(n)]
    dist.all_to_all(received, [tensor_of_rank(rank) * 10 + to for to in range(n)])
    for source, part in enumerate(received):
        assert_close(part, tensor_of_rank(source) * 10 + rank)
    output = torch.zeros(n, 2)
    dist.all_to_all_single(output, torch.tensor([[rank, to] for to in range(n)], dtype=torch.float32))
    assert_close(output, torch.tensor([[source, rank] for source in range(n)], dtype=torch.float32))
    # Rank r sends r + 1 rows to each rank.
    rows = torch.full((n * (rank + 1), 2), float(rank))
    output = torch.zeros(sum(source + 1 for source in range(n)), 2)
    dist.all_to_all_single(output, rows, [source + 1 for source in range(n)], [rank + 1] * n, async_op=True).wait()
    assert_close(output, torch.cat([torch.full((source + 1, 2), float(source)) for source in range(n)]))
    ragged = [torch.zeros(source + 1) for source in range(n)]
    dist.all_to_all(ragged, [torch.full((rank + 1,), float(rank)) for _ in range(n)])
    assert_close(torch.cat(ragged), torch.cat([torch.full((source + 1,), float(source)) for source in range(n)]))


def check_coalesced_collectives(rank: int, n: int) -> None:
    both = [tensor_of_rank(rank), tensor_of_rank(rank) * 2]
    with dist._coalescing_manager():
        for tensor in both:
            dist.all_reduce(tensor)
    assert_close(both[0], tensors_of_all_ranks(n).sum(0))
    assert_close(both[1], tensors_of_all_ranks(n).sum(0) * 2)
    outputs = [torch.zeros(3 * n, 5), torch.zeros(3 * n, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, tensor_of_rank(rank))
    manager.wait()
    for output in outputs:
        assert_close(output, torch.cat([tensor_of_rank(other) for other in range(n)]))


def check_functional_collectives(rank: int, n: int) -> None:
    # Newer versions of torch deprecate these functions, but all versions have them.
    warnings.simplefilter("ignore", FutureWarning)
    group = dist.group.WORLD
    assert_close(functional.all_reduce(tensor_of_rank(rank), "sum", group) + 0, tensors_of_all_ranks(n).sum(0))
    assert_close(
        functional.all_gather_tensor(tensor_of_rank(rank), 0, group) + 0, torch.cat([tensor_of_rank(other) for other in range(n)])
    )
    whole = torch.cat([tensor_of_rank(rank)] * n)
    assert_close(functional.reduce_scatter_tensor(whole, "sum", 0, group) + 0, tensors_of_all_ranks(n).sum(0))
    assert_close(functional.broadcast(tensor_of_rank(rank), 0, group) + 0, tensor_of_rank(0))
    assert_close(
        functional.all_to_all_single(torch.cat([tensor_of_rank(rank)] * n), None, None, group) + 0,
        torch.cat([tensor_of_rank(other) for other in range(n)]),
    )
    summed = functional.all_reduce_coalesced([tensor_of_rank(rank), tensor_of_rank(rank)], "sum", group)
    for tensor in summed:
        assert_close(tensor + 0, tensors_of_all_ranks(n).sum(0))


def check_messages(rank: int, n: int) -> None:
    after, before = (rank + 1) % n, (rank - 1) % n
    for dtype in MOVED:
        mine = torch.zeros(3, 5).to(dtype)
        sent = dist.isend(tensor_of_rank(rank, dtype), after, tag=3)
        dist.recv(mine, before, tag=3)
        sent.wait()
        assert_close(mine, tensor_of_rank(before, dtype))
    if n > 1:
        got = torch.zeros(3, 5)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor_of_rank(rank), after), dist.P2POp(dist.irecv, got, before)])
        for work in works:
            work.wait()
        assert_close(got, tensor_of_rank(before))
    across = torch.zeros(5, 3).t()
    sent = dist.isend(tensor_of_rank(rank), after)
    dist.recv(across, before)
    sent.wait()
    assert_close(across, tensor_of_rank(before))
    # The future of a message that has not arrived does not delay other operations.
    late = dist.irecv(mine_late := torch.zeros(3, 5), before, tag=9)
    future = late.get_future()
    dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
    dist.isend(tensor_of_rank(rank), after, tag=9).wait()
    future.wait()
    assert_close(mine_late, tensor_of_rank(before))


def check_receive_from_any_source(rank: int, n: int) -> None:
    if rank == 0:
        sources = set()
        for _ in range(n - 1):
            got = torch.zeros(3, 5)
            source = dist.recv(got)
            assert_close(got, tensor_of_rank(source))
            sources.add(source)
        assert sources == set(range(1, n))
    else:
        dist.send(tensor_of_rank(rank), 0)
    dist.barrier()


def check_objects(rank: int, n: int) -> None:
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (100 * rank)})
    assert [found["rank"] for found in objects] == list(range(n))
    received = [{"from": rank}, rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(received, 0)
    assert received == [{"from": 0}, 0]
    gathered = [None] * n if rank == 0 else None
    dist.gather_object((rank, "x"), gathered, 0)
    assert rank or gathered == [(other, "x") for other in range(n)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {other}" for other in range(n)] if rank == 0 else None, 0)
    assert mine == [f"for {rank}"]


def check_new_groups(rank: int, n: int) -> None:
    evens = dist.new_group(list(range(0, n, 2)))
    mixed = dist.new_group(list(range(n)), backend="gloo")
    if rank % 2 == 0:
        mine = tensor_of_rank(rank)
        dist.all_reduce(mine, group=evens)
        assert_close(mine, sum(tensor_of_rank(other) for other in range(0, n, 2)))
        roots = tensor_of_rank(rank)
        dist.broadcast(roots, max(range(0, n, 2)), group=evens)
        assert_close(roots, tensor_of_rank(max(range(0, n, 2))))
    mine = tensor_of_rank(rank)
    dist.all_reduce(mine, group=mixed)
    assert_close(mine, tensors_of_all_ranks(n).sum(0))
    dist.barrier()
    if rank % 2 == 0:
        dist.destroy_process_group(evens)
    again = dist.new_group(list(reversed(range(n))))
    mine = tensor_of_rank(rank)
    dist.all_reduce(mine, group=again)
    assert_close(mine, tensors_of_all_ranks(n).sum(0))
    mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("data",))
    mine = tensor_of_rank(rank)
    dist.all_reduce(mine, group=mesh.get_group("data"))
    assert_close(mine, tensors_of_all_ranks(n).sum(0))


def check_futures_of_operations(rank: int, n: int) -> None:
    # Continuations run in the order of the operations, and can wait for operations that they begin.
    second: list[torch.Tensor] = []

    def reduce_again(future: torch.futures.Future) -> torch.Tensor:
        another = future.value()[0] * 1.0
        dist.all_reduce(another, async_op=True).get_future().wait()
        second.append(another)
        return another

    works = [dist.all_reduce(torch.full((4,), float(rank)), async_op=True) for _ in range(6)]
    chained = [work.get_future().then(reduce_again) for work in works]
    for future in chained:
        assert torch.all(future.wait() == n * sum(range(n)))
    assert len(second) == 6
    done = dist.all_reduce(torch.ones(2), async_op=True)
    done.wait()
    assert torch.all(done.get_future().wait()[0] == n)


def check_barriers(rank: int, n: int) -> None:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    if n > 1:
        # Rank 1 calls the barrier only after the barrier has timed out on the other ranks.
        if rank == 1:
            dist.barrier()
            error = raised(RuntimeError, lambda: dist.monitored_barrier(timeout=timedelta(seconds=5)))
        else:
            error = raised(RuntimeError, lambda: dist.monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True))
            dist.barrier()
        assert "rank 1 did not reach" in str(error), error
        dist.monitored_barrier(timeout=timedelta(seconds=30))


if __name__ == "__main__":
    arguments = checks.parse_arguments()
    dist.init_process_group("ring", init_method=arguments.init_method, rank=arguments.rank, world_size=arguments.world_size)
    checks.run(globals(), dist.get_rank(), dist.get_world_size(), only=arguments.only)
    dist.destroy_process_group()
