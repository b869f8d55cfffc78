//! Synchronous sends complete only when a receive has matched the message.

use crate::util::TEST_TIMEOUT;
use crate::util::ranks::TestTransport;
use ringtrain::group::{Source, wait_all};
use std::time::Duration;

use ringtrain::{Rank, SendOptions};

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);

/// Regression test: before the fix, a short synchronous send was complete as soon as the receiver had stored the
/// message.
fn a_synchronous_send_completes_only_when_a_receive_has_matched_it(transport: TestTransport) {
    const PROBED_TAG: u32 = 2;
    const MAY_RECEIVE_TAG: u32 = 3;
    transport.run(2, |group| {
        for count in [0, 1, 8 << 10, 300_000] {
            let content = vec![count as u64; count];
            if group.rank() == R1 {
                assert!(group.probe(R0, 1, TEST_TIMEOUT).unwrap().is_some());
                group.send(&[0u8], R0, PROBED_TAG).unwrap();
                group.receive(&mut [0u8], R0, MAY_RECEIVE_TAG).unwrap();
                let mut buffer = vec![0u64; count];
                group.receive(&mut buffer, R0, 1).unwrap();
                assert_eq!(buffer, content);
                group.receive(&mut buffer, R0, 1).unwrap();
                assert_eq!(buffer, content);
                continue;
            }
            let sent = group.send_async(content.clone(), R1, SendOptions::synchronous(1)).unwrap();
            group.receive(&mut [0u8], R1, PROBED_TAG).unwrap();
            assert!(
                !sent.test(),
                "the message of {count} elements has arrived, and no receive has matched it"
            );
            group.send(&[0u8], R1, MAY_RECEIVE_TAG).unwrap();
            assert_eq!(sent.wait().unwrap(), content);
            group.send(&content, R1, SendOptions::synchronous(1)).unwrap();
        }
    });
}

/// Source: Hoefler, Siebert and Lumsdaine, "Scalable communication protocols for dynamic sparse data exchange"
/// (2010). A rank enters the barrier when its synchronous sends are complete. So all messages have been received when
/// the barrier ends. With other sends, a rank could leave the barrier before it has received all messages.
fn a_sparse_exchange_by_synchronous_sends_and_a_barrier_loses_no_message(transport: TestTransport) {
    transport.run(4, |mut group| {
        for round in 0..40u64 {
            let n = group.size().get();
            let own = u64::from(group.rank().get());
            // During the exchange, a rank does not know which ranks send to it.
            let is_sent = |from: u64, to: u64| !(from * 7 + to * 5 + round).is_multiple_of(3);
            let tag = round as u32;
            let sent: Vec<_> = group
                .size()
                .ranks()
                .filter(|to| is_sent(own, to.get().into()))
                .map(|to| {
                    group.send_async(vec![own; 1 + own as usize], to, SendOptions::synchronous(tag)).unwrap()
                })
                .collect();
            let (mut received, mut barrier) = (Vec::new(), None);
            loop {
                if let Some(status) = group.probe(Source::Any, tag, Duration::ZERO).unwrap() {
                    let mut buffer = vec![0u64; status.count];
                    group.receive(&mut buffer, status.source, tag).unwrap();
                    assert_eq!(buffer, vec![u64::from(status.source.get()); 1 + status.source.index()]);
                    received.push(u64::from(status.source.get()));
                } else if barrier.is_none() && sent.iter().all(ringtrain::Handle::test) {
                    barrier = Some(group.barrier_async().unwrap());
                } else if barrier.as_ref().is_some_and(ringtrain::Handle::test) {
                    break;
                }
            }
            wait_all(sent).unwrap();
            received.sort_unstable();
            let expected: Vec<u64> = (0..u64::from(n)).filter(|&from| is_sent(from, own)).collect();
            assert_eq!(received, expected, "round {round}");
        }
    });
}

on_every_transport! {
    a_synchronous_send_completes_only_when_a_receive_has_matched_it,
    a_sparse_exchange_by_synchronous_sends_and_a_barrier_loses_no_message,
}
