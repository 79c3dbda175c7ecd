//! The token cache on disk: what the files hold, tokenised once. A cache is two files: `NAME.tokens`, the plain
//! records, and `NAME.json`, which says what they were made from and is renamed into place last. A
//! third, `NAME-T.rows`, is made for padded rows: where in the tokens each row begins.
//!
//! A record is the token id as a little-endian u32 with [`FIRST`] set on the first token of a
//! document, followed in the tokens format by its label as an i32. Documents are found by that bit,
//! so that nothing in memory grows with their number. Records are read with `pread`: pages of a
//! mapping would count as resident memory of the run.

use super::error::{DataError, Place};
use super::source::{At, Found, Reading};
use super::tokenizer::{Tokenizer, content_hash};
use super::{DataSpec, Format, IGNORED};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Changed whenever the same files would give other records.
const VERSION: u32 = 2;
/// Marks the first token of a document.
pub(super) const FIRST: u32 = 1 << 31;
/// Text that is tokenised at once, for each thread.
const BATCH_BYTES_PER_THREAD: usize = 256 << 10;
/// Records looked at in one read while rows are counted.
const SCAN_RECORDS: u64 = 64 << 10;

/// What the records depend on; where one part differs, the cache is another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    version: u32,
    files: Vec<FileKey>,
    format: Format,
    tokenizer_sha256: Option<String>,
    end_token: Option<u32>,
    vocab: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileKey {
    path: String,
    bytes: u64,
    modified_ns: u64,
}

impl FileKey {
    fn of(file: &Path) -> Result<FileKey, DataError> {
        let about = fs::metadata(file).map_err(DataError::io("read", file))?;
        let path = file.canonicalize().map_err(DataError::io("read", file))?;
        let modified = about.modified().map_err(DataError::io("read", file))?;
        let modified_ns = modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        Ok(FileKey { path: path.to_string_lossy().into_owned(), bytes: about.len(), modified_ns })
    }
}

/// What is known of the records without reading them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counts {
    /// Records.
    pub tokens: u64,
    /// Documents with something to predict.
    pub documents: u64,
    /// Documents without.
    pub skipped: u64,
    /// Tokens that are to be predicted.
    pub labelled: u64,
    /// Tokens of the longest document.
    pub longest: u64,
    longest_file: usize,
    longest_line: u64,
}

#[derive(Serialize, Deserialize)]
struct Meta {
    key: Key,
    counts: Counts,
    /// SHA-256 of the records.
    content: String,
}

/// An open cache.
#[derive(Debug)]
pub(super) struct TokenCache {
    path: PathBuf,
    file: File,
    record_bytes: u64,
    vocab: u64,
    pub counts: Counts,
    pub content: String,
    pub longest: Place,
}

impl TokenCache {
    /// Opens the cache of `spec`'s `files` in `folder`; makes it where there is none that is whole.
    /// `progress` is told bytes done and bytes in all while it is made.
    pub fn open(
        spec: &DataSpec,
        files: &[PathBuf],
        tokenizer: Option<&Path>,
        folder: &Path,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<TokenCache, DataError> {
        let tokenizer = match spec.format {
            Format::Text => Some(tokenizer.ok_or(DataError::NoTokenizer)?),
            Format::Tokens => None,
        };
        let key = Key {
            version: VERSION,
            files: files.iter().map(|file| FileKey::of(file)).collect::<Result<_, _>>()?,
            format: spec.format,
            tokenizer_sha256: tokenizer.map(content_hash).transpose()?,
            end_token: spec.end_token.filter(|_| spec.format == Format::Text),
            vocab: spec.vocab,
        };
        let name = format!("{:x}", Sha256::digest(to_json(&key)));
        let base = folder.join(&name[..16]);
        if let Some(cache) = TokenCache::whole(&key, &base, files) {
            return Ok(cache);
        }
        let _alone = lock(folder)?;
        // Another process may have made it meanwhile.
        if let Some(cache) = TokenCache::whole(&key, &base, files) {
            return Ok(cache);
        }
        let total: u64 = key.files.iter().map(|file| file.bytes).sum();
        let path = base.with_extension("tokens");
        let (counts, content) = write_aside(&path, |out| {
            let mut writer =
                Writer { out, files, vocab: spec.vocab, counts: Counts::default(), document: 0, held: None };
            let progress = &mut |done: u64| progress(done.min(total), total);
            let mut reading = Reading { files, format: spec.format, vocab: spec.vocab, progress, done_bytes: 0 };
            match tokenizer {
                None => reading.run(|at, found| writer.ids(at, found))?,
                Some(file) => {
                    let mut encoder = Encoder::new(file, spec, threads)?;
                    reading.run(|at, found| encoder.text(at, found, &mut writer))?;
                    encoder.flush(&mut writer)?;
                }
            }
            Ok(writer.counts)
        })?;
        for (file, before) in files.iter().zip(&key.files) {
            if FileKey::of(file)? != *before {
                return Err(DataError::Changed { file: file.clone() });
            }
        }
        let meta = Meta { key: key.clone(), counts, content };
        let about = base.with_extension("json");
        write_aside(&about, |out| out.write(&to_json(&meta)))?;
        TokenCache::whole(&key, &base, files).ok_or(DataError::Damaged { file: path })
    }

    /// The cache at `base` if it is there, whole, and made from `key`.
    fn whole(key: &Key, base: &Path, files: &[PathBuf]) -> Option<TokenCache> {
        let meta: Meta = serde_json::from_slice(&fs::read(base.with_extension("json")).ok()?).ok()?;
        let path = base.with_extension("tokens");
        let file = File::open(&path).ok()?;
        let record_bytes = match key.format {
            Format::Text => 4,
            Format::Tokens => 8,
        };
        let Counts { tokens, documents, longest, longest_file, longest_line, .. } = meta.counts;
        let whole = meta.key == *key && file.metadata().ok()?.len() == tokens.checked_mul(record_bytes)?;
        let sound = longest_file < files.len() && (documents == 0 || (2 <= longest && longest <= tokens));
        if !whole || !sound {
            return None;
        }
        let longest = At { file: longest_file, line: longest_line }.place(files);
        Some(TokenCache {
            path,
            file,
            record_bytes,
            vocab: key.vocab,
            counts: meta.counts,
            content: meta.content,
            longest,
        })
    }

    /// Reads up to `count` records from `start` on into `buffer` (its old content is lost).
    pub fn read<'a>(&'a self, start: u64, count: u64, buffer: &'a mut Vec<u8>) -> Result<Records<'a>, DataError> {
        let count = count.min(self.counts.tokens.saturating_sub(start));
        buffer.resize((count * self.record_bytes) as usize, 0);
        self.file.read_exact_at(buffer, start * self.record_bytes).map_err(DataError::io("read", &self.path))?;
        Ok(Records { cache: self, bytes: buffer })
    }

    fn damaged(&self) -> DataError {
        DataError::Damaged { file: self.path.clone() }
    }
}

/// Records as they were read, checked one by one.
pub(super) struct Records<'a> {
    cache: &'a TokenCache,
    bytes: &'a [u8],
}

/// One token of the cache.
#[derive(Clone, Copy)]
pub(super) struct Record {
    pub token: i32,
    /// −100 where it is not to be predicted.
    pub label: i32,
    /// It begins a document.
    pub first: bool,
}

impl Records<'_> {
    /// Records read; fewer than asked for at the end of the data.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.cache.record_bytes as usize
    }

    /// The record at `index`; what the model does not know is a damaged cache.
    pub fn get(&self, index: usize) -> Result<Record, DataError> {
        let size = self.cache.record_bytes as usize;
        let word = |at: usize| {
            let bytes = &self.bytes[at..at + 4];
            u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
        };
        let id = word(index * size);
        let token = id & !FIRST;
        let label = if size == 4 { token as i32 } else { word(index * size + 4) as i32 };
        let known = |id: i32| id >= 0 && (id as u64) < self.cache.vocab;
        if !known(token as i32) || !(known(label) || label == IGNORED) {
            return Err(self.cache.damaged());
        }
        Ok(Record { token: token as i32, label, first: id & FIRST != 0 })
    }
}

/// Turns text into records, many pieces at once.
struct Encoder {
    tokenizer: Tokenizer,
    end_token: u32,
    pool: rayon::ThreadPool,
    batch: Vec<Piece>,
    batch_bytes: usize,
    batch_bytes_max: usize,
}

struct Piece {
    at: At,
    text: String,
    begins: bool,
    ends: bool,
}

impl Encoder {
    fn new(file: &Path, spec: &DataSpec, threads: usize) -> Result<Encoder, DataError> {
        let tokenizer = Tokenizer::load(file)?;
        let (tokenizer_vocab, vocab) = (tokenizer.vocab(), spec.vocab);
        if tokenizer_vocab > vocab {
            return Err(DataError::TokenizerVocab { file: file.to_owned(), tokenizer_vocab, vocab });
        }
        let end_token = spec.end_token.ok_or_else(|| DataError::NoEndToken { tokenizer: file.to_owned() })?;
        let threads = threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|error| DataError::io("start threads for", file)(io::Error::other(error)))?;
        let batch_bytes_max = threads * BATCH_BYTES_PER_THREAD;
        Ok(Encoder { tokenizer, end_token, pool, batch: Vec::new(), batch_bytes: 0, batch_bytes_max })
    }

    fn text(&mut self, at: At, found: Found, writer: &mut Writer) -> Result<(), DataError> {
        match found {
            Found::Text { piece, begins, ends } => {
                self.batch_bytes += piece.len() + size_of::<Piece>();
                self.batch.push(Piece { at, text: piece.to_owned(), begins, ends });
            }
            _ => writer.counts.skipped += 1,
        }
        if self.batch_bytes >= self.batch_bytes_max { self.flush(writer) } else { Ok(()) }
    }

    fn flush(&mut self, writer: &mut Writer) -> Result<(), DataError> {
        let (batch, tokenizer) = (std::mem::take(&mut self.batch), &self.tokenizer);
        self.batch_bytes = 0;
        let encode = |piece: &Piece| {
            let failed = |reason| DataError::Encode { place: Some(piece.at.place(writer.files)), reason };
            tokenizer.encode_piece(&piece.text).map_err(failed)
        };
        let encoded: Vec<Vec<u32>> = self.pool.install(|| batch.par_iter().map(encode).collect::<Result<_, _>>())?;
        for (Piece { at, begins, ends, .. }, ids) in batch.into_iter().zip(encoded) {
            let prefix = if begins { tokenizer.prefix() } else { &[] };
            let suffix = if ends { tokenizer.suffix() } else { &[] };
            let mut last = None;
            for &id in prefix.iter().chain(&ids).chain(suffix) {
                writer.token(at, id)?;
                last = Some(id);
            }
            if ends {
                if last != Some(self.end_token) {
                    writer.token(at, self.end_token)?;
                }
                writer.end_document(at);
            }
        }
        Ok(())
    }
}

/// Writes records and counts them.
struct Writer<'a> {
    out: &'a mut Out,
    files: &'a [PathBuf],
    vocab: u64,
    counts: Counts,
    /// Tokens of the document so far.
    document: u64,
    /// Its first record, written when a second comes: a single token has nothing to predict.
    held: Option<[u8; 8]>,
}

impl Writer<'_> {
    fn ids(&mut self, at: At, found: Found) -> Result<(), DataError> {
        if let Found::Tokens { ids, labels } = found {
            for (index, &id) in ids.iter().enumerate() {
                self.push(id as u32, Some(labels.map_or(id, |labels| labels[index])))?;
            }
        }
        self.end_document(at);
        Ok(())
    }

    fn token(&mut self, at: At, id: u32) -> Result<(), DataError> {
        if u64::from(id) >= self.vocab || id >= FIRST {
            let place = at.place(self.files);
            return Err(DataError::TokenRange { place, what: "token", id: i64::from(id), vocab: self.vocab });
        }
        self.push(id, None)
    }

    fn push(&mut self, id: u32, label: Option<i32>) -> Result<(), DataError> {
        let mut record = [0; 8];
        let id = if self.document == 0 { id | FIRST } else { id };
        record[..4].copy_from_slice(&id.to_le_bytes());
        record[4..].copy_from_slice(&label.unwrap_or(0).to_le_bytes());
        let size = if label.is_some() { 8 } else { 4 };
        self.document += 1;
        if self.document == 1 {
            self.held = Some(record);
            return Ok(());
        }
        self.counts.labelled += u64::from(label != Some(IGNORED));
        if let Some(held) = self.held.take() {
            self.out.write(&held[..size])?;
        }
        self.out.write(&record[..size])
    }

    fn end_document(&mut self, at: At) {
        let tokens = std::mem::take(&mut self.document);
        if tokens < 2 {
            self.held = None;
            self.counts.skipped += 1;
            return;
        }
        self.counts.documents += 1;
        self.counts.tokens += tokens;
        if tokens > self.counts.longest {
            self.counts.longest = tokens;
            (self.counts.longest_file, self.counts.longest_line) = (at.file, at.line);
        }
    }
}

/// Where each padded row begins, as u64s, and after the last row the number of all tokens.
#[derive(Debug)]
pub(super) struct RowStarts {
    path: PathBuf,
    file: File,
    pub rows: u64,
}

impl RowStarts {
    /// Opens the table for rows of `sequence` positions beside `cache`; makes it where there is none.
    pub fn open(cache: &TokenCache, sequence: u64) -> Result<RowStarts, DataError> {
        let stem = cache.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let path = cache.path.with_file_name(format!("{stem}-{sequence}.rows"));
        if let Some(starts) = RowStarts::whole(cache, &path) {
            return Ok(starts);
        }
        let _alone = lock(cache.path.parent().unwrap_or(Path::new(".")))?;
        if let Some(starts) = RowStarts::whole(cache, &path) {
            return Ok(starts);
        }
        write_aside(&path, |out| {
            let mut buffer = Vec::new();
            let (mut at, mut document_start) = (0, 0);
            while at < cache.counts.tokens {
                // One more than is looked at: whether a token is the last of its document stands in the next.
                let records = cache.read(at, SCAN_RECORDS + 1, &mut buffer)?;
                for index in 0..records.len().min(SCAN_RECORDS as usize) {
                    if records.get(index)?.first {
                        document_start = at;
                    }
                    // The last token of a document begins no row: it is only a target.
                    let begins = (at - document_start).is_multiple_of(sequence);
                    let last = index + 1 == records.len() || records.get(index + 1)?.first;
                    if begins && !last {
                        out.write(&at.to_le_bytes())?;
                    }
                    at += 1;
                }
            }
            out.write(&at.to_le_bytes())
        })?;
        RowStarts::whole(cache, &path).ok_or(DataError::Damaged { file: path })
    }

    fn whole(cache: &TokenCache, path: &Path) -> Option<RowStarts> {
        let file = File::open(path).ok()?;
        let bytes = file.metadata().ok()?.len();
        let starts = RowStarts { path: path.to_owned(), rows: (bytes / 8).checked_sub(1)?, file };
        // A table that was cut off ends with the beginning of a row, which is smaller.
        (bytes % 8 == 0 && starts.word(starts.rows).ok()? == cache.counts.tokens).then_some(starts)
    }

    /// The record that `row` begins with.
    pub fn get(&self, row: u64, cache: &TokenCache) -> Result<u64, DataError> {
        let start = self.word(row)?;
        if start < cache.counts.tokens { Ok(start) } else { Err(DataError::Damaged { file: self.path.clone() }) }
    }

    fn word(&self, index: u64) -> Result<u64, DataError> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, index * 8).map_err(DataError::io("read", &self.path))?;
        Ok(u64::from_le_bytes(bytes))
    }
}

/// A file that is being written.
struct Out {
    path: PathBuf,
    file: BufWriter<File>,
    hash: Sha256,
}

impl Out {
    fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.hash.update(bytes);
        self.file.write_all(bytes).map_err(DataError::io("write", &self.path))
    }
}

/// Writes `path` under another name, syncs it and renames it: it is there whole or not at all. Gives
/// the hash of what was written, too.
fn write_aside<T>(path: &Path, write: impl FnOnce(&mut Out) -> Result<T, DataError>) -> Result<(T, String), DataError> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".partial");
    let aside = PathBuf::from(aside);
    let made = (|| {
        let file = File::create(&aside).map_err(DataError::io("write", &aside))?;
        let mut out = Out { path: aside.clone(), file: BufWriter::with_capacity(64 << 10, file), hash: Sha256::new() };
        let value = write(&mut out)?;
        let hash = format!("{:x}", out.hash.finalize());
        let file = out.file.into_inner().map_err(|error| DataError::io("write", &aside)(error.into_error()))?;
        file.sync_all().map_err(DataError::io("write", &aside))?;
        fs::rename(&aside, path).map_err(DataError::io("write", path))?;
        Ok((value, hash))
    })();
    if made.is_err() {
        // A full disk is not to stay full of what nobody will read.
        let _ = fs::remove_file(&aside);
    }
    made
}

/// Holds the folder of caches (made where it is missing) until dropped, so that one process at a time writes there.
fn lock(folder: &Path) -> Result<File, DataError> {
    let refused = |source| DataError::CacheFolder { folder: folder.to_owned(), source };
    fs::create_dir_all(folder).map_err(refused)?;
    let path = folder.join("lock");
    let file = File::create(&path).map_err(refused)?;
    file.lock().map_err(DataError::io("lock", &path))?;
    Ok(file)
}

fn to_json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data is always JSON")
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Sample, all_rows, seen};
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Sample {
        Sample::text(&["1+1", "22", "", "333=", "4"], 3, false)
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named_with_a_way_out() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let message = plimsoll_core::Failure::from(lock(&file.path().join("tokens")).unwrap_err()).to_string();
        assert!(message.starts_with("cannot keep tokens in ") && message.contains("PLIMSOLL_CACHE="), "{message}");
    }

    #[test]
    fn files_are_read_once() {
        let text = "1".repeat(128 << 10);
        let sample = Sample::text(&[text.as_str(); 30], 1024, true);
        let mut told = Vec::new();
        let rows = sample
            .open_watched(&mut |done, total| {
                told.push((done, total));
                ControlFlow::Continue(())
            })
            .unwrap()
            .rows();
        let total = fs::metadata(sample.path("train.jsonl")).unwrap().len();
        assert!(told.len() >= 3 && told.iter().all(|&(done, all)| done <= all && all == total), "{told:?}");
        assert!(told.is_sorted());
        let again = sample.open_watched(&mut |_, _| panic!("read again")).unwrap();
        assert_eq!(again.rows(), rows);
    }

    #[test]
    fn reading_can_be_stopped_and_leaves_nothing() {
        let sample = Sample::text(&["1".repeat(3 << 20).as_str()], 1024, true);
        let stopped = sample.open_watched(&mut |_, _| ControlFlow::Break(()));
        assert!(matches!(stopped, Err(DataError::Stopped)));
        assert_eq!(sample.cached("").len(), 1, "only the lock");
    }

    #[test]
    fn changed_data_is_tokenised_again() {
        let mut sample = sample();
        assert_eq!(sample.open().unwrap().documents(), 4);
        fs::write(sample.path("train.jsonl"), "{\"text\": \"7\"}\n{\"text\": \"\"}").unwrap();
        assert_eq!(sample.open().unwrap().documents(), 1);
        sample.spec.end_token = Some(15);
        assert_eq!(all_rows(&sample.open().unwrap()).labels[0], 15);
        let changed = super::super::sums::tokenizer().to_string().replace("\"7\":7", "\"7\":14");
        fs::write(sample.tokenizer.as_ref().unwrap(), changed).unwrap();
        assert_eq!(all_rows(&sample.open().unwrap()).tokens[0], 14);
    }

    #[test]
    fn what_a_killed_process_left_is_no_hindrance() {
        let sample = sample();
        let whole = seen(&all_rows(&sample.open().unwrap()));
        for file in sample.cached("").into_iter().filter(|file| !file.ends_with("lock")) {
            fs::rename(&file, file.display().to_string() + ".partial").unwrap();
        }
        assert_eq!(seen(&all_rows(&sample.open().unwrap())), whole);
    }

    #[test]
    fn impossible_records_are_a_damaged_cache() {
        let sample = sample();
        let data = sample.open().unwrap();
        let tokens = sample.cached(".tokens").remove(0);
        let length = fs::metadata(&tokens).unwrap().len() as usize;
        fs::write(&tokens, vec![0x7f; length]).unwrap();
        let mut rows = super::super::Rows::new(1, 3);
        assert!(matches!(data.read([0], &mut rows), Err(DataError::Damaged { .. })));
        let starts = sample.cached(".rows").remove(0);
        let length = fs::metadata(&starts).unwrap().len() as usize;
        fs::write(&starts, vec![0x7f; length]).unwrap();
        assert!(matches!(data.read([0], &mut rows), Err(DataError::Damaged { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn a_cache_that_was_cut_off_is_made_again(ending in prop::sample::select(vec![".tokens", ".json", ".rows"]), part in 0.0f64..1.0) {
            let sample = sample();
            let whole = seen(&all_rows(&sample.open().unwrap()));
            let file = sample.cached(ending).remove(0);
            let bytes = fs::read(&file).unwrap();
            fs::write(&file, &bytes[..(bytes.len() as f64 * part) as usize]).unwrap();
            prop_assert_eq!(seen(&all_rows(&sample.open().unwrap())), whole);
            prop_assert_eq!(fs::read(&file).unwrap(), bytes);
        }
    }
}
