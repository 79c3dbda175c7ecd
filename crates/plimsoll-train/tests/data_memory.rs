//! Test that data is read in bounded memory. It has its own binary, because it measures the peak of the process.

use plimsoll_train::data::{DataSpec, Dataset, Format, LongSamples, Rows, addition_example};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::ControlFlow;

/// Returns the peak resident memory of this process in MiB, from `/proc`.
fn peak_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// One document of 40 MiB and many short documents become 180 MiB of records. A reader that held the text or the
/// records in memory would exceed the bound.
#[test]
fn large_text_is_read_in_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    addition_example::write_example(folder.path(), 1).unwrap();
    let line = "347+085=2340 and 1\n";
    let mut out = BufWriter::new(File::create(folder.path().join("one.txt")).unwrap());
    for _ in 0..(40 << 20) / line.len() {
        out.write_all(line.as_bytes()).unwrap();
    }
    out.flush().unwrap();
    let mut out = BufWriter::new(File::create(folder.path().join("many.jsonl")).unwrap());
    for _ in 0..(8 << 20) / line.len() {
        writeln!(out, "{{\"text\": \"347+085=2340\"}}").unwrap();
    }
    out.flush().unwrap();
    let name = |name: &str| folder.path().join(name).display().to_string();
    let spec = DataSpec {
        patterns: vec![name("one.txt"), name("many.jsonl")],
        format: Format::Text,
        sequence: 1024,
        pack: true,
        long: LongSamples::Split,
        vocab: addition_example::VOCAB,
        end_token: Some(addition_example::END_TOKEN),
    };
    let tokenizer = folder.path().join("tokenizer.json");
    let before = peak_mib();
    let cache = folder.path().join("cache");
    let data = Dataset::open(&spec, Some(&tokenizer), &cache, 2, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let mut rows = Rows::new(8, 1024);
    for first in (0..data.rows() - 8).step_by(100) {
        data.read(first..first + 8, &mut rows).unwrap();
    }
    let grown = peak_mib() - before;
    println!("{} tokens, peak grew by {grown} MiB", data.tokens());
    assert!(data.tokens() > 45 << 20);
    assert!(grown < 40, "grew by {grown} MiB");
}
