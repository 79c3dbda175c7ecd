//! Tests of the command line: each runs the real program. One program holds them all, which links once and keeps all cores at
//! work.

mod bad_input;
mod commands;
mod common;
mod data_command;
mod doctor;
mod export;
mod formats;
mod generate;
mod hub;
mod init;
mod journeys;
mod kill;
mod ladder;
mod logging;
mod mixture;
mod model_list;
mod models;
mod nvml;
mod pipeline;
mod plan;
mod recovery;
mod report;
mod scratch;
mod serve;
mod sweep;
mod team;
mod train;
mod usage;
mod view;

use std::fs;
use std::path::Path;

/// A file without a `mod` line would not run.
#[test]
fn every_file_of_tests_is_a_module() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut files = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let Some(stem) = name.strip_suffix(".rs").filter(|stem| *stem != "main") else { continue };
        assert!(include_str!("main.rs").contains(&format!("\nmod {stem};\n")), "main.rs lacks `mod {stem};`");
        files += 1;
    }
    assert!(files > 20, "{files} files");
}
