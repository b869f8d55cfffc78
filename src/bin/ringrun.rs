//! The program `ringrun`.

fn main() {}
