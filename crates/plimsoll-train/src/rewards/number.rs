//! The reward `numeric`: the last number of a text, compared exactly.

use super::Completion;
use super::text::column_text;
use plimsoll_core::Failure;
use plimsoll_core::printable::shortened;
use regex_automata::meta::Regex;
use std::sync::LazyLock;

/// A run of digits with thousands separators, a fraction and an exponent, or a fraction alone. Signs are found in the
/// text before it.
static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
    let separator = format!("[{}]", String::from_iter(SEPARATORS));
    let pattern = format!(r"(?:[0-9]+(?:{separator}[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?");
    Regex::new(&pattern).expect("the pattern is valid")
});

/// Thousands separators: the comma, and spaces at which a line does not break.
const SEPARATORS: [char; 4] = [',', '\u{a0}', '\u{2009}', '\u{202f}'];

/// Largest exponent. Larger ones count as this one.
const EXPONENT_MAX: i64 = 1_000_000_000_000;

/// Most characters of a column in a message.
const SHOWN_CHARS: usize = 80;

/// A decimal number: `digits` × 10^`exponent`. Equal numbers have equal fields.
#[derive(Debug, PartialEq, Eq)]
struct Decimal {
    negative: bool,
    /// Digits without zeros at the start and at the end; empty for 0.
    digits: String,
    exponent: i64,
}

impl Decimal {
    /// Parses digits with an optional fraction and exponent, without separators and sign.
    fn new(negative: bool, number: &str) -> Decimal {
        let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let all = format!("{whole}{fraction}");
        let without_end = all.trim_end_matches('0');
        let digits = without_end.trim_start_matches('0').to_owned();
        if digits.is_empty() {
            return Decimal { negative: false, digits, exponent: 0 };
        }
        let zeros = (all.len() - without_end.len()) as i64;
        let exponent = parse_exponent(exponent) - fraction.len() as i64 + zeros;
        Decimal { negative, digits, exponent }
    }
}

/// Parses an exponent, bounded by ± [`EXPONENT_MAX`].
fn parse_exponent(text: &str) -> i64 {
    let bound = if text.starts_with('-') { -EXPONENT_MAX } else { EXPONENT_MAX };
    text.parse().map_or(bound, |exponent: i64| exponent.clamp(-EXPONENT_MAX, EXPONENT_MAX))
}

/// Returns whether the last number of a completion equals the last number of a column. A text without a number returns
/// false.
///
/// # Errors
/// Those of [`column_text`], or a column without a number.
pub(super) fn matches(reward: &str, column: &str, completion: &Completion) -> Result<bool, Failure> {
    let expected = column_text(reward, column, completion)?;
    let Some(expected) = last_number(&expected) else {
        let shown = shortened(&expected, SHOWN_CHARS);
        return Err(Failure::input(format!(
            "reward {reward}: key `{column}` of a record holds {shown:?}, expected a number"
        )));
    };
    Ok(last_number(completion.text) == Some(expected))
}

/// Returns the last number of a text. Currency and percent signs are ignored.
fn last_number(text: &str) -> Option<Decimal> {
    let range = NUMBER.find_iter(text).last()?.range();
    let (before, number) = (&text[..range.start], &text[range]);
    // The last part of `1.2.3` is no fraction.
    let number = match number.strip_prefix('.') {
        Some(digits) if before.ends_with(|c: char| c.is_ascii_digit() || c == '.') => digits,
        _ => number,
    };
    let groups: Vec<&str> = number.split(SEPARATORS).collect();
    // The last group may have a fraction and an exponent.
    let digit_count = |group: &str| group.find(|c: char| !c.is_ascii_digit()).unwrap_or(group.len());
    let is_grouped = (1..=3).contains(&groups[0].len()) && groups[1..].iter().all(|group| digit_count(group) == 3);
    // Otherwise the commas stand between several numbers.
    match is_grouped {
        true => Some(Decimal::new(is_negative(before), &groups.concat())),
        false if groups.len() == 1 => Some(Decimal::new(is_negative(before), number)),
        false => groups.last().map(|last| Decimal::new(false, last)),
    }
}

/// Returns whether a text ends with a minus sign that belongs to the number after it: `-5`, `-$5`, `$-5`, but not
/// `3-5`.
fn is_negative(before: &str) -> bool {
    let is_currency = |c: char| matches!(c, '$' | '€' | '£' | '¥' | '₹' | '\\');
    let before = before.trim_end_matches(is_currency);
    let Some(before) = before.strip_suffix(['-', '−']) else { return false };
    let ends_term = |c: char| c.is_alphanumeric() || matches!(c, ')' | ']' | '}' | '%' | '-' | '−');
    !before.trim_end_matches(is_currency).ends_with(ends_term)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(text: &str) -> Decimal {
        Decimal::new(text.starts_with('-'), text.trim_start_matches('-'))
    }

    #[test]
    fn last_number_of_text_is_found() {
        let cases = [
            ("3 + 4 = 7", "7"),
            ("She has 5 + 3 = 8 eggs.\n#### 8", "8"),
            ("#### -1,234.50", "-1234.5"),
            ("$1,000,000", "1000000"),
            ("-$5.00", "-5"),
            ("$-5", "-5"),
            (r"\boxed{-\$5}", "-5"),
            ("it costs €3.50.", "3.5"),
            ("50%", "50"),
            ("−12 °C", "-12"),
            ("+7", "7"),
            ("3-5", "5"),
            ("10%-20%", "20"),
            ("(2)-1", "1"),
            ("answer--5", "5"),
            ("x = -5", "-5"),
            (".5", "0.5"),
            ("-.5", "-0.5"),
            ("1.2.3", "3"),
            ("...4", "4"),
            ("1,2,3", "3"),
            ("1,2345", "2345"),
            ("1234,567", "567"),
            ("-1,2", "2"),
            ("12\u{a0}345\u{202f}678", "12345678"),
            ("größer als ２ und 3 数据", "3"),
            ("42.", "42"),
            ("1e3", "1000"),
            ("2.5E-3", "0.0025"),
            ("1e99999999999999999999", "1e1000000000000"),
            ("1e-99999999999999999999", "1e-1000000000000"),
            ("007", "7"),
            ("-0", "0"),
        ];
        for (text, expected) in cases {
            assert_eq!(last_number(text), Some(number(expected)), "{text}");
        }
        for text in ["", "none", "-", "$,.", "１２", "e5x"] {
            let expected = (text == "e5x").then(|| number("5"));
            assert_eq!(last_number(text), expected, "{text}");
        }
    }

    #[test]
    fn decimals_are_compared_exactly() {
        let digits = "9".repeat(400);
        assert_eq!(number(&format!("{digits}.0")), number(&digits));
        assert_ne!(number(&format!("{digits}8")), number(&format!("{digits}9")));
        assert_ne!(number("0.1"), number("0.10000000000000000001"));
        assert_eq!(number("0.0010"), number("1e-3"));
        assert_eq!(number("1000"), number("1e3"));
        assert_ne!(number("5"), number("-5"));
        assert_eq!(number("0.00"), number("0e7"));
        assert_eq!(number("1e999999999").exponent, 999_999_999);
    }
}
