//! Helpers shared by the tests of `data`: small datasets on disk.

use super::formats::resolve_formats;
use super::source::{DocumentOrigin, DocumentPart, SourceReader};
use super::{DataError, DataSpec, Dataset, Format, LongSamples, Objective, Place, Rows, list_files};
use serde_json::json;
use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use tempfile::TempDir;

/// A temporary folder with `train.jsonl` and the matching [`DataSpec`]. Dropping it removes the folder.
pub struct TestData {
    pub folder: TempDir,
    pub spec: DataSpec,
    pub tokenizer: Option<PathBuf>,
}

impl TestData {
    /// Writes data in the tokens format: one line per (ids, labels).
    pub fn tokens(documents: &[(Vec<i32>, Option<Vec<i32>>)], sequence: u64, pack: bool) -> TestData {
        let line = |(ids, labels): &(Vec<i32>, Option<Vec<i32>>)| {
            json!({ "input_ids": ids, "labels": labels }).to_string() + "\n"
        };
        TestData::new(Format::Tokens, &documents.iter().map(line).collect::<String>(), sequence, pack)
    }

    /// Writes data in the text format, one line per text, with the tokenizer of the built-in example.
    pub fn text(texts: &[&str], sequence: u64, pack: bool) -> TestData {
        let lines: String = texts.iter().map(|text| json!({ "text": text }).to_string() + "\n").collect();
        let mut sample = TestData::new(Format::Text, &lines, sequence, pack);
        let tokenizer = sample.path("tokenizer.json");
        fs::write(&tokenizer, super::addition_example::tokenizer().to_string()).unwrap();
        sample.spec.vocab = super::addition_example::VOCAB;
        sample.spec.end_token = Some(super::addition_example::END_TOKEN);
        sample.tokenizer = Some(tokenizer);
        sample
    }

    fn new(format: Format, lines: &str, sequence: u64, pack: bool) -> TestData {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("train.jsonl");
        fs::write(&file, lines).unwrap();
        let patterns = vec![file.display().to_string()];
        let spec = DataSpec {
            patterns,
            format,
            split: None,
            sequence,
            pack,
            long: LongSamples::Split,
            vocab: 1 << 30,
            end_token: None,
            chat: super::ChatSpec::default(),
            objective: Objective::Supervised,
        };
        TestData { folder, spec, tokenizer: None }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn open(&self) -> Result<Dataset, DataError> {
        self.open_with_progress(&mut |_, _| ControlFlow::Continue(()))
    }

    pub fn open_with_progress(
        &self,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Dataset, DataError> {
        Dataset::open(&self.spec, self.tokenizer.as_deref(), &self.path("cache"), 2, progress)
    }

    /// Returns the cache files with names that end in `ending`.
    pub fn cache_files(&self, ending: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path("cache")).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.to_string_lossy().ends_with(ending)).collect()
    }
}

/// Passes the documents of a file with this name and content to `on_part`. Errors name the file without its folder.
pub fn read_file(
    name: &str,
    bytes: &[u8],
    format: Format,
    vocab: u64,
    mut on_part: impl FnMut(DocumentOrigin, DocumentPart),
) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    let patterns = [path.display().to_string()];
    let read = read_patterns(&patterns, format, vocab, &mut on_part);
    read.map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
}

/// Passes the documents of the files that match `patterns` to `on_part`.
fn read_patterns(
    patterns: &[String],
    format: Format,
    vocab: u64,
    on_part: &mut impl FnMut(DocumentOrigin, DocumentPart),
) -> Result<(), DataError> {
    let files = resolve_formats(list_files(patterns, format, None)?, format)?;
    let progress = &mut |_| ControlFlow::Continue(());
    let mut reader = SourceReader { files: &files, vocab, progress, reported_bytes: 0 };
    reader.read_all(|origin, part| {
        on_part(origin, part);
        Ok(())
    })
}

/// Returns the documents of a file as text, each with its place.
pub fn documents_of(name: &str, bytes: &[u8], format: Format) -> Result<Vec<(Place, String)>, String> {
    let mut documents = Vec::new();
    read_file(name, bytes, format, 100, |origin, part| documents.push((origin.place, format!("{part:?}"))))?;
    Ok(documents)
}

/// Returns all rows of `data` in order.
pub fn all_rows(data: &Dataset) -> Rows {
    let mut rows = Rows::new(data.rows(), data.sequence());
    data.read(0..data.rows(), &mut rows).unwrap();
    rows
}

/// Returns the values of `rows` that training uses: tokens, labels, positions and document starts, and weights.
pub fn training_values(rows: &Rows) -> ([Vec<i32>; 4], Vec<f32>) {
    let Rows { tokens, labels, positions, document_start, weights, .. } = rows.clone();
    ([tokens, labels, positions, document_start], weights)
}

/// Runs `work` and panics if it takes longer than a minute.
pub fn with_timeout(work: impl FnOnce() + Send + 'static) {
    let (done, finished) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    if finished.recv_timeout(std::time::Duration::from_secs(60)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        panic!("the test did not finish within 60 s");
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}
