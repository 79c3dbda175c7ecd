//! How much of a memory may be held, as the user writes it; against what is free it becomes a load line.

use crate::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How much of a memory may be held: a share of what is free, or an amount. Read from and printed as `90%` or `6GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Budget {
    /// A share of what is free, from 0.0001 to 1.
    Share(f64),
    /// This much, whatever is free.
    Amount(Bytes),
}

impl Budget {
    /// What a device gives when the user says nothing: 90 % of what is free.
    pub const DEVICE: Budget = Budget::Share(0.9);

    /// What the host gives beside an accelerator when the user says nothing: 80 % of what is free.
    pub const HOST: Budget = Budget::Share(0.8);

    /// The amount, where it is one.
    pub fn amount(self) -> Option<Bytes> {
        match self {
            Budget::Share(_) => None,
            Budget::Amount(bytes) => Some(bytes),
        }
    }

    /// The load line where `free` is free. An amount is taken as it is: whether there is as much is for the
    /// device to say when it is opened.
    pub fn of(self, free: Bytes) -> Bytes {
        match self {
            Budget::Share(share) => Bytes((free.0 as f64 * share) as u64),
            Budget::Amount(bytes) => bytes,
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Nine digits: enough to be read back as the same share, and `0.07 × 100` still prints as 7.
            Budget::Share(share) => f.pad(&format!("{}%", (share * 1e11).round() / 1e9)),
            Budget::Amount(Bytes(bytes)) => {
                // Exact, so that a run file written back means the same bytes.
                let unit =
                    [("GiB", 30), ("MiB", 20), ("KiB", 10)].into_iter().find(|(_, shift)| bytes % (1 << shift) == 0);
                match unit {
                    Some((unit, shift)) => f.pad(&format!("{}{unit}", bytes >> shift)),
                    None => f.pad(&format!("{bytes}B")),
                }
            }
        }
    }
}

/// The text was no budget.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseBudgetError {
    /// Neither a share nor an amount.
    #[error("`{text}` is no budget: expected a share of what is free, such as `90%`, or an amount, such as `6GiB`")]
    Unread {
        /// What was given.
        text: String,
    },
    /// A number that is too small to have been meant as bytes.
    #[error("`{text}` has no unit: write `{text}GiB`, `{text}MiB`, or `{text}B` if bytes are meant")]
    NoUnit {
        /// What was given.
        text: String,
    },
}

/// Numbers without a unit are bytes from here on.
const BARE_LEAST: Bytes = Bytes::mib(1);

impl FromStr for Budget {
    type Err = ParseBudgetError;

    fn from_str(text: &str) -> Result<Budget, ParseBudgetError> {
        let bad = || ParseBudgetError::Unread { text: text.to_owned() };
        if let Some(percent) = text.trim().strip_suffix('%') {
            let percent: f64 = percent.trim().parse().map_err(|_| bad())?;
            return if (0.01..=100.0).contains(&percent) { Ok(Budget::Share(percent / 100.0)) } else { Err(bad()) };
        }
        match text.parse::<Bytes>() {
            Ok(bytes) if bytes > Bytes::ZERO => {
                let bare = text.trim().ends_with(|last: char| last.is_ascii_digit() || last == '.');
                match bare && bytes < BARE_LEAST {
                    true => Err(ParseBudgetError::NoUnit { text: text.trim().to_owned() }),
                    false => Ok(Budget::Amount(bytes)),
                }
            }
            _ => Err(bad()),
        }
    }
}

impl TryFrom<String> for Budget {
    type Error = ParseBudgetError;
    fn try_from(text: String) -> Result<Budget, ParseBudgetError> {
        text.parse()
    }
}

impl From<Budget> for String {
    fn from(budget: Budget) -> String {
        budget.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_shares_of_what_is_free_or_amounts() {
        assert_eq!("90%".parse(), Ok(Budget::Share(0.9)));
        assert_eq!(Budget::Share(0.5).of(Bytes::gib(4)), Bytes::gib(2));
        assert_eq!("6GiB".parse::<Budget>().unwrap().of(Bytes::gib(1)), Bytes::gib(6));
        for bad in ["", "0%", "1e-20%", "-5%", "101%", "nan%", "90 percent", "0GiB", "all"] {
            let error = bad.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains("`90%`") && error.contains("`6GiB`"), "{bad}: {error}");
        }
    }

    #[test]
    fn a_small_number_without_a_unit_is_asked_what_it_means() {
        for bare in ["48", "1", "1048575"] {
            let error = bare.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{bare}GiB`")) && error.contains(&format!("`{bare}B`")), "{error}");
        }
        assert_eq!("1048577".parse(), Ok(Budget::Amount(Bytes((1 << 20) + 1))));
        assert_eq!("48B".parse(), Ok(Budget::Amount(Bytes(48))));
    }

    #[test]
    fn a_budget_written_down_is_read_back_as_the_same() {
        for text in ["90%", "7%", "33.3%", "6GiB", "600MiB", "3KiB", "12345B", "1B"] {
            let budget: Budget = text.parse().unwrap();
            assert_eq!(budget.to_string(), text);
            assert_eq!(budget.to_string().parse(), Ok(budget));
        }
    }
}
