//! Parameter servers and workers of one host, which share the memory of long gradients and parameters. The values must have the
//! same bits as with messages over TCP.

use std::num::NonZeroU32;
use std::ops::Range;
use std::slice;
use std::sync::atomic::AtomicBool;

use ringtrain::train::optimizer::Rule;
use ringtrain::train::{Config, ParameterServer, ParameterServerOptions, SilentObserver, run};

use super::strategies::{parse_strategy, sgd_config};
use super::util::ranks::TestTransport;

/// Each of two servers holds more parameters than a short message.
const COUNT: usize = 20_000;

/// What a worker has received: the outcome of each push as a text, and all values.
type Received = (Vec<String>, Vec<f32>);

/// Sends each kind of request to the servers.
fn send_requests(server: &mut ParameterServer, rank: u32, is_synchronous: bool) -> Received {
    let (mut outcomes, mut values) = (Vec::new(), vec![0.0; COUNT]);
    let mut received = Vec::new();
    let gradient = |step: usize| -> Vec<f32> {
        (0..COUNT).map(|index| ((step * COUNT + index) as f32 + rank as f32).sin()).collect()
    };
    server.pull(&mut values).unwrap();
    received.extend_from_slice(&values);
    outcomes.push(server.push_pull(&gradient(1), &mut values).unwrap());
    received.extend_from_slice(&values);
    outcomes.push(server.push(&gradient(2)).unwrap());
    // An asynchronous server drops the next gradient, because the worker has not received the last parameters. A synchronous one
    // would refuse it.
    if is_synchronous {
        server.pull(&mut values).unwrap();
    }
    outcomes.push(server.push_pull(&gradient(3), &mut values).unwrap());
    received.extend_from_slice(&values);
    if !is_synchronous {
        let mut request_ranges = |ranges: &[Range<usize>], step: usize| {
            let count = ranges.iter().map(Range::len).sum();
            outcomes.push(server.push_ranges(ranges, &gradient(step)[..count]).unwrap());
            server.pull_ranges(ranges, &mut values[..count]).unwrap();
            received.extend_from_slice(&values[..count]);
        };
        request_ranges(slice::from_ref(&(0..COUNT)), 4);
        request_ranges(&[3..9, 100..9_000, 15_000..15_001], 5);
    }
    server.pull(&mut values).unwrap();
    received.extend_from_slice(&values);
    (outcomes.iter().map(|outcome| format!("{outcome:?}")).collect(), received)
}

fn requests_over(transport: TestTransport, n: u32, options: &ParameterServerOptions) -> Vec<Received> {
    let options = options.clone();
    transport.run(n, move |mut group| {
        let initial: Vec<f32> = (0..COUNT).map(|index| (index as f32).cos()).collect();
        let mut server = ParameterServer::start(&mut group, &initial, &options).unwrap();
        if server.is_server() {
            server.wait_for_workers(None);
            assert_eq!(server.lost_workers(), []);
            return Received::default();
        }
        send_requests(&mut server, group.rank().get(), options.synchronous)
    })
}

#[test]
fn each_request_gives_the_same_values_as_over_tcp() {
    for (n, servers, synchronous) in [(2, 1, false), (3, 2, false), (4, 2, true)] {
        let options = ParameterServerOptions {
            servers: NonZeroU32::new(servers).unwrap(),
            rule: Rule::Momentum { momentum: 0.9 },
            learning_rate: 0.1,
            synchronous,
            staleness: (!synchronous).then_some(0),
            ..ParameterServerOptions::default()
        };
        let [tcp, memory, hosts] = TestTransport::ALL.map(|transport| requests_over(transport, n, &options));
        let (outcomes, values) = tcp.last().unwrap();
        assert!(synchronous || outcomes[2].contains("Stale"), "{outcomes:?}");
        assert!(values.len() >= 4 * COUNT && values.iter().all(|value| value.is_finite()));
        assert!(memory == tcp, "{n} ranks, {servers} servers");
        assert!(hosts == tcp, "{n} ranks on hosts of two ranks, {servers} servers");
    }
}

#[test]
fn a_run_in_shared_memory_sends_no_gradients_and_gives_the_same_bits() {
    let config = Config {
        model: Some("mlp:300".parse().unwrap()),
        strategy: parse_strategy("ps-async"),
        epochs: Some(1),
        ..sgd_config()
    };
    let [tcp, memory] = [TestTransport::Tcp, TestTransport::Shm].map(|transport| {
        let config = config.clone();
        let summaries = transport.run(2, move |mut group| {
            run(&mut group, &config, &AtomicBool::new(false), &mut SilentObserver).unwrap()
        });
        summaries.into_iter().next().unwrap()
    });
    assert_eq!(memory.parameters, tcp.parameters);
    let (steps, bytes) = (tcp.report.steps, 4 * tcp.parameters.len() as u64);
    assert!(tcp.report.bytes_sent > steps * bytes, "{} bytes", tcp.report.bytes_sent);
    // Only the results at the end of the run are a message.
    assert!(memory.report.bytes_sent < 2 * bytes + 1000 * steps, "{} bytes", memory.report.bytes_sent);
}
