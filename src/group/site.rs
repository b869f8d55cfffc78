//! The site of a call, which error messages show: the line of the caller, or a line that the caller has set with [`at`].

use std::cell::Cell;
use std::panic::Location;

use crate::types::Site;

thread_local! {
    static SET_SITE: Cell<Option<Site>> = const { Cell::new(None) };
}

/// Runs `calls`. Errors on all ranks then name `site` as the line of each call that this thread makes within `calls`. A
/// binding to another language uses this function, so that errors name a line of the program and not of the binding.
///
/// If `calls` itself calls this function, the site of the inner call applies until the inner call returns.
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
    /// Restores the previous site when it is dropped, also if `calls` panics.
    struct PreviousSite(Option<Site>);

    impl Drop for PreviousSite {
        fn drop(&mut self) {
            SET_SITE.set(self.0);
        }
    }

    let _previous = PreviousSite(SET_SITE.replace(Some(site)));
    calls()
}

impl Site {
    /// Returns the site that the caller has set with [`at`], or otherwise the line of the caller.
    #[track_caller]
    #[inline]
    pub(super) fn here() -> Self {
        let caller = Location::caller();
        SET_SITE.get().unwrap_or_else(|| Self::from(caller))
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn the_innermost_site_applies_until_its_calls_end() {
        let is_in_this_file = |site: Site| site.to_string().starts_with("src/group/site.rs:");
        let (outer, inner) = (Site::new("a.py", 1), Site::new("b.py", 2));
        assert!(is_in_this_file(Site::here()));
        at(outer, || {
            assert_eq!(Site::here(), outer);
            assert_eq!(at(inner, Site::here), inner);
            assert!(catch_unwind(|| at(inner, || panic!("on purpose"))).is_err());
            assert_eq!(Site::here(), outer);
            // The site does not apply to other threads.
            assert!(std::thread::spawn(move || is_in_this_file(Site::here())).join().unwrap());
        });
        assert!(is_in_this_file(Site::here()));
    }
}
