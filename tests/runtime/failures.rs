//! Failures of a job that has started: mismatched calls, missed deadlines, ranks that leave, damage by the network,
//! and connections that do not belong to the job. The tests check that every rank reports the cause.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use crate::util::proxy::{Damage, Proxy};
use crate::util::ranks::{TestTransport, peers_file, peers_file_options, peers_text};
use ringtrain::group::LocalTransport;
use ringtrain::rendezvous::PeersFile;
use ringtrain::wire::Cause;
use ringtrain::wire::Secret;
use ringtrain::wire::handshake::{ConnectionPurpose, Dialer, Handshake as _, Introduction, Job, StreamId};
use ringtrain::{Error, Group, JoinOptions, Rank, ReduceOp};

/// Runs a job in which every rank must fail, and returns the causes by rank.
fn run_failing_job(
    transport: TestTransport,
    n: u32,
    timeout: Duration,
    work: impl Fn(&mut Group) -> Result<(), Error> + Send + Sync + 'static,
) -> Vec<Cause> {
    let adjust = move |options: &mut JoinOptions| options.operation_timeout = timeout;
    transport.run_with(n, adjust, move |mut group| {
        let error = work(&mut group).expect_err("every rank fails");
        // The group has failed, so every further call returns the same error.
        assert_eq!(group.barrier().expect_err("the job has failed"), error);
        error.cause().expect("the job failed").clone()
    })
}

fn assert_equal_causes(causes: &[Cause]) -> &Cause {
    assert!(causes.windows(2).all(|pair| pair[0] == pair[1]), "{causes:#?}");
    &causes[0]
}

const LONG_TIMEOUT: Duration = Duration::from_secs(20);

fn a_mismatch_is_reported_with_the_call_of_the_differing_rank(transport: TestTransport) {
    type Call = fn(&mut Group) -> Result<(), Error>;
    let cases: [(&str, Call, Call, &str); 5] = [
        (
            "count",
            |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
            |group| group.all_reduce(&mut [0f32; 200], ReduceOp::Sum),
            "all_reduce(sum, 200 x f32, ",
        ),
        (
            "dtype",
            |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
            |group| group.all_reduce(&mut [0f64; 100], ReduceOp::Sum),
            "all_reduce(sum, 100 x f64, ",
        ),
        (
            "reduction",
            |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
            |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Max),
            "all_reduce(max, 100 x f32, ",
        ),
        (
            "operation",
            |group| group.all_reduce(&mut [0f32; 100], ReduceOp::Sum),
            |group| group.all_gather(&mut [0f32; 100]),
            "all_gather(100 x f32, ",
        ),
        (
            "root",
            |group| group.broadcast(&mut [0f32; 100], Rank::new(1)).and_then(|()| group.barrier()),
            |group| group.broadcast(&mut [0f32; 100], Rank::new(2)).and_then(|()| group.barrier()),
            "broadcast(root 2, 100 x f32, ",
        ),
    ];
    for (what, common_call, rank_2_call, expected) in cases {
        let causes = run_failing_job(transport, 4, LONG_TIMEOUT, move |group| {
            // Wait until all ranks have joined. Otherwise a rank that is still joining might fail in `Group::join`.
            group.barrier()?;
            if group.rank().get() == 2 { rank_2_call(group) } else { common_call(group) }
        });
        // Every cause names rank 2 and one other rank. Several ranks may detect the mismatch at the same moment, so
        // the other rank need not be the same in all causes.
        for cause in causes {
            let text = cause.to_string();
            assert!(text.contains(&format!("rank 2 called {expected}")), "{what}: {text}");
        }
    }
}

/// Rank 1 calls a barrier that the other ranks do not call, so rank 1 waits in the barrier while the other ranks wait
/// in an all-reduce.
fn an_extra_call_on_one_rank_is_reported_as_a_mismatch(transport: TestTransport) {
    let causes = run_failing_job(transport, 3, LONG_TIMEOUT, |group| {
        // Wait until all ranks have joined. Otherwise a rank that is still joining might fail in `Group::join`.
        group.barrier()?;
        if group.rank().get() == 1 {
            group.barrier()?;
        }
        loop {
            group.all_reduce(&mut [1i32; 10], ReduceOp::Sum)?;
        }
    });
    for cause in causes {
        assert!(matches!(cause, Cause::Mismatch { .. }), "{cause}");
    }
}

fn an_abort_reaches_every_rank_with_its_reason(transport: TestTransport) {
    let causes = run_failing_job(transport, 5, LONG_TIMEOUT, |group| {
        // Wait until all ranks have joined. Otherwise a rank that is still joining might fail in `Group::join`.
        group.barrier()?;
        if group.rank().get() == 3 {
            return Err(group.abort("the loss is NaN at step 17"));
        }
        loop {
            group.all_reduce(&mut [1f32; 1000], ReduceOp::Sum)?;
        }
    });
    let cause = assert_equal_causes(&causes);
    assert!(
        matches!(cause, Cause::Aborted { rank, message, .. } if rank.get() == 3 && message.contains("step 17"))
    );
}

fn a_missed_deadline_names_the_late_rank(transport: TestTransport) {
    let causes = run_failing_job(transport, 3, Duration::from_millis(300), |group| {
        if group.rank().get() == 1 {
            // The late rank computes until the other ranks have missed their deadline and have reported the failure.
            let started = std::time::Instant::now();
            while started.elapsed() < Duration::from_millis(600) {
                thread::yield_now();
            }
        }
        // The late rank may complete its first call with data that were sent before the failure. The next call of the
        // late rank fails.
        loop {
            group.all_reduce(&mut [1f32; 10], ReduceOp::Sum)?;
        }
    });
    let Cause::Timeout { timeout_ms, .. } = &causes[0] else { panic!("{}", causes[0]) };
    assert_eq!(*timeout_ms, 300);
    assert_equal_causes(&causes);
    assert!(causes[0].to_string().contains("all other ranks wait for rank 1"), "{}", causes[0]);
}

fn a_rank_that_leaves_early_is_named(transport: TestTransport) {
    let errors = transport.run(4, |mut group| {
        if group.rank().get() == 2 {
            group.close();
            return None;
        }
        loop {
            if let Err(error) = group.all_reduce(&mut [1f32; 10], ReduceOp::Sum) {
                return Some(error);
            }
        }
    });
    for error in errors.into_iter().flatten() {
        let cause = error.cause().unwrap();
        assert!(matches!(cause, Cause::PeerLeft { rank, .. } if rank.get() == 2), "{cause}");
    }
}

/// A "stranger" is a connection to a rank's port that does not belong to the job, such as a connection of a
/// port scanner.
#[test]
fn a_job_continues_while_its_ranks_refuse_strangers() {
    let (file, secret) = (peers_file(3), Secret::new(b"a secret for this test").unwrap());
    let addresses = file.resolve_all().unwrap();
    let refused_count = Arc::new(AtomicUsize::new(0));
    let workers: Vec<_> = (0..3)
        .map(|rank| {
            // Over TCP, a rank serves its sockets in every collective. In shared memory, a rank serves them only before it
            // sleeps, which ranks of a busy machine may never do.
            let transport = LocalTransport::Tcp;
            let options = JoinOptions { transport, ..peers_file_options(&file, rank, &secret) };
            let refused_count = Arc::clone(&refused_count);
            thread::spawn(move || {
                let mut group = Group::join(&options).unwrap();
                let mut rounds = 0u64;
                loop {
                    // All ranks must leave the loop in the same round, so rank 0 tells them whether the job has
                    // rejected all strangers.
                    let mut is_over =
                        [u8::from(refused_count.load(Ordering::SeqCst) == STRANGER_KIND_COUNT * 3)];
                    group.broadcast(&mut is_over, Rank::ZERO).unwrap();
                    if is_over[0] == 1 {
                        return rounds;
                    }
                    let mut sum = [1u64; 500];
                    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    assert_eq!(sum, [3; 500]);
                    rounds += 1;
                }
            })
        })
        .collect();
    let strangers: Vec<_> = addresses
        .iter()
        .flat_map(|&address| (0..STRANGER_KIND_COUNT).map(move |kind| (address, kind)))
        .map(|(address, kind)| {
            let (file, refused_count) = (file.clone(), Arc::clone(&refused_count));
            thread::spawn(move || {
                connect_as_stranger(address, kind, &file);
                refused_count.fetch_add(1, Ordering::SeqCst);
            })
        })
        .collect();
    for stranger in strangers {
        stranger.join().unwrap();
    }
    for worker in workers {
        assert!(worker.join().unwrap() > 0);
    }
}

/// The number of kinds of strangers: [`connect_as_stranger`] accepts the numbers 0 to 6.
const STRANGER_KIND_COUNT: usize = 7;

/// Connects to a rank as a stranger of the kind `kind`, and returns when the rank has closed the connection.
fn connect_as_stranger(address: SocketAddr, kind: usize, file: &ringtrain::rendezvous::PeersFile) {
    let mut stream = None;
    crate::util::wait_until("the rank listens", || {
        stream = TcpStream::connect(address).ok();
        stream.is_some()
    });
    let mut stream = stream.unwrap();
    stream.set_read_timeout(Some(crate::util::TEST_TIMEOUT)).unwrap();
    let right_job = Job { id: [0; 16], world: file.world().get(), peers_digest: file.digest() };
    let link = |from| {
        let (from, to, stream) = (Rank::new(from), Rank::ZERO, StreamId::ONLY);
        Introduction { purpose: ConnectionPurpose::Link, from, to, stream }
    };
    let hello =
        |secret: &[u8], job: &Job, from| Dialer::new(Secret::new(secret).unwrap(), job, link(from), [5; 32]);
    match kind {
        0 => drop(stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
        1 => drop(stream.write_all(&vec![0xff; 100_000])),
        // The stranger connects and closes the connection without sending a byte, as port scanners do.
        2 => return,
        // The stranger sends nothing and waits until the rank closes the connection.
        3 => {}
        // The stranger sends only the first 60 bytes of a hello, the first message of the handshake.
        4 => drop(stream.write_all(&hello(b"a secret for this test", &right_job, 0).take_output()[..60])),
        // The stranger's hello has another protocol version.
        5 => {
            let mut bytes = hello(b"a secret for this test", &right_job, 0).take_output();
            bytes[8] = 42;
            drop(stream.write_all(&bytes));
        }
        // The stranger has another secret. Because the secrets differ, the stranger cannot verify the rank's answer,
        // but it sends a proof nevertheless.
        _ => {
            let mut dialer = hello(b"some other secret!!", &right_job, 0);
            drop(stream.write_all(&dialer.take_output()));
            let mut answer = [0; 80];
            drop(stream.read_exact(&mut answer));
            drop(stream.write_all(&[7; 32]));
        }
    }
    let mut rest = Vec::new();
    if let Err(error) = stream.read_to_end(&mut rest) {
        let is_closed =
            matches!(error.kind(), std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe);
        assert!(is_closed, "the rank did not close the connection of stranger {kind}: {error}");
    }
}

/// Runs `work` on two ranks with different host ids, each behind a proxy. When both ranks have joined, the proxies
/// begin to do `damage`.
fn run_over_damaged_network<R: Send>(damage: Damage, work: impl Fn(&mut Group) -> R + Sync) -> Vec<R> {
    let text = peers_text(2).replace("127.0.0.1", "127.0.0.9");
    let file = PeersFile::parse(std::path::Path::new("hosts.txt"), &text).unwrap();
    let own = "127.0.0.1".parse().unwrap();
    let proxies = [0, 1].map(|rank| {
        let address = file.resolve(Rank::new(rank)).unwrap();
        Proxy::start(address, SocketAddr::new(own, address.port()))
    });
    let joined = Barrier::new(2);
    thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let method =
                ringtrain::JoinMethod::Peers { file: file.clone(), rank: Rank::new(rank), bind: Some(own) };
            let host_id = Some(format!("host {rank}"));
            let options = JoinOptions { method, host_id, ..peers_file_options(&file, rank, &Secret::none()) };
            let (work, proxies, joined) = (&work, &proxies, &joined);
            scope.spawn(move || {
                let mut group = Group::join(&options).expect("the rank joins");
                group.barrier().expect("the link works");
                joined.wait();
                for proxy in proxies {
                    proxy.set(damage);
                }
                work(&mut group)
            })
        });
        threads.map(|thread| thread.join().expect("the rank's thread does not panic")).into()
    })
}

/// Regression test: before the fix, each rank reported the other rank as lost and did not mention the network,
/// although both ranks were alive.
#[test]
fn a_reset_between_two_live_ranks_is_reported_as_a_network_problem() {
    let repeat =
        |group: &mut Group| (0..).find_map(|_| group.all_reduce(&mut [1f32; 1000], ReduceOp::Sum).err());
    for (rank, error) in run_over_damaged_network(Damage::Reset, repeat).into_iter().enumerate() {
        let error = error.expect("the call fails").to_string();
        assert!(error.contains("check the network between ranks"), "rank {rank}: {error}");
        assert!(error.contains("connection to rank"), "rank {rank}: {error}");
        assert!(error.contains("s after the last frame from it"), "rank {rank}: {error}");
    }
}

/// Regression test: before the fix, if the network delivered nothing in one direction, each rank reported that the
/// other rank hangs.
#[test]
fn a_one_way_block_is_reported_as_a_network_problem() {
    let repeat = |group: &mut Group| {
        group.set_timeout(Duration::from_secs(1));
        (0..).find_map(|_| group.all_reduce(&mut [1f32; 1000], ReduceOp::Sum).err())
    };
    for (rank, error) in run_over_damaged_network(Damage::BlockOneWay, repeat).into_iter().enumerate() {
        let error = error.expect("the call fails at its deadline").to_string();
        assert!(error.contains("network"), "rank {rank}: {error}");
    }
}

/// Regression test: before the fix, a flipped bit gave a wrong sum without an error, because payloads had no checksum
/// by default.
#[test]
fn a_bit_that_flips_between_hosts_is_detected() {
    let all_reduce = |group: &mut Group| group.all_reduce(&mut vec![1f32; 1 << 20], ReduceOp::Sum);
    for result in run_over_damaged_network(Damage::FlipBit, all_reduce) {
        let error = result.expect_err("the flipped bit must cause an error");
        let Some(Cause::Misbehaved { detail, .. }) = error.cause() else { panic!("{error}") };
        assert!(detail.contains("arrived corrupt"), "{error}");
    }
}

on_every_transport! {
    a_mismatch_is_reported_with_the_call_of_the_differing_rank,
    an_extra_call_on_one_rank_is_reported_as_a_mismatch,
    an_abort_reaches_every_rank_with_its_reason,
    a_missed_deadline_names_the_late_rank,
    a_rank_that_leaves_early_is_named,
}
