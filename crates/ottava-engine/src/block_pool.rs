//! The blocks of one group of layers of a KV cache. Sequences that begin with the same tokens share the blocks that hold these tokens, as in vLLM's
//! automatic prefix caching.

use crate::request::AdapterId;
use ottava_common::hash::sha256_of;
use std::collections::{BTreeMap, HashMap};

/// The number of tokens of a block of the KV cache.
pub const BLOCK_SIZE: usize = 32;

/// A name for the contents of a full block: the SHA-256 of all tokens of a sequence up to the end of the block.
pub type BlockKey = [u8; 32];

/// Returns the key of the block of `tokens` that follows the block with the key `before`.
pub fn key_after(before: Option<&BlockKey>, tokens: &[u32]) -> BlockKey {
    let tokens: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    sha256_of(&[before.map_or(&[], |key| &key[..]), &tokens])
}

/// Returns the key before the first block of a sequence of an adapter. Adapters compute different keys and values for the same tokens, so their
/// blocks need different keys.
pub fn key_of_adapter(AdapterId(number): AdapterId) -> BlockKey {
    sha256_of(&[b"adapter ", &number.to_le_bytes()])
}

/// A block.
#[derive(Clone, Debug, Default)]
struct Block {
    /// The number of sequences that use the block.
    users: usize,
    /// The key by which further sequences find the block.
    key: Option<BlockKey>,
    /// The time at which its last user returned the block.
    since: u64,
}

/// A pool of blocks. An unused block with a key stays until another block is needed. Then the block that has been unused for the longest time is
/// evicted.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// The unused blocks without a key. The last block is taken next.
    free: Vec<i32>,
    /// The unused blocks with a key, by the time since which they are unused.
    unused: BTreeMap<u64, i32>,
    by_key: HashMap<BlockKey, i32>,
    time: u64,
}

impl BlockPool {
    /// Makes a pool of `all` unused blocks.
    pub fn new(all: usize) -> BlockPool {
        let (blocks, free) = (vec![Block::default(); all], (0..all as i32).rev().collect());
        BlockPool { blocks, free, unused: BTreeMap::new(), by_key: HashMap::new(), time: 0 }
    }

    /// Returns the number of blocks, free or used.
    pub fn all(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the number of blocks that sequences use.
    pub fn used(&self) -> usize {
        self.all() - self.free.len() - self.unused.len()
    }

    /// Returns whether the pool has enough blocks to extend `blocks` to hold `tokens` tokens.
    pub fn suffice(&self, blocks: &[i32], tokens: usize) -> bool {
        missing(blocks, tokens) <= self.free.len() + self.unused.len()
    }

    /// Extends `blocks` to hold `tokens` tokens. Returns the keys that no longer have a block. Panics if the pool does not have enough blocks.
    pub fn extend(&mut self, blocks: &mut Vec<i32>, tokens: usize) -> Vec<BlockKey> {
        let mut evicted = Vec::new();
        for _ in 0..missing(blocks, tokens) {
            let block = self.free.pop().unwrap_or_else(|| self.evict(&mut evicted));
            self.blocks[block as usize].users = 1;
            blocks.push(block);
        }
        evicted
    }

    /// Takes the block with a key that has been unused for the longest time, and adds its key to `evicted`.
    fn evict(&mut self, evicted: &mut Vec<BlockKey>) -> i32 {
        let (_, block) = self.unused.pop_first().expect("there are enough blocks");
        let key = self.blocks[block as usize].key.take().expect("it has a key");
        self.by_key.remove(&key);
        evicted.push(key);
        block
    }

    /// Takes back the `blocks` of a sequence. The last blocks with a key are evicted first, since the earlier blocks can be shared without them.
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

    /// Returns how many of `keys` have a block, up to the first key without a block.
    pub fn cached(&self, keys: &[BlockKey]) -> usize {
        keys.iter().take_while(|key| self.by_key.contains_key(*key)).count()
    }

    /// Finds the blocks with the first of `keys`, up to the first key without a block, and counts one more user of each. Returns these blocks.
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

    /// Lets other sequences find a used, full block by `key`. If another block has this key, that block keeps it.
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

    /// Simulates a sequence that has computed these tokens.
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
        // The same tokens after different tokens have another key.
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
        // The blocks are used again, so they become the youngest.
        let again = pool.share(&keys(&old));
        assert_eq!(again, a);
        pool.put_back(&again);
        let mut other = Vec::new();
        assert!(pool.suffice(&other, 128) && !pool.suffice(&other, 129));
        let evicted = pool.extend(&mut other, 96);
        assert_eq!(other, [b[1], b[0], a[1]], "the end of a sequence goes before its beginning");
        assert_eq!(evicted, [keys(&new)[1], keys(&new)[0], keys(&old)[1]]);
        assert_eq!((pool.cached(&keys(&old)), pool.cached(&keys(&new))), (1, 0));
        assert_eq!((pool.share(&keys(&old)), pool.share(&keys(&new))), (vec![a[0]], vec![]));
        assert_eq!(pool.used(), 4);
    }
}
