//! A series of numbers as points in a rectangle of characters.

use super::Abilities;

/// Returns `height` lines of `width` characters that plot `values`: the largest on the first line, the least on the last.
/// Several values of a column become their mean. Without values, the lines are empty.
pub(super) fn points(values: &[f64], width: usize, height: usize, abilities: Abilities) -> Vec<String> {
    let point = if abilities.unicode { '•' } else { '*' };
    let columns = means(values, width);
    let (least, most) = columns
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| (least.min(*value), most.max(*value)));
    let row = |value: f64| match most > least {
        true => ((most - value) / (most - least) * (height as f64 - 1.0)).round() as usize,
        false => height / 2,
    };
    let rows: Vec<usize> = columns.iter().map(|value| row(*value)).collect();
    let line = |number: usize| rows.iter().map(|row| if *row == number { point } else { ' ' }).collect::<String>();
    (0..height).map(|number| line(number).trim_end().to_owned()).collect()
}

/// Returns at most `width` means of consecutive values.
fn means(values: &[f64], width: usize) -> Vec<f64> {
    let columns = values.len().min(width);
    let part = |column: usize| {
        let range = column * values.len() / columns..(column + 1) * values.len() / columns;
        values[range.clone()].iter().sum::<f64>() / range.len() as f64
    };
    (0..columns).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASCII: Abilities = Abilities { color: false, unicode: false };

    #[test]
    fn falling_series_runs_from_top_to_bottom() {
        assert_eq!(points(&[3.0, 2.0, 1.0], 10, 3, ASCII), ["*", " *", "  *"]);
        assert_eq!(points(&[4.0, 2.0, 3.0, 1.0], 2, 2, ASCII), ["*", " *"]);
        assert_eq!(points(&[5.0, 5.0], 4, 3, ASCII), ["", "**", ""]);
        assert_eq!(points(&[], 4, 2, ASCII), ["", ""]);
    }
}
