//! Memory budgets as written by the user (`90%`, `6GiB`) and their parser. Applied to the free memory of a device, a
//! budget becomes a load line.

use crate::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A memory budget: a share of the free memory or an amount. Parsed from and printed as `90%` or `6GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Budget {
    /// A share of the free memory, from 0.0001 to 1.
    Share(f64),
    /// A fixed amount, independent of the free memory.
    Amount(Bytes),
}

impl Budget {
    /// Default budget of a device: 90 % of its free memory.
    pub const DEVICE: Budget = Budget::Share(0.9);

    /// Default budget of the host memory for offloaded tensors: 80 % of the free host memory.
    pub const HOST: Budget = Budget::Share(0.8);

    /// Returns the amount if the budget is an amount, `None` if it is a share.
    pub fn amount(self) -> Option<Bytes> {
        match self {
            Budget::Share(_) => None,
            Budget::Amount(bytes) => Some(bytes),
        }
    }

    /// Computes the load line in bytes for a memory with `free` free bytes. A budget that is an amount is returned
    /// unchanged, even above `free`. Whether so much memory is available is only checked when the device is opened.
    pub fn load_line(self, free: Bytes) -> Bytes {
        match self {
            Budget::Share(share) => Bytes((free.0 as f64 * share) as u64),
            Budget::Amount(bytes) => bytes,
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Nine digits suffice to parse the same share again, and `0.07 × 100` still prints as 7.
            Budget::Share(share) => f.pad(&format!("{}%", (share * 1e11).round() / 1e9)),
            Budget::Amount(Bytes(bytes)) => {
                // Exact, so that a run file written by Plimsoll parses to the same bytes.
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

/// An error of parsing a [`Budget`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseBudgetError {
    /// The text is neither a share nor an amount.
    #[error("`{text}` is not a budget: expected a share of free memory, such as `90%`, or an amount, such as `6GiB`")]
    Invalid {
        /// The text that failed to parse.
        text: String,
    },
    /// The text is a number without a unit, and too small to mean bytes.
    #[error("`{text}` has no unit: write `{text}GiB`, `{text}MiB`, or `{text}B` if bytes are meant")]
    NoUnit {
        /// The text that failed to parse.
        text: String,
    },
}

/// Smallest number without a unit that is accepted as bytes. A smaller number is rejected with
/// [`ParseBudgetError::NoUnit`].
const UNITLESS_BYTES_MIN: Bytes = Bytes::mib(1);

impl FromStr for Budget {
    type Err = ParseBudgetError;

    fn from_str(text: &str) -> Result<Budget, ParseBudgetError> {
        let invalid = || ParseBudgetError::Invalid { text: text.to_owned() };
        if let Some(percent) = text.trim().strip_suffix('%') {
            let percent: f64 = percent.trim().parse().map_err(|_| invalid())?;
            return if (0.01..=100.0).contains(&percent) { Ok(Budget::Share(percent / 100.0)) } else { Err(invalid()) };
        }
        match text.parse::<Bytes>() {
            Ok(bytes) if bytes > Bytes::ZERO => {
                let unitless = text.trim().ends_with(|last: char| last.is_ascii_digit() || last == '.');
                match unitless && bytes < UNITLESS_BYTES_MIN {
                    true => Err(ParseBudgetError::NoUnit { text: text.trim().to_owned() }),
                    false => Ok(Budget::Amount(bytes)),
                }
            }
            _ => Err(invalid()),
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
    fn budget_parses_shares_and_amounts() {
        assert_eq!("90%".parse(), Ok(Budget::Share(0.9)));
        assert_eq!(Budget::Share(0.5).load_line(Bytes::gib(4)), Bytes::gib(2));
        assert_eq!("6GiB".parse::<Budget>().unwrap().load_line(Bytes::gib(1)), Bytes::gib(6));
        for bad in ["", "0%", "1e-20%", "-5%", "101%", "nan%", "90 percent", "0GiB", "all"] {
            let error = bad.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains("`90%`") && error.contains("`6GiB`"), "{bad}: {error}");
        }
    }

    #[test]
    fn small_number_without_unit_is_rejected() {
        for bare in ["48", "1", "1048575"] {
            let error = bare.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{bare}GiB`")) && error.contains(&format!("`{bare}B`")), "{error}");
        }
        assert_eq!("1048577".parse(), Ok(Budget::Amount(Bytes((1 << 20) + 1))));
        assert_eq!("48B".parse(), Ok(Budget::Amount(Bytes(48))));
    }

    #[test]
    fn printed_budget_parses_to_same_budget() {
        for text in ["90%", "7%", "33.3%", "6GiB", "600MiB", "3KiB", "12345B", "1B"] {
            let budget: Budget = text.parse().unwrap();
            assert_eq!(budget.to_string(), text);
            assert_eq!(budget.to_string().parse(), Ok(budget));
        }
    }
}
