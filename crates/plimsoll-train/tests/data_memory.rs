//! Tests that data is read in bounded memory. They have their own binary, because they measure the peak of the process.

use parquet::data_type::Int32Type;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use plimsoll_train::data::{DataError, DataSpec, Dataset, Format, LongSamples, Objective, Rows, addition_example};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// One measurement at a time, because the peak is that of the process.
static MEASURING: Mutex<()> = Mutex::new(());

/// Runs `work`, and returns its result with the MiB by which it raised the peak of the process.
fn with_peak<T>(work: impl FnOnce() -> T) -> (T, u64) {
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = peak_mib();
    let result = work();
    (result, peak_mib() - before)
}

/// Returns the peak resident memory of this process in MiB, from `/proc`.
fn peak_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// One document of 40 MiB and many short documents become 180 MiB of records. A reader that held the text or the
/// records in memory would exceed the bound.
#[test]
#[ignore = "slow: .ci/slow-tests"]
fn large_text_is_read_in_bounded_memory() {
    let _measuring = MEASURING.lock();
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
        split: None,
        sequence: 1024,
        pack: true,
        long: LongSamples::Split,
        vocab: addition_example::VOCAB,
        end_token: Some(addition_example::END_TOKEN),
        chat: plimsoll_train::data::ChatSpec::default(),
        objective: Objective::Supervised,
    };
    let tokenizer = folder.path().join("tokenizer.json");
    let cache = folder.path().join("cache");
    let (data, grown) = with_peak(|| {
        let data = Dataset::open(&spec, Some(&tokenizer), &cache, 2, &mut |_, _| ControlFlow::Continue(())).unwrap();
        let mut rows = Rows::new(8, 1024);
        for first in (0..data.rows() - 8).step_by(100) {
            data.read(first..first + 8, &mut rows).unwrap();
        }
        data
    });
    println!("{} tokens, peak grew by {grown} MiB", data.tokens());
    assert!(data.tokens() > 45 << 20);
    assert!(grown < 40, "grew by {grown} MiB");
}

/// Tokens of a record of the large files.
const RECORD_TOKENS: i32 = 1024;

/// Writes records of token ids until they take `bytes`. Returns their number.
fn write_records(out: &mut dyn Write, bytes: u64, begin: &str, between: &str, end: &str) -> u64 {
    let ids: Vec<String> = (0..RECORD_TOKENS).map(|id| (id % 900 + 100).to_string()).collect();
    let record = ids.join(",");
    let count = bytes / record.len() as u64;
    for index in 0..count {
        let before = if index == 0 { begin } else { between };
        write!(out, "{before}{record}").unwrap();
    }
    write!(out, "{end}").unwrap();
    count
}

/// Writes a Parquet file of token ids with `count` records in row groups of 64 MiB.
fn write_parquet(path: &Path, count: u64) {
    let schema = "message m { optional group input_ids (LIST) { repeated group list { optional int32 element; } } }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Default::default()).unwrap();
    let ids: Vec<i32> = (0..RECORD_TOKENS).map(|id| id.wrapping_mul(7919) % 1000).map(i32::abs).collect();
    let (defined, repeated) = (vec![3; ids.len()], [vec![0], vec![1; ids.len() - 1]].concat());
    let group_records = (64 << 20) / (4 * RECORD_TOKENS as u64);
    for first in (0..count).step_by(group_records as usize) {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        for _ in first..count.min(first + group_records) {
            column.typed::<Int32Type>().write_batch(&ids, Some(&defined), Some(&repeated)).unwrap();
        }
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

/// Opens a file of token ids.
fn open_tokens(path: &Path) -> Result<Dataset, DataError> {
    let spec = DataSpec {
        patterns: vec![path.display().to_string()],
        format: Format::Auto,
        split: None,
        sequence: 1024,
        pack: true,
        long: LongSamples::Split,
        vocab: 1000,
        end_token: None,
        chat: plimsoll_train::data::ChatSpec::default(),
        objective: Objective::Supervised,
    };
    Dataset::open(&spec, None, &path.with_extension("cache"), 2, &mut |_, _| ControlFlow::Continue(()))
}

/// Each container of 64 MiB, or of `PLIMSOLL_TEST_MIB`, is read record by record.
#[test]
#[ignore = "slow: .ci/slow-tests"]
fn large_files_of_each_container_are_read_in_bounded_memory() {
    let _measuring = MEASURING.lock();
    let mib = std::env::var("PLIMSOLL_TEST_MIB").map_or(64, |mib| mib.parse().unwrap());
    let (bytes, folder) = (mib << 20, tempfile::tempdir().unwrap());
    for (name, limit_mib) in
        [("a.jsonl", 16), ("a.json", 16), ("a.csv", 16), ("a.jsonl.gz", 16), ("a.json.zst", 24), ("a.parquet", 48)]
    {
        let path = folder.path().join(name);
        let file = || BufWriter::new(File::create(&path).unwrap());
        let object = "{\"input_ids\":[";
        let lines = |out: &mut dyn Write| write_records(out, bytes, object, &format!("]}}\n{object}"), "]}");
        let list =
            |out: &mut dyn Write| write_records(out, bytes, &format!("[{object}"), &format!("]}},{object}"), "]}]");
        let count = match name {
            "a.jsonl" => lines(&mut file()),
            "a.json" => list(&mut file()),
            "a.csv" => write_records(&mut file(), bytes, "id,input_ids\n1,\"[", "]\"\n1,\"[", "]\"\n"),
            "a.jsonl.gz" => lines(&mut flate2::write::GzEncoder::new(file(), flate2::Compression::fast())),
            "a.json.zst" => list(&mut zstd::Encoder::new(file(), 1).unwrap().auto_finish()),
            _ => {
                let count = bytes / (4 * RECORD_TOKENS as u64);
                write_parquet(&path, count);
                count
            }
        };
        let size = fs::metadata(&path).unwrap().len() >> 20;
        let (data, grown) = with_peak(|| open_tokens(&path).unwrap());
        println!("{name}: {size} MiB, {} tokens, peak grew by {grown} MiB", data.tokens());
        assert_eq!(data.tokens(), count * RECORD_TOKENS as u64);
        assert!(grown < limit_mib, "{name}: grew by {grown} MiB");
        drop(data);
        fs::remove_file(&path).unwrap();
        fs::remove_dir_all(path.with_extension("cache")).unwrap();
    }
}

/// A compressed line of 512 MiB is refused as soon as it is longer than a record may be.
#[test]
fn compressed_line_without_end_is_refused_in_bounded_memory() {
    let _measuring = MEASURING.lock();
    let folder = tempfile::tempdir().unwrap();
    let ones = [b'1'; 1 << 20];
    for (name, message) in [
        ("a.jsonl.zst", "a.jsonl.zst:1: the line is longer than 16.00 MiB"),
        ("a.json.zst", "a.json.zst:1: the line is longer than 16.00 MiB"),
        ("a.csv.zst", "a.csv.zst: the record is longer than 16.00 MiB"),
    ] {
        let path = folder.path().join(name);
        let mut out = zstd::Encoder::new(File::create(&path).unwrap(), 1).unwrap();
        (0..512).for_each(|_| out.write_all(&ones).unwrap());
        out.finish().unwrap();
        let (refusal, grown) = with_peak(|| open_tokens(&path).unwrap_err().to_string());
        assert!(refusal.ends_with(message), "{refusal}");
        assert!(grown < 64, "{name}: grew by {grown} MiB");
    }
}
