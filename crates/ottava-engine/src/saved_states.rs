//! The places of saved recurrent states. A saved state is found by the key of the block at whose end it was, so that a request that begins with the same
//! tokens continues after this block. Speculation takes places without a key for the states before proposed tokens.

use crate::block_pool::BlockKey;
use std::collections::{BTreeMap, HashMap};

/// The places of saved states. When a place is needed, the saved state that was not found for the longest time is forgotten.
#[derive(Debug, Default)]
pub struct SavedStates {
    all: usize,
    free: Vec<usize>,
    /// The place of each state with a key, and the time at which it was last saved or found.
    by_key: HashMap<BlockKey, (usize, u64)>,
    by_time: BTreeMap<u64, BlockKey>,
    time: u64,
}

impl SavedStates {
    /// Makes `all` free places.
    pub fn new(all: usize) -> SavedStates {
        SavedStates { all, free: (0..all).rev().collect(), ..SavedStates::default() }
    }

    /// Returns the number of places.
    pub fn all(&self) -> usize {
        self.all
    }

    /// Returns whether a state has this key.
    pub fn has(&self, key: &BlockKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// Returns the place of the state with this key. The state becomes the last that is forgotten.
    pub fn find(&mut self, key: &BlockKey) -> Option<usize> {
        self.time += 1;
        let (place, time) = self.by_key.get_mut(key)?;
        self.by_time.remove(&std::mem::replace(time, self.time));
        self.by_time.insert(self.time, *key);
        Some(*place)
    }

    /// Returns the place to which the state with this key must be copied. Returns `None` if a state with this key is saved already, or if no place is
    /// left. With `only_free`, no other state is forgotten for it.
    pub fn save(&mut self, key: BlockKey, only_free: bool) -> Option<usize> {
        if self.find(&key).is_some() || (only_free && self.free.is_empty()) {
            return None;
        }
        let place = self.take()?;
        self.time += 1;
        self.by_key.insert(key, (place, self.time));
        self.by_time.insert(self.time, key);
        Some(place)
    }

    /// Forgets the state with this key, if there is one.
    pub fn forget(&mut self, key: &BlockKey) {
        if let Some((place, time)) = self.by_key.remove(key) {
            self.by_time.remove(&time);
            self.free.push(place);
        }
    }

    /// Takes a place until [`SavedStates::put_back`]. Returns `None` if all places are taken.
    pub fn take(&mut self) -> Option<usize> {
        if self.free.is_empty() {
            let oldest = *self.by_time.first_key_value()?.1;
            self.forget(&oldest);
        }
        self.free.pop()
    }

    /// Takes back a place of [`SavedStates::take`].
    pub fn put_back(&mut self, place: usize) {
        self.free.push(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: u8) -> BlockKey {
        [name; 32]
    }

    #[test]
    fn the_state_that_was_not_found_for_longest_is_forgotten() {
        let mut saved = SavedStates::new(3);
        let [a, b, c] = [1, 2, 3].map(|name| saved.save(key(name), false).expect("a place is free"));
        assert!(a != b && b != c && a != c);
        assert_eq!((saved.save(key(1), false), saved.find(&key(4))), (None, None), "it is saved already");
        assert_eq!(saved.save(key(4), true), None, "no place is free");
        // The first state was found since, so the second is the oldest.
        assert_eq!((saved.save(key(4), false), saved.find(&key(2))), (Some(b), None));
        assert_eq!([1, 3, 4].map(|name| saved.find(&key(name))), [Some(a), Some(c), Some(b)]);
        saved.forget(&key(3));
        assert_eq!((saved.has(&key(3)), saved.save(key(5), true)), (false, Some(c)));
    }

    #[test]
    fn a_taken_place_is_not_handed_out() {
        let mut saved = SavedStates::new(2);
        let (own, other) = (saved.save(key(1), false), saved.take());
        assert_eq!(saved.take(), own, "the state with a key is forgotten");
        assert_eq!((saved.take(), saved.save(key(2), false), saved.has(&key(1))), (None, None, false));
        saved.put_back(other.expect("a place was free"));
        assert_eq!((saved.save(key(2), true), saved.all()), (other, 2));
        assert_eq!(SavedStates::new(0).save(key(1), false), None);
    }
}
