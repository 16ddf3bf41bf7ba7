//! Generation: what one sequence needs beside the model, which is only read.

use super::stage::Stage;
use crate::context::{Context, Sequences};
use crate::error::Result;
use crate::layers::{Block, KvCache};
use crate::mode::Mode;
use crate::param::{Fetched, Resident};
use crate::recompute::{Recompute, SavedActivations};
use crate::scaling::{Casts, Recorder, Scales};
use ottava_tensor::{DType, Device, Tensor};

/// The keys and values of one sequence, and where its casts measure.
pub struct Session {
    caches: Vec<KvCache>,
    recorder: Recorder,
    /// Tokens so far.
    len: usize,
}

impl Session {
    /// An empty session for a model with these blocks and `casts` FP8 casts.
    pub(super) fn new(
        device: &Device,
        dtype: DType,
        blocks: &[Block],
        casts: usize,
        capacity: usize,
    ) -> Result<Session> {
        let cache = |block: &Block| block.attention().cache(device, dtype, capacity);
        let caches = blocks.iter().map(cache).collect::<Result<_>>()?;
        Ok(Session { caches, recorder: Recorder::new(device, casts)?, len: 0 })
    }

    /// Normalised activations `[T, C]` of the new tokens `ids`, which join those before.
    pub(super) fn forward(&mut self, stage: &Stage, scales: &Scales, ids: &Tensor) -> Result<Tensor> {
        let Session { caches, recorder, len } = self;
        let start = *len;
        let sequences = Sequences::at(ids.device(), 1, ids.len(), start)?;
        let mut context = Context {
            casts: Casts { scales, recorder, mode: Mode::EVALUATION },
            fetched: Fetched::none(),
            sequences: &sequences,
            recompute: Recompute::None,
            saved_activations: SavedActivations::Exact,
        };
        let x = stage.forward_only(ids, &mut context, &mut Resident, |i, block, x, context| {
            block.forward_cached(x, &mut caches[i], start, context)
        })?;
        *len += ids.len();
        Ok(x)
    }
}
