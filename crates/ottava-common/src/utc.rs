//! Dates of the calendar.

/// A time in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Utc {
    /// The year, month (from 1) and day (from 1).
    pub date: [u64; 3],
    /// The hour, minute and second.
    pub time: [u64; 3],
}

impl Utc {
    /// Converts `seconds` since 1970. Days are converted as in Hinnant, "chrono-compatible low-level date algorithms", 2021.
    pub fn of(seconds: u64) -> Utc {
        let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
        let (era, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let of_year = day - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let (day, month) = (of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
        let year = year + era * 400 + u64::from(month <= 2);
        Utc { date: [year, month, day], time: [rest / 3600, rest / 60 % 60, rest % 60] }
    }
}

#[cfg(test)]
mod tests {
    use super::Utc;

    #[test]
    fn dates_agree_with_the_command_date() {
        // `date -u -d @SECONDS`
        for (seconds, date, time) in [
            (0, [1970, 1, 1], [0, 0, 0]),
            (951_782_399, [2000, 2, 28], [23, 59, 59]),
            (951_782_400, [2000, 2, 29], [0, 0, 0]),
            (1_798_761_599, [2026, 12, 31], [23, 59, 59]),
            (4_107_542_400, [2100, 3, 1], [0, 0, 0]),
        ] {
            assert_eq!(Utc::of(seconds), Utc { date, time });
        }
    }
}
