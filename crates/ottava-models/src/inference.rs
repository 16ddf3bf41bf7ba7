//! The new tokens of several sequences. Their keys and values are in a cache of blocks.

use ottava_common::error::Result;
use ottava_recipe::context::Sequences;
use ottava_recipe::recurrent::RecurrentBatch;
use ottava_tensor::ops::PagedBatch;
use ottava_tensor::{DType, Device, Staging, Tensor};
use std::ops::Range;

/// The new tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct SequenceTokens<'a> {
    /// The number of tokens before the new tokens.
    pub start: usize,
    /// The number of tokens whose keys and values are in the cache before the pass.
    cached: usize,
    /// The new tokens.
    pub new: &'a [u32],
    /// The blocks that hold the sequence's tokens, in order, for each group of the cache's layers. Blocks before the window of a group are not read.
    pub blocks: &'a [Vec<i32>],
    /// The slot of the sequence's recurrent states.
    slot: usize,
}

impl<'a> SequenceTokens<'a> {
    /// Creates the entry of a sequence with `new` tokens after `start` tokens. The cache must have the keys and values of the earlier tokens.
    pub fn new(start: usize, new: &'a [u32], blocks: &'a [Vec<i32>]) -> SequenceTokens<'a> {
        SequenceTokens { start, cached: start, new, blocks, slot: 0 }
    }

    /// Sets the slot of the sequence's recurrent states. Without a call, it is slot 0, for batches of one sequence.
    pub fn in_slot(self, slot: usize) -> SequenceTokens<'a> {
        SequenceTokens { slot, ..self }
    }

    /// Returns whether the new tokens follow the new tokens of `before` in the same sequence, as the rows of [`SequenceTokens::rows`].
    fn continues(&self, before: &SequenceTokens) -> bool {
        (self.slot, self.cached, self.start) == (before.slot, before.cached, before.start + before.new.len())
    }

    /// Returns each new token of `sequences` as a separate sequence that ends with this token. A pass writes the keys and values of all rows before
    /// attention reads them, so the results are the same.
    pub fn rows(sequences: &[SequenceTokens<'a>]) -> Vec<SequenceTokens<'a>> {
        let of = |&of: &SequenceTokens<'a>| {
            let row = move |(at, new)| SequenceTokens { start: of.start + at, new, ..of };
            of.new.chunks(1).enumerate().map(row)
        };
        sequences.iter().flat_map(of).collect()
    }
}

/// The new tokens of a batch of sequences, on the device, in memory of fixed capacity. Unused sequences have no new tokens.
pub struct InferenceBatch {
    /// All numbers of the batch, I32, at the places of `layout`. One copy to the device writes them.
    words: Tensor,
    layout: Layout,
    /// The layout of the tokens. Its positions are in `words`.
    sequences: Sequences,
    max_new: usize,
    /// Whether attention is the attention of training, which does not read the cache. All sequences begin in such a batch. It is planned for each number
    /// of tokens.
    pub(super) is_whole: bool,
}

/// The numbers of a batch's tensors. Each tensor begins at a multiple of [`ALIGNMENT`] numbers.
#[derive(Clone, Copy)]
struct Layout {
    tokens: usize,
    sequences: usize,
    /// The number of groups of the cache's layers, which have a block table each.
    groups: usize,
    /// The width of a block table.
    blocks: usize,
    /// The number of documents of the attention of training. `None` without boundaries of documents.
    documents: Option<usize>,
}

/// The number of I32 numbers at whose multiples a tensor begins: 256 bytes.
const ALIGNMENT: usize = 64;

impl Layout {
    /// Returns the numbers of elements of the tensors, in the order of [`BatchTensors`].
    fn lengths(&self) -> Vec<usize> {
        let Layout { tokens, sequences, groups, blocks, documents } = *self;
        let of_rows = [tokens, tokens, sequences + 1, sequences, sequences, sequences + 1, sequences, sequences];
        let tables = vec![sequences * blocks; groups];
        of_rows.into_iter().chain(tables).chain(documents.map(|documents| documents + 1)).collect()
    }

    /// Returns the places of the tensors.
    fn places(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let mut place = |length: usize| {
            let start = usize::next_multiple_of(end, ALIGNMENT);
            end = start + length;
            start..end
        };
        self.lengths().into_iter().map(&mut place).collect()
    }

    /// Returns the number of words.
    fn words(&self) -> usize {
        self.places().last().map_or(0, |place| place.end)
    }
}

/// The tensors of a batch, which are views of its words.
pub(super) struct BatchTensors {
    pub ids: Tensor, /* I32 [T] */
    pub sequences: Sequences,
    query_starts: Tensor, /* I32 [N + 1] */
    context_lens: Tensor, /* I32 [N], as the next three */
    cached_lens: Tensor,
    /// The new tokens of each sequence for recurrent layers: the offsets of segments `[N + 1]`, the slots `[N]`, and the numbers of earlier tokens
    /// `[N]`. The rows of a sequence are one segment.
    segments: [Tensor; 3],
    /// The block table `[N, blocks]` for each group of the cache's layers.
    block_tables: Vec<Tensor>,
    max_new: usize,
}

impl BatchTensors {
    /// Returns the batch with the block table of each group.
    pub fn by_group(&self) -> Vec<PagedBatch<'_>> {
        let BatchTensors { query_starts, context_lens, cached_lens, max_new, .. } = self;
        let of = |block_tables| PagedBatch { query_starts, context_lens, cached_lens, block_tables, max_new: *max_new };
        self.block_tables.iter().map(of).collect()
    }

    /// Returns the new tokens of each sequence, for recurrent layers.
    pub fn recurrent(&self) -> RecurrentBatch<'_> {
        let [starts, slots, past] = &self.segments;
        RecurrentBatch { starts, slots, past }
    }
}

/// Returns the new tokens of each sequence for recurrent layers: the offsets of segments, the slots, and the numbers of earlier tokens. There are
/// `count` segments, and the last of them may be empty.
fn segments(sequences: &[SequenceTokens], count: usize) -> [Vec<i32>; 3] {
    let (mut starts, mut slots, mut past, mut end) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (at, sequence) in sequences.iter().enumerate() {
        if at == 0 || !sequence.continues(&sequences[at - 1]) {
            starts.push(end);
            slots.push(sequence.slot as i32);
            past.push(sequence.cached as i32);
        }
        end += sequence.new.len() as i32;
    }
    starts.resize(count + 1, end);
    slots.resize(count, 0);
    past.resize(count, 0);
    [starts, slots, past]
}

/// A GPU pads large batches to a multiple of this number of tokens. It is the least number of tokens of a packed pass. For a model that does not pack, a
/// GPU computes a sequence whose length is a multiple of it with the attention of training.
pub const PREFILL_MULTIPLE: usize = 256;

/// The maximum number of sequences of a packed batch. Attention over documents is planned for one number of documents: these and the padding.
pub const MOST_PACKED: usize = 31;

/// Returns `rows`, padded on a GPU. Padding limits the number of different row counts, because products are tuned for each count.
pub fn padded_rows(device: &Device, rows: usize) -> usize {
    match device {
        Device::Cuda(_) if rows <= PREFILL_MULTIPLE => rows.next_power_of_two(),
        Device::Cuda(_) => rows.next_multiple_of(PREFILL_MULTIPLE),
        Device::Cpu | Device::DryCpu(_) => rows,
    }
}

/// Returns the number of groups of the cache's layers, and the maximum number of blocks that a sequence has in a group.
pub fn most_blocks(sequences: &[SequenceTokens]) -> [usize; 2] {
    let groups = sequences.first().map_or(1, |sequence| sequence.blocks.len());
    let blocks = sequences.iter().flat_map(|sequence| sequence.blocks).map(Vec::len).max();
    [groups, blocks.unwrap_or(0)]
}

impl InferenceBatch {
    /// Returns the tensors of the batch. Their addresses do not change, but [`InferenceBatch::set`] must not run while they exist.
    pub(super) fn tensors(&self) -> Result<BatchTensors> {
        let Layout { sequences, groups, blocks, documents, .. } = self.layout;
        let places = self.layout.places();
        let mut views = places.into_iter().map(|place| self.words.rows(place.start, place.end));
        let mut next = || views.next().expect("the layout has a place for each tensor");
        let (ids, positions) = (next()?, next()?);
        let (query_starts, context_lens, cached_lens) = (next()?, next()?, next()?);
        let segments = [next()?, next()?, next()?];
        let block_tables = (0..groups).map(|_| next()?.reshape(&[sequences, blocks])).collect::<Result<_, _>>()?;
        let mut of_tokens = self.sequences.clone();
        of_tokens.positions = positions;
        of_tokens.cu_seqlens = documents.map(|_| next()).transpose()?;
        let max_new = self.max_new;
        let sequences = of_tokens;
        Ok(BatchTensors { ids, sequences, query_starts, context_lens, cached_lens, segments, block_tables, max_new })
    }

    /// Creates an empty batch with room for `tokens` new tokens of `sequences` sequences. Each sequence has at most `max_new` new tokens, and at most
    /// `max_blocks` blocks in each of the cache's `groups`.
    pub fn new(
        device: &Device,
        tokens: usize,
        sequences: usize,
        max_new: usize,
        [groups, max_blocks]: [usize; 2],
    ) -> Result<InferenceBatch> {
        let layout = Layout { tokens, sequences, groups, blocks: max_blocks, documents: None };
        InferenceBatch::of_layout(device, layout, max_new)
    }

    fn of_layout(device: &Device, layout: Layout, max_new: usize) -> Result<InferenceBatch> {
        let words = Tensor::zeros(device, &[layout.words()], DType::I32)?;
        let sequences = Sequences::new(device, 1, layout.tokens)?;
        Ok(InferenceBatch { words, layout, sequences, max_new, is_whole: layout.documents.is_some() })
    }

    /// Writes the new tokens of `sequences` to the batch, one sequence after the other.
    ///
    /// Panics if the batch has no room for them.
    pub fn set(&mut self, sequences: &[SequenceTokens]) -> Result<()> {
        let words = self.numbers(sequences);
        Ok(self.words.write_bytes(bytemuck::cast_slice(&words))?)
    }

    /// Writes new tokens as [`InferenceBatch::set`] does, after the work that was enqueued before, and does not wait for this work.
    pub fn set_by(&mut self, staging: &mut Staging, sequences: &[SequenceTokens]) -> Result<()> {
        let words = self.numbers(sequences);
        Ok(staging.write(&mut self.words, bytemuck::cast_slice(&words))?)
    }

    /// Replaces the ids of the first new tokens by ids on the device: of token `i` by `ids[places[i]]`, with I32 `ids`.
    pub fn take_ids(&mut self, ids: &Tensor, places: &[usize]) -> Result<()> {
        let mut at = 0;
        for run in places.chunk_by(|before, after| before + 1 == *after) {
            // The ids are the first of the words.
            self.words.copy_from(at, &ids.rows(run[0], run[0] + run.len())?)?;
            at += run.len();
        }
        Ok(())
    }

    /// Returns the words for the new tokens of `sequences`.
    fn numbers(&self, sequences: &[SequenceTokens]) -> Vec<i32> {
        let Layout { tokens, sequences: rows, groups, blocks: width, documents } = self.layout;
        let (mut ids, mut positions) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens));
        let (mut starts, mut lens, mut cached_lens) = (vec![0], Vec::with_capacity(rows), Vec::with_capacity(rows));
        let mut tables = vec![vec![0i32; rows * width]; groups];
        for (row, sequence) in sequences.iter().enumerate() {
            let SequenceTokens { start, cached, new, blocks, .. } = *sequence;
            let (has_room, end) = (blocks.iter().all(|blocks| blocks.len() <= width), (start + new.len()) as i32);
            assert!(new.len() <= self.max_new && has_room, "a sequence has room in its batch");
            ids.extend(new.iter().map(|&id| id as i32));
            positions.extend(start as i32..end);
            starts.push(ids.len() as i32);
            lens.push(end);
            cached_lens.push(cached as i32);
            for (table, blocks) in tables.iter_mut().zip(blocks) {
                table[row * width..][..blocks.len()].copy_from_slice(blocks);
            }
        }
        assert!(sequences.len() <= rows && ids.len() <= tokens, "a batch has room for its sequences");
        // The padding is a document, and the others have no tokens.
        let of_documents = documents.map(|documents| {
            let mut boundaries = starts.clone();
            boundaries.resize(documents + 1, tokens as i32);
            boundaries
        });
        starts.resize(rows + 1, ids.len() as i32);
        let [segment_starts, slots, past] = segments(sequences, rows);
        let values = [ids, positions, starts, lens, cached_lens, segment_starts, slots, past].into_iter();
        let values = values.chain(tables).chain(of_documents);
        let mut words = vec![0i32; self.words.len()];
        for (place, values) in self.layout.places().into_iter().zip(values) {
            words[place.start..][..values.len()].copy_from_slice(&values);
        }
        words
    }

    /// Creates a batch of sequences with one new token each. The batch is padded to `rows` sequences.
    pub fn of_rows(device: &Device, sequences: &[SequenceTokens], rows: usize) -> Result<InferenceBatch> {
        let mut batch = InferenceBatch::new(device, rows, rows, 1, most_blocks(sequences))?;
        batch.set(sequences)?;
        Ok(batch)
    }

    /// Creates a batch of the new tokens of `sequences`, whose attention reads the cache. On a GPU the batch is padded, because products are tuned for each
    /// number of rows.
    pub fn over_cache(device: &Device, sequences: &[SequenceTokens]) -> Result<InferenceBatch> {
        let tokens = padded_rows(device, sequences.iter().map(|sequence| sequence.new.len()).sum());
        let max_new = sequences.iter().map(|sequence| sequence.new.len()).max().unwrap_or(0);
        let mut batch = InferenceBatch::new(device, tokens, sequences.len(), max_new, most_blocks(sequences))?;
        batch.set(sequences)?;
        Ok(batch)
    }

    /// Creates a batch as [`InferenceBatch::over_cache`]. If it has the first tokens of one sequence, a GPU may compute their attention as in training.
    pub fn padded(device: &Device, sequences: &[SequenceTokens]) -> Result<InferenceBatch> {
        let mut batch = InferenceBatch::over_cache(device, sequences)?;
        // On a CPU, both kinds of attention run the same loops.
        if let ([one], Device::Cuda(_)) = (sequences, device) {
            batch.is_whole = one.start == 0 && one.new.len().is_multiple_of(PREFILL_MULTIPLE);
        }
        Ok(batch)
    }

    /// Creates a batch of the first tokens of at most [`MOST_PACKED`] sequences, for a model that packs them ([`Decoder::packs_prompts`]). The batch is
    /// padded as by [`InferenceBatch::padded`]. Its attention is the attention of training over documents.
    ///
    /// Panics if a sequence has earlier tokens, or if there are too many sequences.
    ///
    /// [`Decoder::packs_prompts`]: crate::Decoder::packs_prompts
    pub fn packed(device: &Device, sequences: &[SequenceTokens]) -> Result<InferenceBatch> {
        assert!(sequences.iter().all(|sequence| sequence.start == 0), "packed sequences begin in their batch");
        assert!(sequences.len() <= MOST_PACKED, "the attention of training is planned for a number of documents");
        let tokens = padded_rows(device, sequences.iter().map(|sequence| sequence.new.len()).sum());
        let max_new = sequences.iter().map(|sequence| sequence.new.len()).max().unwrap_or(0);
        let [groups, blocks] = most_blocks(sequences);
        let layout = Layout { tokens, sequences: sequences.len(), groups, blocks, documents: Some(MOST_PACKED + 1) };
        let mut batch = InferenceBatch::of_layout(device, layout, max_new)?;
        batch.set(sequences)?;
        Ok(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU reads ahead only what the cache has before the pass, so a row's cached tokens exclude earlier rows of the same pass.
    #[test]
    fn rows_count_what_earlier_passes_have_cached() {
        let (new, blocks) = ([5, 6, 7], [vec![0]]);
        let sequences = [SequenceTokens::new(2, &new, &blocks), SequenceTokens::new(9, &new[..1], &blocks)];
        let batch = InferenceBatch::of_rows(&Device::Cpu, &SequenceTokens::rows(&sequences), 5).unwrap();
        let BatchTensors { context_lens, cached_lens, .. } = batch.tensors().unwrap();
        assert_eq!(context_lens.to_vec::<i32>().unwrap(), [3, 4, 5, 10, 0]);
        assert_eq!(cached_lens.to_vec::<i32>().unwrap(), [2, 2, 2, 9, 0]);
    }

    /// A recurrent layer reads the state of a sequence once, also if each token of the sequence is a row.
    #[test]
    fn rows_of_a_sequence_are_one_segment() {
        let (new, blocks) = ([5, 6, 7], [vec![0]]);
        let sequences = [
            SequenceTokens::new(2, &new, &blocks).in_slot(4),
            // The number of earlier tokens is that after the tokens of the sequence before.
            SequenceTokens::new(5, &new[..2], &blocks).in_slot(1),
            SequenceTokens::new(0, &new[..1], &blocks).in_slot(3),
        ];
        let rows = InferenceBatch::of_rows(&Device::Cpu, &SequenceTokens::rows(&sequences), 8).unwrap();
        let whole = InferenceBatch::padded(&Device::Cpu, &sequences).unwrap();
        for (batch, count) in [(&rows, 8), (&whole, 3)] {
            let tensors = batch.tensors().unwrap();
            let RecurrentBatch { starts, slots, past } = tensors.recurrent();
            let [starts, slots, past] = [starts, slots, past].map(|of| of.to_vec::<i32>().unwrap());
            assert_eq!((&starts[..4], &slots[..3], &past[..3]), (&[0, 3, 5, 6][..], &[4, 1, 3][..], &[2, 5, 0][..]));
            assert!(starts.len() == count + 1 && starts[3..].iter().all(|&start| start == 6));
        }
    }
}
