//! The blocks of a sequence in a KV cache, and the free blocks.

use crate::block_pool::{BLOCK_SIZE, BlockKey, BlockPool};
use crate::saved_states::SavedStates;

/// The blocks of a sequence, for each group of the cache's layers.
#[derive(Debug, Default)]
pub struct SequenceBlocks {
    /// The blocks of each group, in the order of the sequence's tokens. A block that was returned to the pool keeps its entry.
    pub tables: Vec<Vec<i32>>,
    /// The number of blocks of each group that were returned to the pool. They are the first blocks, whose keys no later token sees.
    given_back: Vec<usize>,
    /// The slot of the sequence's recurrent states, once it has one.
    slot: Option<usize>,
}

impl SequenceBlocks {
    /// Returns the slot of the sequence's recurrent states.
    ///
    /// Panics before [`Pools::extend`].
    pub fn slot(&self) -> usize {
        self.slot.expect("a running sequence has a slot")
    }
}

/// The blocks of one group of layers.
#[derive(Debug)]
struct Pool {
    window: Option<usize>,
    free: BlockPool,
}

/// The blocks of all groups of a cache's layers. A layer with a window needs only the blocks whose keys later tokens see.
#[derive(Debug)]
pub struct Pools {
    pools: Vec<Pool>,
    /// The free slots of recurrent states. There is a slot for each sequence that runs at once.
    slots: Vec<usize>,
    /// Whether sequences have recurrent states.
    has_states: bool,
    /// The places of saved recurrent states.
    pub saved: SavedStates,
    /// The maximum number of tokens of a sequence that a step computes.
    chunk: usize,
}

/// What a sequence shares with earlier sequences.
#[derive(Debug, PartialEq, Eq)]
pub struct Shared {
    /// The number of shared blocks.
    pub blocks: usize,
    /// The number of blocks that could be shared if all recurrent states were saved.
    pub cached: usize,
    /// The place of the recurrent states at the end of the shared blocks, if the sequence has states.
    pub state: Option<usize>,
}

/// Returns the maximum number of blocks that a sequence needs at once if tokens see `window` keys and a step computes up to `chunk` tokens.
fn blocks_in_window(window: usize, chunk: usize) -> usize {
    window.saturating_add(chunk).div_ceil(BLOCK_SIZE) + 1
}

impl Pools {
    /// Returns the number of blocks of a group with `window`, for a cache of `tokens` tokens, `max_batch` sequences and steps of `chunk` tokens.
    pub fn blocks_for(window: Option<usize>, tokens: usize, max_batch: usize, chunk: usize) -> usize {
        let for_window = window.map_or(usize::MAX, |window| blocks_in_window(window, chunk).saturating_mul(max_batch));
        tokens.div_ceil(BLOCK_SIZE).min(for_window)
    }

    /// Makes the pools of groups with these windows and numbers of blocks, for `slots` sequences at once and steps of up to `chunk` tokens of a sequence.
    pub fn new(groups: impl IntoIterator<Item = (Option<usize>, usize)>, slots: usize, chunk: usize) -> Pools {
        let pool = |(window, blocks)| Pool { window, free: BlockPool::new(blocks) };
        let pools = groups.into_iter().map(pool).collect();
        Pools { pools, slots: (0..slots).rev().collect(), has_states: false, saved: SavedStates::default(), chunk }
    }

    /// Returns the pools of a model whose sequences have recurrent states, with places for `saved` saved states.
    pub fn with_states(self, saved: usize) -> Pools {
        Pools { has_states: true, saved: SavedStates::new(saved), ..self }
    }

    /// Returns whether sequences have recurrent states.
    pub fn has_states(&self) -> bool {
        self.has_states
    }

    /// Returns the number of blocks of the group whose tokens see the most keys.
    pub fn all(&self) -> usize {
        self.pools.first().map_or(0, |pool| pool.free.all())
    }

    /// Returns the number of used blocks of this group.
    pub fn used(&self) -> usize {
        self.pools.first().map_or(0, |pool| pool.free.used())
    }

    /// Returns the length of the longest sequence for which all blocks suffice.
    pub fn room(&self) -> usize {
        let room = |Pool { window, free }: &Pool| match window {
            Some(window) if free.all() >= blocks_in_window(*window, self.chunk) => usize::MAX,
            _ => free.all() * BLOCK_SIZE,
        };
        self.pools.iter().map(room).min().unwrap_or(usize::MAX)
    }

    /// Returns the blocks of a sequence that no token from number `computed` on sees, and adds blocks for the next step. A group without a window
    /// gets blocks for all `tokens` tokens, and a group with a window gets blocks for the tokens of the step. A sequence without a slot gets a slot. If a
    /// pool does not have enough blocks, or no slot is left, adds no blocks and returns false.
    pub fn extend(&mut self, blocks: &mut SequenceBlocks, computed: usize, tokens: usize) -> bool {
        let SequenceBlocks { tables, given_back, slot } = blocks;
        tables.resize_with(self.pools.len(), Vec::new);
        given_back.resize(self.pools.len(), 0);
        for ((Pool { window, free }, table), given_back) in self.pools.iter_mut().zip(&*tables).zip(given_back) {
            let Some(window) = window else { continue };
            let unseen = ((computed + 1).saturating_sub(*window) / BLOCK_SIZE).min(table.len());
            if unseen > *given_back {
                free.put_back(&table[std::mem::replace(given_back, unseen)..unseen]);
            }
        }
        let of_step = tokens.min(computed.saturating_add(self.chunk));
        let reach = |pool: &Pool| if pool.window.is_some() { of_step } else { tokens };
        let suffice = (slot.is_some() || !self.slots.is_empty())
            && self.pools.iter().zip(&*tables).all(|(pool, table)| pool.free.suffice(table, reach(pool)));
        if suffice {
            *slot = slot.or_else(|| self.slots.pop());
            for (pool, table) in self.pools.iter_mut().zip(tables) {
                let tokens = reach(pool);
                let evicted = pool.free.extend(table, tokens);
                // Without its block, a saved state is not found.
                evicted.iter().for_each(|key| self.saved.forget(key));
            }
        }
        suffice
    }

    /// Returns whether sequences can share blocks. They cannot if a group has a window, since its blocks are returned before the sequence ends, or if
    /// sequences have recurrent states and there is no place to save states.
    pub fn can_share(&self) -> bool {
        let has_groups = match &self.pools[..] {
            [Pool { window, .. }] => window.is_none(),
            groups => groups.is_empty() && self.has_states,
        };
        has_groups && (!self.has_states || self.saved.all() > 0)
    }

    /// Gives a sequence without blocks the blocks that hold its first tokens, up to the first of `keys` without a block. A sequence with recurrent states
    /// gets blocks up to the last saved states.
    pub fn share(&mut self, blocks: &mut SequenceBlocks, keys: &[BlockKey]) -> Shared {
        let cached = self.pools.first().map_or(keys.len(), |pool| pool.free.cached(keys));
        let mut shared = Shared { blocks: cached, cached, state: None };
        if self.has_states {
            shared.blocks = keys[..cached].iter().rposition(|key| self.saved.has(key)).map_or(0, |last| last + 1);
            shared.state = keys[..shared.blocks].last().and_then(|key| self.saved.find(key));
        }
        let tables: Vec<_> = self.pools.iter_mut().map(|pool| pool.free.share(&keys[..shared.blocks])).collect();
        *blocks = SequenceBlocks { given_back: vec![0; tables.len()], tables, slot: None };
        shared
    }

    /// Lets other sequences share the blocks of a sequence from number `first` on. `keys` has the key of each block.
    pub fn publish(&mut self, blocks: &SequenceBlocks, keys: &[BlockKey], first: usize) {
        for (pool, table) in self.pools.iter_mut().zip(&blocks.tables) {
            table.iter().zip(keys).skip(first).for_each(|(&block, key)| pool.free.publish(block, *key));
        }
    }

    /// Forgets the contents of the blocks and the saved states, since the weights that computed them have changed. No sequence may use a block.
    pub fn forget(&mut self) {
        self.saved = SavedStates::new(self.saved.all());
        for pool in &mut self.pools {
            debug_assert_eq!(pool.free.used(), 0, "no sequence uses a block");
            pool.free = BlockPool::new(pool.free.all());
        }
    }

    /// Takes back all blocks of a sequence, and its slot.
    pub fn put_back(&mut self, blocks: &mut SequenceBlocks) {
        let SequenceBlocks { tables, given_back, slot } = std::mem::take(blocks);
        self.slots.extend(slot);
        for ((pool, table), given_back) in self.pools.iter_mut().zip(tables).zip(given_back) {
            pool.free.put_back(&table[given_back..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_handed_out_once_and_come_back() {
        let mut pools = Pools::new([(None, 5)], 2, 1000);
        let [mut a, mut b] = [SequenceBlocks::default(), SequenceBlocks::default()];
        assert!(pools.extend(&mut a, 0, 65) && pools.extend(&mut a, 65, 96) && pools.extend(&mut b, 0, 1));
        assert_eq!((&a.tables, &b.tables), (&vec![vec![0, 1, 2]], &vec![vec![3]]));
        assert_eq!((pools.used(), pools.all(), pools.room()), (4, 5, 160));
        assert!(!pools.extend(&mut b, 1, 96) && b.tables[0].len() == 1, "of two missing ones, one is free");
        assert_eq!((a.slot(), b.slot()), (0, 1));
        let mut c = SequenceBlocks::default();
        assert!(!pools.extend(&mut c, 0, 1) && c.slot.is_none(), "each slot belongs to a sequence");
        pools.put_back(&mut a);
        assert!(pools.extend(&mut c, 0, 1) && c.slot() == 0);
        pools.put_back(&mut c);
        assert!(pools.extend(&mut b, 1, 160));
        b.tables[0].sort_unstable();
        assert_eq!(b.tables, [[0, 1, 2, 3, 4]]);
    }

    /// Of three blocks, the first two have states at their ends. The state of an evicted block is forgotten.
    #[test]
    fn sequences_with_states_share_blocks_up_to_a_saved_state() {
        let keys = [1, 2, 3].map(|name| [name; 32]);
        for groups in [vec![(None, 4)], vec![]] {
            let has_blocks = !groups.is_empty();
            let mut pools = Pools::new(groups, 2, 1000).with_states(2);
            let [mut a, mut b] = [SequenceBlocks::default(), SequenceBlocks::default()];
            let nothing = |cached| Shared { blocks: 0, cached, state: None };
            let all = if has_blocks { 0 } else { 3 };
            assert_eq!(pools.share(&mut a, &keys), nothing(all));
            assert!(pools.can_share() && pools.extend(&mut a, 0, 96));
            pools.publish(&a, &keys, 0);
            assert_eq!(pools.share(&mut b, &keys), nothing(3));
            let [_, second] = [0, 1].map(|number| pools.saved.save(keys[number], false));
            assert_eq!(pools.share(&mut b, &keys), Shared { blocks: 2, cached: 3, state: second });
            assert_eq!(b.tables.iter().map(Vec::len).collect::<Vec<_>>(), vec![2; usize::from(has_blocks)]);
            pools.put_back(&mut a);
            pools.put_back(&mut b);
            // Another sequence takes the free block and the last two blocks with keys.
            assert!(pools.extend(&mut a, 0, 96));
            assert_eq!([0, 1].map(|number| pools.saved.has(&keys[number])), [true, !has_blocks]);
            pools.put_back(&mut a);
            pools.forget();
            assert!(!pools.saved.has(&keys[0]));
        }
        assert!(!Pools::new([(None, 4)], 2, 1000).with_states(0).can_share(), "no state can be saved");
        assert!(!Pools::new([(Some(9), 4)], 2, 1000).with_states(2).can_share());
    }

    /// A sequence of 1000 tokens is computed in a step of 20 tokens, then token by token. One group sees all keys, and one sees the last 70.
    #[test]
    fn a_window_needs_no_more_blocks_than_it_spans() {
        let (chunk, window) = (20, 70);
        let blocks = Pools::blocks_for(Some(window), 1000, 1, chunk);
        assert_eq!((blocks, Pools::blocks_for(None, 1000, 1, chunk)), (4, 32));
        let mut pools = Pools::new([(None, 32), (Some(window), blocks)], 1, chunk);
        assert_eq!(pools.room(), 1024);
        let (mut sequence, mut computed) = (SequenceBlocks::default(), 0);
        while computed < 1000 {
            let new = if computed < 600 { chunk } else { 1 };
            assert!(pools.extend(&mut sequence, computed, if computed < 600 { 600 } else { computed + 1 }));
            let [all, windowed] = &sequence.tables[..] else { panic!("two groups") };
            assert!(all.len() * BLOCK_SIZE >= computed + new && windowed.len() * BLOCK_SIZE >= computed + new);
            // The keys of this step's tokens are in different blocks.
            let first = (computed + 1).saturating_sub(window) / BLOCK_SIZE;
            let mut live = windowed[first..].to_vec();
            live.sort_unstable();
            live.dedup();
            assert_eq!(live.len(), windowed.len() - first);
            computed += new;
        }
        pools.put_back(&mut sequence);
        assert_eq!(pools.pools.iter().map(|pool| pool.free.used()).sum::<usize>(), 0);
        assert_eq!(Pools::new([(Some(window), blocks)], 1, chunk).room(), usize::MAX);
    }
}
