//! The library as programs use it: each rank is a thread of the test, over real sockets and shared memory.

mod bench_results;
mod collectives;
mod concurrency;
mod conformance;
mod failures;
mod groups;
mod hierarchy;
mod joining;
mod links;
mod loopback;
mod messages;
mod mismatches;
mod named_tensors;
mod objects;
mod profile;
mod random_programs;
mod shared_buffers;
mod streams;
mod threads;
#[path = "../util/mod.rs"]
mod util;
mod wire_format;
