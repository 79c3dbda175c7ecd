//! Log-probabilities of answers, or of the tokens of completions, under the initial weights, in the files `train.scores` and `eval.scores` of the run folder.
//!
//! A file begins with the fingerprint of weights and data, 32 bytes. If the fingerprint differs, the file is emptied. A list of
//! entries follows, one for each row of data, in the order in which they were computed:
//!
//! | bytes | content |
//! |--:|---|
//! | 8 | number of the row, over all sources |
//! | 4 | number of values |
//! | 4 | CRC-32 of row, count and values |
//! | 8 each | log-probability of each answer or token, as f64 |
//!
//! All numbers are little-endian. On opening, a file is cut off at the first incomplete or damaged entry.

use crate::config::{Objective, RunConfig};
use crate::data::SourceRow;
use plimsoll_core::Failure;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Bytes of an entry before its values.
const HEADER: usize = 16;
/// Offset of a row that has no entry.
const MISSING: u64 = u64::MAX;

/// The reference scores of a set of data, on disk.
pub(crate) struct ReferenceScores {
    path: PathBuf,
    file: File,
    /// Number of the first row of each source.
    first_rows: Vec<u64>,
    /// Offset of the entry of each row in the file, or [`MISSING`].
    offsets: Vec<u64>,
    /// Bytes of the file.
    length: u64,
}

/// Returns the number of the first row of each source, if the rows of all sources are numbered one after the other.
fn first_rows(rows: &[u64]) -> Vec<u64> {
    let mut next = 0;
    let first_of = |rows: &u64| {
        next += rows;
        next - rows
    };
    rows.iter().map(first_of).collect()
}

/// Returns a SHA-256 that identifies initial weights and rows. It covers `[model]`, `[lora]`, seed, precision, method, rungs,
/// objective and temperature of the run; names, sizes and times of the model's files, not their contents; `data.sequence`, `data.pack`, and `content`,
/// the SHA-256 of the data.
pub(crate) fn fingerprint(run: &RunConfig, content: &str) -> [u8; 32] {
    let (mut relevant, data) = (RunConfig::default(), &run.data);
    (relevant.model, relevant.lora) = (run.model.clone(), run.lora.clone());
    (relevant.data.sequence, relevant.data.pack) = (data.sequence, data.pack);
    let train = &run.train;
    (relevant.train.seed, relevant.train.precision, relevant.train.method) =
        (train.seed, train.precision, train.method);
    relevant.train.rungs.clone_from(&train.rungs);
    relevant.train.objective = train.objective;
    if train.objective == Objective::Grpo {
        relevant.grpo.temperature = run.grpo.temperature;
    }
    let mut hasher = Sha256::new();
    hasher.update(relevant.to_toml());
    hasher.update(content);
    for path in run.model.path.iter().chain(&run.model.adapter) {
        let path = Path::new(path);
        let mut files: Vec<PathBuf> =
            fs::read_dir(path).map_or(vec![path.to_owned()], |files| files.flatten().map(|file| file.path()).collect());
        files.sort();
        for file in files {
            let Ok(metadata) = file.metadata() else { continue };
            let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            hasher.update(format!("{:?} {} {modified:?}", file.file_name(), metadata.len()));
        }
    }
    hasher.finalize().into()
}

impl ReferenceScores {
    /// Opens the file `name` in `folder`, and begins it anew if there is none with this fingerprint. `rows` is the number of
    /// rows of each source.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn open(folder: &Path, name: &str, fingerprint: &[u8; 32], rows: &[u64]) -> Result<ReferenceScores, Failure> {
        let path = folder.join(name);
        let opened = fs::create_dir_all(folder)
            .and_then(|()| File::options().read(true).write(true).create(true).truncate(false).open(&path));
        let file = opened.map_err(|error| file_failure(&path, "write", &error))?;
        let offsets = vec![MISSING; rows.iter().sum::<u64>() as usize];
        let length = fingerprint.len() as u64;
        let mut scores = ReferenceScores { path, file, first_rows: first_rows(rows), offsets, length };
        let mut found = [0; 32];
        let is_same = scores.file.read_exact_at(&mut found, 0).is_ok() && found == *fingerprint;
        let prepared = if is_same { scores.scan() } else { scores.file.write_all_at(fingerprint, 0) };
        let cut = prepared.and_then(|()| scores.file.set_len(scores.length));
        cut.map_err(|error| file_failure(&scores.path, "write", &error))?;
        Ok(scores)
    }

    /// Finds the offsets of all entries up to the first that is not whole.
    fn scan(&mut self) -> io::Result<()> {
        let all = self.file.metadata()?.len();
        let mut reader = BufReader::new(&self.file);
        reader.seek(SeekFrom::Start(self.length))?;
        let (mut header, mut found) = ([0; HEADER], Vec::new());
        let mut at = self.length;
        while read_whole(&mut reader, &mut header)? {
            let (row, count, checksum) = split_header(&header);
            let bytes = (HEADER as u64) + u64::from(count) * 8;
            if row >= self.offsets.len() as u64 || bytes > all - at {
                break;
            }
            let mut values = vec![0; count as usize * 8];
            if !read_whole(&mut reader, &mut values)? || entry_checksum(row, count, &values) != checksum {
                break;
            }
            found.push((row, bytes));
            at += bytes;
        }
        found.into_iter().for_each(|(row, bytes)| self.record(row, bytes));
        Ok(())
    }

    fn record(&mut self, row: u64, bytes: u64) {
        self.offsets[row as usize] = self.length;
        self.length += bytes;
    }

    /// Returns the number of rows of all sources.
    pub fn rows(&self) -> usize {
        self.offsets.len()
    }

    /// Returns the number of a row, counted over all sources.
    pub fn number(&self, row: SourceRow) -> u64 {
        self.first_rows[row.source] + row.row
    }

    /// Returns whether the scores of a row are known.
    pub fn has(&self, row: SourceRow) -> bool {
        self.offsets[self.number(row) as usize] != MISSING
    }

    /// Appends the scores of the answers of a row.
    ///
    /// # Errors
    /// The file cannot be written, or a score is not finite.
    pub fn push(&mut self, row: SourceRow, answers: &[f64]) -> Result<(), Failure> {
        if answers.iter().any(|answer| !answer.is_finite()) {
            let message = "an answer has a log-probability under the initial weights that is not finite";
            return Err(Failure::input(message).hint("check the weights of the model, or train.precision"));
        }
        let (number, count) = (self.number(row), answers.len() as u32);
        let values: Vec<u8> = answers.iter().flat_map(|answer| answer.to_le_bytes()).collect();
        let checksum = entry_checksum(number, count, &values);
        let header = [&number.to_le_bytes()[..], &count.to_le_bytes(), &checksum.to_le_bytes()].concat();
        let entry = [header, values].concat();
        self.file.write_all_at(&entry, self.length).map_err(|error| file_failure(&self.path, "write", &error))?;
        self.record(number, entry.len() as u64);
        Ok(())
    }

    /// Flushes the entries to disk.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn sync(&self) -> Result<(), Failure> {
        self.file.sync_data().map_err(|error| file_failure(&self.path, "write", &error))
    }

    /// Returns the scores of the answers of a row.
    ///
    /// # Errors
    /// The row has no entry, or the file was changed.
    pub fn of(&self, row: SourceRow) -> Result<Vec<f64>, Failure> {
        let number = self.number(row);
        let offset = self.offsets[number as usize];
        let damaged = || file_failure(&self.path, "read", &io::Error::other("its content has changed"));
        let mut header = [0; HEADER];
        if offset == MISSING || self.file.read_exact_at(&mut header, offset).is_err() {
            return Err(damaged());
        }
        let (found, count, checksum) = split_header(&header);
        let bytes = u64::from(count) * 8;
        if found != number || offset + HEADER as u64 + bytes > self.length {
            return Err(damaged());
        }
        let mut values = vec![0; bytes as usize];
        self.file.read_exact_at(&mut values, offset + HEADER as u64).map_err(|_| damaged())?;
        if entry_checksum(found, count, &values) != checksum {
            return Err(damaged());
        }
        let value = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("values have eight bytes"));
        Ok(values.chunks_exact(8).map(value).collect())
    }
}

/// Fills `buffer` from the reader. Returns false if fewer bytes are left.
fn read_whole(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match reader.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns row, number of answers, and checksum of an entry.
fn split_header(header: &[u8; HEADER]) -> (u64, u32, u32) {
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    (u64::from(word(0)) | u64::from(word(4)) << 32, word(8), word(12))
}

fn entry_checksum(row: u64, count: u32, values: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&row.to_le_bytes());
    hasher.update(&count.to_le_bytes());
    hasher.update(values);
    hasher.finalize()
}

fn file_failure(path: &Path, action: &str, error: &io::Error) -> Failure {
    let path = path.display();
    Failure::input(format!("cannot {action} {path}: {error}"))
        .hint(format!("make the file accessible, or remove {path}: a run that is resumed computes it again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(source: usize, row: u64) -> SourceRow {
        SourceRow { source, row }
    }

    #[test]
    fn entries_are_found_again_and_a_torn_one_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let open = |rows: &[u64]| ReferenceScores::open(folder.path(), "train.scores", &[7; 32], rows).unwrap();
        let mut scores = open(&[2, 1]);
        scores.push(row(1, 0), &[-1.5, -2.5]).unwrap();
        scores.push(row(0, 1), &[-0.25, -4.0, -8.0, -1e-300]).unwrap();
        assert!(!scores.has(row(0, 0)) && scores.has(row(1, 0)));
        let path = folder.path().join("train.scores");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, [&whole[..], &whole[32..52]].concat()).unwrap();
        let mut scores = open(&[2, 1]);
        assert_eq!(scores.of(row(1, 0)).unwrap(), [-1.5, -2.5]);
        assert_eq!(scores.of(row(0, 1)).unwrap(), [-0.25, -4.0, -8.0, -1e-300]);
        assert_eq!(fs::read(&path).unwrap(), whole);
        scores.push(row(0, 0), &[]).unwrap();
        assert!(scores.of(row(0, 0)).unwrap().is_empty());
        assert!(scores.push(row(0, 0), &[f64::NAN]).is_err());
    }

    #[test]
    fn scores_of_other_weights_or_data_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let open = |fingerprint: u8| ReferenceScores::open(folder.path(), "x", &[fingerprint; 32], &[2]).unwrap();
        open(1).push(row(0, 1), &[-1.0]).unwrap();
        assert!(open(1).has(row(0, 1)));
        assert!(!open(2).has(row(0, 1)));
        assert_eq!(fs::read(folder.path().join("x")).unwrap(), [2; 32]);
        let of = |settings: &[&str], content: &str| {
            let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
            fingerprint(&RunConfig::parse("run.toml", "model.preset = \"gpt\"", &settings).unwrap(), content)
        };
        assert_eq!(of(&[], "a"), of(&["train.learning_rate=1", "dpo.beta=2", "train.steps=7"], "a"));
        for other in ["train.seed=2", "model.preset=other", "data.sequence=7", "lora.rank=3", "train.precision=f64"] {
            assert_ne!(of(&[], "a"), of(&[other], "a"), "{other}");
        }
        assert_ne!(of(&[], "a"), of(&[], "b"));
    }

    #[test]
    fn changed_entries_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let open = || ReferenceScores::open(folder.path(), "train.scores", &[7; 32], &[2]).unwrap();
        let mut scores = open();
        scores.push(row(0, 0), &[-1.5, -2.5]).unwrap();
        scores.push(row(0, 1), &[-1.5, -2.5]).unwrap();
        let path = folder.path().join("train.scores");
        let mut bytes = fs::read(&path).unwrap();
        bytes[52] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let refused = scores.of(row(0, 0)).unwrap_err();
        assert!(refused.message.ends_with("its content has changed"), "{}", refused.message);
        assert!(refused.hints[0].ends_with("a run that is resumed computes it again"), "{:?}", refused.hints);
        assert!(scores.of(row(0, 1)).is_ok());
        // Entries from a damaged one on are computed again.
        let scores = open();
        assert!(!scores.has(row(0, 0)) && !scores.has(row(0, 1)));
    }
}
