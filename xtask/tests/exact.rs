//! Runs a small part of `cargo xtask soak`, the test that plans are exact. The soak is a process of its own, because it
//! counts the heap of the whole process.

use std::process::Command;

#[test]
fn plans_are_exact_for_random_models() {
    let soak = ["soak", "--only", "cases", "--seed", "20", "--runs", "24"];
    let output = Command::new(env!("CARGO_BIN_EXE_xtask")).args(soak).output().expect("the chores are there");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.trim_end().ends_with(" passed, 0 failed"), "{said}");
}
