//! Plans are exact: a share of `cargo xtask soak`, which says what is shown and how. It runs as a program of its own,
//! since what the heap gives is counted for the whole process.

use std::process::Command;

#[test]
fn plans_are_exact_on_random_small_models() {
    let soak = ["soak", "--only", "cases", "--seed", "20", "--runs", "24"];
    let output = Command::new(env!("CARGO_BIN_EXE_xtask")).args(soak).output().expect("the chores are there");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.trim_end().ends_with(" passed, 0 failed"), "{said}");
}
