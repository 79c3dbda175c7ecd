//! Formatting of numbers, tables, wrapped lines and shell words. `Bytes` formats itself.

/// Formats a count with three significant figures: `344`, `12.3 k`, `134.5 M`, `8.03 B`.
pub fn count(number: f64) -> String {
    scaled(number, &[("B", 1e9), ("M", 1e6), ("k", 1e3)]).unwrap_or_else(|| format!("{number:.0}"))
}

/// Formats operations per second: `1.35 TFLOP/s`.
pub fn flops(number: f64) -> String {
    scaled(number, &[("TFLOP/s", 1e12), ("GFLOP/s", 1e9)]).unwrap_or_else(|| format!("{:.1} MFLOP/s", number / 1e6))
}

fn scaled(number: f64, units: &[(&str, f64)]) -> Option<String> {
    let (unit, scale) = units.iter().find(|(_, scale)| number >= *scale)?;
    let number = number / scale;
    let decimals = if number < 10.0 { 2 } else { 1 };
    Some(format!("{number:.decimals$} {unit}"))
}

/// Formats a duration: `820 µs`, `84.1 ms`, `1.25 s`, `3 min 20 s`, `2 h 05 min`, `5.6 days`. A number that rounds up to a larger
/// unit is shown in that unit.
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

/// Formats the remaining time like a clock: `0:26`, `1:02:03`, `3 days`.
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

/// Formats a position, counted from 1: `1st`, `2nd`, `11th`.
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

/// Formats a fraction as percent with this many decimals: `97.5 %`.
pub fn percent(share: f64, decimals: usize) -> String {
    format!("{:.decimals$} %", share * 100.0)
}

/// Formats rows as columns two spaces apart. The first column is aligned left, the others right. Each line begins with `indent`
/// and ends without spaces.
pub fn columns(rows: &[Vec<String>], indent: &str) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cell_width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..count).map(|column| cell_width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = indent.to_owned();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            line += &if column == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// Wraps text at `width` characters; further lines begin with `indent`.
pub fn wrapped(words: &str, width: usize, indent: &str) -> String {
    let mut text = String::new();
    let mut line = String::new();
    for word in words.split(' ') {
        if !line.trim().is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            text += line.trim_end();
            text.push('\n');
            line = indent.to_owned();
        } else if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    text + line.trim_end() + "\n"
}

/// Quotes a word for a POSIX shell where necessary.
pub fn shell_word(word: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./=:,@%+".contains(letter);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
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
            ["runs/sums", "my runs/a", "it's", ""].map(shell_word),
            ["runs/sums", "'my runs/a'", r"'it'\''s'", "''"]
        );
    }

    #[test]
    fn text_wraps_at_width() {
        assert_eq!(wrapped("why: one two three", 10, "  "), "why: one\n  two\n  three\n");
        assert_eq!(wrapped("a-very-long-word", 4, "  "), "a-very-long-word\n");
    }
}
