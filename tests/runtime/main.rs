//! Tests of the library's public API. Each rank is a thread of the test. The ranks communicate over real sockets and
//! shared memory.

/// For each function `name(transport: TestTransport)`, defines a module `name` that has one test for each transport.
macro_rules! on_every_transport {
    ($($name:ident),+ $(,)?) => { $( mod $name {
        use crate::util::ranks::TestTransport;

        #[test]
        fn over_tcp() {
            super::$name(TestTransport::Tcp);
        }

        // Without `--full`, `tools/test` tests links of several connections only in `streams.rs`.
        #[test]
        #[ignore = "runs with tools/test --full"]
        fn over_streams() {
            super::$name(TestTransport::Streams);
        }

        #[test]
        fn over_shm() {
            super::$name(TestTransport::Shm);
        }

        // `hierarchy`, `conformance` and `random_programs` test several hosts without `--full` too.
        #[test]
        #[ignore = "runs with tools/test --full"]
        fn over_hosts() {
            super::$name(TestTransport::Hosts);
        }
    } )+ };
}

mod bench_results;
mod collectives;
mod compression;
mod concurrency;
mod conformance;
mod ef21;
mod failures;
mod groups;
mod hierarchy;
mod idle_strangers;
mod isolated;
mod joining;
mod leaving_ranks;
mod links;
mod loopback;
mod messages;
mod mismatches;
mod missing_calls;
mod named_tensors;
mod objects;
mod profile;
mod random_programs;
mod served_by_rank_0;
mod shared_buffers;
mod sleeping_ranks;
mod special_values;
mod streams;
mod synchronous_sends;
mod threads;
#[path = "../util/mod.rs"]
mod util;
mod verbs;
mod wire_format;
