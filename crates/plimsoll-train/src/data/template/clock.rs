//! `strftime_now`: a fixed moment, written with the directives of Python's `strftime`.

use super::failure::{Outcome, fail};

const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// The longest format.
const FORMAT_BYTES_MAX: usize = 1000;

/// A moment of the calendar, without a time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CivilTime {
    year: i64,
    /// Month, from 1 on.
    month: i64,
    /// Day of the month, from 1 on.
    day: i64,
    /// Day of the year, from 0 on.
    year_day: i64,
    /// Day of the week, 0 for Sunday.
    weekday: i64,
    /// Second of the day.
    second: i64,
}

impl CivilTime {
    /// Returns the moment `seconds` after the beginning of 1970.
    fn at(seconds: i64) -> CivilTime {
        let (days, second) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
        let is_leap = |year: i64| (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let year_length = |year: i64| if is_leap(year) { 366 } else { 365 };
        // Whole cycles of 400 years first, so that no moment takes many steps.
        let (mut year, mut rest) = (1970 + 400 * days.div_euclid(146_097), days.rem_euclid(146_097));
        while rest >= year_length(year) {
            rest -= year_length(year);
            year += 1;
        }
        let (year_day, mut month) = (rest, 1);
        let lengths = [31, if is_leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        for length in lengths {
            if rest < length {
                break;
            }
            rest -= length;
            month += 1;
        }
        CivilTime { year, month, day: rest + 1, year_day, weekday: (days + 4).rem_euclid(7), second }
    }

    /// Returns what a directive stands for, and `None` for an unknown one.
    fn directive(self, directive: char) -> Option<String> {
        let (hour, minute, second) = (self.second / 3600, self.second / 60 % 60, self.second % 60);
        let hour12 = (hour + 11) % 12 + 1;
        let weekday = WEEKDAYS[self.weekday as usize];
        let month = MONTHS[self.month as usize - 1];
        let whole = |format: &str| self.format(format).ok();
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'C' => format!("{:02}", self.year.div_euclid(100)),
            'm' => format!("{:02}", self.month),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.year_day + 1),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'w' => self.weekday.to_string(),
            'u' => ((self.weekday + 6) % 7 + 1).to_string(),
            'U' => format!("{:02}", (self.year_day + 7 - self.weekday) / 7),
            'W' => format!("{:02}", (self.year_day + 7 - (self.weekday + 6) % 7) / 7),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour12:02}"),
            'k' => format!("{hour:2}"),
            'l' => format!("{hour12:2}"),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'f' => "000000".to_owned(),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'z' | 'Z' => String::new(),
            'F' => whole("%Y-%m-%d")?,
            'T' | 'X' => whole("%H:%M:%S")?,
            'R' => whole("%H:%M")?,
            'D' | 'x' => whole("%m/%d/%y")?,
            'c' => whole("%a %b %e %H:%M:%S %Y")?,
            'r' => whole("%I:%M:%S %p")?,
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }

    fn format(self, format: &str) -> Outcome<String> {
        let mut out = String::new();
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let directive = rest.next();
            // `%-d` is `%d` without zeros or blanks before it.
            let (directive, trims) = match directive {
                Some('-') => (rest.next(), true),
                other => (other, false),
            };
            let text = directive.and_then(|directive| self.directive(directive));
            let Some(text) = text else {
                return Err(fail(format!("strftime_now does not know the format `{format}`")));
            };
            let trimmed = text.trim_start_matches(['0', ' ']);
            out.push_str(match (trims, trimmed.is_empty()) {
                (true, false) => trimmed,
                (true, true) => "0",
                _ => &text,
            });
        }
        Ok(out)
    }
}

/// Returns the moment `seconds` after the beginning of 1970 (UTC), in a format of `strftime`.
pub(super) fn format_moment(seconds: i64, format: &str) -> Outcome<String> {
    match format.len() <= FORMAT_BYTES_MAX {
        true => CivilTime::at(seconds).format(format),
        false => Err(fail(format!("the format of strftime_now is longer than {FORMAT_BYTES_MAX} bytes"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_match_the_calendar() {
        // References: `date -u -d @N +FORMAT`.
        for (seconds, expected) in [
            (0, "Thursday 01 January 1970 00:00:00 001 4 4 00 00 70"),
            (951_782_400, "Tuesday 29 February 2000 00:00:00 060 2 2 09 09 00"),
            (1_735_689_599, "Tuesday 31 December 2024 23:59:59 366 2 2 52 53 24"),
            (4_102_444_800, "Friday 01 January 2100 00:00:00 001 5 5 00 00 00"),
            (-1, "Wednesday 31 December 1969 23:59:59 365 3 3 52 52 69"),
        ] {
            assert_eq!(format_moment(seconds, "%A %d %B %Y %T %j %w %u %U %W %y").unwrap(), expected);
        }
        assert_eq!(format_moment(0, "%-d %e %b %-I %p%%").unwrap(), "1  1 Jan 12 AM%");
        assert!(format_moment(0, "%Q").is_err());
        assert!(format_moment(0, "%").is_err());
        assert!(format_moment(i64::MAX, "%Y").is_ok());
    }
}
