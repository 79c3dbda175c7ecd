//! Parsers of flag values.

use std::time::Duration;

/// Returns a parser for whole numbers from 1 on.
pub fn positive() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// Parses a duration such as `90s`, `3m`, `1h` or `45` (seconds).
pub fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit {
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err("expected a duration such as 30s, 3m or 1h".to_owned()),
    };
    let seconds = number.parse::<f64>().unwrap_or(0.0) * scale;
    if !(1.0..=86400.0).contains(&seconds) {
        return Err("expected a duration from 1s to 24h, such as 30s or 3m".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Parses a finite number from 0 on.
pub fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("expected a number, 0 or more".to_owned()),
    }
}

/// Parses a number above 0 and at most 1.
pub fn share(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number > 0.0 && number <= 1.0 => Ok(number),
        _ => Err("expected a number above 0, at most 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_accepts_units_and_rejects_nonsense() {
        assert_eq!(duration("3m"), Ok(Duration::from_secs(180)));
        assert_eq!(duration("1.5h"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("45"), Ok(Duration::from_secs(45)));
        for bad in ["", "m", "0s", "3 parsec", "-1s", "99999h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
