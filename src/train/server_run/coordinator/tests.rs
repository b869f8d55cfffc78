use std::thread;

use super::*;

/// Longer than any test takes. A test that waits so long fails, because the main thread was not woken.
const NEVER: Duration = Duration::from_mins(1);
const NOTHING: AwaitedProgress = AwaitedProgress { batches: u64::MAX, updates: u64::MAX };

/// Returns the coordinator of a run of 100 batches with two workers, which are the clients 0 and 1.
fn new_coordinator(is_synchronous: bool) -> BatchCoordinator {
    let position =
        Position { epoch: 0, step: 0, steps_total: 0, momentum_start: 0, loss_sum: 0.0, samples: 0 };
    let start = RunStart { position, done_ahead: &[], batches_per_epoch: 50, epochs: 2 };
    BatchCoordinator::new(&start, vec![Rank::new(1), Rank::new(2)], 0, is_synchronous)
}

/// Makes the client compute its next batch, with this sum of the losses of so many samples.
fn push(coordinator: &BatchCoordinator, client: usize, loss: f64, samples: u64) {
    let note = coordinator.reply_note(client, PushOrNote::Note, &WorkRequest::default().encode());
    let WorkReply::Work(Assignment::Batch(batch)) = WorkReply::decode(&note) else { panic!("no batch") };
    let request = WorkRequest { loss, samples, batch, ..WorkRequest::default() };
    coordinator.record_push_outcome(client, &request.encode(), PushOutcome::Applied { staleness: 0 });
}

/// Returns the progress for which the main thread waits while another thread calls `work`.
fn progress_during(
    coordinator: &BatchCoordinator,
    awaited: AwaitedProgress,
    work: impl FnOnce() + Send,
) -> TrainingProgress {
    thread::scope(|scope| {
        scope.spawn(|| {
            while coordinator.lock().awaited_progress.is_none() {
                thread::yield_now();
            }
            work();
        });
        let started = Instant::now();
        let progress = coordinator.wait_for_progress(awaited, 0, NEVER);
        assert!(started.elapsed() < NEVER, "no thread has woken the main thread");
        progress
    })
}

#[test]
fn the_main_thread_wakes_up_when_it_has_work() {
    let updates = |updates| AwaitedProgress { updates, ..NOTHING };
    let batches = |batches| AwaitedProgress { batches, ..NOTHING };
    let lost = || LinkOutcome::Lost("the connection failed".into());
    for is_synchronous in [false, true] {
        let new = || new_coordinator(is_synchronous);
        let push_both = |run: &BatchCoordinator, times: usize| {
            for update in 0..2 * times {
                push(run, update % 2, 1.0, 1);
            }
        };
        let run = new();
        let progress = progress_during(&run, updates(4), || push_both(&run, 2));
        assert_eq!((progress.batches, progress.is_finished), (if is_synchronous { 2 } else { 4 }, false));
        let run = new();
        let progress = progress_during(&run, batches(1), || push_both(&run, 1));
        assert!(progress.batches >= 1);
        let run = new();
        assert!(progress_during(&run, NOTHING, || run.stop_run()).is_finished);
        let run = new();
        let progress = progress_during(&run, NOTHING, || {
            run.record_link_end(0, &lost());
            run.record_link_end(1, &lost());
        });
        let problem = "the connection failed".to_owned();
        let expected = if is_synchronous {
            RunFailure::WorkerLost { worker: Rank::new(1), problem }
        } else {
            RunFailure::AllWorkersLost { worker: Rank::new(2), problem }
        };
        assert_eq!(progress.failure, Some(expected));
        assert_eq!((run.lost_workers().len(), run.failure()), (2, progress.failure));
    }
}

#[test]
fn updates_that_the_main_thread_does_not_await_wake_no_thread() {
    let run = new_coordinator(false);
    run.lock().awaited_progress = Some(AwaitedProgress { batches: 100, updates: 50 });
    for update in 1..50 {
        push(&run, update % 2, 1.0, 1);
        assert!(run.lock().awaited_progress.is_some(), "update {update}");
    }
    push(&run, 0, 1.0, 1);
    assert!(run.lock().awaited_progress.is_none());
}

#[test]
fn each_step_has_the_mean_loss_of_its_samples() {
    let at_once = |run: &BatchCoordinator, seen| run.wait_for_progress(NOTHING, seen, Duration::ZERO);
    let losses = |progress: &TrainingProgress, batches: std::ops::Range<u64>| {
        batches.map(|batch| progress.step_of_batch(batch).unwrap().loss).collect::<Vec<_>>()
    };
    let run = new_coordinator(true);
    for (first, second) in [((6.0, 3), (2.0, 1)), ((1.0, 1), (1.0, 3))] {
        push(&run, 0, first.0, first.1);
        push(&run, 1, second.0, second.1);
    }
    assert_eq!(losses(&at_once(&run, 0), 0..2), [2.0, 0.5]);
    let run = new_coordinator(false);
    for loss in [1.0, 2.0, 3.0, 4.0] {
        push(&run, 0, loss, 1);
    }
    assert_eq!(losses(&at_once(&run, 1), 1..4), [2.0, 3.0, 4.0]);
    assert_eq!(losses(&at_once(&run, 2), 2..3), [3.0], "the caller shows fewer batches than are done");
    assert_eq!(at_once(&run, 4).steps, []);
    run.lock().recent_steps.drain(..2);
    assert_eq!(losses(&at_once(&run, 0), 0..4), [3.0, 3.0, 3.0, 4.0], "the first two steps are forgotten");
}
