//! What the tests of `data` share: small data sets on disk.

use super::{DataError, DataSpec, Dataset, Format, Long, Rows};
use serde_json::json;
use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use tempfile::TempDir;

/// A folder with `train.jsonl`, and how to read it; the folder is removed when dropped.
pub struct Sample {
    pub folder: TempDir,
    pub spec: DataSpec,
    pub tokenizer: Option<PathBuf>,
}

impl Sample {
    /// The tokens format: a line for each (ids, labels).
    pub fn tokens(documents: &[(Vec<i32>, Option<Vec<i32>>)], sequence: u64, pack: bool) -> Sample {
        let line = |(ids, labels): &(Vec<i32>, Option<Vec<i32>>)| {
            json!({ "input_ids": ids, "labels": labels }).to_string() + "\n"
        };
        Sample::new(Format::Tokens, &documents.iter().map(line).collect::<String>(), sequence, pack)
    }

    /// The text format with the tokenizer of the built-in example: a line for each text.
    pub fn text(texts: &[&str], sequence: u64, pack: bool) -> Sample {
        let lines: String = texts.iter().map(|text| json!({ "text": text }).to_string() + "\n").collect();
        let mut sample = Sample::new(Format::Text, &lines, sequence, pack);
        let tokenizer = sample.path("tokenizer.json");
        fs::write(&tokenizer, super::sums::tokenizer().to_string()).unwrap();
        sample.spec.vocab = super::sums::VOCAB;
        sample.spec.end_token = Some(super::sums::END);
        sample.tokenizer = Some(tokenizer);
        sample
    }

    fn new(format: Format, lines: &str, sequence: u64, pack: bool) -> Sample {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("train.jsonl");
        fs::write(&file, lines).unwrap();
        let patterns = vec![file.display().to_string()];
        let spec = DataSpec { patterns, format, sequence, pack, long: Long::Split, vocab: 1 << 30, end_token: None };
        Sample { folder, spec, tokenizer: None }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn open(&self) -> Result<Dataset, DataError> {
        self.open_watched(&mut |_, _| ControlFlow::Continue(()))
    }

    pub fn open_watched(&self, progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>) -> Result<Dataset, DataError> {
        Dataset::open(&self.spec, self.tokenizer.as_deref(), &self.path("cache"), 2, progress)
    }

    /// The files of the cache that end in `ending`.
    pub fn cached(&self, ending: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path("cache")).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.to_string_lossy().ends_with(ending)).collect()
    }
}

/// All rows of `data` in order.
pub fn all_rows(data: &Dataset) -> Rows {
    let mut rows = Rows::new(data.rows(), data.sequence());
    data.read(0..data.rows(), &mut rows).unwrap();
    rows
}

/// What training sees of `rows`.
pub fn seen(rows: &Rows) -> ([Vec<i32>; 4], Vec<f32>) {
    let Rows { tokens, labels, positions, document_start, weights, .. } = rows.clone();
    ([tokens, labels, positions, document_start], weights)
}

/// Fails instead of hanging.
pub fn watched(work: impl FnOnce() + Send + 'static) {
    let (done, finished) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    if finished.recv_timeout(std::time::Duration::from_secs(60)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        panic!("hangs");
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}
