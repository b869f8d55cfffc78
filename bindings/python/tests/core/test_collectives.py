"""Compares every collective with numpy, for all element types and reductions, blocking and asynchronous. Checks that results
have the same bits on all ranks."""

import itertools
import os
from collections.abc import Iterator

import numpy as np

import ringtrain as ring
from ranks import Cases, raised

cases = Cases(__file__)

FULL = bool(os.environ.get("TEST_FULL"))
"""Whether `tools/test --full` runs the tests."""

FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "longlong", "uint8", "uint16", "uint32", "uint64", "ulonglong")
NUMBERS = FLOATS + INTEGERS
COMPLEX = ("complex64", "complex128")
STRUCTURED = np.dtype([("id", "<i4"), ("O", "u1"), ("value", "<f8", (2,))])
SENDABLE = (
    *NUMBERS,
    "bool",
    *COMPLEX,
    "datetime64[ns]",
    "timedelta64[s]",
    ">i4",
    ">f8",
    ">c16",
    "longdouble",
    "S5",
    "U3",
    "V7",
    STRUCTURED,
)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 4, 5), (1021,), (300_007,))
SMALL_SHAPES = SHAPES[:-2]
WITH_EVERY_SHAPE = ("float16", "float64", "int32", "uint8", "bool", "complex64")
"""The types that the gate reduces with every shape."""


def reductions_and_shapes(dtype, shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields every reduction of the type with one shape, and the sum of some types with every shape. With `tools/test --full`,
    yields every reduction with every shape."""
    for op, shape in itertools.product(supported_reductions(dtype), shapes):
        if FULL or shape == (3, 5) or (op == "sum" and dtype in WITH_EVERY_SHAPE):
            yield op, shape


ARITHMETIC = ("sum", "prod", "min", "max", "avg")
LOGICAL = ("land", "lor", "lxor")
BITWISE = ("band", "bor", "bxor")


def make_sample(dtype, shape, rank, seed=0) -> np.ndarray:
    """Returns the array that rank `rank` contributes. Every rank can compute the arrays of all ranks. The values are
    small integers, so sums and products over a few ranks are exact."""
    dtype = np.dtype(dtype)
    words = np.random.default_rng([seed, rank]).integers(0, 5, size=shape or (1,))
    if dtype.kind in "fui":
        values = (words - 2 if dtype.kind != "u" else words).astype(dtype)
    elif dtype.kind == "b":
        values = words > 1
    elif dtype.kind == "c":
        values = (words - 2 + 1j * words[..., ::-1]).astype(dtype)
    elif dtype.kind in "mM":
        values = words.astype("i8").view(dtype)
    elif dtype.kind in "SU":
        values = np.array([f"a{word}" for word in words.flat], dtype).reshape(words.shape)
    elif dtype.names:
        values = np.zeros(words.shape, dtype)
        values["id"], values["O"], values["value"][..., 0] = words, words + 1, words / 4
    else:
        values = np.frombuffer(words.astype("i8").tobytes(), "V8").astype(dtype).reshape(words.shape)
    return values.reshape(shape)


def expected_reduction(op, arrays) -> np.ndarray:
    """Returns the result that numpy computes for a reduction."""
    stack = np.stack(arrays)
    dtype = stack.dtype
    if dtype.kind == "b":
        names = {
            "sum": "any",
            "max": "any",
            "lor": "any",
            "bor": "any",
            "prod": "all",
            "min": "all",
            "land": "all",
            "band": "all",
        }
        if op in ("lxor", "bxor"):
            return np.logical_xor.reduce(stack, axis=0)
        return getattr(np, names[op])(stack, axis=0)
    with np.errstate(all="ignore"):
        if op == "avg" and dtype.kind in "iu":
            return average_of_integers(stack)
        result = {
            "sum": lambda: np.sum(stack, axis=0, dtype=dtype),
            "prod": lambda: np.prod(stack, axis=0, dtype=dtype),
            "avg": lambda: np.sum(stack, axis=0, dtype=dtype) / len(arrays),
            "min": lambda: np.min(stack, axis=0),
            "max": lambda: np.max(stack, axis=0),
            "land": lambda: np.logical_and.reduce(stack, axis=0),
            "lor": lambda: np.logical_or.reduce(stack, axis=0),
            "lxor": lambda: np.logical_xor.reduce(stack, axis=0),
            "band": lambda: np.bitwise_and.reduce(stack, axis=0),
            "bor": lambda: np.bitwise_or.reduce(stack, axis=0),
            "bxor": lambda: np.bitwise_xor.reduce(stack, axis=0),
        }[op]()
    return result.astype(dtype)


def average_of_integers(stack) -> np.ndarray:
    """Returns the sum divided by the number of arrays and rounded towards zero, as the library rounds averages of
    integers."""
    total = np.sum(stack, axis=0, dtype="i8" if stack.dtype.kind == "i" else "u8")
    return (np.sign(total) * (np.abs(total) // len(stack)) if stack.dtype.kind == "i" else total // len(stack)).astype(
        stack.dtype
    )


def stack_arrays(arrays) -> np.ndarray:
    """Stacks the arrays. The result has the type and the byte order of the first array."""
    return np.stack(arrays).astype(arrays[0].dtype)


def concatenate_arrays(arrays) -> np.ndarray:
    """Concatenates the arrays. The result has the type and the byte order of the first array."""
    return np.concatenate(arrays).astype(arrays[0].dtype)


def supported_reductions(dtype) -> tuple[str, ...]:
    kind = np.dtype(dtype).kind
    if kind == "c":
        return ("sum", "avg")
    if kind == "b":
        return ("sum", "prod", "min", "max", *LOGICAL, *BITWISE)
    return ARITHMETIC + LOGICAL + (BITWISE if kind in "iu" else ())


def assert_same(got, expected, what="") -> None:
    """Checks that both arrays have the same type, shape and values. Floats may differ by rounding errors."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype, (what, got.dtype, expected.dtype)
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    if got.dtype.kind == "f":
        tolerance = 4 * np.finfo(got.dtype).eps
        assert np.allclose(got, expected, rtol=tolerance, atol=tolerance), (what, got, expected)
    elif got.dtype.kind == "c":
        assert np.allclose(got, expected), (what, got, expected)
    else:
        assert np.array_equal(got, expected), (what, got, expected)


def assert_same_on_all_ranks(world, results) -> None:
    """Checks that all ranks have results with the same bits."""
    digest = b"".join(np.ascontiguousarray(result).tobytes() for result in results)
    assert len(set(world.all_gather_object(digest))) == 1, "ranks have different bits"


def all_samples(world, dtype, shape, seed=0) -> list[np.ndarray]:
    return [make_sample(dtype, shape, rank, seed) for rank in range(world.size)]


@cases.for_each((*NUMBERS, "bool", *COMPLEX))
def all_reduce_gives_the_same_result_in_all_forms(world, dtype):
    results = []
    for op, shape in reductions_and_shapes(dtype, SHAPES):
        if shape == SHAPES[-1] and (op != "sum" or dtype in ("float16", *INTEGERS) and not FULL):
            continue
        arrays = all_samples(world, dtype, shape)
        own, expected, what = arrays[world.rank], expected_reduction(op, arrays), (dtype, op, shape)
        before = own.copy()
        results.append(world.all_reduce(own, op))
        assert_same(results[-1], expected, what)
        assert np.array_equal(own, before), "the input must not change"
        out = np.empty_like(own)
        assert world.all_reduce(own, op, out=out) is out or shape == ()
        assert_same(out, expected, what)
        assert world.all_reduce(own, op, out=own) is own
        assert_same(own, expected, what)
        assert_same(world.all_reduce_async(before, op).wait(), expected, what)
    assert_same_on_all_ranks(world, results)


@cases.for_each((*NUMBERS, "bool", *COMPLEX))
def reduce_scan_and_exscan_give_right_results(world, dtype):
    n, rank = world.size, world.rank
    for op, shape in reductions_and_shapes(dtype, SMALL_SHAPES):
        arrays = all_samples(world, dtype, shape, 1)
        own = arrays[rank]
        for root in range(n):
            result = world.reduce(own, op, root)
            handle = world.reduce_async(own, op, root=root)
            waited = handle.wait()
            if rank == root:
                assert_same(result, expected_reduction(op, arrays), (dtype, op, shape))
                assert_same(waited, expected_reduction(op, arrays), (dtype, op, shape))
            else:
                assert result is None and waited is None
        if op == "avg":
            continue
        assert_same(world.scan(own, op), expected_reduction(op, arrays[: rank + 1]), (dtype, op, shape))
        assert_same(world.scan_async(own, op).wait(), expected_reduction(op, arrays[: rank + 1]), (dtype, op, shape))
        buffer = own.copy()
        assert world.scan(buffer, op, out=buffer) is buffer
        assert_same(buffer, expected_reduction(op, arrays[: rank + 1]))
        result, waited = world.exscan(own, op), world.exscan_async(own, op).wait()
        out = own.copy()
        world.exscan(own, op, out=out)
        if rank == 0:
            assert result is None and waited is None
            assert_same(out, own, "on rank 0 the output must not change")
        else:
            for got in (result, waited, out):
                assert_same(got, expected_reduction(op, arrays[:rank]), (dtype, op, shape))


@cases.for_each((*NUMBERS, "bool", *COMPLEX))
def reduce_scatter_accepts_even_and_uneven_parts(world, dtype):
    n, rank = world.size, world.rank
    for op in supported_reductions(dtype):
        for row in ((), (3,), (2, 0)):
            arrays = all_samples(world, dtype, (5 * n, *row), 2)
            expected = expected_reduction(op, arrays)
            mine = expected[5 * rank : 5 * rank + 5]
            assert_same(world.reduce_scatter(arrays[rank], op), mine)
            assert_same(world.reduce_scatter_async(arrays[rank], op).wait(), mine)
            out = np.empty_like(mine)
            assert world.reduce_scatter(arrays[rank], op, out=out) is out
            assert_same(out, mine)
            counts = [r % 3 for r in range(n)]
            arrays = all_samples(world, dtype, (sum(counts), *row), 3)
            before = sum(counts[:rank])
            mine = expected_reduction(op, arrays)[before : before + counts[rank]]
            assert_same(world.reduce_scatter(arrays[rank], op, counts=counts), mine)
            assert_same(world.reduce_scatter_async(arrays[rank], op, counts=counts).wait(), mine)


@cases.for_each(SENDABLE)
def collectives_without_reduction_give_right_results(world, dtype):
    n, rank = world.size, world.rank
    for shape in SMALL_SHAPES:
        arrays = all_samples(world, dtype, shape, 4)
        own = arrays[rank]
        for root in range(n):
            assert_same(world.broadcast(own, root), arrays[root])
            assert_same(world.broadcast_async(own, root).wait(), arrays[root])
            out = own.copy()
            assert world.broadcast(out, root, out=out) is out
            assert_same(out, arrays[root])
            for got in (world.gather(own, root), world.gather_async(own, root).wait()):
                if rank == root:
                    assert_same(got, stack_arrays(arrays))
                else:
                    assert got is None
        assert_same(world.all_gather(own), stack_arrays(arrays))
        assert_same(world.all_gather_async(own).wait(), stack_arrays(arrays))
    for row in ((), (3,), (0, 2)):
        arrays = all_samples(world, dtype, (2 * n, *row), 5)
        own = arrays[rank]
        mine = slice(2 * rank, 2 * rank + 2)
        assert_same(world.all_to_all(own), concatenate_arrays([array[mine] for array in arrays]))
        assert_same(world.all_to_all_async(own).wait(), concatenate_arrays([array[mine] for array in arrays]))
        for root in range(n):
            given = own if rank == root else None
            assert_same(world.scatter(given, root), arrays[root][mine])
            assert_same(world.scatter_async(given, root).wait(), arrays[root][mine])
            out = np.empty_like(own[:2])
            assert world.scatter(given, root, out=out) is out
            assert_same(out, arrays[root][mine])


@cases.for_each(("float32", "uint8", "bool", "complex128", "datetime64[ns]", STRUCTURED))
def collectives_accept_uneven_parts(world, dtype):
    n, rank = world.size, world.rank
    for row in ((), (3,)):
        counts = [(3 * r) % 4 for r in range(n)]
        parts = [make_sample(dtype, (counts[r], *row), r, 6) for r in range(n)]
        whole = np.concatenate(parts)
        own = parts[rank]
        assert_same(world.all_gather(own, counts=counts), whole)
        assert_same(world.all_gather_async(own, counts=counts).wait(), whole)
        for got, expected in zip(world.all_gather_list(own), parts, strict=True):
            assert_same(got, expected)
        for root in range(n):
            for got in (world.gather(own, root, counts=counts), world.gather_async(own, root, counts=counts).wait()):
                if rank == root:
                    assert_same(got, whole)
                else:
                    assert got is None
            given = whole if rank == root else None
            assert_same(world.scatter(given, root, counts=counts), own)
            assert_same(world.scatter_async(given, root, counts=counts).wait(), own)
            out = np.empty_like(own)
            assert_same(world.scatter(given, root, counts=np.array(counts), out=out), own)
        # Rank i sends (i + 2j) mod 3 rows to rank j.
        table = [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]
        arrays = [make_sample(dtype, (sum(table[i]), *row), i, 7) for i in range(n)]
        pieces = [arrays[i][sum(table[i][:rank]) : sum(table[i][: rank + 1])] for i in range(n)]
        sent, received = table[rank], [table[i][rank] for i in range(n)]
        expected = np.concatenate(pieces)
        assert_same(world.all_to_all(arrays[rank], send_counts=sent, receive_counts=received), expected)
        assert_same(world.all_to_all_async(arrays[rank], send_counts=sent, receive_counts=received).wait(), expected)


@cases
def short_and_long_arrays_give_right_results(world):
    n, rank = world.size, world.rank
    for count in (1, 63, 65_537, 300_007) if FULL else (1, 63, 65_537):
        arrays = all_samples(world, "float32", (count * n,), 8)
        total = expected_reduction("sum", arrays)
        mine = slice(rank * count, (rank + 1) * count)
        results = [world.all_reduce(arrays[rank]), world.all_gather(arrays[rank][:count])]
        assert_same(results[0], total)
        assert_same(world.reduce_scatter(arrays[rank]), total[mine])
        assert_same(world.all_to_all(arrays[rank]), np.concatenate([array[mine] for array in arrays]))
        assert_same(world.scan(arrays[rank]), expected_reduction("sum", arrays[: rank + 1]))
        results.append(world.broadcast(arrays[rank], root=n - 1))
        assert_same_on_all_ranks(world, results)


@cases
def reductions_of_floats_have_the_same_bits_on_all_ranks(world):
    for dtype, count in itertools.product(FLOATS, (1, 5, 1000, 100_003)):
        own = np.random.default_rng([9, world.rank]).standard_normal(count).astype(dtype)
        counts = [count // world.size + (r < count % world.size) for r in range(world.size)]
        parts = world.reduce_scatter(own, counts=counts)
        assert_same_on_all_ranks(
            world, [world.all_reduce(own, op) for op in ("sum", "avg", "prod")] + [world.all_gather(parts, counts=counts)]
        )
        special = own.copy()
        special[world.rank % count] = (np.nan, np.inf, -np.inf, -0.0)[world.rank % 4]
        assert_same_on_all_ranks(world, [world.all_reduce(special, op) for op in ("sum", "min", "max")])


@cases
def collectives_accept_scalars_lists_and_arrays_without_dimensions(world):
    n = world.size
    one = world.all_reduce(1)
    assert one == n and isinstance(one, np.integer)
    assert isinstance(world.all_reduce(1.5), np.floating) and world.all_reduce(1.5) == 1.5 * n
    assert world.all_reduce(np.float32(2)).dtype == np.float32
    assert world.all_reduce(True) and isinstance(world.all_reduce(True), np.bool_)
    assert world.all_reduce(1 + 2j) == n * (1 + 2j)
    assert np.array_equal(world.all_reduce([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]]) * n)
    array = world.all_reduce(np.array(3.0))
    assert isinstance(array, np.ndarray) and array.shape == () and array == 3 * n
    assert world.broadcast(world.rank, root=n - 1) == n - 1
    assert world.all_gather(world.rank).tolist() == list(range(n))
    assert [part.tolist() for part in world.all_gather_list(world.rank)] == [[r] for r in range(n)]
    assert world.scan(1) == world.rank + 1
    assert world.all_reduce_async(1).wait() == n
    out = np.zeros(())
    world.all_reduce(2.0, out=out)
    assert out == 2 * n


@cases
def calls_with_and_without_a_conversion_of_arrays_agree(world):
    """Every second rank passes arrays that the compiled module takes as they are. The other ranks pass arrays to convert."""
    n, rank = world.size, world.rank
    calls = {
        "all_reduce": (lambda x, out: world.all_reduce(x, "max", out=out), lambda shape: shape),
        "reduce_scatter": (lambda x, out: world.reduce_scatter(x, "max", out=out), lambda shape: (shape[0] // n, *shape[1:])),
        "broadcast": (lambda x, out: world.broadcast(x, n - 1, out=out), lambda shape: shape),
        "all_gather": (lambda x, out: world.all_gather(x, out=out), lambda shape: (n, *shape)),
        "gather": (lambda x, out: world.gather(x, n - 1, out=out), lambda shape: (n, *shape)),
        "scatter": (lambda x, out: world.scatter(x, n - 1, out=out), lambda shape: (shape[0] // n, *shape[1:])),
        "all_to_all": (lambda x, out: world.all_to_all(x, out=out), lambda shape: shape),
    }
    for (name, (call, result_shape)), dtype, shape in itertools.product(
        calls.items(), (*NUMBERS, "bool"), ((n,), (2 * n, 3), (n, 0))
    ):
        what = f"{name} of {dtype} {shape}"
        x = make_sample(dtype, shape, rank)
        copy = np.repeat(x, 2, axis=0)[::2]
        before = x.copy()
        results = []
        for is_direct in (True, rank % 2 == 0, False):
            out = np.full(result_shape(shape), 9).astype(dtype)
            result = call(x if is_direct else copy, out)
            assert result is (out if name != "gather" or rank == n - 1 else None), what
            results.append(out)
        for result in results:
            assert_same(result, results[-1], what)
        assert_same(x, before, what)


@cases
def inputs_may_have_any_layout(world):
    n, rank = world.size, world.rank
    base = make_sample("float32", (6 * n, 8), rank, 10)
    total = expected_reduction("sum", all_samples(world, "float32", (6 * n, 8), 10))
    layouts = {
        "transposed": lambda a: a.T,
        "every other": lambda a: a[::2],
        "backwards": lambda a: a[::-1],
        "columns": lambda a: a[:, 1:5],
        "Fortran": np.asfortranarray,
        "repeated": lambda a: np.broadcast_to(a[0], (4, 8)),
        "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    }
    for name, view in layouts.items():
        assert_same(world.all_reduce(view(base)), view(total), name)
        assert_same(world.all_reduce_async(view(base)).wait(), view(total), name)
        gathered = world.all_gather(view(base))
        for r in range(n):
            assert_same(gathered[r], view(make_sample("float32", (6 * n, 8), r, 10)), name)
        assert_same(world.broadcast(view(base), root=0), view(make_sample("float32", (6 * n, 8), 0, 10)), name)
    packed = np.zeros(9, np.dtype([("pad", "u1"), ("value", "<f8")]))
    packed["value"] = rank
    assert_same(world.all_reduce(packed["value"]), np.full(9, float(sum(range(n)))), "unaligned")
    unaligned = np.frombuffer(b"x" + np.arange(5.0).tobytes(), np.uint8)[1:].view("f8")
    assert_same(world.all_reduce(unaligned), np.arange(5.0) * n, "unaligned and contiguous")
    assert_same(world.all_gather(unaligned), np.stack([np.arange(5.0)] * n), "unaligned and contiguous")


@cases
def inputs_may_overlap_the_result(world):
    n, rank = world.size, world.rank
    arrays = all_samples(world, "int64", (4 * n,), 11)
    total = expected_reduction("sum", arrays)
    mine = slice(4 * rank, 4 * rank + 4)
    x = arrays[rank].copy()
    assert_same(world.all_reduce(x, out=x[:]), total, "another view of the same memory")
    x = np.concatenate([arrays[rank], [0, 0]])
    assert_same(world.all_reduce(x[:-2], out=x[2:]), total, "two elements further")
    x = np.concatenate([arrays[rank], [0, 0]])
    assert_same(world.all_reduce_async(x[:-2], out=x[2:]).wait(), total, "two elements further")
    # First the output is this rank's part of the input, as MPI and NCCL require of in-place operations. Then the output is
    # another part of the input.
    for position in (mine, slice(0, 4)):
        for call in (world.reduce_scatter, lambda *args, **kwargs: world.reduce_scatter_async(*args, **kwargs).wait()):
            x = arrays[rank].copy()
            assert_same(call(x, out=x[position]), total[mine], f"reduce_scatter to {position}")
    parts = np.stack([array[:4] for array in arrays])
    for row in (rank, 0):
        for call in (world.all_gather, lambda *args, **kwargs: world.all_gather_async(*args, **kwargs).wait()):
            whole = np.zeros((n, 4), np.int64)
            whole[row] = arrays[rank][:4]
            assert_same(call(whole[row], out=whole), parts, f"all_gather from {row}")
        for root in range(n):
            whole = np.zeros((n, 4), np.int64)
            whole[row] = arrays[rank][:4]
            got = world.gather(whole[row], root, out=whole if rank == root else None)
            if rank == root:
                assert_same(got, parts, f"gather from {row}")
    exchanged = np.concatenate([array[mine] for array in arrays])
    for call in (world.all_to_all, lambda *args, **kwargs: world.all_to_all_async(*args, **kwargs).wait()):
        x = arrays[rank].copy()
        assert_same(call(x, out=x), exchanged, "all_to_all in place")
    for root, position in itertools.product(range(n), (mine, slice(0, 4))):
        x = arrays[rank].copy()
        got = world.scatter(x if rank == root else None, root, out=x[position])
        assert_same(got, arrays[root][mine], "scatter to a part of the input")
    for call in (world.scan, world.exscan):
        x = np.concatenate([arrays[rank], [0]])
        got = call(x[:-1], out=x[1:])
        upto = rank + (call == world.scan)
        if upto:
            assert_same(got, expected_reduction("sum", arrays[:upto]), "scan one element further")


@cases
def large_inputs_may_overlap_the_result(world):
    """Regression test: before the fix, if a long input and its result overlapped, the result overwrote input elements
    that had not been read yet."""
    n, rank = world.size, world.rank
    count, shift = 600_000 if FULL else 300_000, 1000
    arrays = all_samples(world, "int64", (n * count,), 14)
    own = arrays[rank]
    memory = np.concatenate([own, np.zeros(shift, np.int64)])
    world.send_receive(memory[:-shift], (rank + 1) % n, memory[shift:], (rank - 1) % n)
    assert_same(memory[shift:], arrays[(rank - 1) % n], "send_receive")
    part = slice(rank * count, (rank + 1) * count)
    memory = np.concatenate([own, np.zeros(shift, np.int64)])
    assert_same(
        world.reduce_scatter(memory[:-shift], out=memory[shift : shift + count]),
        expected_reduction("sum", arrays)[part],
        "reduce_scatter",
    )
    memory = np.concatenate([own, np.zeros(shift, np.int64)])
    exchanged = np.concatenate([array[part] for array in arrays])
    assert_same(world.all_to_all(memory[:-shift], out=memory[shift:]), exchanged, "all_to_all")
    whole = np.zeros(n * count, np.int64)
    given = whole[shift : shift + count] if n > 1 else whole
    given[...] = own[:count]
    assert_same(world.all_gather(given, out=whole.reshape(n, count)), np.stack([a[:count] for a in arrays]), "all_gather")


@cases
def compressed_all_reduces_are_close_to_the_sum(world):
    for name, eps in (("fp16", 2.0**-10), ("bf16", 2.0**-7)):
        arrays = [np.random.default_rng([12, r]).standard_normal(10_001).astype(np.float32) for r in range(world.size)]
        own = arrays[world.rank]
        results = [
            world.all_reduce(own, compression=name),
            world.all_reduce(own, "avg", compression=name) * np.float32(world.size),
            world.all_reduce_async(own, compression=name).wait(),
        ]
        buffer = own.copy()
        results.append(world.all_reduce(buffer, out=buffer, compression=name))
        expected = np.sum(arrays, axis=0)
        for result in results:
            assert np.max(np.abs(result - expected)) < 4 * world.size * eps * max(1, np.max(np.abs(expected)))
        assert_same_on_all_ranks(world, results)
        raised(ring.Unsupported, world.all_reduce, own.astype(np.float64), compression=name)
    raised(ring.InvalidArgument, world.all_reduce, own, compression="zip")
    assert_same(world.all_reduce(own, compression="none"), np.sum(arrays, axis=0).astype(np.float32)) if world.size == 1 else None


INVALID_CALLS = {
    "an unknown reduction": lambda g, x: g.all_reduce(x, "median"),
    "an empty name of a reduction": lambda g, x: g.all_reduce(x, ""),
    "bitwise and of floats": lambda g, x: g.all_reduce(x, "band"),
    "average of booleans": lambda g, x: g.all_reduce(x > 0, "avg"),
    "product of complex numbers": lambda g, x: g.all_reduce(x + 1j, "prod"),
    "sum of dates": lambda g, x: g.all_reduce(x.astype("M8[s]")),
    "sum of structures": lambda g, x: g.all_reduce(np.zeros(3, STRUCTURED)),
    "sum of strings": lambda g, x: g.all_reduce("text"),
    "sum of big-endian numbers": lambda g, x: g.all_reduce(x.astype(">f4")),
    "sum of big-endian complex numbers": lambda g, x: g.all_reduce(x.astype(">c8")),
    "sum of long doubles": lambda g, x: g.all_reduce(x.astype("longdouble")),
    "sum of long complex numbers": lambda g, x: g.all_reduce(x.astype("clongdouble")),
    "sum of objects": lambda g, x: g.all_reduce(np.array([None, 1])),
    "sum of None": lambda g, x: g.all_reduce(None),
    "all_gather of objects": lambda g, x: g.all_gather(np.array([None, 1])),
    "broadcast of objects": lambda g, x: g.broadcast(np.array([{}])),
    "scatter of objects": lambda g, x: g.scatter(np.array([{}] * g.size), root=g.rank, out=np.zeros(1)),
    "send of objects": lambda g, x: g.send(np.array([{}]), 0),
    "out of another shape": lambda g, x: g.all_reduce(x, out=np.zeros(len(x) + 1, np.float32)),
    "out of another type": lambda g, x: g.all_reduce(x, out=np.zeros(len(x))),
    "out of another byte order": lambda g, x: g.all_reduce(x, out=np.zeros(len(x), ">f4")),
    "out that is not an array": lambda g, x: g.all_reduce(x, out=[0.0] * len(x)),
    "out that is a memory view": lambda g, x: g.all_reduce(x, out=memoryview(x)),
    "out that is not contiguous": lambda g, x: g.all_reduce(x, out=np.zeros(2 * len(x), np.float32)[::2]),
    "out that is read-only": lambda g, x: g.all_reduce(x, out=np.frombuffer(x.tobytes(), np.float32)),
    "out that is not contiguous, in place": lambda g, x: g.all_reduce(x[::2], out=x[::2]),
    "a root that is not in the group": lambda g, x: g.broadcast(x, root=g.size),
    "a root of 2**40": lambda g, x: g.broadcast(x, root=2**40),
    "a negative root": lambda g, x: g.broadcast(x, root=-1),
    "a root of a reduce that is not in the group": lambda g, x: g.reduce(x, root=g.size),
    "a root of a gather that is not in the group": lambda g, x: g.gather(x, root=g.size),
    "a root of a scatter that is not in the group": lambda g, x: g.scatter(x, root=g.size),
    "a root of objects that is not in the group": lambda g, x: g.broadcast_object(1, root=g.size),
    "a negative root for objects": lambda g, x: g.gather_object(1, root=-1),
    "rows that cannot be divided": lambda g, x: (
        g.reduce_scatter(np.zeros(g.size + 1)) if g.size > 1 else g.reduce_scatter(np.zeros(()))
    ),
    "all_to_all of an array without rows": lambda g, x: g.all_to_all(np.zeros(())),
    "too few counts": lambda g, x: g.all_gather(x, counts=[len(x)] * (g.size - 1)),
    "too many counts": lambda g, x: g.reduce_scatter(x, counts=[len(x)] + [0] * g.size),
    "negative counts": lambda g, x: g.reduce_scatter(x, counts=[-1] * g.size),
    "negative counts of a gather": lambda g, x: g.gather(x, counts=[-1] * g.size),
    "too few counts of a gather": lambda g, x: g.gather(x, counts=[]),
    "too few counts of a scatter": lambda g, x: g.scatter(x, counts=[]),
    "negative counts of a scatter": lambda g, x: g.scatter(x, counts=[-len(x)] * g.size),
    "counts whose sum is not the number of rows": lambda g, x: g.reduce_scatter(x, counts=[len(x) + 1] * g.size),
    "counts that differ from this rank's rows": lambda g, x: g.all_gather(x, counts=[len(x) + 1] * g.size),
    "counts that do not fit into memory": lambda g, x: (
        g.all_gather(x[:0], counts=[0 if r == g.rank else 2**62 for r in range(g.size)])
        if g.size > 1
        else g.all_gather(x, counts=[2**62])
    ),
    "send_counts without receive_counts": lambda g, x: g.all_to_all(x, send_counts=[len(x)] + [0] * (g.size - 1)),
    "receive_counts without send_counts": lambda g, x: g.all_to_all(x, receive_counts=[0] * g.size),
    "a message to a rank that does not exist": lambda g, x: g.send(x, g.size),
    "a message to rank -1": lambda g, x: g.send(x, -1),
    "a message from a rank that does not exist": lambda g, x: g.receive(x, g.size),
    "a message from rank -1": lambda g, x: g.receive_async(x, -1),
    "the first invalid tag": lambda g, x: g.send(x, 0, 2**32 - 1),
    "a receive into a read-only array": lambda g, x: g.receive(np.frombuffer(x.tobytes(), np.float32)),
    "a receive into a list": lambda g, x: g.receive([0.0]),
    "a receive into an array that is not contiguous": lambda g, x: g.receive(x[::2]),
    "a subgroup with a rank that does not exist": lambda g, x: g.subgroup([g.size]),
    "a subgroup with a negative rank": lambda g, x: g.subgroup([-1]),
    "a subgroup with the same rank twice": lambda g, x: g.subgroup([0, 0]),
    "a negative timeout": lambda g, x: setattr(g, "timeout", -1.0),
    "a timeout that is not a number": lambda g, x: setattr(g, "timeout", float("nan")),
    "a negative timeout of a probe": lambda g, x: g.probe(timeout=-1.0),
    "an unknown operation": lambda g, x: g.algorithm("all_reduc", 8),
    "memory of an unsupported type": lambda g, x: g.alloc(4, "complex64"),
    "memory of a negative length": lambda g, x: g.alloc(-1),
    "a tag of 2**40": lambda g, x: g.send(x, 0, 2**40),
    "a negative tag": lambda g, x: g.send(x, 0, -1),
    "a negative tag of a receive": lambda g, x: g.receive(x, 0, -1),
}


@cases.for_each(INVALID_CALLS)
def invalid_arguments_are_refused_and_nothing_is_sent(world, name):
    x = make_sample("float32", (6,), world.rank, 13)
    before = x.copy()
    sent = world.statistics()["operations"]
    error = raised(Exception, INVALID_CALLS[name], world, x)
    assert isinstance(error, ring.InvalidArgument), f"{type(error).__name__}: {error}"
    assert str(error), "the error has no message"
    assert np.array_equal(x, before), "the argument must not change"
    assert world.statistics()["operations"] == sent
    assert world.all_reduce(1) == world.size, "the group must still be usable"


@cases
def a_scatter_that_cannot_be_divided_fails_on_every_rank(world):
    """In a scatter, the root first sends the shape of its array, so that all ranks raise the same error."""
    x = np.arange(2 * world.size + 1)
    raised(ring.InvalidArgument, world.scatter, x, counts=[len(x) + 1] * world.size)
    raised(ring.InvalidArgument, world.scatter, np.zeros(()))
    raised(ring.InvalidArgument, world.scatter_async, np.zeros(()), counts=[0] * world.size)
    if world.size > 1:
        raised(ring.InvalidArgument, world.scatter, x)
    assert world.all_reduce(1) == world.size


@cases
def errors_have_the_documented_classes(world):
    x = np.zeros(12, np.float32)
    for call in (world.all_reduce, world.reduce, world.scan, world.reduce_scatter):
        assert isinstance(raised(ring.Unsupported, call, x.astype("M8[s]")), ValueError)
    for call in (world.all_reduce_async, world.reduce_async, world.scan_async, world.exscan_async):
        raised(ring.Unsupported, call, x, "bxor")
    raised(TypeError, world.all_reduce)
    raised(TypeError, world.all_reduce, x, 5)
    raised(TypeError, world.broadcast, x, "0")


@cases
def arguments_of_ranks_that_are_not_the_root_are_ignored(world):
    """If an operation uses only the root's argument, the other ranks may pass any object."""
    for root in range(world.size):
        x = np.arange(3) if world.rank == root else np.zeros(3, np.int64)
        assert world.broadcast(x, root).tolist() == [0, 1, 2]
        given = [object()] if world.rank != root else list(range(world.size))
        assert world.scatter_object(given, root) == world.rank
        assert world.scatter(np.arange(world.size) if world.rank == root else object(), root).tolist() == [world.rank]


@cases
def all_ranks_fail_if_the_root_cannot_scatter_its_array(world):
    """Regression test: before the fix, all ranks except the root waited until their deadline."""
    n, root = world.size, world.size - 1
    for reason, x in (
        ("the root has to pass the array", None),
        ("cannot be sent", np.array([None] * n)),
        ("inhomogeneous", [[1], [2, 3]]),
    ):
        for scatter in (world.scatter, world.scatter_async):
            error = raised(Exception, scatter, x if world.rank == root else None, root)
            assert reason in str(error), error
            if world.rank != root:
                assert type(error) is ring.Error and error.rank == root, repr(error)
                assert str(error).startswith(f"rank {root} did not contribute to this collective: "), error
        assert world.scatter(np.arange(n), root).tolist() == [world.rank], "the group must be able to go on"


test_collectives = cases.tests()

if __name__ == "__main__":
    cases.main()
