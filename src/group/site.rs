//! Where calls are made: at their caller's line, unless that says otherwise.

use std::cell::Cell;
use std::panic::Location;

use crate::types::Site;

thread_local! {
    /// What this thread's caller has said.
    static GIVEN: Cell<Option<Site>> = const { Cell::new(None) };
}

/// Makes calls whose line is `site` in errors, here and on the other ranks, if the ranks do not agree or wait in
/// vain. It is for bindings to other languages, so that errors name a line of the program and not of the binding.
///
/// It applies to the calls that this thread makes in `calls`; with nested uses the innermost applies.
///
/// ```
/// use ringtrain::{Group, ReduceOp, Site, group};
///
/// let mut group = Group::solo();
/// let mut gradients = [1.0f32; 8];
/// group::at(Site::new("train.py", 12), || group.all_reduce(&mut gradients, ReduceOp::Sum))?;
/// # Ok::<(), ringtrain::Error>(())
/// ```
pub fn at<R>(site: Site, calls: impl FnOnce() -> R) -> R {
    /// Also where the calls panic.
    struct Before(Option<Site>);

    impl Drop for Before {
        fn drop(&mut self) {
            GIVEN.set(self.0);
        }
    }

    let _before = Before(GIVEN.replace(Some(site)));
    calls()
}

impl Site {
    /// Where the caller is, or says that it is. It costs one look at a variable of the thread.
    #[track_caller]
    #[inline]
    pub(super) fn here() -> Self {
        let caller = Location::caller();
        GIVEN.get().unwrap_or_else(|| Self::from(caller))
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn the_innermost_place_counts_and_ends_with_its_calls() {
        let own = |site: Site| site.to_string().starts_with("src/group/site.rs:");
        let (outer, inner) = (Site::new("a.py", 1), Site::new("b.py", 2));
        assert!(own(Site::here()));
        at(outer, || {
            assert_eq!(Site::here(), outer);
            assert_eq!(at(inner, Site::here), inner);
            assert!(catch_unwind(|| at(inner, || panic!("on purpose"))).is_err());
            assert_eq!(Site::here(), outer);
            // Another thread's calls are made elsewhere.
            assert!(std::thread::spawn(move || own(Site::here())).join().unwrap());
        });
        assert!(own(Site::here()));
    }
}
