//! The blocks of one group of layers of a KV cache. Sequences that begin with the same tokens share the blocks that hold these tokens, as
//! with vLLM's automatic prefix caching.

use crate::request::AdapterId;
use ottava_common::hash::sha256_of;
use std::collections::{BTreeMap, HashMap};

/// Tokens of a block of the KV cache.
pub const BLOCK_SIZE: usize = 32;

/// Names what is in a full block: the SHA-256 of all tokens of a sequence up to its end.
pub type BlockKey = [u8; 32];

/// The key of the block of `tokens` that follows the block of key `before`.
pub fn key_after(before: Option<&BlockKey>, tokens: &[u32]) -> BlockKey {
    let tokens: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    sha256_of(&[before.map_or(&[], |key| &key[..]), &tokens])
}

/// The key before the first block of a sequence of an adapter, whose keys and values of the same tokens are others.
pub fn key_of_adapter(AdapterId(number): AdapterId) -> BlockKey {
    sha256_of(&[b"adapter ", &number.to_le_bytes()])
}

/// A block.
#[derive(Clone, Debug, Default)]
struct Block {
    /// Sequences that use it.
    users: usize,
    /// The key by which further sequences find it.
    key: Option<BlockKey>,
    /// When its last user gave it back.
    since: u64,
}

/// Hands out blocks. A block with a key that nobody uses stays until another one is needed: the one that is unused for longest goes first.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Unused blocks without a key; the last is the next one.
    free: Vec<i32>,
    /// Unused blocks with a key, by time.
    unused: BTreeMap<u64, i32>,
    by_key: HashMap<BlockKey, i32>,
    time: u64,
}

impl BlockPool {
    /// All of `all` blocks.
    pub fn new(all: usize) -> BlockPool {
        let (blocks, free) = (vec![Block::default(); all], (0..all as i32).rev().collect());
        BlockPool { blocks, free, unused: BTreeMap::new(), by_key: HashMap::new(), time: 0 }
    }

    /// The number of blocks, free or used.
    pub fn all(&self) -> usize {
        self.blocks.len()
    }

    /// The number of blocks that sequences use.
    pub fn used(&self) -> usize {
        self.all() - self.free.len() - self.unused.len()
    }

    /// Whether there are blocks to extend `blocks` to hold `tokens`.
    pub fn suffice(&self, blocks: &[i32], tokens: usize) -> bool {
        missing(blocks, tokens) <= self.free.len() + self.unused.len()
    }

    /// Extends `blocks` to hold `tokens`. Panics if there are not enough.
    pub fn extend(&mut self, blocks: &mut Vec<i32>, tokens: usize) {
        for _ in 0..missing(blocks, tokens) {
            let block = self.free.pop().unwrap_or_else(|| self.evict());
            self.blocks[block as usize].users = 1;
            blocks.push(block);
        }
    }

    /// Takes the block with a key that is unused for longest.
    fn evict(&mut self) -> i32 {
        let (_, block) = self.unused.pop_first().expect("there are enough blocks");
        let key = self.blocks[block as usize].key.take().expect("it has a key");
        self.by_key.remove(&key);
        block
    }

    /// Takes `blocks` of a sequence back. Of blocks with a key, the last are evicted first: the others are found without them.
    pub fn put_back(&mut self, blocks: &[i32]) {
        for &number in blocks.iter().rev() {
            let block = &mut self.blocks[number as usize];
            block.users -= 1;
            match (block.users, block.key) {
                (0, Some(_)) => {
                    self.time += 1;
                    block.since = self.time;
                    self.unused.insert(self.time, number);
                }
                (0, None) => self.free.push(number),
                _ => {}
            }
        }
    }

    /// The blocks with the first of `keys`, up to one that there is not, for one more sequence.
    pub fn share(&mut self, keys: &[BlockKey]) -> Vec<i32> {
        let found: Vec<i32> = keys.iter().map_while(|key| self.by_key.get(key).copied()).collect();
        for &number in &found {
            let block = &mut self.blocks[number as usize];
            if block.users == 0 {
                self.unused.remove(&block.since);
            }
            block.users += 1;
        }
        found
    }

    /// Lets others find a used block, which is full, by `key`. If there is another one with this key, that one stays.
    pub fn publish(&mut self, number: i32, key: BlockKey) {
        let block = &mut self.blocks[number as usize];
        if block.key.is_none() && !self.by_key.contains_key(&key) {
            block.key = Some(key);
            self.by_key.insert(key, number);
        }
    }
}

fn missing(blocks: &[i32], tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_SIZE).saturating_sub(blocks.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(tokens: &[u32]) -> Vec<BlockKey> {
        let mut keys: Vec<BlockKey> = Vec::new();
        tokens.chunks_exact(BLOCK_SIZE).for_each(|block| keys.push(key_after(keys.last(), block)));
        keys
    }

    /// A sequence that has computed these tokens.
    fn compute(pool: &mut BlockPool, tokens: &[u32]) -> Vec<i32> {
        let keys = keys(tokens);
        let mut blocks = pool.share(&keys);
        let shared = blocks.len();
        pool.extend(&mut blocks, tokens.len());
        blocks.iter().zip(&keys).skip(shared).for_each(|(&block, &key)| pool.publish(block, key));
        blocks
    }

    #[test]
    fn sequences_share_the_blocks_of_equal_beginnings() {
        let mut pool = BlockPool::new(8);
        let first: Vec<u32> = (0..100).collect();
        let mut second = first.clone();
        second[70] = 0;
        let (a, b) = (compute(&mut pool, &first), compute(&mut pool, &second));
        assert_eq!((&a, &b), (&vec![0, 1, 2, 3], &vec![0, 1, 4, 5]), "the third block has another token");
        // The same tokens after others are something else.
        assert!(pool.share(&keys(&first[32..])).is_empty());
        pool.put_back(&a);
        assert_eq!(pool.used(), 4, "the other sequence uses two of them");
        pool.put_back(&b);
        assert_eq!(pool.used(), 0);
        assert_eq!(compute(&mut pool, &first)[..3], [0, 1, 2], "they stay when nobody uses them");
    }

    #[test]
    fn the_blocks_that_are_unused_for_longest_are_evicted() {
        let mut pool = BlockPool::new(4);
        let (old, new): (Vec<u32>, Vec<u32>) = ((0..64).collect(), (100..164).collect());
        let (a, b) = (compute(&mut pool, &old), compute(&mut pool, &new));
        pool.put_back(&a);
        pool.put_back(&b);
        // A use makes them the youngest.
        let again = pool.share(&keys(&old));
        assert_eq!(again, a);
        pool.put_back(&again);
        let mut other = Vec::new();
        assert!(pool.suffice(&other, 128) && !pool.suffice(&other, 129));
        pool.extend(&mut other, 96);
        assert_eq!(other, [b[1], b[0], a[1]], "the end of a sequence goes before its beginning");
        assert_eq!((pool.share(&keys(&old)), pool.share(&keys(&new))), (vec![a[0]], vec![]));
        assert_eq!(pool.used(), 4);
    }
}
