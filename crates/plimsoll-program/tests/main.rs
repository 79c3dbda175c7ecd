//! Tests of Programs and of the passes on them. One program holds them all.

mod book;
mod methods;
mod offload;
mod precision;

use std::fs;
use std::path::Path;

/// A file without a `mod` line would not run.
#[test]
fn every_file_of_tests_is_a_module() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for entry in fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let Some(stem) = name.strip_suffix(".rs").filter(|stem| !["main"].contains(stem)) else { continue };
        assert!(include_str!("main.rs").contains(&format!("\nmod {stem};\n")), "main.rs lacks `mod {stem};`");
    }
}
