//! The finished ranges of a download.

use std::ops::Range;

/// Ranges of bytes of a file that are written, in ascending order and without overlaps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// Reads lines `START END`. Ignores a last line without its newline, which a killed process may leave, and lines beyond `size`.
    pub(crate) fn parse(text: &str, size: u64) -> Ranges {
        let mut ranges = Ranges::default();
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            let numbers = line.split_once(' ').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
            if let Some((start, end)) = numbers.filter(|&(start, end): &(u64, u64)| start < end && end <= size) {
                ranges.add(start..end);
            }
        }
        ranges
    }

    /// Returns the line that [`Ranges::parse`] reads.
    pub(crate) fn line(range: &Range<u64>) -> String {
        format!("{} {}\n", range.start, range.end)
    }

    /// Adds a range.
    pub(crate) fn add(&mut self, new: Range<u64>) {
        self.0.push(new);
        self.0.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::with_capacity(self.0.len());
        for range in self.0.drain(..).filter(|range| !range.is_empty()) {
            match merged.last_mut().filter(|last| range.start <= last.end) {
                Some(last) => last.end = last.end.max(range.end),
                None => merged.push(range),
            }
        }
        self.0 = merged;
    }

    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns the first range of at most `most` bytes below `size` that is not in these ranges; `None` if there is none.
    pub(crate) fn first_gap(&self, size: u64, most: u64) -> Option<Range<u64>> {
        let (start, end) = match self.0.first() {
            Some(first) if first.start == 0 => (first.end, self.0.get(1).map_or(size, |next| next.start)),
            first => (0, first.map_or(size, |next| next.start)),
        };
        (start < size).then(|| start..end.min(start.saturating_add(most)))
    }

    /// Whether all bytes of the `range` are in one of these ranges.
    #[cfg(test)]
    fn has(&self, range: &Range<u64>) -> bool {
        self.0.iter().any(|known| known.start <= range.start && range.end <= known.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_found_until_the_file_is_whole() {
        let mut ranges = Ranges::parse("10 20\n30 40\n5 12\n90 200\n40 4", 100);
        // The line beyond the size, and the last line without its newline, are not counted.
        assert_eq!(ranges, Ranges(vec![5..20, 30..40]));
        let mut gaps = Vec::new();
        while let Some(gap) = ranges.first_gap(100, 30) {
            assert!(!ranges.has(&gap));
            ranges.add(gap.clone());
            gaps.push(gap);
        }
        assert_eq!(gaps, [0..5, 20..30, 40..70, 70..100]);
        assert_eq!(ranges.bytes(), 100);
        assert_eq!(Ranges::default().first_gap(0, 10), None);
    }
}
