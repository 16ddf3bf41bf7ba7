//! Decode steps: every row is a token with its own context. On a GPU, they are captured as CUDA graphs, one for each padded size of the batch. Ranks
//! that divide a model run the same steps in the same order. So they capture the same steps, including the collectives.

use crate::request::{AdapterId, EngineOptions};
use ottava_common::error::{Error, Result};
use ottava_models::{Decoder, InferenceBatch, KvCache, SequenceTokens, most_blocks};
use ottava_recipe::capture::{Capture, Launch};
use ottava_tensor::cuda::{CudaDevice, Graph};
use ottava_tensor::ops::{argmax, cast};
use ottava_tensor::{DType, Device, Staging, Suspended, Tensor};
use std::collections::HashMap;
use std::sync::Arc;

/// The number of rows of each pass if results must not depend on the batch, but the order of sums may depend on the number of rows.
const INVARIANT_ROWS: usize = 64;

/// The number of bytes of a buffer for inputs of steps. Larger inputs take the buffers in turn.
const STAGED: usize = 256 << 10;

/// Returns the number of rows of all passes, if it must be the same.
pub(super) fn fixed_rows(model: &Decoder, options: &EngineOptions) -> Option<usize> {
    let is_gpu = matches!(model.device(), Device::Cuda(_));
    let is_fixed = options.batch_invariant && is_gpu && !model.recipe().has_ordered_sums(model.device());
    is_fixed.then_some(INVARIANT_ROWS)
}

/// The decode steps by size and by adapter, since a graph reads fixed weights. The size is the number of rows and the number of blocks of the longest
/// sequence, both powers of two.
///
/// Only the results of the last step hold memory. Steps of all sizes use the same memory for their results in turns.
pub struct DecodeSteps {
    steps: HashMap<Size, DecodeStep>,
    /// The size of the last step.
    last: Option<Size>,
    /// The number of rows of all steps, if it must be the same.
    pub(super) rows: Option<usize>,
    /// The buffers through which steps get their inputs.
    pub(super) staging: Staging,
}

/// The adapter, the number of rows, and the number of blocks of the longest sequence.
type Size = (Option<AdapterId>, [usize; 2]);

/// The decode step of one size.
struct DecodeStep {
    batch: InferenceBatch,
    rows: Tensor, /* I32 [R], 0 to R - 1 */
    results: Results,
    capture: Capture,
}

/// The results of a decode step.
#[derive(Default)]
enum Results {
    /// The step has not run yet.
    #[default]
    None,
    Held(Scored),
    /// Other steps use the memory of the results.
    Suspended([Suspended; 2]),
}

impl Results {
    /// Returns the memory of the results to the device.
    fn suspend(&mut self) {
        *self = match std::mem::take(self) {
            Results::Held(Scored { logits, likeliest }) => Results::Suspended([logits, likeliest].map(Tensor::suspend)),
            other => other,
        };
    }

    /// Takes memory for the results again.
    fn resume(&mut self) -> Result<()> {
        if let Results::Suspended([logits, likeliest]) = self {
            *self = Results::Held(Scored { logits: logits.resume()?, likeliest: likeliest.resume()? });
        }
        Ok(())
    }
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

/// Returns the error of logits of token `number` of a request that are not finite.
pub(super) fn not_finite(number: usize) -> Error {
    Error::NonFinite(format!("a logit of token {number} is not finite: the model's weights or activations are not"))
}

impl DecodeSteps {
    /// Makes steps on `device` of `rows` rows, or of any number of rows if it is `None`.
    pub fn new(device: &Device, rows: Option<usize>) -> DecodeSteps {
        DecodeSteps { steps: HashMap::new(), last: None, rows, staging: Staging::with_chunk(device, STAGED) }
    }

    /// Forgets all captured steps, because the memory that they read has moved.
    pub(super) fn forget(&mut self) {
        (self.last, self.steps) = Default::default();
    }

    /// Computes one token of each of `sequences` on a GPU. The linears of `model` must hold the adapters of `adapter`. Several entries may be tokens
    /// of the same sequence. Rows of the result are in the order of `sequences`, followed by rows of padding. With `ids`, the new token of sequence `i` is
    /// the token on the device at place `i` of the places, instead of the token in `sequences`.
    pub fn run(
        &mut self,
        model: &Decoder,
        adapter: Option<AdapterId>,
        cache: &mut KvCache,
        sequences: &[SequenceTokens],
        ids: Option<(&Tensor, &[usize])>,
    ) -> Result<Scored> {
        let [groups, blocks] = most_blocks(sequences);
        let rows = self.rows.unwrap_or(sequences.len());
        let size = [rows, blocks].map(usize::next_power_of_two);
        let size = (adapter, size);
        if self.last != Some(size) {
            self.suspend();
        }
        self.last = Some(size);
        let step = match self.steps.entry(size) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(DecodeStep::new(model, groups, size.1)?),
        };
        step.batch.set_by(&mut self.staging, sequences)?;
        if let Some((tokens, places)) = ids {
            step.batch.take_ids(tokens, places)?;
        }
        step.run(model, cache)
    }

    /// Returns the memory of the results of the last step to the device.
    pub(super) fn suspend(&mut self) {
        if let Some(step) = self.last.take().and_then(|last| self.steps.get_mut(&last)) {
            step.results.suspend();
        }
    }
}

impl DecodeStep {
    fn new(model: &Decoder, groups: usize, [sequences, blocks]: [usize; 2]) -> Result<DecodeStep> {
        let device = model.device();
        let rows: Vec<i32> = (0..sequences as i32).collect();
        let rows = Tensor::from_slice(device, &[sequences], &rows)?;
        let batch = InferenceBatch::new(device, sequences, sequences, 1, [groups, blocks])?;
        Ok(DecodeStep { batch, rows, results: Results::None, capture: Capture::on(device) })
    }

    fn run(&mut self, model: &Decoder, cache: &mut KvCache) -> Result<Scored> {
        // A graph writes the results at their addresses.
        self.results.resume()?;
        let launch = self.capture.ready_for();
        if let (Launch::Replay, Capture::Done(graph)) = (launch, &mut self.capture) {
            graph.replay()?;
        } else {
            self.results = Results::None;
            let scored = match (launch, model.device()) {
                (Launch::Capture, Device::Cuda(gpu)) => self.captured(gpu, model, cache)?,
                _ => self.computed(model, cache)?,
            };
            if launch == Launch::WarmUp {
                self.capture = Capture::Due;
            }
            self.results = Results::Held(scored);
        }
        match &self.results {
            Results::Held(scored) => Ok(scored.clone()),
            Results::None | Results::Suspended(_) => unreachable!("the step has just run"),
        }
    }

    fn computed(&self, model: &Decoder, cache: &mut KvCache) -> Result<Scored> {
        Scored::score(model, &model.hidden(&self.batch, cache)?, &self.rows)
    }

    /// Captures the step and runs it. If the capture fails, runs the step without a graph, as all later steps.
    fn captured(&mut self, gpu: &Arc<CudaDevice>, model: &Decoder, cache: &mut KvCache) -> Result<Scored> {
        let mut scored = None;
        let captured = Graph::capture(gpu, || {
            scored = Some(self.computed(model, cache)?);
            Ok::<_, ottava_common::Error>(())
        });
        match (captured, scored) {
            (Ok(mut graph), Some(scored)) => {
                graph.replay()?;
                self.capture = Capture::Done(graph);
                Ok(scored)
            }
            (captured, _) => {
                let reason = captured.err().map(|error| error.to_string()).unwrap_or_default();
                tracing::warn!("decode steps are not captured as CUDA graphs: {reason}");
                self.capture = Capture::Never;
                self.computed(model, cache)
            }
        }
    }
}
