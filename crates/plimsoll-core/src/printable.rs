//! Text as it may reach a terminal or a log: without characters that act on a terminal, and of bounded length.
//!
//! Names, paths, keys, tokens and messages of other machines may contain anything. They are stored as they are, also in
//! JSON, and pass through this module where they are printed.

use std::borrow::Cow;

/// The most characters of a name in a message. The middle of a longer one is left out.
pub const MAX_NAME_CHARS: usize = 200;

/// The most characters of a line. The longest path has 4096 bytes, and a command may contain several.
const MAX_LINE_CHARS: usize = 16_000;

/// Returns text of several lines for a terminal: with an escape such as `\u{1b}` for each unprintable
/// character except line breaks and tabs.
pub fn printable_text(text: &str) -> Cow<'_, str> {
    escaped(text, &['\n', '\t'])
}

/// Returns text as one line for a terminal, with escapes for line breaks and other unprintable characters. The middle
/// of a text of many thousand characters is left out.
pub fn printable_line(text: &str) -> String {
    escaped(&shortened(text, MAX_LINE_CHARS), &[]).into_owned()
}

/// Returns a message as [`printable_line`] does, and also leaves out the middle of words above [`MAX_NAME_CHARS`], such
/// as names from a file.
pub fn printable_message(message: &str) -> String {
    let words = message.split_inclusive(char::is_whitespace);
    printable_line(&words.map(|word| shortened(word, MAX_NAME_CHARS)).collect::<String>())
}

/// Returns text of at most `max_chars` characters: `…` replaces the middle of a longer one.
pub fn shortened(text: &str, max_chars: usize) -> Cow<'_, str> {
    // A character has at least one byte.
    let count = if text.len() <= max_chars { text.len() } else { text.chars().count() };
    if count <= max_chars {
        return Cow::Borrowed(text);
    }
    let tail = max_chars / 3;
    let head = text.chars().take(max_chars - 1 - tail);
    head.chain(['…']).chain(text.chars().skip(count - tail)).collect()
}

/// Replaces each unprintable character that is not in `kept` by its escape.
fn escaped<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let is_shown = |c: char| kept.contains(&c) || is_printable(c);
    if text.chars().all(is_shown) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_shown(c) {
            escaped.push(c);
        } else {
            escaped.extend(c.escape_default());
        }
    }
    Cow::Owned(escaped)
}

/// Returns whether a character is shown and does nothing else to a terminal. False for control characters (C0, C1),
/// line and paragraph separators, directions of text (bidi), zero-width and other invisible characters, and characters
/// without a meaning in Unicode.
fn is_printable(c: char) -> bool {
    match c {
        ' '..='~' => true,
        '\u{2028}' | '\u{2029}' => false,
        // Letters without a glyph: Hangul fillers.
        '\u{115f}' | '\u{1160}' | '\u{3164}' | '\u{ffa0}' => false,
        _ if c.is_control() => false,
        _ if c.is_alphanumeric() || c.is_whitespace() => true,
        // The standard library knows the other characters. It escapes a combining mark only at the start of a text.
        _ => String::from_iter(['a', c]).escape_debug().nth(1) == Some(c),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_act_are_escaped() {
        let c0 = "\0 \u{7} \u{8} \u{1b}]0;x \r \u{7f}";
        assert_eq!(printable_text(c0), r"\u{0} \u{7} \u{8} \u{1b}]0;x \r \u{7f}");
        let escaped_chars = ('\u{0}'..'\u{20}').chain('\u{7f}'..='\u{9f}').chain('\u{200b}'..='\u{200f}');
        let bidi = ('\u{2028}'..='\u{202e}').chain('\u{2060}'..='\u{2064}').chain('\u{2066}'..='\u{206f}');
        let others = "\u{ad}\u{61c}\u{180e}\u{3164}\u{feff}\u{fff9}\u{e0001}\u{e0041}\u{e000}".chars();
        for c in escaped_chars.chain(bidi).chain(others) {
            let line = printable_line(&format!("x{c}y"));
            assert!(line.starts_with("x\\") && line.ends_with('y') && !line.contains(c), "{line:?}");
        }
    }

    #[test]
    fn shown_characters_stay() {
        let text = "it's \"a\" C:\\b `c` é e\u{301} größer 数\u{3000}据 हिन्दी עברית 😀\u{a0}→ × …";
        assert!(matches!(printable_text(text), Cow::Borrowed(same) if same == text));
        assert_eq!(printable_message(text), text);
        assert_eq!(printable_text("a\n\tb"), "a\n\tb");
        assert_eq!(printable_line("a\n\tb"), r"a\n\tb");
    }

    #[test]
    fn escaped_text_stays_as_it_is() {
        let once = printable_message(&format!("a\u{1b}b {}", "n".repeat(1000)));
        assert_eq!(printable_message(&once), once);
    }

    #[test]
    fn names_in_messages_are_bounded() {
        let path = format!("runs/{}/model.safetensors", "å".repeat(70_000));
        let message = printable_message(&format!("cannot read {path}: gone"));
        let name = message.split(' ').nth(2).unwrap();
        assert!(name.chars().count() <= MAX_NAME_CHARS, "{name}");
        let [start, end] = ["cannot read runs/åå", "/model.safetensors: gone"];
        assert!(message.starts_with(start) && message.ends_with(end), "{message}");
        let many_words = printable_line(&"word ".repeat(100_000));
        assert_eq!(many_words.chars().count(), MAX_LINE_CHARS);
        assert_eq!((&*shortened("äbcdef", 6), &*shortened("abcdefg", 4)), ("äbcdef", "ab…g"));
    }
}
