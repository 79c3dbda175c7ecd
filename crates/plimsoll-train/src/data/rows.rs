//! Documents to rows: where each row begins in the token cache, and what stands in it. The rules are in the
//! module documentation of `data`.

use super::cache::{Record, RowStarts, TokenCache};
use super::error::{DataError, Place};
use super::{DataSpec, Long, source};
use plimsoll_core::Bytes;
use std::ops::ControlFlow;
use std::path::Path;

/// The label of a position without a target.
pub const IGNORED: i32 = -100;

/// The longest row: far beyond any model, and small enough that a row is always read at once.
const SEQUENCE_MAX: u64 = 1 << 24;

/// All rows of some files. Holds open files and a few numbers: its memory does not grow with the data.
#[derive(Debug)]
pub struct Dataset {
    cache: TokenCache,
    starts: Option<RowStarts>,
    sequence: u64,
    rows: u64,
}

impl Dataset {
    /// Opens the data of `spec`; tokenises it first, with `threads` threads, where `cache_folder`
    /// does not hold the result already. `tokenizer` is a `tokenizer.json`; the tokens format needs none.
    /// `progress` is told (bytes done, bytes in all) about every MiB while files are read, and may stop it
    /// ([`DataError::Stopped`]).
    pub fn open(
        spec: &DataSpec,
        tokenizer: Option<&Path>,
        cache_folder: &Path,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Dataset, DataError> {
        let sequence = spec.sequence;
        if !(1..=SEQUENCE_MAX).contains(&sequence) {
            return Err(DataError::Sequence { sequence, limit: SEQUENCE_MAX });
        }
        let files = source::files(&spec.patterns, spec.format)?;
        let cache = TokenCache::open(spec, &files, tokenizer, cache_folder, threads, progress)?;
        let counts = &cache.counts;
        if counts.documents == 0 {
            return Err(DataError::Empty { files, skipped: counts.skipped });
        }
        if counts.labelled == 0 {
            return Err(DataError::NoLabels { files, tokens: counts.tokens });
        }
        if spec.long == Long::Refuse && counts.longest - 1 > sequence {
            return Err(DataError::Long { place: cache.longest, tokens: counts.longest, sequence });
        }
        let starts = if spec.pack { None } else { Some(RowStarts::open(&cache, sequence)?) };
        let rows = match &starts {
            Some(starts) => starts.rows,
            None => (counts.tokens - 1).div_ceil(sequence),
        };
        Ok(Dataset { cache, starts, sequence, rows })
    }

    /// Rows of an epoch, at least 1.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// T: positions of a row.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Tokens of all documents, end tokens included.
    pub fn tokens(&self) -> u64 {
        self.cache.counts.tokens
    }

    /// Documents with something to predict.
    pub fn documents(&self) -> u64 {
        self.cache.counts.documents
    }

    /// Documents that were skipped, since they have nothing to predict.
    pub fn skipped_documents(&self) -> u64 {
        self.cache.counts.skipped
    }

    /// Tokens that an epoch predicts, at least 1.
    pub fn labelled_tokens(&self) -> u64 {
        self.cache.counts.labelled
    }

    /// SHA-256 of all tokens and labels: other data have another.
    pub fn content(&self) -> &str {
        &self.cache.content
    }

    /// The longest document: its tokens, and where it is.
    pub fn longest_document(&self) -> (u64, &Place) {
        (self.cache.counts.longest, &self.cache.longest)
    }

    /// Replaces what is in `into` by the rows numbered `rows`.
    pub fn read(&self, rows: impl IntoIterator<Item = u64>, into: &mut Rows) -> Result<(), DataError> {
        into.clear();
        for row in rows {
            self.read_row(row, into)?;
        }
        Ok(())
    }

    fn read_row(&self, row: u64, into: &mut Rows) -> Result<(), DataError> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(into.sequence as u64, self.sequence, "rows of another length");
        let start = match &self.starts {
            Some(starts) => starts.get(row, &self.cache)?,
            None => row * self.sequence,
        };
        let mut buffer = std::mem::take(&mut into.buffer);
        // One record more than positions: the target of the last one.
        let records = self.cache.read(start, self.sequence + 1, &mut buffer)?;
        let mut document_start = 0;
        let mut record = records.get(0)?;
        for at in 0..into.sequence {
            let next = if at + 1 < records.len() { Some(records.get(at + 1)?) } else { None };
            if record.first {
                document_start = at;
            }
            into.push(at, document_start, record, next);
            match next {
                Some(next) if !(next.first && self.starts.is_some()) => record = next,
                // The data has ended, or in padded rows the document.
                _ => {
                    into.pad_row(at + 1);
                    break;
                }
            }
        }
        into.buffer = buffer;
        Ok(())
    }
}

/// Rows to be trained on; used again and again without allocating. The vectors hold R × T values, row by row.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    sequence: usize,
    /// Token ids.
    pub tokens: Vec<i32>,
    /// The id that each position predicts, or [`IGNORED`].
    pub labels: Vec<i32>,
    /// Place in the visible part of the document, from 0.
    pub positions: Vec<i32>,
    /// The first index of the row that a position sees; the last is its own.
    pub document_start: Vec<i32>,
    /// What the loss of a position counts: 1, or 0 where there is no label.
    pub weights: Vec<f32>,
    buffer: Vec<u8>,
}

impl Rows {
    /// Room for `rows` rows of `sequence` positions.
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
            buffer: Vec::with_capacity((sequence as usize + 1) * 8),
        }
    }

    /// The most memory that `rows` rows of `sequence` positions hold.
    pub fn bytes(rows: u64, sequence: u64) -> Bytes {
        Bytes(rows * sequence * 20 + (sequence + 1) * 8)
    }

    /// Rows held.
    pub fn len(&self) -> usize {
        self.tokens.len() / self.sequence.max(1)
    }

    /// No row is held.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Positions that have a label.
    pub fn labelled_tokens(&self) -> u64 {
        self.labels.iter().filter(|&&label| label != IGNORED).count() as u64
    }

    /// Adds a row of padding only, for a micro-batch that is not full.
    pub fn push_empty(&mut self) {
        self.pad_row(0);
    }

    /// Replaces what is held by some rows of another set.
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

    /// Removes all rows and keeps the room.
    pub fn clear(&mut self) {
        for ids in [&mut self.tokens, &mut self.labels, &mut self.positions, &mut self.document_start] {
            ids.clear();
        }
        self.weights.clear();
    }

    fn push(&mut self, at: usize, document_start: usize, record: Record, next: Option<Record>) {
        let label = next.filter(|next| !next.first).map_or(IGNORED, |next| next.label);
        self.tokens.push(record.token);
        self.labels.push(label);
        self.positions.push((at - document_start) as i32);
        self.document_start.push(document_start as i32);
        self.weights.push(if label == IGNORED { 0.0 } else { 1.0 });
    }

    /// Fills the rest of a row from `at` on; each position sees only itself, which costs attention least.
    fn pad_row(&mut self, at: usize) {
        for at in at..self.sequence {
            self.tokens.push(0);
            self.labels.push(IGNORED);
            self.positions.push(0);
            self.document_start.push(at as i32);
            self.weights.push(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Sample, all_rows, seen};
    use super::super::{DataError, sums};
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use std::collections::HashMap;
    use std::fs;

    type Documents = Vec<(Vec<i32>, Option<Vec<i32>>)>;

    /// Documents whose tokens are all different, so that each can be told from every other.
    fn documents() -> impl Strategy<Value = Documents> {
        let document = (prop::collection::vec(any::<bool>(), 0..40), any::<bool>());
        prop::collection::vec(document, 1..12).prop_map(|documents| {
            let mut next = 0..;
            let mut distinct = |(labelled, given): (Vec<bool>, bool)| {
                let ids: Vec<i32> = next.by_ref().take(labelled.len()).collect();
                let label = |(&id, labelled)| if labelled { id } else { IGNORED };
                let labels = ids.iter().zip(labelled).map(label).collect();
                (ids, given.then_some(labels))
            };
            documents.into_iter().map(&mut distinct).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn every_token_is_predicted_once_from_its_own_document(
            documents in documents(),
            sequence in 1u64..50,
            pack: bool,
        ) {
            let sample = Sample::tokens(&documents, sequence, pack);
            let mut predicted: HashMap<i32, i32> = HashMap::new();
            let mut document_of: HashMap<i32, usize> = HashMap::new();
            let mut successors = Vec::new();
            for (number, (ids, labels)) in documents.iter().enumerate() {
                document_of.extend(ids.iter().map(|&id| (id, number)));
                for at in 1..ids.len() {
                    successors.push((ids[at - 1], labels.as_ref().map_or(ids[at], |labels| labels[at])));
                }
            }
            let expected: HashMap<i32, i32> = successors.into_iter().filter(|&(_, label)| label != IGNORED).collect();
            let data = match sample.open() {
                Ok(data) => data,
                Err(error) => {
                    prop_assert!(matches!(error, DataError::Empty { .. } | DataError::NoLabels { .. }), "{error}");
                    prop_assert_eq!(expected.len(), 0);
                    return Ok(());
                }
            };
            let length = |ids: &Vec<i32>| (ids.len() as u64).saturating_sub(1);
            let kept: Vec<u64> = documents.iter().map(|(ids, _)| length(ids)).filter(|&length| length > 0).collect();
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
                prop_assert_eq!(rows.weights[index], if label == IGNORED { 0.0 } else { 1.0 });
                if label != IGNORED {
                    prop_assert_eq!(predicted.insert(token, label), None, "predicted twice");
                }
                let padding = start == at && token == 0 && label == IGNORED && index > 0;
                if !padding {
                    // All that is seen, and nothing else of this row before it, is of this document.
                    prop_assert!((start..=at).all(|seen| document_of[&rows.tokens[row + seen]] == document_of[&token]));
                    prop_assert!(start == 0 || document_of[&rows.tokens[row + start - 1]] != document_of[&token]);
                }
            }
            prop_assert_eq!(predicted, expected);
        }
    }

    #[test]
    fn packed_text_is_laid_out_as_promised() {
        const I: i32 = IGNORED;
        let end = sums::END as i32;
        let mut sample = Sample::text(&["1", "", "23", "4567"], 3, true);
        let data = sample.open().unwrap();
        assert_eq!((data.rows(), data.tokens(), data.skipped_documents()), (3, 10, 1));
        let rows = all_rows(&data);
        assert_eq!(rows.tokens, [1, end, 2, 3, end, 4, 5, 6, 7], "the last end is only a target");
        assert_eq!(rows.labels, [end, I, 3, end, I, 5, 6, 7, end]);
        assert_eq!(rows.positions, [0, 1, 0, 0, 1, 0, 0, 1, 2]);
        assert_eq!(rows.document_start, [0, 0, 2, 0, 0, 2, 0, 0, 0]);

        sample.spec.sequence = 4;
        let data = sample.open().unwrap();
        let mut rows = Rows::new(2, 4);
        data.read([2], &mut rows).unwrap();
        rows.push_empty();
        assert_eq!(rows.tokens, [7, end, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rows.labels, [end, I, I, I, I, I, I, I]);
        assert_eq!(rows.positions, [0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(rows.document_start, [0, 0, 2, 3, 0, 1, 2, 3]);
        assert_eq!(rows.weights, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn text_ends_with_one_end_token_and_begins_as_the_tokenizer_says() {
        let sample = Sample::text(&["1<end>", "2"], 8, false);
        let mut tokenizer = sums::tokenizer();
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
    fn a_text_file_is_one_document_and_globs_are_taken_in_order() {
        let mut sample = Sample::text(&["9"], 4, false);
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
        let (tokens, place) = data.longest_document();
        assert_eq!((tokens, place.file.as_path(), place.line), (4, sample.path("a.txt").as_path(), None));
    }

    #[test]
    fn a_refused_long_document_is_named_and_the_hint_works() {
        for pack in [false, true] {
            let mut sample = Sample::tokens(&[(vec![1, 2], None), (vec![1, 2, 3, 4, 5, 6], None)], 4, pack);
            assert_eq!(sample.open().unwrap().longest_document().0, 6);
            sample.spec.long = Long::Refuse;
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
    fn what_cannot_be_trained_on_is_refused_by_name() {
        let refusal = |change: &dyn Fn(&mut Sample)| {
            let mut sample = Sample::text(&["1"], 4, true);
            change(&mut sample);
            let folder = sample.folder.path().display().to_string() + "/";
            let failure = plimsoll_core::Failure::from(sample.open().unwrap_err());
            assert_eq!(failure.exit, plimsoll_core::Exit::Input);
            failure.message.replace(&folder, "")
        };
        let write = |name: &'static str, content: &'static [u8]| {
            move |sample: &mut Sample| fs::write(sample.path(name), content).unwrap()
        };
        let pattern = |name: &'static str| {
            move |sample: &mut Sample| {
                fs::write(sample.path("a.csv"), "").unwrap();
                sample.spec.patterns = vec![sample.path(name).display().to_string()];
            }
        };
        type Change = dyn Fn(&mut Sample);
        let cases: [(&Change, &str); 6] = [
            (&|sample| sample.spec.patterns.clear(), "no data file is named"),
            (&|sample| sample.tokenizer = None, "data of the text format needs a tokenizer.json"),
            (&|sample| sample.spec.end_token = None, "no end token is known for tokenizer.json"),
            (&|sample| sample.spec.vocab = 13, "tokenizer.json knows 14 tokens, the model 13"),
            (
                &|sample| sample.spec.end_token = Some(16),
                "train.jsonl:1: token 16 is outside the model's vocabulary of 16 tokens",
            ),
            (&|sample| sample.spec.sequence = 0, "sequence = 0 is not between 1 and 16777216"),
        ];
        for (change, message) in cases {
            assert_eq!(refusal(change), message);
        }
        assert_eq!(refusal(&pattern("none*.jsonl")), "no file matches `none*.jsonl`");
        assert_eq!(
            refusal(&pattern("a***")),
            "`a***` is no file and no glob: wildcards are either regular `*` or recursive `**`"
        );
        assert_eq!(refusal(&pattern("a.csv")), "a.csv: expected a .jsonl or .txt file");
        assert_eq!(
            refusal(&write("train.jsonl", b"")),
            "no data: nothing to predict in train.jsonl (0 empty documents)"
        );
        assert_eq!(
            refusal(&write("train.jsonl", b"{\"text\":\"\"}\n\n")),
            "no data: nothing to predict in train.jsonl (1 empty documents)"
        );
        assert_eq!(
            refusal(&write("tokenizer.json", b"{}")),
            "tokenizer.json cannot be used: Model missing. at line 1 column 2"
        );
        assert!(
            refusal(&|sample| sample.tokenizer = Some(sample.path("none")))
                .starts_with("cannot read none: No such file")
        );
        let ignored = Sample::tokens(&[(vec![1, 2], Some(vec![1, -100]))], 4, true).open().unwrap_err().to_string();
        assert!(ignored.starts_with("no data: all 2 tokens of "), "{ignored}");
    }

    #[test]
    fn rows_are_used_again_without_allocating() {
        let sample = Sample::tokens(&[((0..100).collect(), None)], 7, true);
        let data = sample.open().unwrap();
        let mut rows = Rows::new(5, 7);
        let room = |rows: &Rows| (rows.tokens.as_ptr(), rows.weights.as_ptr(), rows.buffer.as_ptr());
        let before = room(&rows);
        for row in 0..data.rows() {
            data.read((0..5).map(|step| (row + step) % data.rows()), &mut rows).unwrap();
            assert_eq!((room(&rows), rows.len()), (before, 5));
        }
        let capacities = rows.tokens.capacity() * 20 + rows.buffer.capacity();
        assert_eq!(Rows::bytes(5, 7).0, capacities as u64);
        let again = seen(&rows);
        data.read((data.rows() - 1..data.rows() + 4).map(|row| row % data.rows()), &mut rows).unwrap();
        assert_eq!(seen(&rows), again);
    }
}
