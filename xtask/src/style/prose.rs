//! Figures about prose: how comments open, words that hide the actor, and long sentences in documents.

use super::{Finding, Source};

/// First words that make the opening of a comment a bare clause instead of a verb or a noun phrase.
const BARE_OPENINGS: &[&str] = &["What", "Who", "Whoever", "Whatever", "That", "Where", "How", "So"];

/// Words that stand for an actor without naming the actor.
const HIDDEN_ACTORS: &[&str] = &["who", "nobody", "somebody", "whoever"];

/// Largest permitted number of words in a sentence of a document. Tables and code do not count as sentences.
const SENTENCE_WORDS_MAX: usize = 35;

/// Largest permitted number of words in documents: the start of the path, and the number.
const DOCUMENT_WORDS_MAX: [(&str, usize); 3] =
    [("README.md", 1200), ("docs/ARCHITECTURE.md", 2500), ("docs/design/", 900)];

/// A comment of one or more adjacent lines.
struct Comment {
    line: usize,
    text: String,
    is_doc: bool,
}

/// Returns the figures about the comments of all code files: bare clauses at the start, and hidden actors.
pub fn comments(sources: &[Source]) -> Vec<Finding> {
    let (mut docs, mut all, mut bare, mut hidden) = (0, 0, Vec::new(), Vec::new());
    for source in sources.iter().filter(|source| source.has_extension(&["rs", "py", "cu", "cuh", "cpp", "h"])) {
        for comment in comments_of(source) {
            let place = || format!("{}:{}: {}", source.path, comment.line, shorten(&comment.text));
            all += 1;
            if has_hidden_actor(&comment.text) {
                hidden.push(place());
            }
            if comment.is_doc {
                docs += 1;
                if opens_with_bare_clause(&comment.text) {
                    bare.push(place());
                }
            }
        }
    }
    vec![
        Finding { name: "doc comments that open with a bare clause", of: docs, places: bare, limit: 0.015 },
        Finding { name: "comments with who, nobody, somebody, whoever", of: all, places: hidden, limit: 0.002 },
    ]
}

/// Returns the figures that count long sentences in `README.md`, `CONTRIBUTING.md` and `docs/`, and long documents.
pub fn documents(sources: &[Source]) -> Vec<Finding> {
    let (mut long, mut long_documents) = (Vec::new(), Vec::new());
    for source in sources.iter().filter(|source| is_document(&source.path)) {
        for (line, sentence) in sentences(&source.text) {
            let words = sentence.split_whitespace().filter(|word| word.chars().any(char::is_alphanumeric)).count();
            if words > SENTENCE_WORDS_MAX {
                long.push(format!("{}:{line}: {words} words: {}", source.path, shorten(&sentence)));
            }
        }
        let words = source.text.split_whitespace().count();
        let limits = DOCUMENT_WORDS_MAX.iter().filter(|(path, _)| source.path.starts_with(path));
        let passed = limits.filter(|(_, most)| words > *most);
        long_documents.extend(passed.map(|(_, most)| format!("{}: {words} words, at most {most}", source.path)));
    }
    vec![
        Finding { name: "sentences above 35 words in README and docs", of: 0, places: long, limit: 0.0 },
        Finding { name: "documents with more words than permitted", of: 0, places: long_documents, limit: 0.0 },
    ]
}

fn is_document(path: &str) -> bool {
    path.ends_with(".md") && (path.starts_with("docs/") || ["README.md", "CONTRIBUTING.md"].contains(&path))
}

/// Returns all comments of a file. Adjacent comment lines of one kind form one comment, and each Python docstring is
/// one.
fn comments_of(source: &Source) -> Vec<Comment> {
    if source.path.ends_with(".py") { python_comments(&source.text) } else { line_comments(&source.text) }
}

fn line_comments(text: &str) -> Vec<Comment> {
    let mut comments: Vec<Comment> = Vec::new();
    let mut open: Option<&str> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        let marker = ["///", "//!", "//"].into_iter().find(|marker| line.starts_with(marker));
        if let Some(marker) = marker {
            let words = line[marker.len()..].trim();
            match comments.last_mut().filter(|_| open == Some(marker)) {
                Some(comment) => comment.text = format!("{} {words}", comment.text),
                None => comments.push(Comment { line: number, text: words.to_owned(), is_doc: marker != "//" }),
            }
        }
        open = marker;
    }
    comments
}

fn python_comments(text: &str) -> Vec<Comment> {
    let mut comments: Vec<Comment> = Vec::new();
    let (mut in_docstring, mut in_comment) = (false, false);
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if in_docstring {
            let comment = comments.last_mut().expect("a docstring was opened");
            comment.text = format!("{} {}", comment.text, line.trim_end_matches("\"\"\""));
            in_docstring = !line.ends_with("\"\"\"");
        } else if let Some(rest) = line.strip_prefix("\"\"\"") {
            comments.push(Comment { line: number, text: rest.trim_end_matches("\"\"\"").to_owned(), is_doc: true });
            in_docstring = !rest.ends_with("\"\"\"");
        } else if line.starts_with('#') && !line.starts_with("#!") {
            let words = line.trim_start_matches('#').trim();
            match comments.last_mut().filter(|_| in_comment) {
                Some(comment) => comment.text = format!("{} {words}", comment.text),
                None => comments.push(Comment { line: number, text: words.to_owned(), is_doc: false }),
            }
        }
        in_comment = line.starts_with('#');
    }
    comments
}

fn opens_with_bare_clause(text: &str) -> bool {
    let first = text.trim_start().split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
    BARE_OPENINGS.contains(&first)
}

fn has_hidden_actor(text: &str) -> bool {
    let mut words = text.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    words.any(|word| HIDDEN_ACTORS.iter().any(|actor| word.eq_ignore_ascii_case(actor)))
}

/// Returns the sentences of a Markdown text, each with the line on which its paragraph begins. Code blocks, tables,
/// headings and HTML are left out. A list item counts as a paragraph.
fn sentences(text: &str) -> Vec<(usize, String)> {
    let (mut paragraphs, mut in_code): (Vec<(usize, String)>, bool) = (Vec::new(), false);
    let mut goes_on = false;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.starts_with("```") {
            in_code = !in_code;
            goes_on = false;
            continue;
        }
        let is_prose = !line.is_empty() && !["|", "#", "<", "---"].iter().any(|mark| line.starts_with(mark));
        if in_code || !is_prose {
            goes_on = false;
            continue;
        }
        let is_item = line.starts_with("- ") || line.starts_with("* ") || starts_with_number(line);
        match paragraphs.last_mut().filter(|_| goes_on && !is_item) {
            Some((_, paragraph)) => {
                paragraph.push(' ');
                paragraph.push_str(line);
            }
            None => paragraphs.push((number, line.to_owned())),
        }
        goes_on = true;
    }
    paragraphs.iter().flat_map(|(line, text)| split_sentences(text).into_iter().map(|s| (*line, s))).collect()
}

/// Returns whether a line begins an item of a numbered list: `12. text`.
fn starts_with_number(line: &str) -> bool {
    line.split_once(". ").is_some_and(|(number, _)| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

/// Splits a paragraph into sentences, at each `.`, `!`, `?` and `:` before a space or at the end, outside of code
/// spans.
fn split_sentences(paragraph: &str) -> Vec<String> {
    let (mut sentences, mut sentence, mut in_span) = (Vec::new(), String::new(), false);
    let mut letters = paragraph.chars().peekable();
    while let Some(letter) = letters.next() {
        in_span ^= letter == '`';
        sentence.push(letter);
        let ends = matches!(letter, '.' | '!' | '?' | ':') && letters.peek().is_none_or(|next| *next == ' ');
        if ends && !in_span {
            sentences.push(std::mem::take(&mut sentence));
        }
    }
    sentences.push(sentence);
    sentences
}

fn shorten(text: &str) -> String {
    text.trim().chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_openings_and_hidden_actors_are_found() {
        let text = "/// What stays.\nfn a() {}\n/// Returns what\n/// nobody wants.\nfn b() {}\n// So be it.\n";
        let findings = comments(&[Source { path: "a.rs".to_owned(), text: text.to_owned() }]);
        assert_eq!((findings[0].of, findings[0].places.len()), (2, 1));
        assert_eq!((findings[1].of, findings[1].places.len()), (3, 1));
    }

    #[test]
    fn docstrings_are_doc_comments() {
        let text = "def f():\n    \"\"\"Where it is.\n\n    Whoever asks.\"\"\"\n    # Somebody.\n    # Else.\n";
        let findings = comments(&[Source { path: "a.py".to_owned(), text: text.to_owned() }]);
        assert_eq!((findings[0].of, findings[0].places.len()), (1, 1));
        assert_eq!((findings[1].of, findings[1].places.len()), (2, 2));
    }

    #[test]
    fn only_prose_sentences_count_in_documents() {
        let long = "word ".repeat(36);
        let text = format!("# {long}\n| {long} |\n```\n{long}\n```\n- one. two\n\n{long}. short\n");
        let findings = documents(&[Source { path: "docs/a.md".to_owned(), text }]);
        assert_eq!(findings[0].places.len(), 1, "{:?}", findings[0].places);
        assert!(findings[0].places[0].starts_with("docs/a.md:8: 36 words"));
    }
}
