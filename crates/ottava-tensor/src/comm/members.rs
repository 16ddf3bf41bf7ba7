//! The ranks of a group, and their names in error messages.

use super::fault::list_ranks;
use std::fmt;

/// The ranks of a group, by their numbers in the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Members {
    /// The number of the group in its job. The group of all ranks has the number 0.
    pub id: u64,
    pub name: String,
    /// The ranks in the order of the group.
    pub ranks: Vec<usize>,
}

impl Members {
    /// Returns the group of all ranks of a job.
    pub fn world(size: usize) -> Members {
        Members { id: 0, name: "world".into(), ranks: (0..size).collect() }
    }

    /// Returns the index in the group of a rank of the job.
    pub fn place(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|&member| member == rank)
    }

    /// Returns the groups of a split in which member `i` gives colour and key `places[i]`. There is one group per colour, ordered by key and then by
    /// rank in this group.
    pub fn divide(&self, places: &[(usize, usize)]) -> Vec<Vec<usize>> {
        let mut sorted: Vec<_> = places.iter().copied().zip(self.ranks.iter().copied()).collect();
        sorted.sort_by_key(|&(place, _)| place);
        let groups = sorted.chunk_by(|(a, _), (b, _)| a.0 == b.0);
        groups.map(|group| group.iter().map(|&(_, rank)| rank).collect()).collect()
    }

    /// Encodes the hub's answer to a member: the number and the ranks of the member's group.
    pub fn encode(&self) -> Vec<u8> {
        encode([self.id].into_iter().chain(self.ranks.iter().map(|&rank| rank as u64)))
    }

    /// Decodes the hub's answer, or returns `None` if the answer is malformed.
    pub fn decode(name: &str, bytes: &[u8]) -> Option<Members> {
        let mut numbers = decode(bytes);
        let id = numbers.next()?;
        Some(Members { id, name: name.into(), ranks: numbers.map(|rank| rank as usize).collect() })
    }
}

/// Encodes the message of a rank in a split: its colour and key.
pub(super) fn encode_place((colour, key): (usize, usize)) -> Vec<u8> {
    encode([colour as u64, key as u64])
}

/// Decodes colour and key from a message whose length was checked.
pub(super) fn decode_place(bytes: &[u8]) -> (usize, usize) {
    let mut numbers = decode(bytes).map(|number| number as usize);
    numbers.next().zip(numbers.next()).expect("two numbers")
}

fn encode(numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
    numbers.into_iter().flat_map(u64::to_le_bytes).collect()
}

fn decode(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(size_of::<u64>()).map(|number| u64::from_le_bytes(number.try_into().expect("eight bytes")))
}

impl fmt::Display for Members {
    /// Writes " of group `tensor` (ranks 4 to 7)", to be appended to the number of a call. Writes nothing for the group of all ranks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.id == 0 { Ok(()) } else { write!(f, " of group `{}` ({})", self.name, list_ranks(&self.ranks)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_orders_ranks_by_key_and_then_by_rank() {
        let group = Members { id: 7, name: "even".into(), ranks: vec![0, 2, 4, 6, 8] };
        assert_eq!(group.divide(&[(1, 5), (0, 0), (1, 2), (1, 5), (0, 0)]), [vec![2, 8], vec![4, 0, 6]]);
        assert_eq!(group.place(6), Some(3));
        assert_eq!(group.to_string(), " of group `even` (ranks 0, 2, 4, 6, 8)");
        assert_eq!(Members::world(3).to_string(), "");
    }
}
