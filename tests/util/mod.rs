//! What several test files share.
#![allow(dead_code, unreachable_pub)]

pub mod ranks;
