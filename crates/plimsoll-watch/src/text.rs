//! Formatting of numbers, tables, wrapped lines and shell words. `Bytes` formats itself.

use comfy_table::{CellAlignment, Table, presets};
use plimsoll_core::printable::{MAX_NAME_CHARS, printable_line, shortened};
use textwrap::WordSplitter;

/// The most characters of a cell of a table. Tables support no column of 65,536 characters or more.
const MAX_CELL_CHARS: usize = 1000;

/// Formats a count in ones, thousands, millions or billions: `344`, `12.3 k`, `134.5 M`, `8.03 B`.
pub fn count(number: f64) -> String {
    scaled(number, &[("B", 1e9), ("M", 1e6), ("k", 1e3)]).unwrap_or_else(|| format!("{number:.0}"))
}

/// Formats floating-point operations per second in MFLOP/s, GFLOP/s or TFLOP/s: `1.35 TFLOP/s`.
pub fn flops(number: f64) -> String {
    scaled(number, &[("TFLOP/s", 1e12), ("GFLOP/s", 1e9)]).unwrap_or_else(|| format!("{:.1} MFLOP/s", number / 1e6))
}

fn scaled(number: f64, units: &[(&str, f64)]) -> Option<String> {
    let (unit, scale) = units.iter().find(|(_, scale)| number >= *scale)?;
    let number = number / scale;
    let decimals = if number < 10.0 { 2 } else { 1 };
    Some(format!("{number:.decimals$} {unit}"))
}

/// Formats a duration in seconds: `820 µs`, `84.1 ms`, `1.25 s`, `3 min 20 s`, `2 h 05 min`, `5.6 days`. A duration
/// that rounds up to a larger unit is shown in that unit. Returns `?` if the number is not finite.
pub fn seconds(number: f64) -> String {
    match number {
        _ if !number.is_finite() => "?".to_owned(),
        _ if number < 0.9995e-3 => format!("{:.0} µs", number * 1e6),
        _ if number < 0.99995 => format!("{:.1} ms", number * 1e3),
        _ if number < 99.995 => format!("{number:.2} s"),
        _ if number < 7199.5 => {
            let whole = number.round() as u64;
            format!("{} min {:02} s", whole / 60, whole % 60)
        }
        _ if number < 48.0 * 3600.0 - 30.0 => {
            let minutes = (number / 60.0).round() as u64;
            format!("{} h {:02} min", minutes / 60, minutes % 60)
        }
        _ => format!("{:.1} days", number / 86_400.0),
    }
}

/// Formats a remaining time in seconds like a clock: `0:26`, `1:02:03`, `3 days`. Returns `?` if the number is negative
/// or not finite.
pub fn clock(number: f64) -> String {
    if !number.is_finite() || number < 0.0 {
        return "?".to_owned();
    }
    let whole = number.round() as u64;
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        1..48 => format!("{hours}:{minutes:02}:{seconds:02}"),
        _ => format!("{} days", (hours + 12) / 24),
    }
}

/// Formats a position, counted from 1, as an ordinal number: `1st`, `2nd`, `11th`.
pub fn ordinal(place: usize) -> String {
    let ending = match (place % 10, place % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{place}{ending}")
}

/// Formats a fraction as percent with `decimals` decimals: 0.975 with one decimal is `97.5 %`.
pub fn percent(share: f64, decimals: usize) -> String {
    format!("{:.decimals$} %", share * 100.0)
}

/// Returns text from data as one printable line of bounded length, with escapes such as `\n`.
pub fn excerpt(text: &str) -> String {
    printable_line(&shortened(text, MAX_NAME_CHARS))
}

/// Formats rows of cells as columns two spaces apart, one line per row. The first column is aligned left, the others
/// right. Lines have no trailing spaces. Rows may have unequal numbers of cells. A cell is one printable line of bounded
/// width.
pub fn columns(rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    let cells = rows.iter().map(|row| row.iter().map(|cell| printable_line(&shortened(cell, MAX_CELL_CHARS))));
    table.load_preset(presets::NOTHING).add_rows(cells);
    for (index, column) in table.column_iter_mut().enumerate() {
        if index == 0 {
            column.set_padding((0, 0));
        } else {
            column.set_padding((2, 0)).set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// Formats rows like [`columns`], with a note after each, wrapped at `width` characters. `notes` has one for each row.
pub fn columns_with_notes(rows: &[Vec<String>], notes: &[String], width: usize) -> String {
    let table = columns(rows);
    table.lines().zip(notes).map(|(line, note)| wrapped(&format!("{line}  {note}"), width, "      ")).collect()
}

/// Wraps a line of text between words at `width` characters; a longer word stays whole. Lines after the first begin
/// with `indent`. The last line ends with a line break.
pub fn wrapped(text: &str, width: usize, indent: &str) -> String {
    let options = textwrap::Options::new(width)
        .subsequent_indent(indent)
        .break_words(false)
        .word_splitter(WordSplitter::NoHyphenation);
    textwrap::fill(&printable_line(text), options) + "\n"
}

/// Returns a word as it is written in a POSIX shell: in quotes if it has characters with a meaning there, else
/// unchanged.
pub fn shell_word(word: &str) -> String {
    let quoted = |word: &str| shlex::Quoter::new().allow_nul(true).quote(word).expect("NUL is allowed").into_owned();
    // `shlex` also quotes `=`, `,` and `%`, which mean nothing to a shell outside braces.
    let others = word.replace(['=', ',', '%'], "");
    if !others.is_empty() && quoted(&others) == others { word.to_owned() } else { quoted(word) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_significant_figures() {
        assert_eq!([344.0, 12_300.0, 134.5e6, 8.03e9].map(count), ["344", "12.3 k", "134.5 M", "8.03 B"]);
        assert_eq!([8.2e-4, 0.0841, 1.25, 200.0].map(seconds), ["820 µs", "84.1 ms", "1.25 s", "3 min 20 s"]);
        let long = [7199.0, 7200.0, 7530.0, 484_200.0].map(seconds);
        assert_eq!(long, ["119 min 59 s", "2 h 00 min", "2 h 06 min", "5.6 days"]);
        assert_eq!([179.4, 179.7, 99.996].map(seconds), ["2 min 59 s", "3 min 00 s", "1 min 40 s"]);
        assert_eq!([9.996e-4, 0.99996].map(seconds), ["1.0 ms", "1.00 s"]);
        assert_eq!([26.0, 3723.0, 260_000.0, f64::NAN].map(clock), ["0:26", "1:02:03", "3 days", "?"]);
        assert_eq!(percent(0.975, 1), "97.5 %");
        assert_eq!(flops(1.35e12), "1.35 TFLOP/s");
    }

    #[test]
    fn shell_words_are_quoted_if_needed() {
        assert_eq!(
            ["runs/sums", "my runs/a", "it's", "", "train.rungs=[\"lora\"]", "$HOME"].map(shell_word),
            ["runs/sums", "'my runs/a'", "\"it's\"", "''", "'train.rungs=[\"lora\"]'", "'$HOME'"]
        );
        for plain in ["--set", "train.steps=20", "virtual:a=1MiB@0.4,host=1MiB", "memory.budget=90%"] {
            assert_eq!(shell_word(plain), plain);
        }
    }

    #[test]
    fn columns_are_aligned_without_trailing_spaces() {
        let rows = [vec!["", "peak", "step"], vec!["  fast", "2 GiB", "20 µs"], vec!["slow", "", "1 s"], vec!["none"]];
        let rows = rows.map(|row| row.into_iter().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(columns(&rows), "         peak   step\n  fast  2 GiB  20 µs\nslow             1 s\nnone\n");
        assert_eq!(columns(&[]), "");
    }

    #[test]
    fn wide_cells_are_cut_to_one_line() {
        let text = columns(&[vec!["n".repeat(70_000), "a\nb\u{1b}".to_owned()]]);
        assert!(text.ends_with("n  a\\nb\\u{1b}\n") && text.lines().count() == 1, "{text}");
        assert!(text.chars().count() < MAX_CELL_CHARS + 20, "{text}");
    }

    #[test]
    fn text_wraps_at_width() {
        assert_eq!(wrapped("why: one two three", 10, "  "), "why: one\n  two\n  three\n");
        assert_eq!(wrapped("a-very-long-word", 4, "  "), "a-very-long-word\n");
        assert_eq!(wrapped("why: a\nb", 40, "  "), "why: a\\nb\n");
    }
}
