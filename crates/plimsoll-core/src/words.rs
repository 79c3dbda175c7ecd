//! Counts with a noun in the singular or plural, for messages.

/// Formats a count with its noun: `1 layer`, `3 layers`, `2 retries`. `singular` is the noun for a count of one.
pub fn format_count(count: impl TryInto<u64>, singular: &str) -> String {
    let count = count.try_into().unwrap_or(u64::MAX);
    match singular.strip_suffix('y') {
        _ if count == 1 => format!("1 {singular}"),
        Some(stem) if !stem.ends_with(['a', 'e', 'o', 'u']) => format!("{count} {stem}ies"),
        _ => format!("{count} {singular}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_count_chooses_singular_or_plural() {
        assert_eq!([0_u64, 1, 2].map(|number| format_count(number, "layer")), ["0 layers", "1 layer", "2 layers"]);
        assert_eq!([1_usize, 2].map(|number| format_count(number, "retry")), ["1 retry", "2 retries"]);
        assert_eq!(format_count(2_u32, "day"), "2 days");
    }
}
