//! Parsing of the `--inject-…` flags, and their formatting.

use super::{Injection, OpSelector, PROGRAMS};
use plimsoll_core::Failure;
use std::fmt;
use std::str::FromStr;

impl Injection {
    /// Parses the value of `--inject-slow`.
    ///
    /// # Errors
    /// The value is not of the form `DEVICE:STEP:FACTOR`.
    pub fn slow(text: &str) -> Result<Injection, Failure> {
        let invalid = || {
            Failure::input(format!("--inject-slow `{text}`: expected DEVICE:STEP:FACTOR with a factor of 1 to 1000"))
                .hint("for example virtual:b:12:1.5")
        };
        let mut parts: Vec<&str> = text.split(':').collect();
        let factor = parts.pop().and_then(|factor| factor.parse::<f64>().ok()).ok_or_else(invalid)?;
        let step = parts.pop().and_then(|step| step.parse().ok()).ok_or_else(invalid)?;
        let device = parts.join(":");
        let is_valid = !device.is_empty() && (1.0..=1000.0).contains(&factor);
        is_valid.then_some(Injection::Slow { device, step, factor }).ok_or_else(invalid)
    }

    /// Parses the value of `--inject-silence`.
    ///
    /// # Errors
    /// The value is not of the form `DEVICE:STEP[:open][:forever]`.
    pub fn silence(text: &str) -> Result<Injection, Failure> {
        let invalid = || {
            Failure::input(format!("--inject-silence `{text}`: expected DEVICE:STEP[:open][:forever]"))
                .hint("for example virtual:b:12, virtual:b:12:forever, or virtual:b:0:open")
        };
        let (rest, forever) = text.strip_suffix(":forever").map_or((text, false), |rest| (rest, true));
        let (place, opening) = rest.strip_suffix(":open").map_or((rest, false), |rest| (rest, true));
        let (device, step) = place.rsplit_once(':').ok_or_else(invalid)?;
        let step = step.parse().map_err(|_| invalid())?;
        let is_valid = !device.is_empty();
        is_valid.then(|| Injection::Silence { device: device.to_owned(), step, opening, forever }).ok_or_else(invalid)
    }

    /// Parses the value of `--inject-loss`.
    ///
    /// # Errors
    /// The value is not of the form `DEVICE:STEP[:PROGRAM]`.
    pub fn loss(text: &str) -> Result<Injection, Failure> {
        let invalid = || {
            Failure::input(format!("--inject-loss `{text}`: expected DEVICE:STEP[:PROGRAM]"))
                .hint("for example virtual:b:12, or cuda:1:12:update")
        };
        let mut parts: Vec<&str> = text.split(':').collect();
        let program = parts.pop_if(|last| PROGRAMS.contains(last)).map(str::to_owned);
        let step = parts.pop().and_then(|step| step.parse().ok()).ok_or_else(invalid)?;
        let device = parts.join(":");
        (!device.is_empty()).then_some(Injection::Loss { device, step, program }).ok_or_else(invalid)
    }
}

impl FromStr for Injection {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Injection, Failure> {
        let invalid = || {
            Failure::input(format!("--inject-oom `{text}`: expected [DEVICE/]STEP[:PROGRAM[:OP]], or random:P"))
                .hint("for example 12, 12:backward, 12:update:3, virtual:b/12:norm, 0:load, or random:0.01")
        };
        if let Some(probability) = text.strip_prefix("random:") {
            let probability: f64 = probability.parse().map_err(|_| invalid())?;
            return (probability > 0.0 && probability <= 1.0)
                .then_some(Injection::RandomOutOfMemory { probability })
                .ok_or_else(invalid);
        }
        let (device, place) = match text.rsplit_once('/') {
            Some((device, place)) => (Some(device.to_owned()), place),
            None => (None, text),
        };
        let mut parts = place.split(':');
        let step = parts.next().unwrap_or_default().parse().map_err(|_| invalid())?;
        let program = parts.next().map(str::to_owned);
        if let Some(program) = program.as_deref().filter(|name| !PROGRAMS.contains(name)) {
            return Err(Failure::input(format!("--inject-oom `{text}`: unknown Program `{program}`"))
                .hint(format!("the Programs are {}", PROGRAMS.join(", "))));
        }
        let op = match parts.next() {
            None => None,
            Some("") => return Err(invalid()),
            Some(op) => Some(match op.parse::<u32>() {
                Ok(0) => return Err(invalid()),
                Ok(number) => OpSelector::Number(number),
                Err(_) => OpSelector::Named(op.to_owned()),
            }),
        };
        if parts.next().is_some() { Err(invalid()) } else { Ok(Injection::OutOfMemory { device, step, program, op }) }
    }
}

/// Formats the injection as its flag.
impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = |program: &Option<String>| program.as_ref().map_or(String::new(), |program| format!(":{program}"));
        match self {
            Injection::OutOfMemory { device, step, program, op } => {
                let device = device.as_ref().map_or(String::new(), |device| format!("{device}/"));
                let op = match op {
                    None => String::new(),
                    Some(OpSelector::Number(number)) => format!(":{number}"),
                    Some(OpSelector::Named(name)) => format!(":{name}"),
                };
                write!(f, "--inject-oom {device}{step}{}{op}", suffix(program))
            }
            Injection::RandomOutOfMemory { probability } => write!(f, "--inject-oom random:{probability}"),
            Injection::Slow { device, step, factor } => write!(f, "--inject-slow {device}:{step}:{factor}"),
            Injection::Loss { device, step, program } => write!(f, "--inject-loss {device}:{step}{}", suffix(program)),
            Injection::Silence { device, step, opening, forever } => {
                let (opening, forever) = (if *opening { ":open" } else { "" }, if *forever { ":forever" } else { "" });
                write!(f, "--inject-silence {device}:{step}{opening}{forever}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn injections_parse_from_flag_values() {
        let at = |step, program: Option<&str>, op| Injection::OutOfMemory {
            device: None,
            step,
            program: program.map(str::to_owned),
            op,
        };
        assert_eq!("12".parse(), Ok(at(12, None, None)));
        assert_eq!("12:backward".parse(), Ok(at(12, Some("backward"), None)));
        assert_eq!("3:update:7".parse(), Ok(at(3, Some("update"), Some(OpSelector::Number(7)))));
        assert_eq!("3:forward:product".parse(), Ok(at(3, Some("forward"), Some(OpSelector::Named("product".into())))));
        assert_eq!("random:0.25".parse(), Ok(Injection::RandomOutOfMemory { probability: 0.25 }));
        for invalid in ["", "x", "-1", "1:sideways", "1:update:0", "1:update:", "1:update:2:3", "random:0", "random:2"]
        {
            assert!(invalid.parse::<Injection>().is_err(), "{invalid}");
        }
    }
}
