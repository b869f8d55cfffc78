//! A macro that implements `Debug` for errors.

/// Implements `Debug` for an error type with the text of its `Display`, because `main` and `unwrap` print errors with
/// `Debug`.
macro_rules! debug_as_display {
    ($error:ty) => {
        impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    };
}

pub(crate) use debug_as_display;
