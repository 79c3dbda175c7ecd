//! The `plimsoll` command line.
fn main() {}
