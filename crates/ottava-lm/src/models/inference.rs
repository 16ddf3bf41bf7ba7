//! Inference: forward of new tokens of many sequences, whose keys and values are in a cache of blocks.

use super::stage::Stage;
use crate::context::{Context, PagedPass, Sequences};
use crate::error::Result;
use crate::mode::Mode;
use crate::param::{Loan, Resident};
use crate::recompute::{Recompute, SavedActivations};
use crate::scaling::{Casts, Recorder, Scales};
use ottava_tensor::ops::{AttentionSpec, KvBlocks, PagedBatch};
use ottava_tensor::{DType, Device, Tensor};

/// Keys and values of all layers, and the statistics that casts of inference write.
pub struct KvCache {
    layers: Vec<KvBlocks>,
    recorder: Recorder,
}

/// The new tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct SequenceTokens<'a> {
    /// All tokens of the sequence so far, the new ones included.
    pub tokens: &'a [u32],
    /// The number of new tokens, which are the last.
    pub new: usize,
    /// The blocks of the cache that hold its tokens, in order.
    pub blocks: &'a [i32],
}

/// The new tokens of a batch of sequences, on the device, in tensors of fixed capacity: those of unused sequences have no new tokens.
pub struct InferenceBatch {
    ids: Tensor, /* I32 [T] */
    positions: Sequences,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    max_new: usize,
    /// Whether it is one whole sequence, padded to a multiple of [`PREFILL_MULTIPLE`] for the attention of training, which is planned for
    /// each length.
    is_whole: bool,
}

/// On a GPU, whole sequences of a multiple of this length use the attention of training.
pub const PREFILL_MULTIPLE: usize = 256;

/// The number of rows of products, padded from `rows`: on a GPU one of few numbers, since products are tuned for each.
pub fn padded_rows(device: &Device, rows: usize) -> usize {
    match device {
        Device::Cuda(_) if rows <= PREFILL_MULTIPLE => rows.next_power_of_two(),
        Device::Cuda(_) => rows.next_multiple_of(PREFILL_MULTIPLE),
        Device::Cpu | Device::DryCpu(_) => rows,
    }
}

impl InferenceBatch {
    /// Room for `tokens` new tokens of `sequences` sequences, at most `max_new` of each, in up to `max_blocks` blocks each.
    pub fn new(
        device: &Device,
        tokens: usize,
        sequences: usize,
        max_new: usize,
        max_blocks: usize,
    ) -> Result<InferenceBatch> {
        let zeros = |shape: &[usize]| Tensor::zeros(device, shape, DType::I32);
        Ok(InferenceBatch {
            ids: zeros(&[tokens])?,
            positions: Sequences { batch: 1, seq_len: tokens, positions: zeros(&[tokens])?, cu_seqlens: None },
            query_starts: zeros(&[sequences + 1])?,
            context_lens: zeros(&[sequences])?,
            block_tables: zeros(&[sequences, max_blocks])?,
            max_new,
            is_whole: false,
        })
    }

    /// Loads the new tokens of `sequences`, one sequence after the other.
    ///
    /// Panics if there is no room for them.
    pub fn set(&mut self, sequences: &[SequenceTokens]) -> Result<()> {
        let [rows, width] = [self.context_lens.len(), self.block_tables.shape()[1]];
        let (mut ids, mut positions) = (Vec::with_capacity(self.ids.len()), Vec::with_capacity(self.ids.len()));
        let (mut starts, mut lens, mut tables) = (vec![0], Vec::with_capacity(rows), vec![0i32; rows * width]);
        for (sequence, table) in sequences.iter().zip(tables.chunks_exact_mut(width)) {
            let SequenceTokens { tokens, new, blocks } = *sequence;
            assert!(new <= self.max_new && blocks.len() <= width, "a sequence has room in its batch");
            let first = tokens.len() - new;
            ids.extend(tokens[first..].iter().map(|&id| id as i32));
            positions.extend(first as i32..tokens.len() as i32);
            starts.push(ids.len() as i32);
            lens.push(tokens.len() as i32);
            table[..blocks.len()].copy_from_slice(blocks);
        }
        assert!(sequences.len() <= rows && ids.len() <= self.ids.len(), "a batch has room for its sequences");
        starts.resize(rows + 1, ids.len() as i32);
        lens.resize(rows, 0);
        ids.resize(self.ids.len(), 0);
        positions.resize(self.ids.len(), 0);
        let Sequences { positions: on_device, .. } = &mut self.positions;
        let all = [&mut self.ids, on_device, &mut self.query_starts, &mut self.context_lens, &mut self.block_tables];
        for (tensor, values) in all.into_iter().zip([&ids, &positions, &starts, &lens, &tables]) {
            tensor.write_bytes(bytemuck::cast_slice(values))?;
        }
        Ok(())
    }

    /// The new tokens of `sequences`, padded on a GPU, whose products are tuned for each number of rows.
    pub fn padded(device: &Device, sequences: &[SequenceTokens]) -> Result<InferenceBatch> {
        let tokens = padded_rows(device, sequences.iter().map(|sequence| sequence.new).sum());
        let most = |of: fn(&SequenceTokens) -> usize| sequences.iter().map(of).max().unwrap_or(0);
        let (max_new, max_blocks) = (most(|sequence| sequence.new), most(|sequence| sequence.blocks.len()));
        let mut batch = InferenceBatch::new(device, tokens, sequences.len(), max_new, max_blocks)?;
        batch.set(sequences)?;
        // On a CPU, both kinds of attention run the same loops.
        if let ([one], Device::Cuda(_)) = (sequences, device) {
            batch.is_whole = one.new == one.tokens.len() && one.new.is_multiple_of(PREFILL_MULTIPLE);
        }
        Ok(batch)
    }
}

impl KvCache {
    /// An empty cache for a model with these attention layers and `casts` FP8 casts.
    pub(super) fn new(
        device: &Device,
        layers: &[AttentionSpec],
        casts: usize,
        blocks: usize,
        block_size: usize,
        dtype: DType,
    ) -> Result<KvCache> {
        let of = |spec: &AttentionSpec| KvBlocks::new(device, spec, blocks, block_size, dtype);
        let layers = layers.iter().map(of).collect::<Result<_, _>>()?;
        Ok(KvCache { layers, recorder: Recorder::new(device, casts)? })
    }

    /// Normalised activations `[T, C]` of the new tokens.
    pub(super) fn forward(&mut self, stage: &Stage, scales: &Scales, batch: &InferenceBatch) -> Result<Tensor> {
        let KvCache { layers, recorder } = self;
        let batch_of_cache = PagedBatch {
            query_starts: &batch.query_starts,
            context_lens: &batch.context_lens,
            block_tables: &batch.block_tables,
            max_new: batch.max_new,
        };
        let mut context = Context {
            casts: Casts { scales, recorder, mode: Mode::INFERENCE },
            loan: Loan::none(),
            sequences: &batch.positions,
            recompute: Recompute::None,
            saved_activations: SavedActivations::Exact,
            paged: Some(PagedPass { layers, batch: batch_of_cache, is_whole: batch.is_whole }),
        };
        stage.forward_only(&batch.ids, &mut context, &mut Resident)
    }
}
