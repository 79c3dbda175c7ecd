//! Training data: one or more sources, each a dataset of its own, with the order in which their rows are mixed.

use super::error::DataError;
use super::mixture::{MixtureOrder, SourceRow, ticks_of};
use super::order::RowOrder;
use super::rows::{Dataset, Rows};
use super::{RecordFormat, SourceLocation};
use sha2::{Digest, Sha256};

/// The training data of a run: sources, whose rows are mixed. A row belongs to one source.
#[derive(Debug)]
pub struct TrainingData {
    sources: Vec<Dataset>,
    /// Weights of the sources as whole numbers; `None` if each row comes once per epoch, and for one source.
    ticks: Option<Vec<u64>>,
    content_sha256: String,
}

impl TrainingData {
    /// Joins sources, of which there is at least one. All have rows of the same length. `weights` has a weight above 0 for
    /// each source; `None` if each row comes once per epoch.
    pub fn new(sources: Vec<Dataset>, weights: Option<&[f64]>) -> TrainingData {
        assert!(!sources.is_empty(), "training data have a source");
        let ticks = weights.filter(|_| sources.len() > 1).map(ticks_of);
        let content_sha256 = fingerprint(&sources, ticks.as_deref());
        TrainingData { sources, ticks, content_sha256 }
    }

    /// Returns the sources.
    pub fn sources(&self) -> &[Dataset] {
        &self.sources
    }

    /// Returns the share of the rows that each source has.
    pub fn shares(&self) -> Vec<f64> {
        let rows: Vec<u64> = self.sources.iter().map(Dataset::rows).collect();
        let parts = self.ticks.as_ref().unwrap_or(&rows);
        let sum = parts.iter().map(|&part| part as f64).sum::<f64>();
        parts.iter().map(|&part| part as f64 / sum).collect()
    }

    /// Returns the order of the rows. `order` has the seed and the number of [`rows`](Self::rows).
    pub fn order(&self, order: RowOrder) -> MixtureOrder {
        let rows: Vec<u64> = self.sources.iter().map(Dataset::rows).collect();
        MixtureOrder::new(order, &rows, self.ticks.as_deref())
    }

    /// Returns the number of times that each source is seen within the first `rows` rows of a run.
    pub fn epochs_of_sources(&self, rows: u64) -> Vec<f64> {
        self.order(RowOrder { seed: 0, rows: self.rows(), shuffle: false }).epochs_of_sources(rows)
    }

    /// Replaces the content of `into` by the rows `rows`.
    ///
    /// # Errors
    /// A token cache cannot be read or is damaged.
    pub fn read(&self, rows: impl IntoIterator<Item = SourceRow>, into: &mut Rows) -> Result<(), DataError> {
        into.clear();
        rows.into_iter().try_for_each(|SourceRow { source, row }| self.sources[source].read_row(row, into))
    }

    /// Returns T, the number of tokens per row.
    pub fn sequence(&self) -> u64 {
        self.sources[0].sequence()
    }

    /// Returns whether rows hold concatenated documents; otherwise each document begins a new row.
    pub fn is_packed(&self) -> bool {
        self.sources[0].is_packed()
    }

    /// Returns whether rows hold pairs of answers ([`Dataset::has_pairs`]).
    pub fn has_pairs(&self) -> bool {
        self.sources[0].has_pairs()
    }

    /// Returns the number of rows of all sources, which is the length of an epoch. Never 0.
    pub fn rows(&self) -> u64 {
        self.sum(Dataset::rows)
    }

    /// Returns the number of documents that are used: those with a token to predict.
    pub fn documents(&self) -> u64 {
        self.sum(Dataset::documents)
    }

    /// Returns the number of skipped documents: those without a label after the first token.
    pub fn skipped_documents(&self) -> u64 {
        self.sum(Dataset::skipped_documents)
    }

    /// Returns the number of tokens of all documents that are used, including end tokens.
    pub fn tokens(&self) -> u64 {
        self.sum(Dataset::tokens)
    }

    /// Returns the number of labelled tokens of all sources. Without weights, an epoch has as many. Never 0.
    pub fn labelled_tokens(&self) -> u64 {
        self.sum(Dataset::labelled_tokens)
    }

    /// Returns whether the data files of a source were tokenized when it was opened.
    pub fn is_new(&self) -> bool {
        self.sources.iter().any(Dataset::is_new)
    }

    /// Returns the formats of the files, each once.
    pub fn formats(&self) -> Vec<RecordFormat> {
        distinct(self.sources.iter().flat_map(Dataset::formats).copied())
    }

    /// Returns warnings about the chat template, each once.
    pub fn warnings(&self) -> Vec<String> {
        distinct(self.sources.iter().flat_map(Dataset::warnings).cloned())
    }

    /// Returns the trained tokens with which turns of the assistant end, each once; none without conversations.
    pub fn end_tokens(&self) -> Vec<u32> {
        distinct(self.sources.iter().flat_map(Dataset::end_tokens).copied())
    }

    /// Returns the number of tokens of the longest document, and its place.
    pub fn longest_document(&self) -> (u64, &SourceLocation) {
        let first = self.sources[0].longest_document();
        let longer = |longest: (u64, _), next: (u64, _)| if next.0 > longest.0 { next } else { longest };
        self.sources[1..].iter().map(Dataset::longest_document).fold(first, longer)
    }

    /// Returns a SHA-256 in hexadecimal that identifies the data. That of one source is the SHA-256 of its tokens and
    /// labels. That of several covers their contents, their order and their weights.
    pub fn content_sha256(&self) -> &str {
        &self.content_sha256
    }

    fn sum(&self, count: fn(&Dataset) -> u64) -> u64 {
        self.sources.iter().map(count).sum()
    }
}

/// Returns the value of [`TrainingData::content_sha256`].
fn fingerprint(sources: &[Dataset], ticks: Option<&[u64]>) -> String {
    if let [source] = sources {
        return source.content_sha256().to_owned();
    }
    let mut hasher = Sha256::new();
    for (index, source) in sources.iter().enumerate() {
        // 0 is no weight.
        let ticks = ticks.map_or(0, |ticks| ticks[index]);
        hasher.update(source.rows().to_le_bytes());
        hasher.update(ticks.to_le_bytes());
        hasher.update(source.content_sha256());
    }
    format!("{:x}", hasher.finalize())
}

/// Returns the values, each once, in the order of their first occurrence.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for value in values {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TestData, all_rows, training_values};
    use super::*;

    /// Returns data whose documents have the tokens from `first` on. Rows have 4 positions.
    fn source(first: i32, documents: i32) -> TestData {
        let document = |number: i32| ((0..5).map(|at| first + number * 5 + at).collect(), None);
        TestData::tokens(&(0..documents).map(document).collect::<Vec<_>>(), 4, false)
    }

    fn open(samples: &[&TestData], weights: Option<&[f64]>) -> TrainingData {
        TrainingData::new(samples.iter().map(|sample| sample.open().unwrap()).collect(), weights)
    }

    #[test]
    fn rows_of_a_mixture_are_those_of_their_sources() {
        let (few, many) = (source(0, 3), source(1000, 9));
        let data = open(&[&few, &many], Some(&[1.0, 1.0]));
        assert_eq!((data.rows(), data.documents(), data.tokens(), data.shares()), (12, 12, 60, vec![0.5, 0.5]));
        let order = data.order(RowOrder { seed: 1, rows: 12, shuffle: true });
        let mut rows = Rows::new(12, 4);
        data.read((0..12).map(|position| order.row(position)), &mut rows).unwrap();
        let of_few = rows.tokens.chunks(4).filter(|row| row[0] < 1000).count();
        assert_eq!((rows.len(), of_few), (12, 6));
        let alone = all_rows(&data.sources()[1]);
        for (index, row) in rows.tokens.chunks(4).enumerate().filter(|(_, row)| row[0] >= 1000) {
            let at = alone.tokens.chunks(4).position(|other| other == row).expect("a row of the source");
            let (mut found, mut expected) = (Rows::new(1, 4), Rows::new(1, 4));
            found.copy_from(&rows, index..index + 1);
            expected.copy_from(&alone, at..at + 1);
            assert_eq!(training_values(&found), training_values(&expected));
        }
    }

    #[test]
    fn fingerprint_covers_contents_order_and_weights() {
        let (first, second, other) = (source(0, 3), source(100, 3), source(200, 3));
        let sha = |samples: &[&TestData], weights| open(samples, weights).content_sha256().to_owned();
        let known = [
            sha(&[&first], None),
            sha(&[&first, &second], None),
            sha(&[&second, &first], None),
            sha(&[&first, &other], None),
            sha(&[&first, &second], Some(&[1.0, 1.0])),
            sha(&[&first, &second], Some(&[3.0, 1.0])),
        ];
        for (index, fingerprint) in known.iter().enumerate() {
            assert!(!known[..index].contains(fingerprint), "{index}");
        }
        assert_eq!(known[0], first.open().unwrap().content_sha256());
        assert_eq!(known[5], sha(&[&first, &second], Some(&[0.75, 0.25])), "the shares are equal");
    }
}
