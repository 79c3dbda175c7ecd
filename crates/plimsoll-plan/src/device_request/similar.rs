//! Known words of a device list that are similar to an unknown one, for "did you mean".

use super::CardFigures;
use crate::paper;

/// Similarity (0 to 1) from which on a known word is proposed.
const SIMILARITY_MIN: f64 = 0.75;
/// Most by which a proposed word may be less similar than the best one.
const SIMILARITY_RANGE: f64 = 0.05;
/// Similarity of a word that begins with the unknown one, or the other way round: `a100` and `a100-80g`.
const PREFIX_SIMILARITY: f64 = 0.9;
/// Most words that are proposed.
const PROPOSALS_MAX: usize = 3;
/// Words of users that no spelling leads to.
const SYNONYMS: [(&str, &str); 3] = [("gpu", "cuda"), ("nvidia", "cuda"), ("ram", "host")];

/// Returns the words that `name`, a part of a list before `=`, may stand for. The best one is first; there may be none.
pub(super) fn similar_words(name: &str) -> Vec<String> {
    let (machine, own) = name.rsplit_once('/').map_or(("", name), |(machine, _)| name.split_at(machine.len() + 1));
    let (count, own) = split_count(own);
    let kinds = ["virtual", "cuda", "card"];
    let (own, rest) = own.split_at(own.find(':').unwrap_or(own.len()));
    let known: Vec<&str> = match rest {
        "" => paper::names()
            .chain(["cpu", "cuda", "cuda:0", "auto", "ray", "host", "file"])
            .chain(CardFigures::KEYS)
            .collect(),
        _ => kinds.to_vec(),
    };
    let count = count.map_or_else(String::new, |count| format!("{count}x"));
    closest(own, &known).into_iter().map(|word| format!("{machine}{count}{word}{rest}")).collect()
}

/// Returns the words among `known` that the user may have meant by `word`, the best one first: the meaning of a
/// synonym, else at most [`PROPOSALS_MAX`] words of similar spelling. Returns no word if none has a similarity of at
/// least [`SIMILARITY_MIN`].
fn closest<'k>(word: &str, known: &[&'k str]) -> Vec<&'k str> {
    let word = letters(word);
    if let Some((_, meant)) = SYNONYMS.iter().find(|(synonym, _)| *synonym == word) {
        return known.iter().filter(|known| *known == meant).copied().collect();
    }
    let is_beginning = |known: &&&str| word.len() > 2 && letters(known).starts_with(&word);
    let has_few_ends = known.iter().filter(is_beginning).count() <= PROPOSALS_MAX;
    let mut rated: Vec<(f64, &str)> = known
        .iter()
        .map(|known| {
            let begins =
                (has_few_ends && is_beginning(&known)) || (known.len() > 3 && word.starts_with(&letters(known)));
            (similarity(&word, known).max(if begins { PREFIX_SIMILARITY } else { 0.0 }), *known)
        })
        .collect();
    rated.sort_by(|one, other| other.0.total_cmp(&one.0));
    let best = rated.first().map_or(0.0, |(best, _)| *best);
    let is_near = |(similarity, _): &&(f64, &str)| *similarity >= SIMILARITY_MIN.max(best - SIMILARITY_RANGE);
    rated.iter().filter(is_near).take(PROPOSALS_MAX).map(|(_, known)| *known).collect()
}

/// Returns the similarity of a word with a known one, 0 to 1. The series of a card need not be named.
fn similarity(word: &str, known: &str) -> f64 {
    let known = letters(known);
    let model = known.strip_prefix("rtx").unwrap_or(&known);
    let of = |known: &str| strsim::normalized_damerau_levenshtein(word, known);
    of(&known).max(of(model))
}

/// Returns a text in lower case, without spaces and hyphens.
fn letters(text: &str) -> String {
    text.chars().filter(|c| !" -_".contains(*c)).collect::<String>().to_ascii_lowercase()
}

/// Splits the number of cards off a name: `8xrtx5090`, `8*rtx5090`, `8 rtx5090` or `rtx5090x8`. The number is `None` if
/// there is none, or if it is 0.
fn split_count(own: &str) -> (Option<u32>, &str) {
    const TIMES: [char; 4] = ['x', 'X', '*', '×'];
    let number = |text: &str| text.trim().parse::<u32>().ok().filter(|count| *count > 0);
    let after = own.trim_start_matches(|c: char| c.is_ascii_digit());
    let card = after.trim_start().trim_start_matches(TIMES).trim_start();
    if after.len() < own.len() && card.len() < after.len() && !card.is_empty() {
        return (number(&own[..own.len() - after.len()]), card);
    }
    match own.rsplit_once(TIMES) {
        // The number of a model has more digits.
        Some((card, count)) if count.trim().len() <= 2 && number(count).is_some() => (number(count), card.trim_end()),
        _ => (None, own),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_words_are_proposed() {
        for (name, expected) in [
            ("rtx-3009", "rtx3090"),
            ("pc1/rtx 3080", "pc1/rtx3080"),
            ("4090", "rtx4090"),
            ("a6000", "rtx-a6000"),
            ("a100", "a100-40g a100-80g"),
            ("rtx4070s", "rtx4070 rtx4070-super"),
            ("rtx4090ti", "rtx4090 rtx3090ti rtx4060ti"),
            ("8*rtx5090", "8xrtx5090"),
            ("8 x RTX5090", "8xrtx5090"),
            ("pc1/8xrtx509", "pc1/8xrtx5090"),
            ("rtx5090x8", "8xrtx5090"),
            ("rtx309", "rtx3090 rtx3090ti"),
            ("0xrtx5090", "rtx5090"),
            ("hst", "host"),
            ("pc1/hots", "pc1/host"),
            ("lnk", "link"),
            ("virtal:a", "virtual:a"),
            ("cude:1", "cuda:1"),
            ("gpu", "cuda"),
            ("xyz", ""),
            ("rtx", ""),
        ] {
            assert_eq!(similar_words(name).join(" "), expected, "{name}");
        }
    }

    #[test]
    fn any_text_has_few_proposals() {
        for text in ["", "x", "8x", "/", "8x/", "×", "8×", "a/8 ", ":", "é:é", "x999", "rtx5090x", "💾x8"] {
            assert!(similar_words(text).len() <= PROPOSALS_MAX, "{text}");
        }
    }
}
