//! Steps that are captured as CUDA graphs on a GPU, one graph for each padded size: decode steps, whose rows are tokens with their own contexts, and
//! packed steps, which compute the first tokens of several prompts. A host launches a graph in microseconds; it launches the kernels of a packed step
//! one by one in tens of milliseconds, longer than an H200 computes. Ranks that divide a model run the same steps in the same order. So they capture
//! the same steps, including the collectives.

use crate::block_pool::BLOCK_SIZE;
use crate::request::{AdapterId, EngineOptions};
use ottava_common::error::{Error, Result};
use ottava_models::{Decoder, InferenceBatch, KvCache, MOST_PACKED, SequenceTokens, most_blocks, padded_rows};
use ottava_recipe::capture::{Capture, Launch};
use ottava_tensor::cuda::{CudaDevice, Graph};
use ottava_tensor::ops::{argmax, cast, has_ordered_sums};
use ottava_tensor::{DType, Device, Staging, Suspended, Tensor};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// The number of rows of each pass if results must not depend on the batch, but the order of sums may depend on the number of rows.
const INVARIANT_ROWS: usize = 64;

/// The number of bytes of a buffer for inputs of steps. Larger inputs take the buffers in turn.
const STAGED: usize = 256 << 10;

/// Returns the number of rows of all passes, if it must be the same.
pub(super) fn fixed_rows(model: &Decoder, options: &EngineOptions) -> Option<usize> {
    let recipe = model.recipe();
    let casts = recipe.casts.map(|casts| [casts.input, casts.weight].map(|cast| (cast.format, cast.granularity)));
    let is_gpu = matches!(model.device(), Device::Cuda(_));
    let is_fixed = options.batch_invariant && is_gpu && !has_ordered_sums(model.device(), recipe.compute, casts);
    is_fixed.then_some(INVARIANT_ROWS)
}

/// The steps by size and by adapter, since a graph reads fixed weights.
///
/// Only the results of the last step hold memory. Steps of all sizes use the same memory for their results in turns.
pub struct CapturedSteps {
    steps: HashMap<Key, CapturedStep>,
    /// The size of the last step.
    last: Option<Key>,
    /// The number of rows of all decode steps, if it must be the same.
    pub(super) rows: Option<usize>,
    /// The buffers through which steps get their inputs.
    pub(super) staging: Staging,
}

/// The size of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Size {
    /// A decode step: the number of rows and the number of blocks of the longest sequence, both powers of two.
    Rows([usize; 2]),
    /// A packed step: the number of tokens.
    Packed(usize),
}

/// A step: its adapter and its size.
type Key = (Option<AdapterId>, Size);

/// The number of rows of logits of a packed step.
const PACKED_ROWS: usize = MOST_PACKED + 1;

/// The step of one size.
struct CapturedStep {
    batch: InferenceBatch,
    /// The rows whose logits are computed, I32 `[R]`. In a decode step, these are all rows.
    rows: Tensor,
    results: Results,
    capture: Capture,
}

/// The results of a step.
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

/// The results of a step on the device, one row per scored row.
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

impl CapturedSteps {
    /// Makes steps on `device` of `rows` rows, or of any number of rows if it is `None`.
    pub fn new(device: &Device, rows: Option<usize>) -> CapturedSteps {
        CapturedSteps { steps: HashMap::new(), last: None, rows, staging: Staging::with_chunk(device, STAGED) }
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
        let (step, staging) = self.step((adapter, Size::Rows(size)), || CapturedStep::rows(model, groups, size))?;
        step.batch.set_by(staging, sequences)?;
        if let Some((tokens, places)) = ids {
            step.batch.take_ids(tokens, places)?;
        }
        step.run(model, cache)
    }

    /// Computes the first tokens of `sequences` on a GPU, and the logits of some `rows` of these tokens. The linears of `model`, which
    /// [packs prompts](Decoder::packs_prompts), must hold the adapters of `adapter`. Rows of the result are in the order of `rows`, followed by padding.
    ///
    /// Panics if there are more than [`MOST_PACKED`] sequences or rows.
    pub fn run_packed(
        &mut self,
        model: &Decoder,
        adapter: Option<AdapterId>,
        cache: &mut KvCache,
        sequences: &[SequenceTokens],
        rows: &[i32],
    ) -> Result<Scored> {
        let tokens = padded_rows(model.device(), sequences.iter().map(|sequence| sequence.new.len()).sum());
        let [groups, _] = most_blocks(sequences);
        let mut padded = [0; PACKED_ROWS];
        padded[..rows.len()].copy_from_slice(rows);
        let make = || CapturedStep::packed(model, groups, tokens);
        let (step, staging) = self.step((adapter, Size::Packed(tokens)), make)?;
        step.batch.set_by(staging, sequences)?;
        staging.write(&mut step.rows, bytemuck::cast_slice(&padded))?;
        step.run(model, cache)
    }

    /// Returns the step `key`, made by `make` if it has not run before, and the buffers for its inputs.
    fn step(
        &mut self,
        key: Key,
        make: impl FnOnce() -> Result<CapturedStep>,
    ) -> Result<(&mut CapturedStep, &mut Staging)> {
        if self.last != Some(key) {
            self.suspend();
        }
        self.last = Some(key);
        let step = match self.steps.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(make()?),
        };
        Ok((step, &mut self.staging))
    }

    /// Returns the memory of the results of the last step to the device.
    pub(super) fn suspend(&mut self) {
        if let Some(step) = self.last.take().and_then(|last| self.steps.get_mut(&last)) {
            step.results.suspend();
        }
    }
}

impl CapturedStep {
    /// Makes a decode step.
    fn rows(model: &Decoder, groups: usize, [sequences, blocks]: [usize; 2]) -> Result<CapturedStep> {
        let device = model.device();
        let rows: Vec<i32> = (0..sequences as i32).collect();
        let rows = Tensor::from_slice(device, &[sequences], &rows)?;
        let batch = InferenceBatch::new(device, sequences, sequences, 1, [groups, blocks])?;
        Ok(CapturedStep { batch, rows, results: Results::None, capture: Capture::on(device) })
    }

    /// Makes a packed step.
    fn packed(model: &Decoder, groups: usize, tokens: usize) -> Result<CapturedStep> {
        let device = model.device();
        let rows = Tensor::zeros(device, &[PACKED_ROWS], DType::I32)?;
        let batch = InferenceBatch::for_packed(device, tokens, [groups, tokens.div_ceil(BLOCK_SIZE)])?;
        Ok(CapturedStep { batch, rows, results: Results::None, capture: Capture::on(device) })
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
                tracing::warn!("steps of inference are not captured as CUDA graphs: {reason}");
                self.capture = Capture::Never;
                self.computed(model, cache)
            }
        }
    }
}
