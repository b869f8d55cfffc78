//! The program `ringbench`.

fn main() {}
