//! The parts of a preparation. Processes tokenize parts independently of each other, and a last step joins them.
//!
//! Each source is divided into units of about [`UNIT_BYTES`]; every process finds the same edges of units. All sources in order form a range of
//! bytes, which is divided into equal shares, one for each part. Each unit gets a position within its source. The part whose share includes this
//! position tokenizes the unit. So a source within one share is read by a single part, and the parts of a larger source divide its units in
//! proportion to their bytes. This needs no index of a source, and works for any kind of source.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use ottava_common::hash::MIX_STEP;

/// The size of a unit in bytes. A unit has consecutive records; its last record may exceed the size.
pub(super) const UNIT_BYTES: u64 = 1 << 20;

/// The bytes that each record counts in addition to its own bytes, so that many short records also fill a unit.
const RECORD_BYTES: u64 = 64;

/// The maximum number of parts of a preparation.
const MAX_PARTS: usize = 10_000;

/// A part of a preparation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The number of the part, from 1.
    pub number: usize,
    /// The number of parts.
    pub of: usize,
}

impl Part {
    /// The whole preparation by a single process.
    pub(super) const WHOLE: Part = Part { number: 1, of: 1 };
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Part, String> {
        let numbers = text.split_once('/').and_then(|(number, of)| Some((number.parse().ok()?, of.parse().ok()?)));
        match numbers {
            Some((number, of)) if (1..=of).contains(&number) && of <= MAX_PARTS => Ok(Part { number, of }),
            _ => Err(format!("write I/N, part I of N parts, with I from 1 to N and N up to {MAX_PARTS}, such as 1/4")),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

/// The division of a source's units among parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Division {
    /// The position of the source: the sum of the bytes of the sources before it.
    pub(super) start: u64,
    /// The size of the source in bytes.
    pub(super) size: u64,
    /// The size of all sources in bytes.
    pub(super) total: u64,
    /// The number of parts.
    pub(super) parts: usize,
}

impl Division {
    /// Returns the number of the part that tokenizes unit `unit`, which is counted from 0.
    pub(super) fn owner(&self, unit: u64) -> usize {
        // Multiples of the golden ratio are spread evenly for any number of units.
        let place = (u128::from(unit.wrapping_mul(MIX_STEP)) * u128::from(self.size)) >> 64;
        self.part_at(self.start + place as u64)
    }

    /// Returns the parts that may have units of the source.
    pub(super) fn owners(&self) -> RangeInclusive<usize> {
        self.part_at(self.start)..=self.part_at(self.start + self.size.saturating_sub(1))
    }

    fn part_at(&self, byte: u64) -> usize {
        let share = u128::from(byte) * self.parts as u128 / u128::from(self.total.max(1));
        (share as usize).min(self.parts - 1) + 1
    }
}

/// Selects the units of a source that a part tokenizes, while the source is being read.
pub(super) struct Units {
    /// The part and the division; `None` if all units are tokenized.
    part: Option<(usize, Division)>,
    unit_bytes: u64,
    /// The unit of the next record. The next field is the bytes that this unit has so far.
    next: u64,
    bytes: u64,
}

impl Units {
    /// Selects all units.
    pub(super) fn all() -> Units {
        Units { part: None, unit_bytes: UNIT_BYTES, next: 0, bytes: 0 }
    }

    /// Selects the units of `part`.
    pub(super) fn of(part: Part, division: Division, unit_bytes: u64) -> Units {
        Units { part: Some((part.number, division)), unit_bytes, next: 0, bytes: 0 }
    }

    /// Whether the part tokenizes the unit of the next record.
    pub(super) fn has_next(&self) -> bool {
        self.part.is_none_or(|(part, division)| division.owner(self.next) == part)
    }

    /// Counts a record of `bytes` bytes. Returns the unit of the record if the part tokenizes it.
    pub(super) fn take(&mut self, bytes: usize) -> Option<u64> {
        let unit = self.has_next().then_some(self.next);
        self.bytes += bytes as u64 + RECORD_BYTES;
        if self.bytes >= self.unit_bytes {
            (self.next, self.bytes) = (self.next + 1, 0);
        }
        unit
    }

    /// Returns a number above all units that were read so far.
    pub(super) fn end(&self) -> u64 {
        self.next + 1
    }
}

/// The units and documents of a source that a part has.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SourceUnits {
    /// The number of units of the whole source; 0 if the part has no units of this source.
    pub(super) units: u64,
    /// The units with documents of the part, and the number of these documents.
    pub(super) documents: Vec<(u64, u64)>,
    /// The number of records that were skipped because they cannot be used.
    pub(super) bad_records: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_divided_by_bytes_and_small_sources_are_whole() {
        for parts in 1..20 {
            let sizes = [0, 1, 5_000_000, 70_000_000, 3, 300_000_000, 0];
            let total = sizes.iter().sum();
            let (mut start, mut owned) = (0, vec![0.0; parts]);
            for size in sizes {
                let division = Division { start, size, total, parts };
                let units = size / 100_000 + 1;
                for unit in 0..units {
                    let owner = division.owner(unit);
                    assert!(division.owners().contains(&owner));
                    owned[owner - 1] += size as f64 / units as f64;
                }
                start += size;
            }
            for (part, bytes) in owned.into_iter().enumerate() {
                let share = bytes / total as f64 * parts as f64;
                // Each of 19 parts gets about 198 of 3,757 units. With multiples of the golden ratio, the number of units differs from the share by
                // only a few units: the largest observed difference is 1.2 %.
                assert!((share - 1.0).abs() < 0.05, "part {} of {parts} has {share} of its share", part + 1);
            }
        }
    }

    #[test]
    fn parts_are_read_from_their_numbers() {
        assert_eq!("2/3".parse(), Ok(Part { number: 2, of: 3 }));
        assert_eq!(Part { number: 2, of: 3 }.to_string(), "2/3");
        for text in ["", "2", "0/3", "4/3", "1/0", "-1/3", "1/10001", "a/b", "1/2/3"] {
            assert!(text.parse::<Part>().unwrap_err().contains("such as 1/4"), "{text}");
        }
    }
}
