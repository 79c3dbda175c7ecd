//! The token cache on disk: the tokens of the data files, tokenized once.
//!
//! | file | content |
//! |---|---|
//! | `NAME.tokens` | the records, one per token |
//! | `NAME.json` | sources, counts and checksums of the records; renamed to its name last, which completes the cache |
//! | `NAME-T.rows` | for padded rows of T positions: the record with which each row begins |
//! | `NAME-T-pairs.rows`, `NAME-T-packed-pairs.rows` | the same for rows of pairs of answers |
//!
//! Each file has a checksum. All are read and checked when the cache is opened, and what does not match is built again.
//!
//! A record is the token id as a little-endian u32, followed by the label as an i32 unless all data are text. The id has
//! [`FIRST_TOKEN_BIT`] set on the first token of a document, so no list of documents is kept in memory. Records are
//! read with `pread`, because pages of a memory mapping would count as resident memory of the run.

use super::cache_file::write_atomically;
use super::encoder::BatchEncoder;
use super::error::{DataError, SourceLocation};
use super::formats::DataFile;
use super::record_format::RecordFormat;
use super::record_writer::{DatasetCounts, FIRST_TOKEN_BIT, RecordWriter};
use super::source::{DocumentOrigin, SourceReader};
use super::template::{ChatSettings, ChatTemplate, TemplateError};
use super::tokenizer::file_sha256;
use super::{ChatSpec, DataSpec, IGNORED_LABEL, Objective, TrainOn};
use crate::files::FileSummary;
use plimsoll_device::cache::sealed_json;
use plimsoll_device::private_file;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::Read;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Version of the token cache. It changes whenever the same files would yield other records (tokens and labels).
const VERSION: u32 = 4;
/// Records (tokens) per read while all are read in order.
pub(super) const SCAN_RECORDS: u64 = 64 << 10;

/// Everything that the records (tokens and labels) of a token cache depend on. Its hash is the name of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CacheKey {
    version: u32,
    files: Vec<FileKey>,
    tokenizer_sha256: Option<String>,
    end_token: Option<u32>,
    vocab: u64,
    /// Template and settings of conversations; `None` without a template.
    chat: Option<ChatKey>,
}

/// The chat template as part of the key of a token cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ChatKey {
    template_sha256: String,
    settings: ChatSettings,
}

impl CacheKey {
    /// Returns the bytes of a record: with its label, unless all data are text.
    fn record_bytes(&self) -> u64 {
        let is_text = |file: &FileKey| matches!(file.format, None | Some(RecordFormat::Text));
        if self.files.iter().all(is_text) { 4 } else { 8 }
    }
}

/// A data file as part of the key of a token cache. A changed size or modification time counts as changed content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileKey {
    path: String,
    bytes: u64,
    modified_ns: u64,
    /// Format of the records; `None` for a file without records.
    format: Option<RecordFormat>,
}

impl FileKey {
    fn read(DataFile { path: file, format, .. }: &DataFile) -> Result<FileKey, DataError> {
        let metadata = fs::metadata(file).map_err(DataError::io("read", file))?;
        let path = file.canonicalize().map_err(DataError::io("read", file))?;
        let modified = metadata.modified().map_err(DataError::io("read", file))?;
        let modified_ns = modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let path = path.to_string_lossy().into_owned();
        Ok(FileKey { path, bytes: metadata.len(), modified_ns, format: *format })
    }
}

/// Findings about the chat template and the conversations of data files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ChatFindings {
    pub warnings: Vec<String>,
    /// The trained tokens with which turns of the assistant end.
    pub end_tokens: Vec<u32>,
}

/// Finds the chat template of data that may hold conversations, with its settings. `tokenizer` is the model's tokenizer, beside
/// its template. Returns `None` if the data need none, or if there is none and the data may need none.
fn find_chat(
    spec: &DataSpec,
    files: &[FileKey],
    tokenizer: Option<&Path>,
) -> Result<Option<(ChatTemplate, ChatSettings)>, DataError> {
    let formats = || files.iter().filter_map(|file| file.format);
    let Some(tokenizer) = tokenizer.filter(|_| formats().any(RecordFormat::may_need_template)) else {
        return Ok(None);
    };
    let ChatSpec { template, train_on, train_on_end, not_prefix } = &spec.chat;
    let template = match ChatTemplate::find(tokenizer.parent().unwrap_or(Path::new(".")), template.as_deref()) {
        Err(TemplateError::NoTemplate { .. }) if !formats().any(RecordFormat::needs_template) => return Ok(None),
        found => found.map_err(|source| DataError::Template { location: None, source })?,
    };
    // The date of the newest file stands for today, so that a run has the same text when it is resumed.
    let newest = files.iter().map(|file| file.modified_ns).max().unwrap_or(0);
    let now = (newest / 1_000_000_000) as i64;
    // Messages of pairs say themselves whether they are trained.
    let train_on = if spec.objective == Objective::Dpo { TrainOn::Assistant } else { *train_on };
    let settings = ChatSettings { train_on, train_on_end: *train_on_end, not_prefix: *not_prefix, now };
    Ok(Some((template, settings)))
}

/// Content of `NAME.json`, beside its own checksum. It completes a token cache.
#[derive(Serialize, Deserialize)]
struct CacheMetadata {
    key: CacheKey,
    counts: DatasetCounts,
    /// Findings about the chat template.
    chat: ChatFindings,
    /// SHA-256 of all tokens and labels, in hexadecimal.
    content: String,
    /// Size and checksum of the file of records.
    records: FileSummary,
}

/// An open, complete token cache: the tokens of all data files on disk, one record per token.
#[derive(Debug)]
pub(super) struct TokenCache {
    path: PathBuf,
    file: File,
    record_bytes: u64,
    vocab: u64,
    pub counts: DatasetCounts,
    /// Findings about the chat template.
    pub chat: ChatFindings,
    /// SHA-256 of all tokens and labels, in hexadecimal.
    pub content_sha256: String,
    /// Position of the longest document in the user's files.
    pub longest: SourceLocation,
    /// Whether the data files were tokenized now, because there was no complete cache.
    pub is_new: bool,
}

impl TokenCache {
    /// Opens the token cache of `files`, the data files of `spec`, in `folder`. If no complete cache exists, it is
    /// built first, and `progress` is called with the bytes read and the total bytes.
    pub fn open(
        spec: &DataSpec,
        files: &[DataFile],
        tokenizer: Option<&Path>,
        folder: &Path,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<TokenCache, DataError> {
        let needs_tokenizer = files.iter().filter_map(|file| file.format).any(RecordFormat::needs_tokenizer);
        let tokenizer = if needs_tokenizer { Some(tokenizer.ok_or(DataError::NoTokenizer)?) } else { None };
        let file_keys: Vec<FileKey> = files.iter().map(FileKey::read).collect::<Result<_, _>>()?;
        let chat = find_chat(spec, &file_keys, tokenizer)?;
        let key = CacheKey {
            version: VERSION,
            files: file_keys,
            tokenizer_sha256: tokenizer.map(file_sha256).transpose()?,
            end_token: spec.end_token.filter(|_| needs_tokenizer),
            vocab: spec.vocab,
            chat: chat.as_ref().map(|(template, settings)| ChatKey {
                template_sha256: template.fingerprint(),
                settings: settings.clone(),
            }),
        };
        let name = format!("{:x}", Sha256::digest(to_json(&key)));
        let base = folder.join(&name[..16]);
        if let Some(cache) = TokenCache::open_existing(&key, &base, files) {
            return Ok(cache);
        }
        let _lock = lock_folder(folder)?;
        // Another process may have built it while this one waited for the lock.
        if let Some(cache) = TokenCache::open_existing(&key, &base, files) {
            return Ok(cache);
        }
        TokenCache::build(&key, &base, spec, files, tokenizer, chat, threads, progress)?;
        let damaged = || DataError::DamagedCache { file: base.with_extension("tokens") };
        let cache = TokenCache::open_existing(&key, &base, files).ok_or_else(damaged)?;
        Ok(TokenCache { is_new: true, ..cache })
    }

    /// Reads the data files and writes their token cache: records to the path `base` with the ending `.tokens`,
    /// metadata with the ending `.json`. Fails if a data file changes meanwhile.
    fn build(
        key: &CacheKey,
        base: &Path,
        spec: &DataSpec,
        files: &[DataFile],
        tokenizer: Option<&Path>,
        chat: Option<(ChatTemplate, ChatSettings)>,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(), DataError> {
        let total: u64 = key.files.iter().map(|file| file.bytes).sum();
        let ((counts, chat), written) = write_atomically(&base.with_extension("tokens"), |out| {
            let mut writer = RecordWriter {
                out,
                files,
                vocab: spec.vocab,
                record_bytes: key.record_bytes(),
                counts: DatasetCounts::default(),
                document_tokens: 0,
                pending_first: None,
            };
            let progress = &mut |done: u64| progress(done.min(total), total);
            let mut reader = SourceReader { files, vocab: spec.vocab, progress, reported_bytes: 0 };
            let mut findings = ChatFindings::default();
            match tokenizer {
                None => reader.read_all(|origin, part| writer.write_part(origin, part))?,
                Some(file) => {
                    let mut encoder = BatchEncoder::new(file, spec, chat, threads)?;
                    reader.read_all(|origin, part| encoder.push_part(origin, part, &mut writer))?;
                    encoder.flush(&mut writer)?;
                    findings = ChatFindings { warnings: encoder.warnings(), end_tokens: encoder.end_tokens() };
                }
            }
            Ok((writer.counts, findings))
        })?;
        for (file, before) in files.iter().zip(&key.files) {
            if FileKey::read(file)? != *before {
                return Err(DataError::FileChanged { file: file.path.clone() });
            }
        }
        let (content, records) = (written.sha256, written.summary);
        let metadata = CacheMetadata { key: key.clone(), counts, chat, content, records };
        let sealed = sealed_json::seal(&metadata).expect("plain data has a JSON form").to_string();
        write_atomically(&base.with_extension("json"), |out| out.write(sealed.as_bytes()))?;
        Ok(())
    }

    /// Opens the cache at `base`, or returns `None` unless it is complete, unchanged and was built from `key`.
    fn open_existing(key: &CacheKey, base: &Path, files: &[DataFile]) -> Option<TokenCache> {
        let metadata: CacheMetadata =
            sealed_json::from_slice(&private_file::read(&base.with_extension("json")).ok()?).ok()?;
        let path = base.with_extension("tokens");
        let file = private_file::open(&path).ok()?;
        let record_bytes = key.record_bytes();
        let DatasetCounts { tokens, documents, longest, longest_file, longest_place, .. } = metadata.counts;
        let complete = metadata.key == *key && file.metadata().ok()?.len() == tokens.checked_mul(record_bytes)?;
        let consistent = longest_file < files.len() && (documents == 0 || (2 <= longest && longest <= tokens));
        if !complete || !consistent || FileSummary::read(&file).ok()? != metadata.records {
            return None;
        }
        let longest = DocumentOrigin { file: longest_file, place: longest_place }.location(files);
        Some(TokenCache {
            path,
            file,
            record_bytes,
            vocab: key.vocab,
            counts: metadata.counts,
            chat: metadata.chat,
            content_sha256: metadata.content,
            longest,
            is_new: false,
        })
    }

    /// Reads up to `count` records (tokens with their labels), from record `start` on. Replaces the content of `buffer`
    /// by their bytes.
    pub fn read<'a>(&'a self, start: u64, count: u64, buffer: &'a mut Vec<u8>) -> Result<Records<'a>, DataError> {
        let count = count.min(self.counts.tokens.saturating_sub(start));
        buffer.resize((count * self.record_bytes) as usize, 0);
        self.file.read_exact_at(buffer, start * self.record_bytes).map_err(DataError::io("read", &self.path))?;
        Ok(Records { cache: self, bytes: buffer })
    }

    fn damaged_error(&self) -> DataError {
        DataError::DamagedCache { file: self.path.clone() }
    }
}

/// Records (tokens with their labels) as read from the token cache. Each is checked when it is decoded.
pub(super) struct Records<'a> {
    cache: &'a TokenCache,
    bytes: &'a [u8],
}

/// A token of the token cache with its label, decoded.
#[derive(Clone, Copy)]
pub(super) struct Record {
    pub token: i32,
    /// Label of this token, for the position before it: usually the token's own id; −100 keeps it out of the loss.
    pub label: i32,
    /// Whether it is the first token of a document.
    pub begins_document: bool,
}

impl Records<'_> {
    /// Returns the number of records read, which is smaller than requested at the end of the data.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.cache.record_bytes as usize
    }

    /// Decodes the record at `index`. An id outside the vocabulary is reported as a damaged cache.
    pub fn get(&self, index: usize) -> Result<Record, DataError> {
        let size = self.cache.record_bytes as usize;
        let word = |at: usize| {
            let bytes = &self.bytes[at..at + 4];
            u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
        };
        let id = word(index * size);
        let token = id & !FIRST_TOKEN_BIT;
        let label = if size == 4 { token as i32 } else { word(index * size + 4) as i32 };
        let known = |id: i32| id >= 0 && (id as u64) < self.cache.vocab;
        if !known(token as i32) || !(known(label) || label == IGNORED_LABEL) {
            return Err(self.cache.damaged_error());
        }
        Ok(Record { token: token as i32, label, begins_document: id & FIRST_TOKEN_BIT != 0 })
    }
}

/// The rule by which documents begin rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowRule {
    /// Each document begins a row, and goes on in further rows if it is longer.
    Documents,
    /// Each two consecutive documents are a pair and share a row. Without `pack`, each pair begins a row. With it, a pair
    /// begins a row only if it does not fit in the current one.
    Pairs { pack: bool },
}

/// The table of rows that begin with a document: the index in the token cache of the first token of each row, as u64,
/// followed by the number of all tokens and the CRC-32 of all before it.
#[derive(Debug)]
pub(super) struct RowStarts {
    path: PathBuf,
    file: File,
    pub rows: u64,
    pub rule: RowRule,
}

impl RowStarts {
    /// Opens the table of rows of `sequence` positions beside `cache`. If none exists, it is built first. No pair is
    /// longer than a row.
    pub fn open(cache: &TokenCache, sequence: u64, rule: RowRule) -> Result<RowStarts, DataError> {
        let stem = cache.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let kind = match rule {
            RowRule::Documents => "",
            RowRule::Pairs { pack: false } => "-pairs",
            RowRule::Pairs { pack: true } => "-packed-pairs",
        };
        let path = cache.path.with_file_name(format!("{stem}-{sequence}{kind}.rows"));
        if let Some(starts) = RowStarts::open_existing(cache, &path, rule) {
            return Ok(starts);
        }
        let _lock = lock_folder(cache.path.parent().unwrap_or(Path::new(".")))?;
        if let Some(starts) = RowStarts::open_existing(cache, &path, rule) {
            return Ok(starts);
        }
        write_atomically(&path, |out| {
            let mut buffer = Vec::new();
            let (mut record, mut document_start) = (0, 0);
            let mut pairs = PairRows::new(sequence, rule == RowRule::Pairs { pack: true });
            while record < cache.counts.tokens {
                // One more than is scanned: the next record tells whether a token is the last of its document.
                let records = cache.read(record, SCAN_RECORDS + 1, &mut buffer)?;
                for index in 0..records.len().min(SCAN_RECORDS as usize) {
                    let begins_document = records.get(index)?.begins_document;
                    if begins_document {
                        document_start = record;
                    }
                    // The last token of a document begins no row, because it is only a target.
                    let last = index + 1 == records.len() || records.get(index + 1)?.begins_document;
                    let start = match rule {
                        RowRule::Documents => {
                            (!last && (record - document_start).is_multiple_of(sequence)).then_some(record)
                        }
                        RowRule::Pairs { .. } if last => pairs.end_document(document_start, record + 1),
                        RowRule::Pairs { .. } => None,
                    };
                    if let Some(start) = start {
                        out.write(&start.to_le_bytes())?;
                    }
                    record += 1;
                }
            }
            out.write(&record.to_le_bytes())?;
            let checksum = out.summary()?.crc32;
            out.write(&u64::from(checksum).to_le_bytes())
        })?;
        RowStarts::open_existing(cache, &path, rule).ok_or(DataError::DamagedCache { file: path })
    }

    /// Opens the table at `path`, or returns `None` unless it is complete, unchanged and that of `cache`.
    fn open_existing(cache: &TokenCache, path: &Path, rule: RowRule) -> Option<RowStarts> {
        let file = private_file::open(path).ok()?;
        let bytes = file.metadata().ok()?.len();
        let summary = FileSummary::read((&file).take(bytes.checked_sub(8)?)).ok()?;
        let starts = RowStarts { path: path.to_owned(), rows: (bytes / 8).checked_sub(2)?, file, rule };
        let ending = [starts.read_u64(starts.rows).ok()?, starts.read_u64(starts.rows + 1).ok()?];
        (bytes % 8 == 0 && ending == [cache.counts.tokens, u64::from(summary.crc32)]).then_some(starts)
    }

    /// Returns the index in the token cache of the first token of row `row`.
    pub fn start_of(&self, row: u64, cache: &TokenCache) -> Result<u64, DataError> {
        let start = self.read_u64(row)?;
        if start < cache.counts.tokens { Ok(start) } else { Err(DataError::DamagedCache { file: self.path.clone() }) }
    }

    /// Returns the index in the token cache after the last token of row `row`. Only for pairs, whose rows are contiguous.
    pub fn end_of(&self, row: u64, cache: &TokenCache) -> Result<u64, DataError> {
        let end = self.read_u64(row + 1)?;
        if end <= cache.counts.tokens { Ok(end) } else { Err(DataError::DamagedCache { file: self.path.clone() }) }
    }

    fn read_u64(&self, index: u64) -> Result<u64, DataError> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, index * 8).map_err(DataError::io("read", &self.path))?;
        Ok(u64::from_le_bytes(bytes))
    }
}

/// State of the search for rows of pairs.
struct PairRows {
    sequence: u64,
    pack: bool,
    /// First token of the row that is being filled; `None` before the first.
    row_start: Option<u64>,
    /// First token of a pair of which only the first document has ended.
    pair_start: Option<u64>,
}

impl PairRows {
    fn new(sequence: u64, pack: bool) -> PairRows {
        PairRows { sequence, pack, row_start: None, pair_start: None }
    }

    /// Ends a document with the tokens from `start` to `end`. Returns the first token of a row that begins with its pair.
    fn end_document(&mut self, start: u64, end: u64) -> Option<u64> {
        let Some(pair_start) = self.pair_start.take() else {
            self.pair_start = Some(start);
            return None;
        };
        // The last token of a row is only a target.
        let fits = |row_start: u64| self.pack && end - row_start - 1 <= self.sequence;
        if self.row_start.is_some_and(fits) {
            return None;
        }
        self.row_start = Some(pair_start);
        self.row_start
    }
}

/// Creates the folder of caches if needed and locks it until the result is dropped. One process at a time writes there.
fn lock_folder(folder: &Path) -> Result<File, DataError> {
    let folder_error = |source| DataError::CacheFolder { folder: folder.to_owned(), source };
    private_file::make_folder(folder).map_err(folder_error)?;
    let path = folder.join("lock");
    let file = private_file::append(&path).map_err(folder_error)?;
    file.lock().map_err(DataError::io("lock", &path))?;
    Ok(file)
}

fn to_json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data is always JSON")
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TestData, all_rows, training_values};
    use super::*;
    use proptest::prelude::*;

    fn sample() -> TestData {
        TestData::text(&["1+1", "22", "", "333=", "4"], 3, false)
    }

    #[test]
    fn unwritable_cache_folder_gets_hint() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let message = plimsoll_core::Failure::from(lock_folder(&file.path().join("tokens")).unwrap_err()).to_string();
        assert!(
            message.starts_with("cannot write the token cache in ") && message.contains("PLIMSOLL_CACHE="),
            "{message}"
        );
    }

    #[test]
    fn cached_files_are_not_read_again() {
        let text = "1".repeat(128 << 10);
        let sample = TestData::text(&[text.as_str(); 30], 1024, true);
        let mut reports = Vec::new();
        let rows = sample
            .open_with_progress(&mut |done, total| {
                reports.push((done, total));
                ControlFlow::Continue(())
            })
            .unwrap()
            .rows();
        let total = fs::metadata(sample.path("train.jsonl")).unwrap().len();
        assert!(reports.len() >= 3 && reports.iter().all(|&(done, all)| done <= all && all == total), "{reports:?}");
        assert!(reports.is_sorted());
        let reopened = sample.open_with_progress(&mut |_, _| panic!("files are read again")).unwrap();
        assert_eq!(reopened.rows(), rows);
    }

    #[test]
    fn stopped_reading_leaves_no_cache() {
        let sample = TestData::text(&["1".repeat(3 << 20).as_str()], 1024, true);
        let stopped = sample.open_with_progress(&mut |_, _| ControlFlow::Break(()));
        assert!(matches!(stopped, Err(DataError::Stopped)));
        assert_eq!(sample.cache_files("").len(), 1, "only the lock file is left");
    }

    #[test]
    fn changed_data_is_tokenized_again() {
        let mut sample = sample();
        assert_eq!(sample.open().unwrap().documents(), 4);
        fs::write(sample.path("train.jsonl"), "{\"text\": \"7\"}\n{\"text\": \"\"}").unwrap();
        assert_eq!(sample.open().unwrap().documents(), 1);
        sample.spec.end_token = Some(15);
        assert_eq!(all_rows(&sample.open().unwrap()).labels[0], 15);
        let changed = super::super::addition_example::tokenizer().to_string().replace("\"7\":7", "\"7\":14");
        fs::write(sample.tokenizer.as_ref().unwrap(), changed).unwrap();
        assert_eq!(all_rows(&sample.open().unwrap()).tokens[0], 14);
    }

    #[test]
    fn leftovers_of_killed_process_are_ignored() {
        let sample = sample();
        let complete = training_values(&all_rows(&sample.open().unwrap()));
        for file in sample.cache_files("").into_iter().filter(|file| !file.ends_with("lock")) {
            fs::rename(&file, file.display().to_string() + ".partial").unwrap();
        }
        assert_eq!(training_values(&all_rows(&sample.open().unwrap())), complete);
    }

    #[test]
    fn impossible_records_report_damaged_cache() {
        let sample = sample();
        let data = sample.open().unwrap();
        let tokens = sample.cache_files(".tokens").remove(0);
        let length = fs::metadata(&tokens).unwrap().len() as usize;
        fs::write(&tokens, vec![0x7f; length]).unwrap();
        let mut rows = super::super::Rows::new(1, 3);
        assert!(matches!(data.read([0], &mut rows), Err(DataError::DamagedCache { .. })));
        let starts = sample.cache_files(".rows").remove(0);
        let length = fs::metadata(&starts).unwrap().len() as usize;
        fs::write(&starts, vec![0x7f; length]).unwrap();
        assert!(matches!(data.read([0], &mut rows), Err(DataError::DamagedCache { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn flipped_bit_in_cache_is_rebuilt(
            ending in prop::sample::select(vec![".tokens", ".json", ".rows"]),
            at in any::<prop::sample::Index>(),
            bit in 0u8..8,
        ) {
            let sample = sample();
            let complete = training_values(&all_rows(&sample.open().unwrap()));
            let file = sample.cache_files(ending).remove(0);
            let bytes = fs::read(&file).unwrap();
            let mut changed = bytes.clone();
            changed[at.index(bytes.len())] ^= 1 << bit;
            fs::write(&file, changed).unwrap();
            prop_assert_eq!(training_values(&all_rows(&sample.open().unwrap())), complete);
            prop_assert_eq!(fs::read(&file).unwrap(), bytes);
        }

        #[test]
        fn truncated_cache_is_rebuilt(ending in prop::sample::select(vec![".tokens", ".json", ".rows"]), part in 0.0f64..1.0) {
            let sample = sample();
            let complete = training_values(&all_rows(&sample.open().unwrap()));
            let file = sample.cache_files(ending).remove(0);
            let bytes = fs::read(&file).unwrap();
            fs::write(&file, &bytes[..(bytes.len() as f64 * part) as usize]).unwrap();
            prop_assert_eq!(training_values(&all_rows(&sample.open().unwrap())), complete);
            prop_assert_eq!(fs::read(&file).unwrap(), bytes);
        }
    }
}
