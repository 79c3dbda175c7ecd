//! Tests of engines, teams and runs without the command line. One program holds
//! all of them except `data_memory` and `planning_memory`, which measure the peak of their process.

mod arena_use;
mod batching;
mod common;
mod offload;
mod parity;
mod remote;
mod team;
mod team_support;

use std::fs;
use std::path::Path;

/// A file without a `mod` line would not run.
#[test]
fn every_file_of_tests_is_a_module() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for entry in fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let Some(stem) =
            name.strip_suffix(".rs").filter(|stem| !["main", "data_memory", "planning_memory"].contains(stem))
        else {
            continue;
        };
        assert!(include_str!("main.rs").contains(&format!("\nmod {stem};\n")), "main.rs lacks `mod {stem};`");
    }
}
