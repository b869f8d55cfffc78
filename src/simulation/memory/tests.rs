//! Litmus tests of the simulated memory: small programs of a few threads. What the memory model of Rust forbids is never seen,
//! and what it allows is seen. The names are those of the literature.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::*;

/// The numbers of seeds for each program.
const SEEDS: u64 = if cfg!(miri) { 50 } else { 1_500 };
/// Two words.
const X: usize = 0;
const Y: usize = 8;

#[derive(Clone, Copy)]
enum Op {
    Load(usize, Ordering),
    Store(usize, u64, Ordering),
    Swap(usize, u64, Ordering),
    Fence,
}
use Op::{Fence, Load, Store, Swap};

#[derive(Clone, Copy, PartialEq, Debug)]
enum Verdict {
    Allowed,
    Forbidden,
}
use Verdict::{Allowed, Forbidden};

/// Runs the threads with random turns. Returns what the threads load, ordered by thread, and the last values of X and Y.
fn run(threads: &[&[Op]], seed: u64) -> (Vec<u64>, [u64; 2]) {
    let memory = SimMemory::new(16, seed);
    let mut random = StdRng::seed_from_u64(seed ^ 0xA5A5);
    let mut loaded = vec![Vec::new(); threads.len()];
    let mut next = vec![0; threads.len()];
    while next.iter().zip(threads).any(|(&next, ops)| next < ops.len()) {
        let thread = random.random_range(0..threads.len());
        let Some(&op) = threads[thread].get(next[thread]) else { continue };
        next[thread] += 1;
        memory.run_as(thread, || match op {
            Load(word, ordering) => loaded[thread].push(memory.load(word, ordering)),
            Store(word, value, ordering) => memory.store(word, value, ordering),
            Swap(word, value, ordering) => loaded[thread].push(memory.swap(word, value, ordering)),
            Fence => memory.fence(),
        });
    }
    memory.settle();
    (loaded.concat(), [X, Y].map(|word| memory.load(word, Relaxed)))
}

fn check(name: &str, threads: &[&[Op]], verdict: Verdict, is_outcome: impl Fn(&[u64], [u64; 2]) -> bool) {
    let seen = (0..SEEDS).find(|&seed| {
        let (loaded, last) = run(threads, seed);
        is_outcome(&loaded, last)
    });
    match verdict {
        Forbidden => assert_eq!(seen, None, "{name}: a seed has a forbidden outcome"),
        Allowed => assert!(seen.is_some(), "{name}: no seed has an allowed outcome"),
    }
}

/// Message passing: a thread that sees the flag sees the data if the flag is released and acquired, or with fences.
#[test]
fn messages_are_passed_by_release_and_acquire_or_by_fences() {
    for (store, load, verdict) in [
        (Release, Acquire, Forbidden),
        (Relaxed, Acquire, Allowed),
        (Release, Relaxed, Allowed),
        (Relaxed, Relaxed, Allowed),
    ] {
        let writer = [Store(X, 1, Relaxed), Store(Y, 1, store)];
        let reader = [Load(Y, load), Load(X, Relaxed)];
        check("message passing", &[&writer, &reader], verdict, |loaded, _| loaded == [1, 0]);
    }
    for (store_fence, load_fence, verdict) in
        [(true, true, Forbidden), (true, false, Allowed), (false, true, Allowed)]
    {
        let mut writer = vec![Store(X, 1, Relaxed), Store(Y, 1, Relaxed)];
        let mut reader = vec![Load(Y, Relaxed), Load(X, Relaxed)];
        if store_fence {
            writer.insert(1, Fence);
        }
        if load_fence {
            reader.insert(1, Fence);
        }
        check("fences", &[&writer, &reader], verdict, |loaded, _| loaded == [1, 0]);
    }
    // A fence orders relaxed stores after it with acquire loads, and release stores with relaxed loads before it.
    let [fenced, released] = [
        vec![Store(X, 1, Relaxed), Fence, Store(Y, 1, Relaxed)],
        vec![Store(X, 1, Relaxed), Store(Y, 1, Release)],
    ];
    let [acquiring, fencing] =
        [vec![Load(Y, Acquire), Load(X, Relaxed)], vec![Load(Y, Relaxed), Fence, Load(X, Relaxed)]];
    check("fence and acquire", &[&fenced, &acquiring], Forbidden, |loaded, _| loaded == [1, 0]);
    check("release and fence", &[&released, &fencing], Forbidden, |loaded, _| loaded == [1, 0]);
}

/// Store buffering: two threads that write and then look at the other's word may both see nothing, unless both use fences.
#[test]
fn only_two_fences_prevent_store_buffering() {
    for (store, load, fences, verdict) in [
        (Relaxed, Relaxed, 0, Allowed),
        (Release, Acquire, 0, Allowed),
        (Release, Acquire, 1, Allowed),
        (Relaxed, Relaxed, 2, Forbidden),
    ] {
        let thread = |own, other, has_fence: bool| {
            let mut ops = vec![Store(own, 1, store), Load(other, load)];
            if has_fence {
                ops.insert(1, Fence);
            }
            ops
        };
        let (first, second) = (thread(X, Y, fences > 0), thread(Y, X, fences > 1));
        check("store buffering", &[&first, &second], verdict, |loaded, _| loaded == [0, 0]);
    }
}

/// Coherence: all threads see the stores to one word in the same order.
#[test]
fn a_word_never_goes_back() {
    let two_stores = [Store(X, 1, Relaxed), Store(X, 2, Relaxed)];
    let two_loads = [Load(X, Relaxed), Load(X, Relaxed)];
    for (outcome, verdict) in
        [([2, 1], Forbidden), ([1, 0], Forbidden), ([2, 0], Forbidden), ([1, 2], Allowed), ([0, 2], Allowed)]
    {
        check("coherence", &[&two_stores, &two_loads], verdict, |loaded, _| loaded == outcome);
    }
    let (one, two) = ([Store(X, 1, Relaxed)], [Store(X, 2, Relaxed)]);
    check("same order", &[&one, &two, &two_loads, &two_loads], Forbidden, |loaded, _| loaded == [1, 2, 2, 1]);
    check("same order", &[&one, &two, &two_loads, &two_loads], Allowed, |loaded, _| loaded == [1, 2, 1, 2]);
    let own_load = [Store(X, 1, Relaxed), Load(X, Relaxed)];
    check("own store", &[&own_load, &two], Forbidden, |loaded, _| loaded == [0]);
    check("own store", &[&own_load, &two], Allowed, |loaded, last| loaded == [2] && last[0] == 2);
    let load_and_store = [Load(X, Relaxed), Store(X, 1, Relaxed)];
    check("load and store", &[&load_and_store, &two], Forbidden, |loaded, last| {
        loaded == [2] && last[0] == 2
    });
}

/// Three and four threads: what a thread has seen is also visible to threads that acquire from it.
#[test]
fn visibility_is_transitive() {
    for (release, acquire, verdict) in [(Release, Acquire, Forbidden), (Relaxed, Relaxed, Allowed)] {
        let threads: [&[Op]; 3] = [
            &[Store(X, 1, Relaxed)],
            &[Load(X, Relaxed), Store(Y, 1, release)],
            &[Load(Y, acquire), Load(X, Relaxed)],
        ];
        check("write to read causality", &threads, verdict, |loaded, _| loaded == [1, 1, 0]);
    }
    for (has_fences, verdict) in [(false, Allowed), (true, Forbidden)] {
        let reader = |first, second| {
            let mut ops = vec![Load(first, Acquire), Load(second, Acquire)];
            if has_fences {
                ops.insert(1, Fence);
            }
            ops
        };
        let (first, second) = (reader(X, Y), reader(Y, X));
        let threads: [&[Op]; 4] = [&[Store(X, 1, Release)], &[Store(Y, 1, Release)], &first, &second];
        check("independent reads of independent writes", &threads, verdict, |loaded, _| {
            loaded == [1, 0, 1, 0]
        });
    }
}

/// Two threads write two words in opposite orders. Without fences, both first stores may be last.
#[test]
fn stores_of_different_words_may_be_reordered() {
    for (has_fences, verdict) in [(false, Allowed), (true, Forbidden)] {
        let thread = |first, second| {
            let mut ops = vec![Store(first, 1, Relaxed), Store(second, 2, Release)];
            if has_fences {
                ops.insert(1, Fence);
            }
            ops
        };
        let (first, second) = (thread(X, Y), thread(Y, X));
        check("2+2W", &[&first, &second], verdict, |_, last| last == [1, 1]);
    }
}

/// Swaps: two swaps do not replace the same store, and a swap passes on what the store before it released.
#[test]
fn swaps_are_atomic_and_continue_a_release() {
    let threads: [&[Op]; 2] = [&[Swap(X, 1, Relaxed)], &[Swap(X, 2, Relaxed)]];
    check("two swaps", &threads, Forbidden, |loaded, _| loaded == [0, 0]);
    check("two swaps", &threads, Allowed, |loaded, last| loaded == [0, 1] && last[0] == 2);
    check("last value", &threads, Forbidden, |loaded, last| loaded == [0, 1] && last[0] == 1);
    let threads: [&[Op]; 3] = [&[Store(X, 1, Relaxed)], &[Swap(X, 2, Relaxed)], &[Swap(X, 3, Relaxed)]];
    check("a store between", &threads, Forbidden, |loaded, last| loaded == [0, 2] && last[0] == 2);
    for (replaced, verdict) in [(1, Forbidden), (0, Allowed)] {
        let threads: [&[Op]; 3] = [
            &[Store(X, 1, Relaxed), Store(Y, 1, Release)],
            &[Swap(Y, 2, Relaxed)],
            &[Load(Y, Acquire), Load(X, Relaxed)],
        ];
        check("release sequence", &threads, verdict, |loaded, _| loaded == [replaced, 2, 0]);
    }
    let swapping = [Swap(Y, 1, AcqRel), Load(X, Relaxed)];
    let threads: [&[Op]; 2] = [&[Store(X, 1, Relaxed), Store(Y, 2, Release)], &swapping];
    check("acquiring swap", &threads, Forbidden, |loaded, _| loaded == [2, 0]);
}

/// Thread 0 writes 16 bytes and sets the flag. Thread 1 looks at the flag, reads the bytes if it is set, and answers. Then
/// thread 0 writes the bytes again. Returns the bytes that thread 1 has read, and the race.
fn pass_bytes(
    seed: u64,
    [write_flag, read_flag, answer, read_answer]: [Ordering; 4],
) -> (Option<[u8; 16]>, bool) {
    let memory = SimMemory::new(64, seed);
    let mut bytes = None;
    memory.run_as(0, || {
        memory.write(32, &[1; 16]);
        memory.store(X, 1, write_flag);
    });
    memory.run_as(1, || {
        if memory.load(X, read_flag) == 1 {
            let mut target = [0; 16];
            memory.read(32, &mut target);
            bytes = Some(target);
            memory.store(Y, 1, answer);
        }
    });
    memory.run_as(0, || {
        if memory.load(Y, read_answer) == 1 {
            memory.write(32, &[2; 16]);
        }
    });
    (bytes, memory.race().is_some())
}

/// Torn reads: bytes are whole if they are ordered. Each ordering that is missing is noted as a race.
#[test]
fn bytes_are_torn_or_raced_without_each_ordering() {
    let right = [Release, Acquire, Release, Acquire];
    let all = |orderings| (0..SEEDS).map(move |seed| pass_bytes(seed, orderings));
    assert!(all(right).all(|(bytes, is_race)| !is_race && bytes.is_none_or(|bytes| bytes == [1; 16])));
    assert!(all(right).any(|(bytes, _)| bytes.is_some()));
    for missing in 0..4 {
        let mut orderings = right;
        orderings[missing] = Relaxed;
        assert!(all(orderings).any(|(_, is_race)| is_race), "ordering {missing} is missing");
        let is_torn = |(bytes, _): (Option<[u8; 16]>, bool)| {
            bytes.is_some_and(|bytes| bytes.contains(&0) && bytes.contains(&1))
        };
        assert_eq!(all(orderings).any(is_torn), missing < 2, "ordering {missing} is missing");
    }
}

#[test]
fn a_thread_that_has_ended_and_a_mutated_line_change_nothing() {
    let memory = SimMemory::new(64, 1);
    let store_at_this_line = |value| memory.store(X, value, Release);
    store_at_this_line(1);
    let sites = memory.sites();
    let (&site, kind) = sites.first_key_value().unwrap();
    assert!(sites.len() == 1 && site.file().ends_with("tests.rs") && kind.is_ordered && !kind.is_fence);
    memory.set_mutation(Some((site, Mutation::Skip)));
    store_at_this_line(2);
    assert_eq!(memory.load(X, Relaxed), 1);
    memory.set_mutation(None);
    memory.end_thread(0);
    memory.store(X, 3, Relaxed);
    memory.write(32, &[3; 4]);
    memory.run_as(1, || {
        memory.settle();
        assert_eq!(memory.load(X, Relaxed), 1);
        memory.read(32, &mut [0; 4]);
        assert_eq!(memory.race(), None);
    });
}

#[test]
fn a_lock_orders_the_threads_that_hold_it_one_after_the_other() {
    for seed in 0..20 {
        let memory = SimMemory::new(64, seed);
        let unlocked = memory.run_as(0, || {
            memory.store(X, 1, Relaxed);
            memory.write(32, &[1]);
            memory.view()
        });
        memory.run_as(1, || {
            memory.acquire_view(&unlocked);
            assert_eq!(memory.load(X, Relaxed), 1);
            memory.write(32, &[2]);
        });
        assert_eq!(memory.race(), None);
    }
}

/// Thread 0 writes the second word of a buffer in place, through its own mapping, and then stores to X. Thread 1 loads X, and
/// then accesses a word. The addresses of the mappings are never used.
fn notes_race(store: Ordering, load: Ordering, word: usize, is_write: bool) -> bool {
    let memory = SimMemory::new(64, 0);
    let mappings = [4096, 8192];
    memory.add_buffer(16, mappings);
    let word_at = |first: usize, word: usize| {
        std::ptr::slice_from_raw_parts(std::ptr::without_provenance::<u8>(first + 8 * word), 8)
    };
    memory.run_as(0, || {
        memory.before_access_in_place(word_at(mappings[0], 1), true);
        memory.store(X, 1, store);
    });
    memory.run_as(1, || {
        while memory.load(X, load) == 0 {}
        memory.before_access_in_place(word_at(mappings[1], word), is_write);
    });
    memory.race().is_some()
}

#[test]
fn accesses_in_place_to_the_same_word_without_an_order_are_a_race() {
    for is_write in [false, true] {
        assert!(!notes_race(Release, Acquire, 1, is_write));
        assert!(notes_race(Relaxed, Acquire, 1, is_write));
        assert!(notes_race(Release, Relaxed, 1, is_write));
        assert!(!notes_race(Relaxed, Relaxed, 0, is_write), "the threads access different words");
        assert!(!notes_race(Relaxed, Relaxed, 2, is_write), "the bytes do not belong to the buffer");
    }
}
