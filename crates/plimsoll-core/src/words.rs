//! Numbers with the words that they count, as people write them.

/// A number of things: `1 layer`, `3 layers`, `2 retries`. `what` is the word for one of them.
pub fn counted(number: impl TryInto<u64>, what: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    match what.strip_suffix('y') {
        _ if number == 1 => format!("1 {what}"),
        Some(stem) if !stem.ends_with(['a', 'e', 'o', 'u']) => format!("{number} {stem}ies"),
        _ => format!("{number} {what}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_one_and_all_else_are_many() {
        assert_eq!([0_u64, 1, 2].map(|number| counted(number, "layer")), ["0 layers", "1 layer", "2 layers"]);
        assert_eq!([1_usize, 2].map(|number| counted(number, "retry")), ["1 retry", "2 retries"]);
        assert_eq!(counted(2_u32, "day"), "2 days");
    }
}
