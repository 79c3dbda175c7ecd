//! Parsers of flag values.

use plimsoll_train::gguf::FileType;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Returns a parser for whole numbers from 1 on.
pub fn positive() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// Parses the type of a GGUF file, such as `q4_k_m`, in any case.
pub fn file_type(text: &str) -> Result<FileType, String> {
    let names = || FileType::ALL.map(FileType::name).join(", ");
    FileType::named(text).ok_or_else(|| format!("expected one of {}", names()))
}

/// Parses the name of a pre-tokenizer of llama.cpp, such as `llama-bpe`.
pub fn pre_tokenizer(text: &str) -> Result<String, String> {
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    match !text.is_empty() && text.chars().all(is_name) {
        true => Ok(text.to_owned()),
        false => Err("expected a name of llama.cpp, such as llama-bpe or qwen2".to_owned()),
    }
}

/// Parses a duration from 1 second to 24 hours, such as `90s`, `3m`, `1h 30m` or `45` (seconds).
pub fn duration(text: &str) -> Result<Duration, String> {
    let unit = if text.parse::<f64>().is_ok() { "s" } else { "" };
    let duration = humantime::parse_duration(&format!("{text}{unit}"))
        .map_err(|_| "expected a duration such as 30s, 3m or 1h".to_owned())?;
    if !(Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&duration) {
        return Err("expected a duration from 1s to 24h, such as 30s or 3m".to_owned());
    }
    Ok(duration)
}

/// Parses a number of seconds from 0.1 to 3600.
pub fn interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected a number of seconds, 0.1 to 3600".to_owned()),
    }
}

/// Parses a speed in tokens per second: a finite number that is 0 or more.
pub fn speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("expected a number of tokens per second, 0 or more".to_owned()),
    }
}

/// Parses an address to listen at: `127.0.0.1:1876`, `localhost:1876`, or a port alone, which means 127.0.0.1. Port 0 lets
/// the system choose one.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let port = text.strip_prefix("localhost:").unwrap_or(text).parse().ok();
    let address = port.map(|port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    address.or_else(|| text.parse().ok()).ok_or_else(|| {
        "expected an IP address with a port, such as 127.0.0.1:1876; a run folder or run file stands before --serve"
            .to_owned()
    })
}

/// Parses a sampling temperature: a finite number that is 0 or more.
pub fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("expected a number, 0 or more".to_owned()),
    }
}

/// Parses a finite number above 0.
pub fn positive_number(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("expected a number above 0".to_owned()),
    }
}

/// Parses a number from 0 to 1.
pub fn share_or_none(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err("expected a number from 0 to 1".to_owned()),
    }
}

/// Parses a text of at least one character.
pub fn non_empty(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("expected a text of at least one character".to_owned()) } else { Ok(text.to_owned()) }
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
    fn addresses_are_local_unless_named() {
        for text in ["127.0.0.1:1876", "localhost:1876", "1876"] {
            assert_eq!(address(text), Ok(SocketAddr::from(([127, 0, 0, 1], 1876))), "{text}");
        }
        assert_eq!(address("[::1]:0").unwrap().to_string(), "[::1]:0");
        for bad in ["", "runs/sums", "localhost", "example.com:80", "127.0.0.1", "127.0.0.1:65536", "localhost:"] {
            assert!(address(bad).is_err_and(|reason| reason.contains("before --serve")), "{bad}");
        }
    }

    #[test]
    fn duration_accepts_units_and_rejects_nonsense() {
        assert_eq!(duration("3m"), Ok(Duration::from_secs(180)));
        assert_eq!(duration("1.5h"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("45"), Ok(Duration::from_secs(45)));
        assert_eq!(duration("2.5"), Ok(Duration::from_millis(2500)));
        for bad in ["", "m", "0s", "3 parsec", "-1s", "99999h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
