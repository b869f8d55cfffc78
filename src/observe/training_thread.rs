//! Records the parts of training in the thread that trains. Code that belongs to a part calls [`span`], and needs to know
//! neither the recorder nor whether there is one.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use super::recorder::Recorder;
pub(crate) use super::span::SpanKind;

thread_local! {
    /// The recorder of the run that this thread executes.
    static CURRENT: RefCell<Option<Arc<Recorder>>> = const { RefCell::new(None) };
}

/// Until this value is dropped, the parts of training in this thread are recorded.
pub(crate) struct ActiveThread;

/// A part of training in progress. It ends when this value is dropped.
pub(crate) struct ActiveSpan(Option<(Arc<Recorder>, SpanKind, Duration)>);

/// Records the parts of training in this thread from now on, if the recorder has a timeline.
pub(crate) fn activate(recorder: Option<&Arc<Recorder>>) -> ActiveThread {
    CURRENT.set(recorder.filter(|recorder| recorder.has_timeline()).cloned());
    ActiveThread
}

/// Begins a part of training.
pub(crate) fn span(kind: SpanKind) -> ActiveSpan {
    let recorder = CURRENT.with_borrow(Clone::clone);
    ActiveSpan(recorder.map(|recorder| {
        let now = recorder.now();
        (recorder, kind, now)
    }))
}

impl Drop for ActiveThread {
    fn drop(&mut self) {
        CURRENT.set(None);
    }
}

impl Drop for ActiveSpan {
    fn drop(&mut self) {
        if let Some((recorder, kind, begun)) = self.0.take() {
            recorder.add_span(kind, begun);
        }
    }
}
