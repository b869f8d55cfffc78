//! The program `ringtrain`.

fn main() {}
