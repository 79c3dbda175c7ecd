//! Rows of a dataset: the start of each row in the token cache, and the values of its positions. The packing and
//! padding rules are in the module documentation of `data`.

use super::cache::{Record, RowRule, RowStarts, SCAN_RECORDS, TokenCache};
use super::error::{DataError, SourceLocation};
use super::formats::{DataFile, resolve_formats};
use super::record_format::RecordFormat;
use super::{DataSpec, LongSamples, Objective, globs};
use plimsoll_core::Bytes;
use std::ops::ControlFlow;
use std::path::Path;

/// The label of a position that predicts nothing: −100, as in transformers.
pub const IGNORED_LABEL: i32 = -100;

/// The largest allowed number of positions per row. It exceeds any model's context.
const SEQUENCE_MAX: u64 = 1 << 24;

/// A dataset: the user's files as numbered rows (training sequences of T tokens), read from a cache of tokens on disk.
///
/// It holds only open files and counts, so its memory does not grow with the data.
#[derive(Debug)]
pub struct Dataset {
    cache: TokenCache,
    row_starts: Option<RowStarts>,
    sequence: u64,
    rows: u64,
    /// Whether rows hold pairs of answers.
    pairs: bool,
    /// Formats of the files, each once.
    formats: Vec<RecordFormat>,
}

impl Dataset {
    /// Opens the data of `spec`. Unless `cache_folder` holds its token cache, the files are tokenized first, with
    /// `threads` threads.
    ///
    /// `tokenizer` is the path of a `tokenizer.json`; token ids need none. While files are read, `progress` is
    /// called about every MiB with the bytes read and the total bytes. If it returns `Break`, the call fails with
    /// [`DataError::Stopped`].
    ///
    /// # Errors
    /// Files, lines or settings that are invalid, data without a target, and a cache that cannot be written.
    pub fn open(
        spec: &DataSpec,
        tokenizer: Option<&Path>,
        cache_folder: &Path,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Dataset, DataError> {
        let sequence = spec.sequence;
        if !(1..=SEQUENCE_MAX).contains(&sequence) {
            return Err(DataError::SequenceOutOfRange { sequence, limit: SEQUENCE_MAX });
        }
        let files = resolve_formats(globs::list_files(&spec.patterns, spec.format, spec.split)?, spec.format)?;
        // A file without records has no format.
        let formats = files.iter().filter_map(|file| Some((file, file.format?)));
        let (objective, pairs) = (spec.objective, spec.objective == Objective::Dpo);
        if let Some((file, format)) = formats.clone().find(|(_, format)| !format.serves(objective)) {
            let file = file.path.clone();
            return Err(DataError::OtherObjective { file, format, objective });
        }
        let cache = TokenCache::open(spec, &files, tokenizer, cache_folder, threads, progress)?;
        let counts = &cache.counts;
        if counts.documents == 0 {
            let files = files.into_iter().map(|file| file.path).collect();
            return Err(DataError::Empty { files, skipped: counts.skipped });
        }
        let rule = match (objective, spec.pack) {
            (Objective::Supervised, true) => None,
            (Objective::Supervised, false) | (Objective::Grpo, _) => Some(RowRule::Documents),
            (Objective::Dpo, pack) => Some(RowRule::Pairs { pack }),
        };
        let long = match objective {
            Objective::Supervised => spec.long,
            Objective::Dpo => LongSamples::Refuse,
            // The lengths of prompts and completions are checked with their own limits.
            Objective::Grpo => LongSamples::Split,
        };
        check_longest(&cache, sequence, long, pairs)?;
        let starts = rule.map(|rule| RowStarts::open(&cache, sequence, rule)).transpose()?;
        let rows = match &starts {
            Some(starts) => starts.rows,
            None => (counts.tokens - 1).div_ceil(sequence),
        };
        Ok(Dataset { cache, row_starts: starts, sequence, rows, pairs, formats: distinct_formats(&files) })
    }

    /// Checks that no document is longer than a row, if `long` refuses such documents.
    ///
    /// # Errors
    /// The longest document, with its place.
    pub fn refuse_long(&self, long: LongSamples) -> Result<(), DataError> {
        check_longest(&self.cache, self.sequence, long, self.pairs)
    }

    /// Returns whether rows hold concatenated documents; otherwise each document, or each pair of answers, begins a new
    /// row.
    pub fn is_packed(&self) -> bool {
        self.row_starts.as_ref().is_none_or(|starts| starts.rule == RowRule::Pairs { pack: true })
    }

    /// Returns whether rows hold pairs of answers: each document is the chosen or the rejected answer with its prompt, in
    /// turn.
    pub fn has_pairs(&self) -> bool {
        self.pairs
    }

    /// Calls `visit` with each token of all documents, in the order of the files.
    ///
    /// # Errors
    /// The token cache cannot be read or is damaged.
    pub(super) fn scan_records(&self, mut visit: impl FnMut(Record)) -> Result<(), DataError> {
        let (mut start, mut buffer) = (0, Vec::new());
        while start < self.tokens() {
            let records = self.cache.read(start, SCAN_RECORDS, &mut buffer)?;
            for index in 0..records.len() {
                visit(records.get(index)?);
            }
            start += records.len() as u64;
        }
        Ok(())
    }

    /// Returns whether the data files were tokenized when this dataset was opened. False if the tokens were cached.
    pub fn is_new(&self) -> bool {
        self.cache.is_new
    }

    /// Returns warnings about the chat template, by which conversations became tokens.
    pub fn warnings(&self) -> &[String] {
        &self.cache.chat.warnings
    }

    /// Returns the trained tokens with which turns of the assistant end; none without conversations.
    pub fn end_tokens(&self) -> &[u32] {
        &self.cache.chat.end_tokens
    }

    /// Returns the formats of the files, each once, in the order of the files.
    pub fn formats(&self) -> &[RecordFormat] {
        &self.formats
    }

    /// Returns the number of rows (training sequences), which is the length of an epoch. Never 0, because empty data
    /// are refused when they are opened.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns T, the number of tokens per row.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns the number of tokens of all documents that are used, including end tokens.
    pub fn tokens(&self) -> u64 {
        self.cache.counts.tokens
    }

    /// Returns the number of documents that are used: those with a token to predict.
    pub fn documents(&self) -> u64 {
        self.cache.counts.documents
    }

    /// Returns the number of skipped documents: those without a label after the first token.
    pub fn skipped_documents(&self) -> u64 {
        self.cache.counts.skipped
    }

    /// Returns the number of labelled tokens (those that count in the loss) per epoch. Never 0, because data without
    /// labels are refused when they are opened.
    pub fn labelled_tokens(&self) -> u64 {
        self.cache.counts.labelled
    }

    /// Returns the SHA-256 of all tokens and labels, in hexadecimal. It identifies the data.
    pub fn content_sha256(&self) -> &str {
        &self.cache.content_sha256
    }

    /// Returns the number of tokens of the longest document, and its place.
    pub fn longest_document(&self) -> (u64, &SourceLocation) {
        (self.cache.counts.longest, &self.cache.longest)
    }

    /// Replaces the content of `into` by the rows with the numbers `rows`, counted from 0 in file order.
    ///
    /// # Errors
    /// The token cache cannot be read or is damaged.
    pub fn read(&self, rows: impl IntoIterator<Item = u64>, into: &mut Rows) -> Result<(), DataError> {
        into.clear();
        for row in rows {
            self.read_row(row, into)?;
        }
        Ok(())
    }

    /// Appends the row numbered `row` to `into`.
    pub(super) fn read_row(&self, row: u64, into: &mut Rows) -> Result<(), DataError> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(into.sequence as u64, self.sequence, "`into` has another number of positions per row");
        // One more record than positions: the target of the last position.
        let most = self.sequence + 1;
        let (start, count) = match &self.row_starts {
            Some(starts) if self.pairs => {
                let start = starts.start_of(row, &self.cache)?;
                (start, starts.end_of(row, &self.cache)?.saturating_sub(start).min(most))
            }
            Some(starts) => (starts.start_of(row, &self.cache)?, most),
            None => (row * self.sequence, most),
        };
        let ends_with_document = self.row_starts.is_some() && !self.pairs;
        let mut buffer = std::mem::take(&mut into.read_buffer);
        let records = self.cache.read(start, count, &mut buffer)?;
        let mut document_start = 0;
        let mut record = records.get(0)?;
        for position in 0..into.sequence {
            let next = if position + 1 < records.len() { Some(records.get(position + 1)?) } else { None };
            if record.begins_document {
                document_start = position;
            }
            into.push(position, document_start, record, next);
            match next {
                Some(next) if !(next.begins_document && ends_with_document) => record = next,
                // The data ended, or the document or the last pair of the row.
                _ => {
                    into.pad_row(position + 1);
                    break;
                }
            }
        }
        into.read_buffer = buffer;
        Ok(())
    }
}

/// Checks that the longest document, or pair of answers if data are `pairs`, fits in a row of `sequence` positions, if
/// `long` refuses longer ones.
fn check_longest(cache: &TokenCache, sequence: u64, long: LongSamples, pairs: bool) -> Result<(), DataError> {
    let tokens = cache.counts.longest;
    if long == LongSamples::Refuse && tokens - 1 > sequence {
        if pairs {
            return Err(DataError::AnswersTooLong { location: cache.longest.clone(), tokens, sequence });
        }
        return Err(DataError::DocumentTooLong { location: cache.longest.clone(), tokens, sequence });
    }
    Ok(())
}

/// Returns the formats of files, each once.
pub(super) fn distinct_formats(files: &[DataFile]) -> Vec<RecordFormat> {
    let mut formats = Vec::new();
    for format in files.iter().filter_map(|file| file.format) {
        if !formats.contains(&format) {
            formats.push(format);
        }
    }
    formats
}

/// The values of R rows (training sequences) of T positions, as Programs take them. The buffer is reused for each batch
/// without allocating. Each vector has shape `[R, T]`.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    sequence: usize,
    /// Input token ids.
    pub tokens: Vec<i32>,
    /// Id of the token that each position predicts (already shifted by one), or [`IGNORED_LABEL`].
    pub labels: Vec<i32>,
    /// Position id for rotary embeddings: the index in the document, counted from its first token in this row. It
    /// restarts at 0 in each row.
    pub positions: Vec<i32>,
    /// For each position, the index in its row of the first position that it attends to: the start of its document. The
    /// last that it attends to is itself.
    pub document_start: Vec<i32>,
    /// Weight of each position in the loss: 1 with a label, 0 without.
    pub weights: Vec<f32>,
    read_buffer: Vec<u8>,
}

impl Rows {
    /// Returns an empty buffer with capacity for `rows` rows of `sequence` positions.
    pub fn new(rows: u64, sequence: u64) -> Rows {
        let values = (rows * sequence) as usize;
        let ids = || Vec::with_capacity(values);
        Rows {
            sequence: sequence as usize,
            tokens: ids(),
            labels: ids(),
            positions: ids(),
            document_start: ids(),
            weights: Vec::with_capacity(values),
            read_buffer: Vec::with_capacity((sequence as usize + 1) * 8),
        }
    }

    /// Returns the bytes of memory of a buffer for `rows` rows of `sequence` positions.
    pub fn max_bytes(rows: u64, sequence: u64) -> Bytes {
        Bytes(rows * sequence * 20 + (sequence + 1) * 8)
    }

    /// Returns the number of rows in the buffer.
    pub fn len(&self) -> usize {
        self.tokens.len() / self.sequence.max(1)
    }

    /// Returns whether the buffer has no row.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the number of positions that have a label.
    pub fn labelled_tokens(&self) -> u64 {
        self.labels.iter().filter(|&&label| label != IGNORED_LABEL).count() as u64
    }

    /// Sums `value` over the labelled positions of each document in row `row`. `value` takes the index of a position in the
    /// whole buffer. Returns one sum for each document that has a label; in rows of pairs, chosen and rejected answers
    /// alternate.
    pub fn sum_documents(&self, row: usize, value: impl Fn(usize) -> f64) -> Vec<f64> {
        let mut sums = Vec::new();
        for (document, at) in self.labelled_positions(row) {
            if document == sums.len() {
                sums.push(0.0);
            }
            sums[document] += value(at);
        }
        sums
    }

    /// Returns the values at the labelled positions of row `row`. `values` has one for each position of the whole buffer.
    pub fn labelled_values(&self, row: usize, values: &[f64]) -> Vec<f64> {
        self.labelled_positions(row).map(|(_, at)| values[at]).collect()
    }

    /// Returns the tokens of the prompt and of the completion in row `row`, which has one document: those before its first
    /// label, and its labels.
    pub fn prompt_and_completion(&self, row: usize) -> (Vec<i32>, Vec<i32>) {
        let positions: Vec<usize> = self.labelled_positions(row).map(|(_, at)| at).collect();
        let begin = row * self.sequence;
        let end = positions.first().map_or(begin, |first| first + 1);
        (self.tokens[begin..end].to_vec(), positions.into_iter().map(|at| self.labels[at]).collect())
    }

    /// Sets the loss weights of the labelled positions of row `row`, in order.
    pub fn set_token_weights(&mut self, row: usize, weights: &[f64]) {
        let positions: Vec<usize> = self.labelled_positions(row).map(|(_, at)| at).collect();
        assert_eq!(positions.len(), weights.len(), "each label has a weight");
        positions.into_iter().zip(weights).for_each(|(at, &weight)| self.weights[at] = weight as f32);
    }

    /// Sets the loss weight of all labelled positions of each document in row `row`. `weights` has one weight for each
    /// document, in the order of [`Rows::sum_documents`].
    pub fn set_document_weights(&mut self, row: usize, weights: &[f64]) {
        let positions: Vec<(usize, usize)> = self.labelled_positions(row).collect();
        positions.into_iter().for_each(|(document, at)| self.weights[at] = weights[document] as f32);
    }

    /// Returns the labelled positions of row `row` as indices in the whole buffer, each with the number of its document
    /// among those of the row that have a label.
    fn labelled_positions(&self, row: usize) -> impl Iterator<Item = (usize, usize)> {
        let positions = row * self.sequence..(row + 1) * self.sequence;
        let (mut documents, mut last_start) = (0, None);
        positions.filter(|&at| self.labels[at] != IGNORED_LABEL).map(move |at| {
            let start = Some(self.document_start[at]);
            documents += usize::from(start != last_start);
            last_start = start;
            (documents - 1, at)
        })
    }

    /// Appends a row with a prompt and its completion, whose tokens have labels. Both fit into a row.
    pub fn push_completion(&mut self, prompt: &[i32], completion: &[i32]) {
        let tokens = [prompt, completion].concat();
        let positions = tokens.len() - 1;
        for (position, &token) in tokens[..positions].iter().enumerate() {
            let is_labelled = position + 1 >= prompt.len();
            self.tokens.push(token);
            self.labels.push(if is_labelled { tokens[position + 1] } else { IGNORED_LABEL });
            self.positions.push(position as i32);
            self.document_start.push(0);
            self.weights.push(f32::from(u8::from(is_labelled)));
        }
        self.pad_row(positions);
    }

    /// Appends a row of padding, which fills a partial micro-batch.
    pub fn push_padding_row(&mut self) {
        self.pad_row(0);
    }

    /// Replaces the content by the rows of `other` with the indices `rows`.
    pub fn copy_from(&mut self, other: &Rows, rows: std::ops::Range<usize>) {
        self.clear();
        self.sequence = other.sequence;
        let values = rows.start * other.sequence..rows.end * other.sequence;
        self.tokens.extend_from_slice(&other.tokens[values.clone()]);
        self.labels.extend_from_slice(&other.labels[values.clone()]);
        self.positions.extend_from_slice(&other.positions[values.clone()]);
        self.document_start.extend_from_slice(&other.document_start[values.clone()]);
        self.weights.extend_from_slice(&other.weights[values]);
    }

    /// Removes all rows and keeps the capacity.
    pub fn clear(&mut self) {
        for ids in [&mut self.tokens, &mut self.labels, &mut self.positions, &mut self.document_start] {
            ids.clear();
        }
        self.weights.clear();
    }

    /// Appends a position of a row. `position` is its index in the row, `document_start` that of the first position of
    /// its document. Its token is that of `record`; its label is that of `next`, the following record, or none if
    /// `next` is `None` or begins a document.
    fn push(&mut self, position: usize, document_start: usize, record: Record, next: Option<Record>) {
        let label = next.filter(|next| !next.begins_document).map_or(IGNORED_LABEL, |next| next.label);
        self.tokens.push(record.token);
        self.labels.push(label);
        self.positions.push((position - document_start) as i32);
        self.document_start.push(document_start as i32);
        self.weights.push(if label == IGNORED_LABEL { 0.0 } else { 1.0 });
    }

    /// Pads a row from position `at` to its end. Each padding position attends only to itself, the cheapest attention.
    fn pad_row(&mut self, at: usize) {
        for at in at..self.sequence {
            self.tokens.push(0);
            self.labels.push(IGNORED_LABEL);
            self.positions.push(0);
            self.document_start.push(at as i32);
            self.weights.push(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TestData, all_rows, training_values};
    use super::super::{DataError, Place, addition_example};
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use std::collections::HashMap;
    use std::fs;

    type Documents = Vec<(Vec<i32>, Option<Vec<i32>>)>;

    /// Generates documents with distinct tokens, so that every token identifies its document.
    fn documents() -> impl Strategy<Value = Documents> {
        let document = (prop::collection::vec(any::<bool>(), 0..40), any::<bool>());
        prop::collection::vec(document, 1..12).prop_map(|documents| {
            let mut next = 0..;
            let mut distinct = |(labelled, given): (Vec<bool>, bool)| {
                let ids: Vec<i32> = next.by_ref().take(labelled.len()).collect();
                let label = |(&id, labelled)| if labelled { id } else { IGNORED_LABEL };
                let labels = ids.iter().zip(labelled).map(label).collect();
                (ids, given.then_some(labels))
            };
            documents.into_iter().map(&mut distinct).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn every_token_is_target_once_within_its_document(
            documents in documents(),
            sequence in 1u64..50,
            pack: bool,
        ) {
            let sample = TestData::tokens(&documents, sequence, pack);
            let mut predicted: HashMap<i32, i32> = HashMap::new();
            let mut document_of: HashMap<i32, usize> = HashMap::new();
            let mut successors = Vec::new();
            for (number, (ids, labels)) in documents.iter().enumerate() {
                document_of.extend(ids.iter().map(|&id| (id, number)));
                for at in 1..ids.len() {
                    successors.push((ids[at - 1], labels.as_ref().map_or(ids[at], |labels| labels[at])));
                }
            }
            let expected: HashMap<i32, i32> = successors.into_iter().filter(|&(_, label)| label != IGNORED_LABEL).collect();
            let data = match sample.open() {
                Ok(data) => data,
                Err(error) => {
                    prop_assert!(matches!(error, DataError::Empty { .. }), "{error}");
                    prop_assert_eq!(expected.len(), 0);
                    return Ok(());
                }
            };
            let has_label = |(ids, labels): &(Vec<i32>, Option<Vec<i32>>)| {
                labels.as_ref().unwrap_or(ids).iter().skip(1).any(|&label| label != IGNORED_LABEL)
            };
            let kept: Vec<u64> =
                documents.iter().filter(|pair| has_label(pair)).map(|(ids, _)| ids.len() as u64 - 1).collect();
            let tokens = kept.iter().map(|length| length + 1).sum::<u64>();
            prop_assert_eq!((data.tokens(), data.documents()), (tokens, kept.len() as u64));
            prop_assert_eq!(data.skipped_documents(), (documents.len() - kept.len()) as u64);
            prop_assert_eq!(data.longest_document().0, kept.iter().max().unwrap() + 1);
            prop_assert_eq!(data.labelled_tokens(), expected.len() as u64);
            let padded_rows: u64 = kept.iter().map(|length| length.div_ceil(sequence)).sum();
            let rows_wanted = if pack { (tokens - 1).div_ceil(sequence) } else { padded_rows };
            prop_assert_eq!(data.rows(), rows_wanted);

            let rows = all_rows(&data);
            prop_assert_eq!(rows.labelled_tokens(), data.labelled_tokens());
            for (index, (&token, &label)) in rows.tokens.iter().zip(&rows.labels).enumerate() {
                let at = index % sequence as usize;
                let row = index - at;
                let start = rows.document_start[index] as usize;
                prop_assert!(start <= at);
                prop_assert_eq!(rows.positions[index] as usize, at - start);
                prop_assert_eq!(rows.weights[index], if label == IGNORED_LABEL { 0.0 } else { 1.0 });
                if label != IGNORED_LABEL {
                    prop_assert_eq!(predicted.insert(token, label), None, "token is a target twice");
                }
                let padding = start == at && token == 0 && label == IGNORED_LABEL && index > 0;
                if !padding {
                    // A position attends to all earlier tokens of its document in this row, and to no others.
                    prop_assert!((start..=at).all(|seen| document_of[&rows.tokens[row + seen]] == document_of[&token]));
                    prop_assert!(start == 0 || document_of[&rows.tokens[row + start - 1]] != document_of[&token]);
                }
            }
            prop_assert_eq!(predicted, expected);
        }
    }

    #[test]
    fn packed_text_has_documented_layout() {
        const I: i32 = IGNORED_LABEL;
        let end = addition_example::END_TOKEN as i32;
        let mut sample = TestData::text(&["1", "", "23", "4567"], 3, true);
        let data = sample.open().unwrap();
        assert_eq!((data.rows(), data.tokens(), data.skipped_documents()), (3, 10, 1));
        let rows = all_rows(&data);
        assert_eq!(rows.tokens, [1, end, 2, 3, end, 4, 5, 6, 7], "the last end token is only a target");
        assert_eq!(rows.labels, [end, I, 3, end, I, 5, 6, 7, end]);
        assert_eq!(rows.positions, [0, 1, 0, 0, 1, 0, 0, 1, 2]);
        assert_eq!(rows.document_start, [0, 0, 2, 0, 0, 2, 0, 0, 0]);

        sample.spec.sequence = 4;
        let data = sample.open().unwrap();
        let mut rows = Rows::new(2, 4);
        data.read([2], &mut rows).unwrap();
        rows.push_padding_row();
        assert_eq!(rows.tokens, [7, end, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rows.labels, [end, I, I, I, I, I, I, I]);
        assert_eq!(rows.positions, [0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rows.document_start, [0, 0, 2, 3, 0, 1, 2, 3]);
        assert_eq!(rows.weights, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn text_gets_prefix_and_exactly_one_end_token() {
        let sample = TestData::text(&["1<end>", "2"], 8, false);
        let mut tokenizer = addition_example::tokenizer();
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<unknown>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
            "special_tokens": { "<unknown>": { "id": "<unknown>", "ids": [13], "tokens": ["<unknown>"] } }
        });
        fs::write(sample.tokenizer.as_ref().unwrap(), tokenizer.to_string()).unwrap();
        let rows = all_rows(&sample.open().unwrap());
        assert_eq!(rows.tokens[..4], [13, 1, 12, 0]);
        assert_eq!(rows.tokens[8..12], [13, 2, 12, 0]);
    }

    #[test]
    fn text_file_is_one_document_globs_are_sorted() {
        let mut sample = TestData::text(&["9"], 4, false);
        for (name, text) in [("b.txt", "12"), ("a.txt", "\u{feff}345"), ("c.txt", "")] {
            fs::write(sample.path(name), text).unwrap();
        }
        let jsonl = sample.spec.patterns[0].clone();
        let all = sample.path("*.txt").display().to_string();
        sample.spec.patterns = vec![sample.path("b.txt").display().to_string(), jsonl, all];
        let data = sample.open().unwrap();
        assert_eq!((data.documents(), data.skipped_documents()), (3, 1));
        let rows = all_rows(&data);
        assert_eq!(rows.tokens, [1, 2, 12, 0, 9, 12, 0, 0, 3, 4, 5, 12]);
        let (tokens, location) = data.longest_document();
        assert_eq!((tokens, location.file.as_path(), location.place), (4, sample.path("a.txt").as_path(), Place::File));
    }

    #[test]
    fn refused_long_document_gets_working_hint() {
        for pack in [false, true] {
            let mut sample = TestData::tokens(&[(vec![1, 2], None), (vec![1, 2, 3, 4, 5, 6], None)], 4, pack);
            assert_eq!(sample.open().unwrap().longest_document().0, 6);
            sample.spec.long = LongSamples::Refuse;
            let failure = plimsoll_core::Failure::from(sample.open().unwrap_err());
            let file = &sample.spec.patterns[0];
            assert_eq!(
                failure.message,
                format!("{file}:2: a document of 6 tokens does not fit in a row of 4 positions")
            );
            assert_eq!(failure.hints, ["set data.sequence = 5 or more, or data.long = \"split\""]);
            sample.spec.sequence = 5;
            assert!(sample.open().is_ok());
        }
    }

    #[test]
    fn unusable_data_is_refused_with_reason() {
        let refusal = |change: &dyn Fn(&mut TestData)| {
            let mut sample = TestData::text(&["1"], 4, true);
            change(&mut sample);
            let folder = sample.folder.path().display().to_string() + "/";
            let failure = plimsoll_core::Failure::from(sample.open().unwrap_err());
            assert_eq!(failure.exit, plimsoll_core::Exit::Input);
            failure.message.replace(&folder, "")
        };
        let write = |name: &'static str, content: &'static [u8]| {
            move |sample: &mut TestData| fs::write(sample.path(name), content).unwrap()
        };
        let pattern = |name: &'static str| {
            move |sample: &mut TestData| {
                fs::write(sample.path("a.xlsx"), "").unwrap();
                sample.spec.patterns = vec![sample.path(name).display().to_string()];
            }
        };
        type Change = dyn Fn(&mut TestData);
        let cases: [(&Change, &str); 6] = [
            (&|sample| sample.spec.patterns.clear(), "no data file is given"),
            (&|sample| sample.tokenizer = None, "data other than token ids need a tokenizer.json"),
            (&|sample| sample.spec.end_token = None, "no end token is defined for tokenizer.json"),
            (&|sample| sample.spec.vocab = 13, "tokenizer.json has 14 tokens, but the model has 13"),
            (
                &|sample| sample.spec.end_token = Some(16),
                "train.jsonl:1: tokenizer.json makes token 16 of this text, outside the model's vocabulary of 16 tokens",
            ),
            (&|sample| sample.spec.sequence = 0, "sequence = 0 is not between 1 and 16777216"),
        ];
        for (change, message) in cases {
            assert_eq!(refusal(change), message);
        }
        assert_eq!(refusal(&pattern("none*.jsonl")), "no file matches `none*.jsonl`");
        assert_eq!(
            refusal(&pattern("a***")),
            "`a***` is neither a file nor a valid glob pattern: wildcards are either regular `*` or recursive `**`"
        );
        assert_eq!(refusal(&pattern("a.xlsx")), "a.xlsx: expected a .jsonl, .json, .csv, .tsv, .parquet or .txt file");
        assert_eq!(refusal(&write("train.jsonl", b"")), "no data: nothing to predict in train.jsonl (0 documents)");
        assert_eq!(
            refusal(&write("train.jsonl", b"{\"text\":\"\"}\n\n")),
            "no data: nothing to predict in train.jsonl (1 document)"
        );
        assert_eq!(
            refusal(&write("tokenizer.json", b"{}")),
            "tokenizer.json cannot be used: Model missing. at line 1 column 2"
        );
        assert!(
            refusal(&|sample| sample.tokenizer = Some(sample.path("none")))
                .starts_with("cannot read none: No such file")
        );
        let ignored = TestData::tokens(&[(vec![1, 2], Some(vec![1, -100]))], 4, true).open().unwrap_err().to_string();
        assert!(ignored.starts_with("no data: nothing to predict in "), "{ignored}");
    }

    #[test]
    fn row_buffer_is_reused_without_allocating() {
        let sample = TestData::tokens(&[((0..100).collect(), None)], 7, true);
        let data = sample.open().unwrap();
        let mut rows = Rows::new(5, 7);
        let buffers = |rows: &Rows| (rows.tokens.as_ptr(), rows.weights.as_ptr(), rows.read_buffer.as_ptr());
        let before = buffers(&rows);
        for row in 0..data.rows() {
            data.read((0..5).map(|step| (row + step) % data.rows()), &mut rows).unwrap();
            assert_eq!((buffers(&rows), rows.len()), (before, 5));
        }
        let capacities = rows.tokens.capacity() * 20 + rows.read_buffer.capacity();
        assert_eq!(Rows::max_bytes(5, 7).0, capacities as u64);
        let earlier = training_values(&rows);
        data.read((data.rows() - 1..data.rows() + 4).map(|row| row % data.rows()), &mut rows).unwrap();
        assert_eq!(training_values(&rows), earlier);
    }
}
