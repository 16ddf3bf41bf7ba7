//! The free blocks of a KV cache.

/// Tokens of a block of the KV cache.
pub const BLOCK_SIZE: usize = 32;

/// Hands out the blocks of a cache.
#[derive(Debug)]
pub struct FreeBlocks {
    free: Vec<i32>,
    all: usize,
}

impl FreeBlocks {
    /// All of `all` blocks.
    pub fn new(all: usize) -> FreeBlocks {
        FreeBlocks { free: (0..all as i32).rev().collect(), all }
    }

    /// The number of blocks, free or used.
    pub fn all(&self) -> usize {
        self.all
    }

    /// The number of used blocks.
    pub fn used(&self) -> usize {
        self.all - self.free.len()
    }

    /// Extends `blocks` to hold `tokens`. Returns false, and takes none, if there are not enough.
    pub fn extend(&mut self, blocks: &mut Vec<i32>, tokens: usize) -> bool {
        let missing = tokens.div_ceil(BLOCK_SIZE).saturating_sub(blocks.len());
        let Some(rest) = self.free.len().checked_sub(missing) else { return false };
        blocks.extend(self.free.drain(rest..).rev());
        true
    }

    /// Takes `blocks` back.
    pub fn put_back(&mut self, blocks: &mut Vec<i32>) {
        self.free.extend(blocks.drain(..).rev());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_handed_out_once_and_come_back() {
        let mut free = FreeBlocks::new(5);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(free.extend(&mut a, 65) && free.extend(&mut a, 96) && free.extend(&mut b, 1));
        assert_eq!((a.as_slice(), b.as_slice(), free.used(), free.all()), (&[0, 1, 2][..], &[3][..], 4, 5));
        assert!(!free.extend(&mut b, 96) && b.len() == 1, "of two missing ones, one is free");
        free.put_back(&mut a);
        assert!(free.extend(&mut b, 160));
        b.sort_unstable();
        assert_eq!(b, [0, 1, 2, 3, 4]);
    }
}
