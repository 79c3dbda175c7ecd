//! Tokenizing of documents in batches, in parallel, in the order of the files.

use super::conversation::{Conversation, Prompt};
use super::error::DataError;
use super::formats::{DataFile, PreferencePair};
use super::guard;
use super::record_writer::RecordWriter;
use super::source::{DocumentOrigin, DocumentPart};
use super::template::{
    ChatSession, ChatSettings, ChatTemplate, ConversationTokenizer, LabelledDocument, TemplateError,
};
use super::tokenizer::{ENCODE_TIME_MAX, Tokenizer};
use super::windows::{TokenWindow, WindowJoiner};
use super::{DataSpec, IGNORED_LABEL};
use rayon::prelude::*;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

/// Bytes of text per thread that are tokenized in one batch.
const BATCH_BYTES_PER_THREAD: usize = 256 << 10;
/// Bytes of a batch that a conversation counts for.
const CONVERSATION_WEIGHT: usize = 8 << 10;

/// An encoder that tokenizes documents in batches, in parallel, and passes the tokens to the writer in order.
pub(super) struct BatchEncoder {
    tokenizer: Arc<Tokenizer>,
    /// For conversations; `None` if the data have none, or the model has no template.
    chat: Option<Arc<ConversationTokenizer>>,
    /// Folder of the tokenizer, for messages.
    folder: PathBuf,
    end_token: Option<u32>,
    pool: rayon::ThreadPool,
    batch: Vec<BatchItem>,
    batch_bytes: usize,
    batch_bytes_max: usize,
    /// The windows of a document that goes on after the batch.
    joiner: Option<WindowJoiner>,
}

/// A document, or a window of one, that waits to be tokenized.
struct BatchItem {
    origin: DocumentOrigin,
    text: BatchText,
}

/// The text of a batch item.
enum BatchText {
    /// A window of a text, which begins at the byte `start` of the text.
    Window {
        window: String,
        start: usize,
        ends: bool,
    },
    /// A prompt and its completion.
    Pair {
        prompt: String,
        completion: String,
    },
    Conversation(Box<Conversation>),
    /// A prompt with two answers.
    Preference(PreferencePair),
    /// A prompt whose completions are sampled.
    Prompt(Prompt),
}

/// The tokens of a batch item.
enum BatchTokens {
    /// The tokens of a text in a single window.
    Whole(Vec<u32>),
    /// The tokens of one of several windows.
    Part { window: TokenWindow, ends: bool },
    /// A prompt and its completion.
    Pair(CompletionTokens),
    /// A prompt with the chosen answer, and with the rejected one, as texts.
    TextAnswers([CompletionTokens; 2]),
    /// A conversation with the chosen answer, and with the rejected one.
    ConversationAnswers([LabelledDocument; 2]),
    /// The documents of a conversation.
    Documents(Vec<LabelledDocument>),
    /// A prompt with the special tokens of its template.
    RenderedPrompt(Vec<u32>),
}

/// The tokens of a prompt and its completion.
struct CompletionTokens {
    ids: Vec<u32>,
    /// Number of tokens at the beginning that have no label.
    unlabelled: usize,
}

/// A failure to tokenize, with the place of the document if it is known.
struct EncodeFailure {
    origin: Option<DocumentOrigin>,
    cause: EncodeCause,
}

/// The cause of a failure to tokenize.
enum EncodeCause {
    Tokenizer(String),
    Template(TemplateError),
}

impl EncodeFailure {
    /// Adds the place in `files`.
    fn into_error(self, files: &[DataFile]) -> DataError {
        let location = self.origin.map(|origin| origin.location(files));
        match self.cause {
            EncodeCause::Tokenizer(reason) => DataError::Encode { location, reason },
            EncodeCause::Template(source) => DataError::Template { location, source },
        }
    }
}

impl BatchEncoder {
    /// Opens the tokenizer in `file` with `threads` threads. `chat` is the template of conversations with its settings.
    ///
    /// # Errors
    /// A tokenizer that cannot be used or has more tokens than the model, and a template that cannot be parsed.
    pub fn new(
        file: &Path,
        spec: &DataSpec,
        chat: Option<(ChatTemplate, ChatSettings)>,
        threads: usize,
    ) -> Result<BatchEncoder, DataError> {
        let tokenizer = Arc::new(Tokenizer::load(file)?);
        let (tokenizer_vocab, vocab) = (tokenizer.vocab(), spec.vocab);
        if tokenizer_vocab > vocab {
            return Err(DataError::TokenizerVocab { file: file.to_owned(), tokenizer_vocab, vocab });
        }
        let chat = chat.map(|(template, settings)| {
            let chat = ConversationTokenizer::new(Arc::clone(&tokenizer), template, settings);
            chat.map(Arc::new).map_err(|source| DataError::Template { location: None, source })
        });
        let chat = chat.transpose()?;
        let threads = threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|error| DataError::io("start threads for", file)(io::Error::other(error)))?;
        let batch_bytes_max = threads * BATCH_BYTES_PER_THREAD;
        let (batch, batch_bytes, joiner) = (Vec::new(), 0, None);
        let folder = file.parent().unwrap_or(Path::new(".")).to_owned();
        let end_token = spec.end_token;
        Ok(BatchEncoder { tokenizer, chat, folder, end_token, pool, batch, batch_bytes, batch_bytes_max, joiner })
    }

    /// Returns the warnings about the chat template so far, each once.
    pub fn warnings(&self) -> Vec<String> {
        self.chat.iter().flat_map(|chat| chat.warnings()).map(|warning| warning.to_string()).collect()
    }

    /// Returns the tokens so far with which turns of the assistant end.
    pub fn end_tokens(&self) -> Vec<u32> {
        self.chat.iter().flat_map(|chat| chat.end_tokens()).collect()
    }

    /// Adds a document, or a window of one, to the batch, and tokenizes and writes the batch if it is full. A document
    /// that needs no tokenizer is written after the batch.
    ///
    /// # Errors
    /// A text that cannot be tokenized, and a document that cannot be written.
    pub fn push_part(
        &mut self,
        origin: DocumentOrigin,
        part: DocumentPart,
        writer: &mut RecordWriter,
    ) -> Result<(), DataError> {
        let (text, bytes) = match part {
            DocumentPart::Text { window, start, ends } => {
                // Tokens with their places take more memory than ids.
                let weight = if start == 0 && ends { 1 } else { 2 };
                (BatchText::Window { window: window.to_owned(), start, ends }, weight * window.len())
            }
            DocumentPart::Pair { prompt, completion } => {
                let bytes = 2 * (prompt.len() + completion.len());
                (BatchText::Pair { prompt, completion }, bytes)
            }
            DocumentPart::Conversation(conversation) => {
                if self.chat.is_none() {
                    let source = TemplateError::NoTemplate { folder: self.folder.clone() };
                    return Err(DataError::Template { location: Some(origin.location(writer.files)), source });
                }
                // Its rendering, and tokens with their places.
                (BatchText::Conversation(conversation), CONVERSATION_WEIGHT)
            }
            DocumentPart::Preference(pair) => {
                if let (PreferencePair::Conversations(_), None) = (&pair, &self.chat) {
                    let source = TemplateError::NoTemplate { folder: self.folder.clone() };
                    return Err(DataError::Template { location: Some(origin.location(writer.files)), source });
                }
                let bytes = match &pair {
                    PreferencePair::Texts { prompt, answers } => {
                        2 * answers.iter().map(|answer| prompt.len() + answer.len()).sum::<usize>()
                    }
                    PreferencePair::Conversations(_) => 2 * CONVERSATION_WEIGHT,
                };
                (BatchText::Preference(pair), bytes)
            }
            DocumentPart::Prompt(prompt) => {
                let bytes = match &prompt {
                    Prompt::Text(text) => 2 * text.len(),
                    Prompt::Conversation(_) if self.chat.is_none() => {
                        let source = TemplateError::NoTemplate { folder: self.folder.clone() };
                        return Err(DataError::Template { location: Some(origin.location(writer.files)), source });
                    }
                    Prompt::Conversation(_) => CONVERSATION_WEIGHT,
                };
                (BatchText::Prompt(prompt), bytes)
            }
            DocumentPart::Verdict => {
                return Err(DataError::Unpaired { location: origin.location(writer.files) });
            }
            other => {
                self.flush(writer)?;
                return writer.write_part(origin, other);
            }
        };
        self.batch_bytes += bytes + size_of::<BatchItem>();
        self.batch.push(BatchItem { origin, text });
        if self.batch_bytes >= self.batch_bytes_max { self.flush(writer) } else { Ok(()) }
    }

    /// Tokenizes the batch in parallel and writes its tokens in order, with the end token after each document.
    ///
    /// # Errors
    /// A text that cannot be tokenized, and a document that cannot be written.
    pub fn flush(&mut self, writer: &mut RecordWriter) -> Result<(), DataError> {
        let batch = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        if batch.is_empty() {
            return Ok(());
        }
        let origins: Vec<_> = batch.iter().map(|item| item.origin).collect();
        let encoded = self.encode_batch(batch).map_err(|failure| failure.into_error(writer.files))?;
        for (origin, tokens) in origins.into_iter().zip(encoded) {
            self.write_tokens(origin, tokens, writer)?;
        }
        Ok(())
    }

    /// Writes the tokens of a batch item, with the special tokens before and after each document.
    fn write_tokens(
        &mut self,
        origin: DocumentOrigin,
        tokens: BatchTokens,
        writer: &mut RecordWriter,
    ) -> Result<(), DataError> {
        let tokenizer = Arc::clone(&self.tokenizer);
        let (ids, begins, ends) = match tokens {
            BatchTokens::Whole(ids) => (ids, true, true),
            BatchTokens::Part { window, ends } => {
                let begins = window.start == 0;
                let failed = |reason| DataError::Encode { location: Some(origin.location(writer.files)), reason };
                (self.join_window(window, ends).map_err(failed)?, begins, ends)
            }
            BatchTokens::Pair(pair) => {
                let document = self.add_special_tokens(pair)?;
                return writer.write_document(origin, &document);
            }
            BatchTokens::RenderedPrompt(ids) => {
                let end_token = self.end_token.ok_or_else(|| self.no_end_token())? as i32;
                let mut labels = vec![IGNORED_LABEL; ids.len()];
                let mut ids: Vec<i32> = ids.into_iter().map(|id| id as i32).collect();
                ids.push(end_token);
                labels.push(end_token);
                return writer.write_document(origin, &LabelledDocument { ids, labels });
            }
            BatchTokens::Documents(documents) => {
                return documents.iter().try_for_each(|document| writer.write_document(origin, document));
            }
            BatchTokens::TextAnswers([chosen, rejected]) => {
                let pair = [self.add_special_tokens(chosen)?, self.add_special_tokens(rejected)?];
                return writer.write_pair(origin, &pair);
            }
            BatchTokens::ConversationAnswers(pair) => return writer.write_pair(origin, &pair),
        };
        for &id in if begins { tokenizer.prefix() } else { &[] } {
            writer.write_text_token(origin, id, true)?;
        }
        for &id in &ids {
            writer.write_text_token(origin, id, true)?;
        }
        if ends {
            for &id in tokenizer.suffix() {
                writer.write_text_token(origin, id, true)?;
            }
            let last = tokenizer.suffix().last().or(ids.last()).or(tokenizer.prefix().last());
            let end_token = self.end_token.ok_or_else(|| self.no_end_token())?;
            if last != Some(&end_token) {
                writer.write_text_token(origin, end_token, true)?;
            }
            writer.end_document(origin);
        }
        Ok(())
    }

    /// Adds prefix, suffix and a missing end token to a prompt with its completion. Labels everything after the prompt; without
    /// a prompt, every token.
    fn add_special_tokens(
        &self,
        CompletionTokens { ids, unlabelled }: CompletionTokens,
    ) -> Result<LabelledDocument, DataError> {
        let (prefix, suffix) = (self.tokenizer.prefix(), self.tokenizer.suffix());
        let end_token = self.end_token.ok_or_else(|| self.no_end_token())?;
        let last = suffix.last().or(ids.last()).or(prefix.last());
        // The end token of a prompt does not end its completion.
        let lacks_end = last != Some(&end_token) || ids.len() <= unlabelled;
        let unlabelled = if unlabelled == 0 { 0 } else { prefix.len() + unlabelled };
        let tokens = prefix.iter().chain(&ids).chain(suffix).chain(lacks_end.then_some(&end_token));
        let ids: Vec<i32> = tokens.map(|&id| id as i32).collect();
        let labels = ids.iter().enumerate().map(|(at, &id)| if at < unlabelled { IGNORED_LABEL } else { id }).collect();
        Ok(LabelledDocument { ids, labels })
    }

    fn no_end_token(&self) -> DataError {
        DataError::NoEndToken { tokenizer: self.folder.join("tokenizer.json") }
    }

    /// Tokenizes a batch in parallel, within a limit of time.
    fn encode_batch(&self, batch: Vec<BatchItem>) -> Result<Vec<BatchTokens>, EncodeFailure> {
        let (done, finished) = mpsc::channel();
        let (tokenizer, chat) = (Arc::clone(&self.tokenizer), self.chat.clone());
        self.pool.spawn(move || {
            let session = || chat.as_deref().map(ConversationTokenizer::session);
            let encode = |chat: &mut Option<ChatSession>, item| encode_item(&tokenizer, chat.as_mut(), item);
            let _ = done.send(batch.into_par_iter().map_init(session, encode).collect());
        });
        let late = |reason: String| {
            let cause = EncodeCause::Tokenizer(self.tokenizer.name_file(&reason));
            EncodeFailure { origin: None, cause }
        };
        guard::receive_limited(&finished, ENCODE_TIME_MAX).map_err(late)?
    }

    /// Joins a window with those before it in its document. Returns the tokens that are known now.
    fn join_window(&mut self, window: TokenWindow, ends: bool) -> Result<Vec<u32>, String> {
        let Some(mut joiner) = self.joiner.take().filter(|_| window.start > 0) else {
            self.joiner = Some(WindowJoiner::new(window));
            return Ok(Vec::new());
        };
        let mut ids = joiner.add(window, ends, &self.tokenizer)?;
        if ends {
            ids.extend(joiner.finish());
        } else {
            self.joiner = Some(joiner);
        }
        Ok(ids)
    }
}

/// Tokenizes a batch item. A window that is only a part of its document has tokens with their places.
fn encode_item(
    tokenizer: &Tokenizer,
    chat: Option<&mut ChatSession>,
    BatchItem { origin, text }: BatchItem,
) -> Result<BatchTokens, EncodeFailure> {
    let encoded = match text {
        BatchText::Window { window, start: 0, ends: true } => tokenizer.encode_whole(&window).map(BatchTokens::Whole),
        BatchText::Window { window, start, ends } => tokenizer
            .encode_placed(&window)
            .map(|tokens| BatchTokens::Part { window: TokenWindow { text: window, start, tokens }, ends }),
        BatchText::Pair { prompt, completion } => {
            encode_completion(tokenizer, &prompt, &completion).map(BatchTokens::Pair)
        }
        // The end token after the prompt is its only label: the completion is empty.
        BatchText::Prompt(Prompt::Text(prompt)) => encode_completion(tokenizer, &prompt, "").map(BatchTokens::Pair),
        BatchText::Prompt(Prompt::Conversation(conversation)) => {
            let chat = chat.expect("a batch with a conversation has a template");
            let failed = |error| EncodeFailure { origin: Some(origin), cause: EncodeCause::Template(error) };
            let text = chat.render_prompt(&conversation).map_err(failed)?;
            tokenizer.encode_whole(&text).map(BatchTokens::RenderedPrompt)
        }
        BatchText::Preference(PreferencePair::Texts { prompt, answers: [chosen, rejected] }) => {
            let encode = |answer: &str| encode_completion(tokenizer, &prompt, answer);
            encode(&chosen).and_then(|chosen| Ok(BatchTokens::TextAnswers([chosen, encode(&rejected)?])))
        }
        BatchText::Preference(PreferencePair::Conversations(conversations)) => {
            let chat = chat.expect("a batch with a conversation has a template");
            let [chosen, rejected] = &conversations;
            let pair = tokenize_answer(chat, chosen).and_then(|chosen| Ok([chosen, tokenize_answer(chat, rejected)?]));
            let failed = |error| EncodeFailure { origin: Some(origin), cause: EncodeCause::Template(error) };
            return pair.map(BatchTokens::ConversationAnswers).map_err(failed);
        }
        BatchText::Conversation(conversation) => {
            let chat = chat.expect("a batch with a conversation has a template");
            let documents = chat.tokenize(&conversation);
            let failed = |error| EncodeFailure { origin: Some(origin), cause: EncodeCause::Template(error) };
            return documents.map(BatchTokens::Documents).map_err(failed);
        }
    };
    encoded.map_err(|reason| EncodeFailure { origin: Some(origin), cause: EncodeCause::Tokenizer(reason) })
}

/// Tokenizes a conversation with an answer, which must give one document.
fn tokenize_answer(chat: &mut ChatSession, conversation: &Conversation) -> Result<LabelledDocument, TemplateError> {
    let documents = chat.tokenize(conversation)?;
    let [document] = <[LabelledDocument; 1]>::try_from(documents)
        .map_err(|documents| TemplateError::SplitAnswer { documents: documents.len() })?;
    Ok(document)
}

/// Tokenizes a prompt with its completion. The tokens are those of the joined text if they begin with the tokens of the
/// prompt alone, which a model sees when it answers. Otherwise both are tokenized by themselves.
fn encode_completion(tokenizer: &Tokenizer, prompt: &str, completion: &str) -> Result<CompletionTokens, String> {
    let mut ids = tokenizer.encode_whole(prompt)?;
    let unlabelled = ids.len();
    let joined = tokenizer.encode_whole(&format!("{prompt}{completion}"))?;
    if joined.starts_with(&ids) {
        ids = joined;
    } else {
        ids.extend(tokenizer.encode_whole(completion)?);
    }
    Ok(CompletionTokens { ids, unlabelled })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{TestData, all_rows};
    use super::super::{Format, Objective, RecordFormat, TrainOn, addition_example};
    use serde_json::json;
    use std::fs;

    /// Returns text data with a tokenizer that merges `1` and `2` into the token 14, and the record `line`.
    fn sample(line: &str, sequence: u64) -> TestData {
        let mut sample = TestData::text(&[], sequence, false);
        let mut tokenizer = addition_example::tokenizer();
        tokenizer["model"]["vocab"]["12"] = json!(14);
        tokenizer["model"]["merges"] = json!([["1", "2"]]);
        fs::write(sample.tokenizer.as_ref().unwrap(), tokenizer.to_string()).unwrap();
        fs::write(sample.path("train.jsonl"), line).unwrap();
        sample.spec.format = Format::Auto;
        sample
    }

    /// Returns tokens and labels of a document with a prompt and its completion.
    fn pair(prompt: &str, completion: &str) -> (Vec<i32>, Vec<i32>) {
        let data = sample(&json!({ "prompt": prompt, "completion": completion }).to_string(), 5).open().unwrap();
        assert_eq!(data.formats(), [RecordFormat::PromptCompletion]);
        let rows = all_rows(&data);
        (rows.tokens, rows.labels)
    }

    #[test]
    fn only_completions_have_labels() {
        assert_eq!(pair("3+4=", "7"), (vec![3, 10, 4, 11, 7], vec![-100, -100, -100, 7, 12]));
        assert_eq!(pair("", "3+4"), (vec![3, 10, 4, 12, 0], vec![10, 4, 12, -100, -100]));
        assert_eq!(pair("3+4", ""), (vec![3, 10, 4, 12, 0], vec![-100, -100, 12, -100, -100]));
        // The end token of the prompt is not that of the completion, which then has its own.
        assert_eq!(pair("3<end>", ""), (vec![3, 12, 12, 0, 0], vec![-100, 12, -100, -100, -100]));
        assert_eq!(pair("3", "4<end>"), (vec![3, 4, 12, 0, 0], vec![4, 12, -100, -100, -100]));
    }

    #[test]
    fn prompts_keep_the_tokens_that_they_have_alone() {
        assert_eq!(pair("12", "3"), (vec![14, 3, 12, 0, 0], vec![3, 12, -100, -100, -100]));
        assert_eq!(pair("3", "12"), (vec![3, 14, 12, 0, 0], vec![14, 12, -100, -100, -100]));
        assert_eq!(pair("1", "2"), (vec![1, 2, 12, 0, 0], vec![2, 12, -100, -100, -100]), "not the token of both");
    }

    #[test]
    fn pairs_of_answers_are_two_documents_each() {
        let lines = [
            json!({ "prompt": "3+4=", "chosen": "7", "rejected": "12" }),
            json!({ "chosen": "5", "rejected": "66" }),
            json!({ "prompt": "7", "chosen": "", "rejected": "8" }),
        ];
        let lines = lines.map(|line| line.to_string()).join("\n");
        let open = |pack: bool, sequence: u64| {
            let mut sample = sample(&lines, sequence);
            (sample.spec.objective, sample.spec.pack) = (Objective::Dpo, pack);
            sample.open().map(|data| (all_rows(&data), data)).map_err(|error| error.to_string())
        };
        const I: i32 = -100;
        // Padded: the answers of a prompt are two documents of one row. The last end token is only a target.
        let (rows, data) = open(false, 12).unwrap();
        assert_eq!((data.rows(), data.documents(), data.is_packed(), data.has_pairs()), (3, 6, false, true));
        let [first, second, third] = [0, 1, 2].map(|row| row * 12..(row + 1) * 12);
        assert_eq!(rows.tokens[first.clone()], [3, 10, 4, 11, 7, 12, 3, 10, 4, 11, 14, 12]);
        assert_eq!(rows.labels[first.clone()], [I, I, I, 7, 12, I, I, I, I, 14, 12, I]);
        assert_eq!(rows.document_start[first], [0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 6, 6]);
        assert_eq!(rows.tokens[second.clone()][..5], [5, 12, 6, 6, 12]);
        assert_eq!(rows.labels[second][..6], [12, I, 6, 12, I, I]);
        assert_eq!(rows.labels[third][..4], [12, I, 8, 12]);
        // Packed: as many pairs as fit, and no pair in two rows.
        let (packed, data) = open(true, 17).unwrap();
        assert_eq!((data.rows(), data.is_packed()), (2, true));
        assert_eq!(packed.tokens[..17], [3, 10, 4, 11, 7, 12, 3, 10, 4, 11, 14, 12, 5, 12, 6, 6, 12]);
        assert_eq!(packed.tokens[17..22], [7, 12, 7, 8, 12]);
        let sums = |row| packed.sum_documents(row, |at| at as f64);
        assert_eq!(sums(0), [3.0 + 4.0, 9.0 + 10.0, 12.0, 14.0 + 15.0]);
        assert_eq!(sums(1), [17.0, 19.0 + 20.0]);
        let mut weighed = packed;
        weighed.set_document_weights(0, &[0.5, -0.5, 2.0, 0.0]);
        let weighted: Vec<f32> = weighed.weights[..17].iter().copied().filter(|&weight| weight != 0.0).collect();
        assert_eq!(weighted, [0.5, 0.5, -0.5, -0.5, 2.0]);
        let refused = open(true, 10).unwrap_err();
        assert!(refused.contains(":1: the pair needs 11 positions"), "{refused}");
        assert_eq!(open(true, 11).unwrap().1.rows(), 2);
    }

    #[test]
    fn conversations_of_a_pair_train_on_the_answers_only() {
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        let (question, hint) = (message("user", "3+4="), message("assistant", "1"));
        let answers = [message("assistant", "7"), message("assistant", "8")];
        let [chosen, rejected] = &answers;
        let records = [
            json!({ "prompt": [question, hint, question], "chosen": [chosen], "rejected": [rejected] }),
            // The prompt is what both begin with.
            json!({ "chosen": [question, hint, question, chosen], "rejected": [question, hint, question, rejected] }),
        ];
        let labels = records.map(|record| {
            let mut sample = sample(&record.to_string(), 64);
            (sample.spec.objective, sample.spec.chat.train_on) = (Objective::Dpo, TrainOn::All);
            let template = "9{% for m in messages %}{{ m['content'] }}<end>{% endfor %}";
            fs::write(sample.path("chat_template.jinja"), template).unwrap();
            sample.spec.chat.template = Some(sample.path("chat_template.jinja").display().to_string());
            let rows = all_rows(&sample.open().unwrap());
            (rows.tokens, rows.labels)
        });
        assert_eq!(labels[0], labels[1]);
        let trained: Vec<i32> = labels[0].1.iter().copied().filter(|&label| label >= 0).collect();
        assert_eq!(trained, [7, 12, 8, 12]);
        let same = json!({ "chosen": [question, chosen], "rejected": [question, chosen] });
        let mut same = sample(&same.to_string(), 64);
        same.spec.objective = Objective::Dpo;
        let refused = same.open().unwrap_err().to_string();
        assert!(
            refused.contains("`chosen` has no message of the assistant after those that both answers share"),
            "{refused}"
        );
    }

    #[test]
    fn files_of_several_formats_keep_their_order() {
        let mut sample = sample("{\"text\": \"1\"}\n{\"text\": \"34\"}\n", 3);
        fs::write(sample.path("b.json"), "[{\"input_ids\": [5, 6], \"labels\": [-100, 6]}]").unwrap();
        fs::write(sample.path("c.csv"), "prompt,completion\n7,8\n").unwrap();
        let paths =
            ["train.jsonl", "b.json", "c.csv", "train.jsonl"].map(|name| sample.path(name).display().to_string());
        sample.spec.patterns = paths.to_vec();
        let data = sample.open().unwrap();
        assert_eq!(data.formats(), [RecordFormat::Text, RecordFormat::Tokens, RecordFormat::PromptCompletion]);
        let rows = all_rows(&data);
        assert_eq!(rows.tokens, [1, 12, 0, 3, 4, 12, 5, 6, 0, 7, 8, 12]);
        assert_eq!(rows.labels, [12, -100, -100, 4, 12, -100, 6, -100, -100, 8, 12, -100]);
        assert_eq!(data.labelled_tokens(), 6);
        // The same files with the same formats have the same tokens, whether the formats are named or recognized.
        sample.spec.patterns = vec![sample.path("train.jsonl").display().to_string()];
        assert!(sample.open().unwrap().is_new());
        sample.spec.format = Format::Text;
        assert!(!sample.open().unwrap().is_new());
    }

    #[test]
    fn data_without_use_are_refused() {
        let conversation = json!({ "messages": [{ "role": "user", "content": "3+4" }] }).to_string();
        let long = json!({ "prompt": "3".repeat(1 << 20), "completion": "4" }).to_string();
        for (line, expected) in [
            (
                "{\"chosen\": \"1\", \"rejected\": \"2\"}",
                ": its format is preference, which only train.objective = \"dpo\" takes",
            ),
            (&conversation, " has no chat template"),
            (&long, ":1: the prompt with its completion or longer answer is longer than 1.00 MiB"),
        ] {
            let refusal = sample(line, 5).open().unwrap_err().to_string();
            assert!(refusal.contains(expected), "{refusal}");
        }
    }
}
