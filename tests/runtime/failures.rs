//! What goes wrong between ranks that have met: disagreement, deadlines, departures, strangers. Every rank learns why.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use crate::util::proxy::{Damage, Proxy};
use crate::util::ranks::{TestTransport, options_by_file, peers_file, peers_text};
use ringtrain::rendezvous::PeersFile;
use ringtrain::wire::Cause;
use ringtrain::wire::Secret;
use ringtrain::wire::handshake::{Dialer, Handshake as _, Introduction, Job, Purpose, Stream};
use ringtrain::{Error, Group, JoinOptions, Rank, ReduceOp};

/// Runs a job in which every rank must fail, and returns the causes by rank.
fn causes(
    transport: TestTransport,
    n: u32,
    timeout: Duration,
    work: impl Fn(&mut Group) -> Result<(), Error> + Send + Sync + 'static,
) -> Vec<Cause> {
    let adjust = move |options: &mut JoinOptions| options.operation_timeout = timeout;
    transport.run_with(n, adjust, move |mut group| {
        let error = work(&mut group).expect_err("every rank fails");
        // The group is done for, and says the same again.
        assert_eq!(group.barrier().expect_err("the job has failed"), error);
        error.cause().expect("the job failed").clone()
    })
}

fn assert_same(causes: &[Cause]) -> &Cause {
    assert!(causes.windows(2).all(|pair| pair[0] == pair[1]), "{causes:#?}");
    &causes[0]
}

const LONG: Duration = Duration::from_secs(20);

fn a_mismatch_shows_both_calls(transport: TestTransport) {
    type Ask = fn(&mut Group) -> Result<(), Error>;
    let cases: [(&str, Ask, Ask, &str); 5] = [
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
    for (what, common, odd, asked) in cases {
        // Rank 2 is the one that differs.
        let causes = causes(transport, 4, LONG, move |group| {
            // Once this is over all have joined, and none learns of the mismatch while it still does.
            group.barrier()?;
            if group.rank().get() == 2 { odd(group) } else { common(group) }
        });
        let told: Vec<String> = causes.iter().map(ToString::to_string).collect();
        // Both neighbours of the odd one may have found it at the same moment, each in its own words.
        for told in told {
            assert!(told.contains(&format!("rank 2 called {asked}")), "{what}: {told}");
        }
    }
}

/// A rank that has one call more than the others is found when it waits where they have gone on.
fn an_extra_call_on_one_rank_is_a_mismatch(transport: TestTransport) {
    let causes = causes(transport, 3, LONG, |group| {
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
    let causes = causes(transport, 5, LONG, |group| {
        // Once this is over all have joined, and none learns of the abort while it still does.
        group.barrier()?;
        if group.rank().get() == 3 {
            return Err(group.abort("the loss is NaN at step 17"));
        }
        loop {
            group.all_reduce(&mut [1f32; 1000], ReduceOp::Sum)?;
        }
    });
    let cause = assert_same(&causes);
    assert!(
        matches!(cause, Cause::Aborted { rank, message, .. } if rank.get() == 3 && message.contains("step 17"))
    );
}

fn a_missed_deadline_names_the_late_rank(transport: TestTransport) {
    let causes = causes(transport, 3, Duration::from_millis(300), |group| {
        if group.rank().get() == 1 {
            // Computes for longer than anybody waits: until the others' last words have come.
            let started = std::time::Instant::now();
            while started.elapsed() < Duration::from_millis(600) {
                thread::yield_now();
            }
        }
        // Who comes late may find what the others sent before they gave up, and learns of it in its next call.
        loop {
            group.all_reduce(&mut [1f32; 10], ReduceOp::Sum)?;
        }
    });
    let Cause::Timeout { timeout_ms, .. } = &causes[0] else { panic!("{}", causes[0]) };
    assert_eq!(*timeout_ms, 300);
    assert_same(&causes);
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

/// Everything that can knock at a rank's port while its job runs, and none of it disturbs the job.
#[test]
fn strangers_are_refused_and_the_job_continues() {
    let (file, secret) = (peers_file(3), Secret::new(b"a secret for this test").unwrap());
    let addresses = file.resolve_all().unwrap();
    let turned_away = Arc::new(AtomicUsize::new(0));
    let workers: Vec<_> = (0..3)
        .map(|rank| {
            let options = options_by_file(&file, rank, &secret);
            let turned_away = Arc::clone(&turned_away);
            thread::spawn(move || {
                let mut group = Group::join(&options).unwrap();
                let mut rounds = 0u64;
                loop {
                    // Rank 0 decides for all whether every stranger has been dealt with.
                    let mut is_over = [u8::from(turned_away.load(Ordering::SeqCst) == STRANGERS * 3)];
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
        .map(|&address| {
            let (file, turned_away) = (file.clone(), Arc::clone(&turned_away));
            thread::spawn(move || {
                for stranger in 0..STRANGERS {
                    knock(address, stranger, &file);
                    turned_away.fetch_add(1, Ordering::SeqCst);
                }
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

const STRANGERS: usize = 7;

/// Plays one stranger and returns when it has been turned away, which is when the port closes the connection.
fn knock(address: SocketAddr, stranger: usize, file: &ringtrain::rendezvous::PeersFile) {
    let mut stream = None;
    crate::util::wait_until("the rank listens", || {
        stream = TcpStream::connect(address).ok();
        stream.is_some()
    });
    let mut stream = stream.unwrap();
    stream.set_read_timeout(Some(crate::util::PATIENCE)).unwrap();
    let right = Job { id: [0; 16], world: file.world().get(), peers_digest: file.digest() };
    let link = |from| {
        let (from, to, stream) = (Rank::new(from), Rank::ZERO, Stream::ONLY);
        Introduction { purpose: Purpose::Link, from, to, stream }
    };
    let hello =
        |secret: &[u8], job: &Job, from| Dialer::new(Secret::new(secret).unwrap(), job, link(from), [5; 32]);
    match stranger {
        0 => drop(stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
        1 => drop(stream.write_all(&vec![0xff; 100_000])),
        // A port scanner's half: connected, closed without a word.
        2 => return,
        // A half-open connection: says nothing until it is thrown out.
        3 => {}
        // A hello that stops in the middle.
        4 => drop(stream.write_all(&hello(b"a secret for this test", &right, 0).take_output()[..60])),
        // Another version.
        5 => {
            let mut bytes = hello(b"a secret for this test", &right, 0).take_output();
            bytes[8] = 42;
            drop(stream.write_all(&bytes));
        }
        // Another secret, and it goes on although it cannot have verified the answer.
        _ => {
            let mut dialer = hello(b"some other secret!!", &right, 0);
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
        assert!(is_closed, "stranger {stranger} was not turned away: {error}");
    }
}

/// Runs `work` on two ranks that count as two hosts, with a proxy in front of each; the proxies begin to do `damage` when both
/// have joined.
fn between_hosts<R: Send>(damage: Damage, work: impl Fn(&mut Group) -> R + Sync) -> Vec<R> {
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
            let options = JoinOptions { method, host_id, ..options_by_file(&file, rank, &Secret::none()) };
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
        threads.map(|thread| thread.join().expect("the rank's thread ends well")).into()
    })
}

/// Each rank called the other one lost, although both were alive, and told its user to read the other one's output.
#[test]
fn a_reset_between_two_live_ranks_points_to_the_network() {
    let repeat =
        |group: &mut Group| (0..).find_map(|_| group.all_reduce(&mut [1f32; 1000], ReduceOp::Sum).err());
    for (rank, error) in between_hosts(Damage::Reset, repeat).into_iter().enumerate() {
        let error = error.expect("the link is gone").to_string();
        assert!(error.contains("check the network between ranks"), "rank {rank}: {error}");
        assert!(error.contains("connection to rank"), "rank {rank}: {error}");
    }
}

/// With nothing delivered in one direction each rank said that the other one hangs.
#[test]
fn a_one_way_block_points_to_the_network() {
    let repeat = |group: &mut Group| {
        group.set_timeout(Duration::from_secs(1));
        (0..).find_map(|_| group.all_reduce(&mut [1f32; 1000], ReduceOp::Sum).err())
    };
    for (rank, error) in between_hosts(Damage::BlockOneWay, repeat).into_iter().enumerate() {
        let error = error.expect("the deadline is over").to_string();
        assert!(error.contains("network"), "rank {rank}: {error}");
    }
}

/// A bit that was flipped between two hosts gave a wrong sum without an error: payloads had no checksum unless asked for.
#[test]
fn a_bit_that_flips_between_hosts_is_an_error() {
    let all_reduce = |group: &mut Group| group.all_reduce(&mut vec![1f32; 1 << 20], ReduceOp::Sum);
    for result in between_hosts(Damage::FlipBit, all_reduce) {
        let error = result.expect_err("the sum is wrong");
        let Some(Cause::Misbehaved { detail, .. }) = error.cause() else { panic!("{error}") };
        assert!(detail.contains("arrived corrupt"), "{error}");
    }
}

on_every_transport! {
    a_mismatch_shows_both_calls,
    an_extra_call_on_one_rank_is_a_mismatch,
    an_abort_reaches_every_rank_with_its_reason,
    a_missed_deadline_names_the_late_rank,
    a_rank_that_leaves_early_is_named,
}
