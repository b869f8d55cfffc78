"""The framework-independent part of Horovod's interface. `ringtrain.torch`, `ringtrain.keras`, `ringtrain.tensorflow` and
`ringtrain.jax` convert their arrays to numpy arrays, and call these modules:

- `job`: `init`, `shutdown`, `is_initialized`, `rank`, `size`, `local_rank`, `local_size`, `cross_rank`, `join` and others. A
  framework exports them unchanged.
- `process_sets`: `ProcessSet`, `global_process_set`, `add_process_set`, `remove_process_set`. A `ProcessSet` has `members()`:
  the group of ranks (`.group`) and its named tensors (`.named`, `.tensor_name(kind, name)`).
- `operations`: `begin_all_reduce(array, Reduction(op, ..), name, process_set)` and the same for `all_gather`, `broadcast`,
  `reduce_scatter`. They take numpy arrays, and return an `Operation` whose `wait()` returns a new array. Names, not the order of
  calls, decide which operations belong together. Also `all_to_all`, `barrier`, and the reductions `Average, Sum, Min, Max,
  Product`.
- `reducer`: `ArrayReducer(members, specs, settings)` averages a fixed list of gradients in buckets: `take(index, array)` from any
  thread as each gradient becomes known, then `finish()`; or `reduce(arrays)` for all at once. Creating it compares the list of
  all ranks, and the error names the first variable that differs.
- `variables`: `broadcast_arrays`, which compares the lists of the ranks in the same way.
- `compression`: `Compression.none, .fp16, .bf16, .int8, ..`. `find_wire(compression)` returns the name for a reducer.
- `local`: variables whose gradients are not exchanged.
- `objects`: `broadcast_object`, `allgather_object`.

These modules do not import a framework. They accept numpy arrays of all types of numpy, and of `ml_dtypes.bfloat16`.
"""
