//! [`Bytes`]: an amount of memory, its units and its parser.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};
use std::str::FromStr;

/// An amount of memory in bytes. Printed in binary units (`1.50 GiB`). Parsed from binary units (`6GiB`, `600 MiB`),
/// decimal units (`2GB`) and plain bytes (`4096`), up to [`Bytes::MAX_PARSED`]. Sums stop at the largest amount, so
/// that they never become small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(
    feature = "schema",
    derive(schemars::JsonSchema),
    schemars(inline, description = "An amount of memory in bytes.")
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Zero bytes.
    pub const ZERO: Bytes = Bytes(0);

    /// The largest amount that is parsed: 1 EiB. The sum of a few amounts is exact.
    pub const MAX_PARSED: Bytes = Bytes(1 << 60);

    /// Returns `n` mebibytes.
    pub const fn mib(n: u64) -> Bytes {
        Bytes(n << 20)
    }

    /// Returns `n` gibibytes.
    pub const fn gib(n: u64) -> Bytes {
        Bytes(n << 30)
    }

    /// Returns `self - other`, or zero if `other` is larger.
    pub fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// Returns the amount in mebibytes, with its fraction.
    pub fn as_mib(self) -> f64 {
        self.0 as f64 / (1u64 << 20) as f64
    }
}

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Bytes;
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0 - other.0)
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(iter: I) -> Bytes {
        iter.fold(Bytes::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        for (unit, shift) in UNITS {
            if self.0 >= 1u64 << shift {
                return f.pad(&format!("{:.2} {unit}", self.0 as f64 / (1u64 << shift) as f64));
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

/// An error of parsing [`Bytes`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an amount of memory: expected a number with a unit, such as `6GiB`")]
pub struct ParseBytesError {
    /// The text that failed to parse.
    pub text: String,
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Bytes, ParseBytesError> {
        let invalid = || ParseBytesError { text: text.to_owned() };
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let number: f64 = number.parse().map_err(|_| invalid())?;
        let scale = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "kib" | "k" => 1024.0,
            "mib" | "m" => 1024.0 * 1024.0,
            "gib" | "g" => 1024.0 * 1024.0 * 1024.0,
            "tib" | "t" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            _ => return Err(invalid()),
        };
        let bytes = number * scale;
        if !(0.0..=Bytes::MAX_PARSED.0 as f64).contains(&bytes) {
            return Err(invalid());
        }
        Ok(Bytes(bytes as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_parse_binary_and_decimal_units() {
        assert_eq!("6GiB".parse(), Ok(Bytes::gib(6)));
        assert_eq!("1.5 MiB".parse(), Ok(Bytes(3 << 19)));
        assert_eq!("2 GB".parse(), Ok(Bytes(2_000_000_000)));
        assert_eq!("4096".parse(), Ok(Bytes(4096)));
        for bad in ["", "GiB", "-1GiB", "1 parsec", "1e999GiB", "nan", "1048577TiB", &format!("{}TiB", "9".repeat(400))]
        {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
        }
        assert_eq!("1048576TiB".parse(), Ok(Bytes::MAX_PARSED));
    }

    #[test]
    fn sums_of_bytes_do_not_wrap() {
        let huge = Bytes(u64::MAX - 1);
        assert_eq!([huge, Bytes(1)].into_iter().sum::<Bytes>(), Bytes(u64::MAX));
        assert_eq!(huge + huge, Bytes(u64::MAX));
    }

    #[test]
    fn bytes_print_in_binary_units() {
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes::gib(3).to_string(), "3.00 GiB");
        assert_eq!(format!("{:>10}", Bytes::mib(1)), "  1.00 MiB");
    }
}
