//! Dates in chat templates.

use std::time::{SystemTime, UNIX_EPOCH};

/// The time that chat templates read, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The present time.
    Now,
    /// Midnight of 26 July 2024. Llama's templates use this date if there is no clock. With a fixed date, the tokens of a file do not change.
    Fixed,
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
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

impl Clock {
    /// Formats the time by Python's `strftime` format. Errors with the first unknown code.
    pub(crate) fn format(self, format: &str) -> Result<String, String> {
        let seconds = match self {
            Clock::Now => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            Clock::Fixed => 1_721_952_000,
        };
        format_seconds(seconds, format)
    }
}

fn format_seconds(seconds: u64, format: &str) -> Result<String, String> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[((days + 4) % 7) as usize]);
    let (mut out, mut rest) = (String::new(), format.chars());
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let code = rest.next().unwrap_or_default();
        let padded = code != '-';
        let code = if padded { code } else { rest.next().unwrap_or_default() };
        let number = |value: u64| if padded { format!("{value:02}") } else { value.to_string() };
        out += &match code {
            'd' => number(day),
            'm' => number(month),
            'y' => number(year % 100),
            'H' => number(second / 3600),
            'M' => number(second / 60 % 60),
            'S' => number(second % 60),
            'Y' => year.to_string(),
            'B' => month_name.into(),
            'b' => month_name[..3].into(),
            'A' => day_name.into(),
            'a' => day_name[..3].into(),
            '%' => "%".into(),
            _ => return Err(format!("strftime_now: `%{code}` of {format:?} is not supported")),
        };
    }
    Ok(out)
}

/// Returns year, month and day of a day since 1970, with the algorithm `civil_from_days` (Howard Hinnant, *chrono-Compatible Low-Level Date
/// Algorithms*).
fn date(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(Clock::Fixed.format("%d %b %Y, %A").unwrap(), "26 Jul 2024, Friday");
        // Expected values from `date -u -d @951827696` and similar calls.
        assert_eq!(format_seconds(951_827_696, "%a %-d %B %Y %H:%M:%S").unwrap(), "Tue 29 February 2000 12:34:56");
        assert_eq!(format_seconds(0, "%Y-%m-%d %y %-m%%").unwrap(), "1970-01-01 70 1%");
        assert_eq!(format_seconds(4_102_444_799, "%Y-%m-%d").unwrap(), "2099-12-31");
        assert!(format_seconds(0, "%Q").unwrap_err().contains("`%Q`"));
    }
}
