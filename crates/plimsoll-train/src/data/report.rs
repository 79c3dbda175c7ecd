//! Figures of training data for `plimsoll data`: counts, lengths, duplicates, sample documents and warnings. They come
//! from one pass over the token cache, so they describe what the model sees.

use super::cache::Record;
use super::error::{DataError, SourceLocation};
use super::rows::IGNORED_LABEL;
use super::tokenizer::Tokenizer;
use super::training_data::TrainingData;
use super::{LongSamples, RecordFormat};
use plimsoll_core::format_count;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hasher};

/// The most documents that are compared with each other.
const COMPARED_DOCUMENTS_MAX: u64 = 4_000_000;
/// The most tokens of a sample that are split into parts, for people.
const PART_TOKENS_MAX: usize = 4096;
/// Share of padding from which on it is a warning.
const MOSTLY_PADDING: f64 = 0.9;
/// Share of duplicates from which on they are a warning.
const MANY_DUPLICATES: f64 = 0.1;
/// Share of documents longer than a row from which on they are a warning.
const MANY_LONG: f64 = 0.1;
/// Times that a source may be seen within a run without a warning.
const EPOCHS_MAX: f64 = 4.0;

/// Choices and facts of a report that the dataset does not hold.
pub struct ReportSettings<'a> {
    /// Number of sample documents.
    pub samples: usize,
    /// The model's tokenizer; `None` if it has none.
    pub tokenizer: Option<&'a Tokenizer>,
    /// The model's begin token; `None` if it has none.
    pub begin_token: Option<u32>,
    /// Tokens at which the model stops.
    pub end_tokens: &'a [i64],
    /// Handling of documents longer than a row, as the run file says. The dataset itself is opened with `split`.
    pub long: LongSamples,
    /// Largest number of positions that the model takes in a row.
    pub max_positions: u64,
}

/// Figures of the documents of all sources, with samples and warnings.
#[derive(Debug, Default)]
pub struct DataFigures {
    /// Formats of the files, each once.
    pub formats: Vec<RecordFormat>,
    /// Documents that are used.
    pub documents: u64,
    /// Documents without a token to predict.
    pub skipped: u64,
    /// Tokens of all documents that are used.
    pub tokens: u64,
    /// Tokens that are targets of the loss.
    pub labelled_tokens: u64,
    /// The longest document; `None` if no document is used.
    pub longest: Option<LongestDocument>,
    /// Rows of an epoch.
    pub rows: u64,
    /// Share of the positions of all rows that are padding; `None` without rows.
    pub padding_share: Option<f64>,
    /// Documents that need more positions than a row has.
    pub long_documents: u64,
    /// Documents that continue in a further row.
    pub split_documents: u64,
    /// Documents with the same tokens as one before them.
    pub duplicates: u64,
    /// Documents that were compared: all, unless there are more than 4 million.
    pub compared_documents: u64,
    /// Documents by length, from the shortest to the longest.
    pub lengths: Vec<LengthBucket>,
    /// The first documents, in the order of the files.
    pub samples: Vec<SampleDocument>,
    /// Warnings about the data.
    pub warnings: Vec<DataWarning>,
    /// The error with which a run refuses the data; `None` if it takes them.
    pub refusal: Option<DataError>,
}

/// Figures of one source of training data.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceFigures {
    /// Formats of its files, each once.
    pub formats: Vec<RecordFormat>,
    /// Documents that are used.
    pub documents: u64,
    /// Tokens of these documents.
    pub tokens: u64,
    /// Rows of the source.
    pub rows: u64,
    /// Share of the rows of the run that are from the source.
    pub share: f64,
    /// Number of times that the source is seen within the run; `None` if the length of the run is not known.
    pub epochs: Option<f64>,
}

impl SourceFigures {
    /// Returns the figures of each source. `run_rows` is the number of rows that the run reads; `None` if it is not known.
    pub fn read(data: &TrainingData, run_rows: Option<u64>) -> Vec<SourceFigures> {
        let epochs = run_rows.map(|rows| data.epochs_of_sources(rows));
        let sources = data.sources().iter().zip(data.shares()).enumerate();
        sources
            .map(|(index, (source, share))| SourceFigures {
                formats: source.formats().to_vec(),
                documents: source.documents(),
                tokens: source.tokens(),
                rows: source.rows(),
                share,
                epochs: epochs.as_ref().map(|epochs| epochs[index]),
            })
            .collect()
    }

    /// Returns a warning if the source is seen many times within the run. `key` names it.
    pub fn repetition_warning(&self, key: &str) -> Option<DataWarning> {
        let epochs = self.epochs.filter(|&epochs| epochs > EPOCHS_MAX)?;
        let text = format!(
            "{key} is seen {epochs:.1} times within the run; lower its weight, add data to it, or shorten the run"
        );
        Some(DataWarning::new("source-repeated", text))
    }
}

/// The longest document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LongestDocument {
    /// Number of its tokens.
    pub tokens: u64,
    /// Its place in the files.
    pub location: SourceLocation,
}

/// Number of documents whose lengths lie in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LengthBucket {
    /// The smallest number of tokens: a power of two.
    pub from_tokens: u64,
    /// The largest number of tokens.
    pub to_tokens: u64,
    /// Number of documents.
    pub documents: u64,
}

/// A document with its labels and its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SampleDocument {
    /// Token ids.
    pub input_ids: Vec<i32>,
    /// Label of each token, not shifted; −100 is not predicted.
    pub labels: Vec<i32>,
    /// Text of all tokens, special tokens included; `None` without a tokenizer.
    pub text: Option<String>,
    /// Text of the first 4096 tokens in parts with and without labels. Without a tokenizer, the text is the token ids.
    pub parts: Vec<TextPart>,
}

/// A part of a sample whose tokens all have labels, or all have none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextPart {
    /// Text of the part.
    pub text: String,
    /// Number of its tokens.
    pub tokens: usize,
    /// Whether its tokens have labels.
    pub is_labelled: bool,
}

/// A warning about the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataWarning {
    /// Name of the kind of warning.
    pub id: &'static str,
    /// Description, with what to do.
    pub text: String,
}

impl DataWarning {
    fn new(id: &'static str, text: impl Into<String>) -> DataWarning {
        DataWarning { id, text: text.into() }
    }
}

impl DataFigures {
    /// Reads all documents of `data` once.
    ///
    /// # Errors
    /// The token cache cannot be read or is damaged.
    pub fn read(data: &TrainingData, settings: &ReportSettings) -> Result<DataFigures, DataError> {
        let mut scan = Scan::new(data, settings);
        for source in data.sources() {
            // The rows of each source begin at its first document.
            scan.position = 0;
            source.scan_records(|record| scan.push(record))?;
            scan.end_document();
        }
        let (tokens, location) = data.longest_document();
        let positions = data.rows() * data.sequence();
        // The last token of a row of pairs, or of a padded document, is only a target.
        let only_targets = match (data.has_pairs(), data.is_packed()) {
            (true, _) => data.rows(),
            (false, true) => 0,
            (false, false) => data.documents(),
        };
        let used = data.tokens() - only_targets;
        let mut figures = DataFigures {
            formats: data.formats(),
            documents: data.documents(),
            skipped: data.skipped_documents(),
            tokens: data.tokens(),
            labelled_tokens: data.labelled_tokens(),
            longest: Some(LongestDocument { tokens, location: location.clone() }),
            rows: data.rows(),
            padding_share: Some(positions.saturating_sub(used) as f64 / positions as f64),
            long_documents: scan.long_documents,
            split_documents: scan.split_documents,
            duplicates: scan.duplicates,
            compared_documents: scan.compared_documents,
            lengths: buckets(&scan.lengths),
            samples: std::mem::take(&mut scan.samples),
            warnings: Vec::new(),
            refusal: data.sources().iter().find_map(|source| source.refuse_long(settings.long).err()),
        };
        for sample in &mut figures.samples {
            sample.decode(settings.tokenizer);
        }
        figures.warnings = warnings(&figures, &scan, data, settings);
        Ok(figures)
    }

    /// Describes data without a token to predict. `refusal` is the error with which a run refuses them.
    pub fn without_labels(formats: Vec<RecordFormat>, skipped: u64, refusal: DataError) -> DataFigures {
        let documents = format_count(skipped, "document");
        let text = format!(
            "no token has a label in {documents}, so a run refuses to start; look at data.train_on and the labels of the data"
        );
        let warnings = vec![DataWarning::new("nothing-labelled", text)];
        DataFigures { formats, skipped, warnings, refusal: Some(refusal), ..DataFigures::default() }
    }
}

/// A pass over the tokens of all sources.
struct Scan {
    sequence: u64,
    is_packed: bool,
    samples_max: usize,
    begun_documents: usize,
    /// Tokens with which a document may begin, and should not begin twice.
    begin_tokens: HashSet<i32>,
    end_tokens: HashSet<i64>,
    /// Index of the next token in the token cache of its source.
    position: u64,
    document: OpenDocument,
    hashes: HashSet<u64>,
    long_documents: u64,
    split_documents: u64,
    duplicates: u64,
    compared_documents: u64,
    double_begins: u64,
    /// Documents whose last labels have an end token.
    labelled_ends: u64,
    /// Documents with 2ⁿ tokens or more, but fewer than 2ⁿ⁺¹, for each n.
    lengths: [u64; 64],
    samples: Vec<SampleDocument>,
}

/// The document that the pass is in.
#[derive(Default)]
struct OpenDocument {
    start: u64,
    tokens: u64,
    first: i32,
    begins_twice: bool,
    /// The last label and the one before it. A turn may end with two end tokens.
    last_labels: [Option<i32>; 2],
    hasher: DefaultHasher,
}

impl Scan {
    fn new(data: &TrainingData, settings: &ReportSettings) -> Scan {
        let prefix = settings.tokenizer.map(Tokenizer::prefix).unwrap_or_default();
        let chat_ends = data.end_tokens().into_iter().map(i64::from);
        Scan {
            sequence: data.sequence(),
            is_packed: data.is_packed() && !data.has_pairs(),
            samples_max: settings.samples,
            begun_documents: 0,
            begin_tokens: settings.begin_token.iter().chain(prefix).map(|&id| id as i32).collect(),
            end_tokens: settings.end_tokens.iter().copied().chain(chat_ends).collect(),
            position: 0,
            document: OpenDocument::default(),
            hashes: HashSet::new(),
            long_documents: 0,
            split_documents: 0,
            duplicates: 0,
            compared_documents: 0,
            double_begins: 0,
            labelled_ends: 0,
            lengths: [0; 64],
            samples: Vec::new(),
        }
    }

    /// Adds the next token.
    fn push(&mut self, record: Record) {
        let Record { token, label, begins_document } = record;
        if begins_document {
            self.end_document();
            self.document = OpenDocument { start: self.position, first: token, ..OpenDocument::default() };
            self.begun_documents += 1;
            if self.begun_documents <= self.samples_max {
                self.samples.push(SampleDocument::default());
            }
        }
        let document = &mut self.document;
        if document.tokens == 1 {
            document.begins_twice = token == document.first && self.begin_tokens.contains(&token);
        }
        if document.tokens > 0 && label != IGNORED_LABEL {
            document.last_labels = [Some(label), document.last_labels[0]];
        }
        document.tokens += 1;
        document.hasher.write_i32(token);
        self.position += 1;
        if self.begun_documents <= self.samples_max
            && let Some(sample) = self.samples.last_mut()
        {
            sample.input_ids.push(token);
            sample.labels.push(label);
        }
    }

    /// Counts the document that ends here; nothing if none has begun.
    fn end_document(&mut self) {
        let document = std::mem::take(&mut self.document);
        if document.tokens < 2 {
            return;
        }
        self.lengths[document.tokens.ilog2() as usize] += 1;
        // The last token of a document is only a target.
        let positions = document.tokens - 1;
        let is_long = positions > self.sequence;
        let row_of = |position: u64| position / self.sequence;
        let crosses = row_of(document.start) != row_of(document.start + positions - 1);
        self.long_documents += u64::from(is_long);
        self.split_documents += u64::from(if self.is_packed { crosses } else { is_long });
        self.double_begins += u64::from(document.begins_twice);
        let mut last_labels = document.last_labels.into_iter().flatten();
        self.labelled_ends += u64::from(last_labels.any(|id| self.end_tokens.contains(&i64::from(id))));
        if self.compared_documents < COMPARED_DOCUMENTS_MAX {
            self.compared_documents += 1;
            self.duplicates += u64::from(!self.hashes.insert(document.hasher.finish()));
        }
    }
}

impl SampleDocument {
    /// Adds the text of the tokens.
    fn decode(&mut self, tokenizer: Option<&Tokenizer>) {
        let ids: Vec<u32> = self.input_ids.iter().map(|&id| id as u32).collect();
        self.text = tokenizer.and_then(|tokenizer| tokenizer.decode_all(&ids).ok());
        let tokenizer = tokenizer.filter(|_| self.text.is_some());
        let count = ids.len().min(PART_TOKENS_MAX);
        let (mut shown, mut start) = (String::new(), 0);
        while start < count {
            let is_labelled = self.labels[start] != IGNORED_LABEL;
            let same = self.labels[start..count].iter().take_while(|&&label| (label != IGNORED_LABEL) == is_labelled);
            let end = start + same.count();
            let text = match tokenizer {
                Some(tokenizer) => next_text(tokenizer, &ids[..end], &ids[start..end], &mut shown, end == count),
                None => ids[start..end].iter().map(|id| format!("{id} ")).collect(),
            };
            self.parts.push(TextPart { text, tokens: end - start, is_labelled });
            start = end;
        }
    }
}

/// Returns the text that the tokens `part` add to those before them; `all` has both. `shown` is the text so far. A
/// character whose bytes are not complete is left to the next part, unless this is the last.
fn next_text(tokenizer: &Tokenizer, all: &[u32], part: &[u32], shown: &mut String, is_last: bool) -> String {
    let whole = tokenizer.decode_all(all).unwrap_or_default();
    let complete = if is_last { &whole } else { whole.trim_end_matches('\u{fffd}') };
    let text = match complete.strip_prefix(shown.as_str()) {
        Some(text) => text.to_owned(),
        None => tokenizer.decode_all(part).unwrap_or_default(),
    };
    *shown += &text;
    text
}

/// Returns the ranges from the shortest to the longest document. `counts` has the documents with 2ⁿ to 2ⁿ⁺¹ − 1 tokens for
/// each n.
fn buckets(counts: &[u64; 64]) -> Vec<LengthBucket> {
    let used = |count: &u64| *count > 0;
    let Some(first) = counts.iter().position(used) else { return Vec::new() };
    let last = counts.iter().rposition(used).unwrap_or(first);
    let bucket = |power: usize| {
        let from_tokens = 1 << power;
        LengthBucket { from_tokens, to_tokens: from_tokens - 1 + from_tokens, documents: counts[power] }
    };
    (first..=last).map(bucket).collect()
}

/// Returns the warnings about data of which at least one document is used.
fn warnings(figures: &DataFigures, scan: &Scan, data: &TrainingData, settings: &ReportSettings) -> Vec<DataWarning> {
    let mut warnings = Vec::new();
    let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    if scan.labelled_ends == 0 && !scan.end_tokens.is_empty() {
        let text = "no document has an end token as its last label, so the model does not learn to stop; end the documents with \
                    the end token, or look at data.train_on_end";
        warnings.push(DataWarning::new("end-never-labelled", text));
    }
    if scan.double_begins > 0 {
        let text = format!(
            "{} with two begin tokens: the tokenizer or the template adds one that the data already have",
            documents_begin(scan.double_begins)
        );
        warnings.push(DataWarning::new("double-begin", text));
    }
    warnings.extend(data.warnings().iter().map(|text| DataWarning::new("template", text)));
    // Rows of prompts are padded up to the longest completion.
    let has_prompts = data.formats().contains(&RecordFormat::Prompt);
    if let Some(padding) = figures.padding_share.filter(|&share| share >= MOSTLY_PADDING && !has_prompts) {
        let remedy = if data.is_packed() { "" } else { " set data.pack = true or" };
        let text = format!("{} of all positions are padding;{remedy} lower data.sequence", percent(padding));
        warnings.push(DataWarning::new("mostly-padding", text));
    }
    let duplicates = share(figures.duplicates, figures.compared_documents);
    if duplicates >= MANY_DUPLICATES {
        let text = format!("{} of the documents have the same tokens as one before them", percent(duplicates));
        warnings.push(DataWarning::new("duplicates", text));
    }
    let long_share = share(figures.long_documents, figures.documents);
    if settings.long == LongSamples::Split && long_share >= MANY_LONG {
        let (needed, most) = (data.longest_document().0 - 1, settings.max_positions);
        let remedy = if needed <= most {
            format!("raise data.sequence to {needed} to keep all whole")
        } else {
            format!("the longest needs data.sequence = {needed}, and the model takes no more than {most}")
        };
        let text = format!(
            "{} of the documents are longer than a row and are split; their later rows do not attend to the earlier ones: {remedy}",
            percent(long_share)
        );
        warnings.push(DataWarning::new("split-documents", text));
    }
    if settings.long == LongSamples::Refuse && figures.long_documents > 0 {
        let documents = format_count(figures.long_documents, "document");
        let text = format!("a run refuses {documents} longer than a row, because data.long is \"refuse\"");
        warnings.push(DataWarning::new("refused-documents", text));
    }
    warnings
}

/// Begins a sentence about documents that begin in some way.
fn documents_begin(count: u64) -> String {
    format!("{} {}", format_count(count, "document"), if count == 1 { "begins" } else { "begin" })
}

#[cfg(test)]
mod tests {
    use super::super::testing::TestData;
    use super::*;

    const END: i32 = super::super::addition_example::END_TOKEN as i32;

    /// Returns the figures of a dataset with two samples. The end token is that of the built-in example, the begin token
    /// is 14.
    fn figures_with(sample: &TestData, long: LongSamples) -> DataFigures {
        let tokenizer = sample.tokenizer.as_ref().map(|file| Tokenizer::load(file).unwrap());
        let settings = ReportSettings {
            samples: 2,
            tokenizer: tokenizer.as_ref(),
            begin_token: Some(14),
            end_tokens: &[i64::from(END)],
            long,
            max_positions: 1000,
        };
        DataFigures::read(&TrainingData::new(vec![sample.open().unwrap()], None), &settings).unwrap()
    }

    fn figures(sample: &TestData) -> DataFigures {
        figures_with(sample, LongSamples::Split)
    }

    /// Returns documents of token ids that are all labels.
    fn documents(ids: &[&[i32]], sequence: u64, pack: bool) -> TestData {
        let documents: Vec<_> = ids.iter().map(|ids| (ids.to_vec(), None)).collect();
        TestData::tokens(&documents, sequence, pack)
    }

    fn ids_of(figures: &DataFigures) -> Vec<&str> {
        figures.warnings.iter().map(|warning| warning.id).collect()
    }

    #[test]
    fn samples_show_special_tokens_and_labels() {
        let found = figures(&TestData::text(&["1+1", "", "22", "3"], 4, true));
        assert_eq!((found.documents, found.skipped, found.samples.len()), (3, 1, 2));
        assert_eq!(found.samples[0].input_ids, [1, 10, 1, END]);
        assert_eq!(found.samples[0].labels, [1, 10, 1, END]);
        assert_eq!(found.samples[1].text.as_deref(), Some("22<end>"));
        let part = TextPart { text: "1+1<end>".to_owned(), tokens: 4, is_labelled: true };
        assert_eq!(found.samples[0].parts, [part]);
        assert_eq!(found.formats, [RecordFormat::Text]);
    }

    #[test]
    fn parts_of_samples_follow_labels() {
        let masked = (vec![5, 6, 7, 8], Some(vec![-100, -100, 7, -100]));
        let found = figures(&TestData::tokens(&[masked], 8, false));
        let part = |text: &str, tokens, is_labelled| TextPart { text: text.to_owned(), tokens, is_labelled };
        assert_eq!(found.samples[0].parts, [part("5 6 ", 2, false), part("7 ", 1, true), part("8 ", 1, false)]);
        assert_eq!((&found.samples[0].text, found.labelled_tokens), (&None, 1));
    }

    #[test]
    fn equal_tokens_count_as_duplicates() {
        let found = figures(&documents(&[&[1, END], &[2, END], &[1, END], &[1, 1, END], &[1, END]], 8, true));
        assert_eq!((found.duplicates, found.compared_documents), (2, 5));
        assert!(ids_of(&found).contains(&"duplicates"));
        let distinct = figures(&documents(&[&[1, END], &[END, 1]], 2, true));
        assert_eq!((distinct.duplicates, ids_of(&distinct)), (0, vec![]));
    }

    #[test]
    fn lengths_are_counted_in_powers_of_two() {
        let nine = [1, 2, 3, 4, 5, 6, 7, 8, END];
        let found = figures(&documents(&[&nine[..2], &nine[..3], &nine], 8, true));
        let counts: Vec<_> =
            found.lengths.iter().map(|bucket| [bucket.from_tokens, bucket.to_tokens, bucket.documents]).collect();
        assert_eq!(counts, [[2, 3, 2], [4, 7, 0], [8, 15, 1]]);
        assert_eq!(found.longest.unwrap().tokens, 9);
    }

    #[test]
    fn padding_and_splits_match_the_layout_of_rows() {
        // Padded: 1, 4 and 5 of 4, 4 and 8 positions.
        let ids: [&[i32]; 3] = [&[1, END], &[1, 2, 3, 4, END], &[1, 2, 3, 4, 5, END]];
        let padded = figures(&documents(&ids, 4, false));
        assert_eq!((padded.rows, padded.padding_share), (4, Some(6.0 / 16.0)));
        assert_eq!((padded.long_documents, padded.split_documents), (1, 1));
        // Packed: the second document begins at position 2 of the first row, the third at position 3 of the second.
        let packed = figures(&documents(&ids, 4, true));
        assert_eq!((packed.rows, packed.padding_share), (3, Some(0.0)));
        assert_eq!((packed.long_documents, packed.split_documents), (1, 2));
    }

    #[test]
    fn each_problem_has_its_warning() {
        let warnings = |ids: &[&[i32]], sequence, pack| {
            let found = figures(&documents(ids, sequence, pack));
            ids_of(&found).join(" ")
        };
        assert_eq!(warnings(&[&[1, 2, END]], 2, false), "");
        assert_eq!(warnings(&[&[1, 2, 3]], 2, false), "end-never-labelled");
        assert_eq!(warnings(&[&[14, 14, END]], 2, false), "double-begin");
        assert_eq!(warnings(&[&[14, 1, END]], 2, false), "");
        assert_eq!(warnings(&[&[1, END]], 10, false), "mostly-padding");
        assert_eq!(warnings(&[&[1, 2, 3, END]], 2, false), "split-documents");
        let too_long = figures(&documents(&[&[[1; 1001].as_slice(), &[END]].concat()], 2, false)).warnings;
        assert_eq!(too_long[0].id, "split-documents");
        assert!(too_long[0].text.ends_with("needs data.sequence = 1001, and the model takes no more than 1000"));
        let long = documents(&[&[1, 2, 3, END]], 2, false);
        let refused = figures_with(&long, LongSamples::Refuse);
        assert_eq!(ids_of(&refused), ["refused-documents"]);
        assert!(matches!(refused.refusal, Some(DataError::DocumentTooLong { tokens: 4, sequence: 2, .. })));
    }

    #[test]
    fn figures_of_sources_are_totals() {
        let (few, many) =
            (documents(&[&[1, 2, END]], 2, true), documents(&[&[1, 2, END], &[3, 4, END], &[4, 5, END]], 2, true));
        let data = TrainingData::new(vec![few.open().unwrap(), many.open().unwrap()], Some(&[3.0, 1.0]));
        let settings = ReportSettings {
            samples: 2,
            tokenizer: None,
            begin_token: None,
            end_tokens: &[i64::from(END)],
            long: LongSamples::Split,
            max_positions: 1000,
        };
        let found = DataFigures::read(&data, &settings).unwrap();
        // Rows of a source begin at its first document.
        assert_eq!((found.documents, found.tokens, found.rows, found.split_documents), (4, 12, 5, 1));
        assert_eq!((found.duplicates, found.samples.len(), found.longest.unwrap().tokens), (1, 2, 3));
        let sources = SourceFigures::read(&data, Some(8));
        let figures: Vec<_> = sources.iter().map(|source| (source.rows, source.share, source.epochs)).collect();
        assert_eq!(figures, [(1, 0.75, Some(6.0)), (4, 0.25, Some(0.5))]);
        let warning = sources[0].repetition_warning("data.source[1]").unwrap();
        assert!(warning.id == "source-repeated" && warning.text.starts_with("data.source[1] is seen 6.0 times"));
        assert_eq!(sources[1].repetition_warning("data.source[2]"), None);
        assert_eq!(SourceFigures::read(&data, None)[0].repetition_warning("data.source[1]"), None);
    }

    #[test]
    fn unlabelled_data_are_refused_with_a_warning() {
        let sample = TestData::tokens(&[(vec![1, 2], Some(vec![-100, -100]))], 4, true);
        let refusal = sample.open().unwrap_err();
        assert!(matches!(refusal, DataError::Empty { skipped: 1, .. }));
        let found = DataFigures::without_labels(vec![RecordFormat::Tokens], 1, refusal);
        assert_eq!((ids_of(&found), found.skipped, found.padding_share), (vec!["nothing-labelled"], 1, None));
    }
}
