//! Decode steps: every row is a token with its own context. On a GPU, they are captured as CUDA graphs, one for each padded size of the batch. Ranks
//! that divide a model run the same steps in the same order. So they capture the same steps, including the collectives.

use crate::request::AdapterId;
use ottava_common::error::Result;
use ottava_models::{Decoder, InferenceBatch, KvCache, SequenceTokens, most_blocks};
use ottava_recipe::capture::{Capture, Launch};
use ottava_tensor::cuda::Graph;
use ottava_tensor::ops::{argmax, cast};
use ottava_tensor::{DType, Device, Tensor};
use std::collections::HashMap;

/// The number of rows of each pass on a GPU if results must not depend on the batch.
pub(super) const INVARIANT_ROWS: usize = 64;

/// The decode steps by size and by adapter, since a graph reads fixed weights. The size is the number of rows and the number of blocks of the longest
/// sequence, both powers of two.
#[derive(Default)]
pub struct DecodeSteps {
    steps: HashMap<(Option<AdapterId>, [usize; 2]), DecodeStep>,
    is_invariant: bool,
}

/// The decode step of one size.
struct DecodeStep {
    batch: InferenceBatch,
    rows: Tensor, /* I32 [R], 0 to R - 1 */
    scored: Option<Scored>,
    capture: Capture,
}

/// The results of a step on the device, one row per sequence.
#[derive(Clone)]
pub struct Scored {
    /// The logits, F32 `[R, V]` (F64 for F64).
    pub logits: Tensor,
    /// The most likely tokens, I32 `[R]`, as [`argmax`] returns them.
    pub likeliest: Tensor,
}

impl Scored {
    /// Computes the logits of some rows of `hidden`.
    pub fn score(model: &Decoder, hidden: &Tensor, rows: &Tensor) -> Result<Scored> {
        let logits = model.logits(hidden, rows)?;
        let likeliest = argmax(&in_f32(&logits)?)?;
        Ok(Scored { logits, likeliest })
    }
}

/// Converts logits or activations to F32, which draws and the host read.
pub fn in_f32(x: &Tensor) -> Result<Tensor> {
    Ok(match x.dtype() {
        DType::F32 => x.clone(),
        _ => cast(x, DType::F32)?,
    })
}

impl DecodeSteps {
    /// Makes steps of [`INVARIANT_ROWS`] rows if `is_invariant` is set, so that no result depends on the number of rows.
    pub(super) fn new(is_invariant: bool) -> DecodeSteps {
        DecodeSteps { is_invariant, ..DecodeSteps::default() }
    }

    /// Computes one token of each of `sequences` on a GPU. The linears of `model` must hold the adapters of `adapter`. Several entries may be tokens
    /// of the same sequence. Rows of the result are in the order of `sequences`, followed by rows of padding.
    pub fn run(
        &mut self,
        model: &Decoder,
        adapter: Option<AdapterId>,
        cache: &mut KvCache,
        sequences: &[SequenceTokens],
    ) -> Result<Scored> {
        let [groups, blocks] = most_blocks(sequences);
        let rows = if self.is_invariant { INVARIANT_ROWS } else { sequences.len() };
        let size = [rows, blocks].map(usize::next_power_of_two);
        let step = match self.steps.entry((adapter, size)) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(DecodeStep::new(model, groups, size)?),
        };
        step.batch.set(sequences)?;
        step.run(model, cache)
    }
}

impl DecodeStep {
    fn new(model: &Decoder, groups: usize, [sequences, blocks]: [usize; 2]) -> Result<DecodeStep> {
        let device = model.device();
        let rows: Vec<i32> = (0..sequences as i32).collect();
        let rows = Tensor::from_slice(device, &[sequences], &rows)?;
        let batch = InferenceBatch::new(device, sequences, sequences, 1, [groups, blocks])?;
        Ok(DecodeStep { batch, rows, scored: None, capture: Capture::on(device) })
    }

    fn run(&mut self, model: &Decoder, cache: &mut KvCache) -> Result<Scored> {
        match (self.capture.ready_for(), model.device()) {
            (Launch::Replay, _) => {
                let Capture::Done(graph) = &mut self.capture else { unreachable!("a graph is ready") };
                graph.replay()?;
            }
            (Launch::Capture, Device::Cuda(gpu)) => {
                let (batch, rows, scored) = (&self.batch, &self.rows, &mut self.scored);
                let captured = Graph::capture(gpu, || {
                    *scored = Some(Scored::score(model, &model.hidden(batch, cache)?, rows)?);
                    Ok::<_, ottava_common::Error>(())
                });
                match captured {
                    Ok(mut graph) => {
                        graph.replay()?;
                        self.capture = Capture::Done(graph);
                    }
                    Err(error) => {
                        tracing::warn!("decode steps are not captured as CUDA graphs: {error}");
                        self.capture = Capture::Never;
                        return self.run(model, cache);
                    }
                }
            }
            (launch, _) => {
                self.scored = Some(Scored::score(model, &model.hidden(&self.batch, cache)?, &self.rows)?);
                if launch == Launch::WarmUp {
                    self.capture = Capture::Due;
                }
            }
        }
        Ok(self.scored.clone().expect("the step has run"))
    }
}
