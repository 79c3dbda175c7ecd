//! The view of a model on training data ([`DataReport`]), for `plimsoll data`: figures, a plot of lengths, sample
//! documents and warnings.

use crate::text::{columns, excerpt, percent, wrapped};
use plimsoll_core::format_count;
use plimsoll_core::printable::printable_text;
use serde::Serialize;

/// Width of the output in characters.
const WIDTH: usize = 80;
/// The longest bar of the plot of lengths.
const BAR_WIDTH: u64 = 40;
/// The most rows of the plot of lengths.
const PLOT_ROWS: usize = 10;
/// Names of files that are listed in full.
const LISTED_FILES: usize = 3;

/// Training data as a model will see them. Unknown values are `null`, never 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DataReport {
    /// Name of the format, or the names joined by ` and `; `None` if no file has a record.
    pub format: Option<String>,
    /// Number of documents that are used: those with a token to predict.
    pub documents: u64,
    /// Number of tokens of all documents that are used.
    pub tokens: u64,
    /// Number of tokens that are predicted.
    pub labelled_tokens: u64,
    /// The longest document; `None` if no document is used.
    pub longest: Option<LongestDocument>,
    /// The first documents, in the order of the files.
    pub samples: Vec<DataSample>,
    /// Warnings about the data.
    pub warnings: Vec<DataWarning>,
    /// Paths of the files.
    pub files: Vec<String>,
    /// Number of documents that are skipped: those without a token to predict.
    pub skipped_documents: u64,
    /// Number of positions of a row.
    pub sequence: u64,
    /// Number of rows of an epoch.
    pub rows: u64,
    /// Whether rows hold concatenated documents.
    pub pack: bool,
    /// Share of the positions of all rows that are padding; `None` without rows.
    pub padding_share: Option<f64>,
    /// Number of documents that need more positions than a row has.
    pub long_documents: u64,
    /// Number of documents that continue in a further row.
    pub split_documents: u64,
    /// Number of documents with the same tokens as one before them.
    pub duplicates: u64,
    /// Number of documents that were compared for duplicates: all, unless there are more than 4 million.
    pub compared_documents: u64,
    /// Number of documents by length, from the shortest to the longest.
    pub lengths: Vec<LengthBucket>,
    /// The sources, in the order of the run file; empty if `data.train` names the data.
    pub sources: Vec<SourceReport>,
    /// The evaluation data; `None` if the run has none.
    pub eval: Option<EvaluationData>,
    /// The reason why a run refuses the data; `None` if it takes them.
    pub refusal: Option<String>,
}

/// The longest document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LongestDocument {
    /// Number of its tokens.
    pub tokens: u64,
    /// Path of its file.
    pub file: String,
    /// Number of its line or record, counted from 1; `None` if the document is a whole file.
    pub record: Option<u64>,
    /// The place for people, such as `train.jsonl:12`.
    #[serde(skip)]
    pub place: String,
}

/// A document as the model sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DataSample {
    /// Token ids.
    pub input_ids: Vec<i32>,
    /// Label of each token, not shifted; −100 is not predicted.
    pub labels: Vec<i32>,
    /// Text of all tokens, special tokens included; `None` without a tokenizer.
    pub text: Option<String>,
    /// The text in parts with and without labels, for people. It may end early.
    #[serde(skip)]
    pub parts: Vec<SamplePart>,
}

/// A part of a sample whose tokens all have labels, or all have none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplePart {
    /// Text of the part.
    pub text: String,
    /// Number of its tokens.
    pub tokens: usize,
    /// Whether its tokens have labels.
    pub is_labelled: bool,
}

/// A warning about the data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DataWarning {
    /// Name of the kind of warning, such as `duplicates`.
    pub id: String,
    /// Description, with what to do.
    pub text: String,
}

/// Number of documents whose lengths lie in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LengthBucket {
    /// The smallest number of tokens.
    pub from_tokens: u64,
    /// The largest number of tokens.
    pub to_tokens: u64,
    /// Number of documents.
    pub documents: u64,
}

/// A source of training data (`[[data.source]]`).
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SourceReport {
    /// Its files, globs or hub ids.
    pub path: Vec<String>,
    /// Name of its format, or the names joined by ` and `; `None` if no file has a record.
    pub format: Option<String>,
    /// Number of documents that are used.
    pub documents: u64,
    /// Number of their tokens.
    pub tokens: u64,
    /// Number of its rows.
    pub rows: u64,
    /// Share of the rows of the run that are from the source.
    pub share: f64,
    /// Number of times that the source is seen within the run; `None` if the run file gives no steps and no epochs.
    pub epochs: Option<f64>,
}

/// Size of the evaluation data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EvaluationData {
    /// Number of documents that are used.
    pub documents: u64,
    /// Number of their tokens.
    pub tokens: u64,
    /// Number of tokens that are predicted.
    pub labelled_tokens: u64,
}

/// The abilities of the output for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextStyle {
    /// Whether text without labels is dimmed; otherwise it is in double brackets.
    pub dims: bool,
    /// Whether characters beyond ASCII are shown.
    pub unicode: bool,
}

impl DataReport {
    /// Returns the report as a JSON object on several lines.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data has a JSON form")
    }

    /// Returns the report for people. All text from files is made printable.
    pub fn text(&self, style: TextStyle) -> String {
        let mut text = self.figures();
        if !self.sources.is_empty() {
            text += &format!("\n{}", source_table(&self.sources));
        }
        if !self.lengths.is_empty() {
            text += &format!("\n{}", plot(&self.lengths, style.unicode));
        }
        for (index, sample) in self.samples.iter().enumerate() {
            text += &format!("\n{}", sample.describe(index + 1, style));
        }
        if !self.warnings.is_empty() {
            text += "\n";
        }
        for DataWarning { id, text: warning } in &self.warnings {
            text += &wrapped(&format!("warning ({id}): {warning}"), WIDTH, "  ");
        }
        text
    }

    /// Returns a line for each figure.
    fn figures(&self) -> String {
        let unknown = || "unknown".to_owned();
        let skipped = match self.skipped_documents {
            0 => String::new(),
            skipped => format!(" ({skipped} skipped: nothing to predict)"),
        };
        let labelled_share = self.labelled_tokens as f64 / self.tokens.max(1) as f64;
        let longest = |longest: &LongestDocument| {
            format!("{}, {}", format_count(longest.tokens, "token"), excerpt(&longest.place))
        };
        let padding = self.padding_share.map_or_else(unknown, |share| percent(share, 1));
        let layout = if self.pack { "packed" } else { "one document each" };
        let mut lines = vec![
            ("format", self.format.clone().unwrap_or_else(unknown)),
            ("files", self.file_names()),
            ("documents", format!("{}{skipped}", self.documents)),
            ("tokens", self.tokens.to_string()),
            ("labelled tokens", format!("{} ({})", self.labelled_tokens, percent(labelled_share, 1))),
        ];
        lines.extend(self.longest.as_ref().map(|document| ("longest document", longest(document))));
        if self.documents > 0 {
            lines.extend([
                ("rows", format!("{} of {} positions, {layout}, {padding} padding", self.rows, self.sequence)),
                ("longer than a row", format_count(self.long_documents, "document")),
                ("split over rows", format_count(self.split_documents, "document")),
                ("duplicates", self.duplicate_text()),
            ]);
        }
        lines.extend(self.eval.map(|eval| ("evaluation data", eval.text())));
        lines.into_iter().map(|(name, value)| wrapped(&format!("{name:18}{value}"), WIDTH, &" ".repeat(18))).collect()
    }

    fn file_names(&self) -> String {
        let listed = self.files.iter().take(LISTED_FILES).map(|file| excerpt(file)).collect::<Vec<_>>().join(", ");
        match self.files.len().saturating_sub(LISTED_FILES) {
            0 => listed,
            more => format!("{listed} and {}", format_count(more, "more file")),
        }
    }

    fn duplicate_text(&self) -> String {
        let documents = format_count(self.duplicates, "document");
        match self.compared_documents < self.documents {
            true => format!("{documents}, of the first {} that were compared", self.compared_documents),
            false => documents,
        }
    }
}

/// Returns a line for each source under a heading. Its paths come last, because they may be long.
fn source_table(sources: &[SourceReport]) -> String {
    let heading = ["source", "share", "seen", "rows", "documents", "tokens", "format"].map(str::to_owned).to_vec();
    let cells = sources.iter().enumerate().map(|(index, source)| source.cells(index + 1));
    let rows: Vec<Vec<String>> = std::iter::once(heading).chain(cells).collect();
    let paths = sources.iter().map(|source| excerpt(&source.path.join(", ")));
    let table = columns(&rows);
    table
        .lines()
        .zip(std::iter::once("path".to_owned()).chain(paths))
        .map(|(line, path)| format!("{line}  {path}\n"))
        .collect()
}

impl SourceReport {
    /// Returns the cells of the source in the table of sources. `number` counts the sources from 1.
    fn cells(&self, number: usize) -> Vec<String> {
        let unknown = || "unknown".to_owned();
        vec![
            number.to_string(),
            percent(self.share, 1),
            self.epochs.map_or_else(unknown, |epochs| format!("{epochs:.1} times")),
            self.rows.to_string(),
            self.documents.to_string(),
            self.tokens.to_string(),
            self.format.clone().unwrap_or_else(unknown),
        ]
    }
}

impl EvaluationData {
    fn text(&self) -> String {
        let documents = format_count(self.documents, "document");
        format!("{documents}, {} ({} labelled)", format_count(self.tokens, "token"), self.labelled_tokens)
    }
}

impl DataSample {
    /// Returns the text of the sample under a heading. `number` counts the samples from 1.
    fn describe(&self, number: usize, style: TextStyle) -> String {
        let labelled = self.labels.iter().skip(1).filter(|&&label| label != -100).count();
        let mask = if style.dims { "others dim" } else { "others in [[ ]]" };
        let tokens = format_count(self.input_ids.len(), "token");
        let mut body: String = self.parts.iter().map(|part| part.styled(style)).collect();
        let shown: usize = self.parts.iter().map(|part| part.tokens).sum();
        if shown < self.input_ids.len() {
            body += &format!("\n... and {}", format_count(self.input_ids.len() - shown, "more token"));
        }
        let lines: String = body.split('\n').map(|line| format!("  {line}").trim_end().to_owned() + "\n").collect();
        format!("sample {number}: {tokens}, {labelled} labelled ({mask})\n{lines}")
    }
}

impl SamplePart {
    /// Returns the text, with a mark on each line if it has no labels.
    fn styled(&self, style: TextStyle) -> String {
        let text = printable_text(&self.text);
        let (before, after) = match (self.is_labelled, style.dims) {
            (true, _) => ("", ""),
            (false, true) => ("\x1b[2m", "\x1b[0m"),
            (false, false) => return format!("[[{text}]]"),
        };
        text.split('\n').map(|line| format!("{before}{line}{after}")).collect::<Vec<_>>().join("\n")
    }
}

/// Plots the number of documents of each range of lengths as bars. The shortest ranges are one row if there are many.
fn plot(lengths: &[LengthBucket], unicode: bool) -> String {
    let (short, rest) = lengths.split_at(lengths.len().saturating_sub(PLOT_ROWS - 1).max(1));
    let shortest = LengthBucket {
        from_tokens: short[0].from_tokens,
        to_tokens: short[short.len() - 1].to_tokens,
        documents: short.iter().map(|bucket| bucket.documents).sum(),
    };
    let rows: Vec<LengthBucket> = std::iter::once(shortest).chain(rest.iter().copied()).collect();
    let most = rows.iter().map(|row| row.documents).max().unwrap_or(1).max(1);
    let mark = if unicode { "█" } else { "#" };
    // A range with documents has a bar.
    let line = |row: &LengthBucket| {
        let range = format!("{} to {}", row.from_tokens, row.to_tokens);
        let bar = (u128::from(row.documents) * u128::from(BAR_WIDTH)).div_ceil(u128::from(most)) as usize;
        format!("{range:>18}  {:>12}  {}", row.documents, mark.repeat(bar)).trim_end().to_owned() + "\n"
    };
    format!("{:>18}  {:>12}\n", "document length", "documents") + &rows.iter().map(line).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: TextStyle = TextStyle { dims: false, unicode: false };

    fn report() -> DataReport {
        let part = |text: &str, is_labelled| SamplePart { text: text.to_owned(), tokens: 2, is_labelled };
        DataReport {
            format: Some("messages and text".to_owned()),
            documents: 4,
            tokens: 40,
            labelled_tokens: 10,
            longest: Some(LongestDocument {
                tokens: 20,
                file: "a.jsonl".to_owned(),
                record: Some(3),
                place: "a.jsonl:3".to_owned(),
            }),
            samples: vec![DataSample {
                input_ids: vec![1, 2, 3, 4],
                labels: vec![-100, -100, 3, 4],
                text: Some("<s>hi\nyes\u{1b}</s>".to_owned()),
                parts: vec![part("<s>hi\n", false), part("yes\u{1b}</s>", true)],
            }],
            warnings: vec![DataWarning { id: "duplicates".to_owned(), text: "50 % are equal".to_owned() }],
            files: ["a", "b", "c", "d", "e"].map(|name| format!("{name}.jsonl")).to_vec(),
            skipped_documents: 1,
            sequence: 16,
            rows: 4,
            pack: false,
            padding_share: Some(0.25),
            long_documents: 1,
            split_documents: 1,
            duplicates: 2,
            compared_documents: 3,
            lengths: vec![LengthBucket { from_tokens: 4, to_tokens: 7, documents: 4 }],
            sources: Vec::new(),
            eval: Some(EvaluationData { documents: 2, tokens: 9, labelled_tokens: 7 }),
            refusal: None,
        }
    }

    #[test]
    fn masked_text_is_in_brackets_or_dim() {
        let plain = report().text(PLAIN);
        assert!(plain.contains("  [[<s>hi\n  ]]yes\\u{1b}</s>\n"), "{plain}");
        assert!(plain.is_ascii(), "{plain}");
        let dimmed = report().text(TextStyle { dims: true, unicode: true });
        assert!(dimmed.contains("  \u{1b}[2m<s>hi\u{1b}[0m\n  \u{1b}[2m\u{1b}[0myes\\u{1b}</s>\n"), "{dimmed}");
    }

    #[test]
    fn figures_name_files_and_limits() {
        let text = report().text(PLAIN);
        for words in [
            "a.jsonl, b.jsonl, c.jsonl and 2 more files\n",
            "4 (1 skipped: nothing to predict)\n",
            "10 (25.0 %)\n",
            "20 tokens, a.jsonl:3\n",
            "4 of 16 positions, one document each, 25.0 % padding\n",
            "2 documents, of the first 3 that were compared\n",
            "2 documents, 9 tokens (7 labelled)\n",
            "warning (duplicates): 50 % are equal\n",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
    }

    #[test]
    fn each_source_has_a_line() {
        let source = |path: &[&str], epochs| SourceReport {
            path: path.iter().map(|&path| path.to_owned()).collect(),
            format: Some("text".to_owned()),
            documents: 2,
            tokens: 20,
            rows: 2,
            share: 0.5,
            epochs,
        };
        let sources = vec![source(&["a.jsonl"], Some(2.25)), source(&["b\u{1b}.jsonl", "c.jsonl"], None)];
        let text = DataReport { sources, ..report() }.text(PLAIN);
        assert!(text.contains("\n1       50.0 %  2.2 times     2          2      20    text  a.jsonl\n"), "{text}");
        assert!(
            text.contains("\n2       50.0 %    unknown     2          2      20    text  b\\u{1b}.jsonl, c.jsonl\n"),
            "{text}"
        );
        assert!(!report().text(PLAIN).contains("source"));
    }

    #[test]
    fn plot_has_ten_rows_of_eighty_columns_at_most() {
        let bucket = |power: u32| LengthBucket {
            from_tokens: 1 << power,
            to_tokens: (2 << power) - 1,
            documents: 1 + u64::from(power) * 1_000_000_000,
        };
        let lengths: Vec<LengthBucket> = (1..28).map(bucket).collect();
        let text = plot(&lengths, false);
        assert_eq!(text.lines().count(), 1 + PLOT_ROWS);
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
        assert!(text.lines().nth(1).unwrap().trim_start().starts_with("2 to 524287 "), "{text}");
        assert!(plot(&lengths[..1], true).ends_with(&("█".repeat(40) + "\n")));
    }

    #[test]
    fn json_has_the_agreed_keys() {
        let json: serde_json::Value = serde_json::from_str(&report().json()).unwrap();
        assert_eq!(json["longest"], serde_json::json!({"tokens": 20, "file": "a.jsonl", "record": 3}));
        assert_eq!(json["samples"][0].as_object().unwrap().len(), 3);
        let without = DataReport { longest: None, padding_share: None, ..report() };
        let json: serde_json::Value = serde_json::from_str(&without.json()).unwrap();
        assert!(json["longest"].is_null() && json.get("padding_share").unwrap().is_null());
    }
}
