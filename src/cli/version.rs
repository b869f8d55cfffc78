//! The text of `--version`.

/// The version, the commit, the features and the target of this build. `build.rs` sets the variables.
pub(super) const LONG_VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    "\ncommit: ",
    env!("RINGTRAIN_COMMIT"),
    "\nfeatures: ",
    env!("RINGTRAIN_FEATURES"),
    "\ntarget: ",
    env!("RINGTRAIN_TARGET")
);
