//! Training: through the library, and as the program `ringtrain` on one rank and on several.

mod command_line;
mod convergence;
mod fashion;
mod library;
mod several_ranks;
#[path = "../util/mod.rs"]
mod util;
