//! The communication of a pass: gathers of weights before a unit runs, and reductions of gradients during backward.

use crate::amaxes::Amaxes;
use crate::bucket::{Bucket, Gather, Stored};
use crate::partition::Partition;
use crate::ranks::{Ranks, Shared};
use crate::reduction::ReduceFormat;
use crate::zero::Zero;
use ottava_common::error::{Error, Result};
use ottava_recipe::param::scopes::GRADIENTS;
use ottava_recipe::param::{Direction, Grad, Loan, LoanedWeight, Param, Units};
use ottava_recipe::scaling::ScalingState;
use ottava_tensor::comm::{Pending, Reduce};
use ottava_tensor::ops::{
    CodingError, add, decode_gradients, encode_gradients, gradient_code_bytes, sum_gradient_codes, transpose,
};
use ottava_tensor::{DType, QuantizedTensor, Tensor};
use std::collections::{HashMap, VecDeque};
use std::mem;

/// The gathers of weights and the reductions of gradients of a pass that are in progress.
///
/// The gradients of a bucket's matrices are in one buffer. A backward that reduces starts the reduction after it has added to the buffer: an
/// all-reduce if every rank updates everything (ZeRO stage 0), else a reduce-scatter to the ranks that update the slices. FP8 codes are exchanged
/// by slices in an all-to-all and added; in stage 0 the sum is cast once more and gathered. If several shard groups store the same slices, these
/// collectives run within a shard group, and the last backward of a step also starts an all-reduce of the slice over shard groups.
pub struct Exchange<'a> {
    partition: &'a Partition,
    /// The gathers in progress, by bucket. `frozen` holds the gathers of frozen weights.
    gathers: HashMap<usize, Gather>,
    frozen: HashMap<usize, Pending>,
    /// Whether gradients are reduced over ranks.
    reduces: bool,
    /// Whether the current backward starts the reductions.
    reduces_now: bool,
    /// Whether the current backward is the last backward of the step that reduces.
    is_last: bool,
    open: VecDeque<Reduction>,
    /// The sums by bucket: a whole buffer, or this rank's slice of the buffer.
    sums: Vec<Option<Tensor>>,
    /// The cast errors of gradients that are sent as FP8 codes.
    error: Option<CodingError>,
}

/// The reduction of a bucket's gradients, in progress.
struct Reduction {
    bucket: usize,
    pending: Pending,
    stage: Stage,
    /// The type of the sum.
    dtype: DType,
    /// Whether no later reduction of the step adds to the sum.
    is_last: bool,
}

/// The result of a collective.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The sum of the gradients.
    Sum,
    /// The codes of this rank's slice from all ranks.
    Codes,
    /// The codes of the sum from all ranks.
    CodesOfSum,
    /// The sum of the slice over all shard groups.
    SumOfReplicas,
}

impl<'a> Exchange<'a> {
    /// Creates the exchange of a step, which lasts from the first micro-batch to the update.
    pub fn of_step(partition: &'a Partition) -> Exchange<'a> {
        let mut exchange = Exchange::of_weights(partition);
        exchange.reduces = partition.ranks().sharing(Shared::Gradients).size() > 1;
        exchange
    }

    /// Creates the exchange of passes without reductions: gradients stay on their rank.
    pub fn of_weights(partition: &'a Partition) -> Exchange<'a> {
        let (gathers, frozen, open, sums) = (HashMap::new(), HashMap::new(), VecDeque::new(), Vec::new());
        let (reduces, reduces_now, is_last) = (false, false, false);
        Exchange { partition, gathers, frozen, reduces, reduces_now, is_last, open, sums, error: None }
    }

    /// Sets whether the next backward starts to reduce the gradients of each unit to which it has added. `is_last_micro_batch` is about this backward.
    pub fn reduce_after_backward(&mut self, reduces: bool, is_last_micro_batch: bool) {
        self.reduces_now = reduces;
        // Stages 0 and 1 reduce each gradient once, after the last backward of a schedule.
        self.is_last = is_last_micro_batch || self.partition.zero() < Zero::Gradients;
    }

    /// Returns whether the current backward also starts the sums over shard groups.
    fn sums_replicas(&self) -> bool {
        self.is_last && self.partition.ranks().slice_replicas().size() > 1
    }

    /// Starts the reduction of the gradients of bucket number `i`.
    fn reduce(&mut self, i: usize, bucket: &mut Bucket, gradients: Tensor) -> Result<()> {
        let ranks = bucket.group(self.partition.ranks());
        let (device, dtype) = (gradients.device().clone(), gradients.dtype());
        let _scope = device.scope(GRADIENTS);
        let (pending, stage) = match (self.partition.reduction(), self.partition.zero()) {
            (ReduceFormat::Float8 { .. }, _) => {
                let error = match &mut self.error {
                    Some(error) => error,
                    none => none.insert(CodingError::new(&device)?),
                };
                let codes = encode_gradients(&gradients, ranks.size(), bucket.feedback.as_mut(), Some(error))?;
                let received = Tensor::empty(&device, codes.shape(), codes.dtype())?;
                (ranks.all_to_all(bucket.name(), &codes, received)?, Stage::Codes)
            }
            (ReduceFormat::Stored, Zero::Nothing) => {
                (ranks.all_reduce(bucket.name(), Reduce::Sum, gradients)?, Stage::Sum)
            }
            (ReduceFormat::Stored, _) => {
                let slice = Tensor::empty(&device, &[bucket.slices.slice_len()], dtype)?;
                (ranks.reduce_scatter(bucket.name(), &gradients, slice)?, Stage::Sum)
            }
        };
        self.open.push_back(Reduction { bucket: i, pending, stage, dtype, is_last: self.is_last });
        Ok(())
    }

    /// Returns the number of collectives that follow one another for the gradients of a bucket.
    fn stages(&self) -> usize {
        let own = match (self.partition.reduction(), self.partition.zero()) {
            (ReduceFormat::Float8 { .. }, Zero::Nothing) => 2,
            _ => 1,
        };
        own + usize::from(self.sums_replicas())
    }

    /// Waits for the oldest collective of gradients, and processes its result.
    fn settle(&mut self, buckets: &[Bucket]) -> Result<()> {
        let Some(Reduction { bucket: i, pending, stage, dtype, is_last }) = self.open.pop_front() else {
            return Ok(());
        };
        let (bucket, ranks) = (&buckets[i], buckets[i].group(self.partition.ranks()));
        let arrived = pending.wait()?;
        let _scope = arrived.device().clone().scope(GRADIENTS);
        let slice = bucket.slices.slice_len();
        let sum = match stage {
            Stage::Sum => arrived,
            Stage::SumOfReplicas => {
                self.sums[i] = Some(arrived);
                return Ok(());
            }
            Stage::Codes => {
                let sum = sum_gradient_codes(&arrived, slice, dtype)?;
                drop(arrived);
                if self.partition.zero() == Zero::Nothing {
                    let error = self.error.as_mut().expect("made for the first codes");
                    let codes = encode_gradients(&sum, 1, None, Some(error))?;
                    let shape = [ranks.size(), gradient_code_bytes(slice)];
                    let mut all = Tensor::empty(codes.device(), &shape, codes.dtype())?;
                    all.copy_from(ranks.rank(), &codes)?;
                    let pending = ranks.all_gather(bucket.name(), all)?;
                    self.open.push_back(Reduction { bucket: i, pending, stage: Stage::CodesOfSum, dtype, is_last });
                    return Ok(());
                }
                sum
            }
            Stage::CodesOfSum => decode_gradients(&arrived, slice, dtype)?,
        };
        if self.sums.len() <= i {
            self.sums.resize(i + 1, None);
        }
        let sum = match self.sums[i].take() {
            Some(before) => add(&before, &sum)?,
            None => sum,
        };
        if !is_last || self.partition.ranks().slice_replicas().size() == 1 {
            self.sums[i] = Some(sum);
            return Ok(());
        }
        let pending = self.partition.ranks().of_replicas(|group| group.all_reduce(bucket.name(), Reduce::Sum, sum))?;
        self.open.push_back(Reduction { bucket: i, pending, stage: Stage::SumOfReplicas, dtype, is_last });
        Ok(())
    }

    /// Finishes the reductions: each of `params` gets its reduced gradient, or the reduced gradient of its slice. Amaxes are reduced over the ranks
    /// that share scales. Returns the relative error of the gradients that this rank sent as FP8 codes, F32 `[1]`.
    pub fn finish(&mut self, mut params: Vec<&mut Param>, scaling: &mut ScalingState) -> Result<Option<Tensor>> {
        let ranks = self.partition.ranks();
        let amaxes = Amaxes::merge(scaling, ranks)?;
        if !self.reduces {
            ranks.sum_whole_gradients(&mut params)?;
            ranks.sum_replicated_gradients(&mut params)?;
            amaxes.finish(scaling)?;
            return Ok(None);
        }
        let vectors = [false, true].map(|experts| Vectors::reduce(&mut params, experts, ranks));
        let buckets = self.partition.buckets();
        while !self.open.is_empty() {
            self.settle(&buckets)?;
        }
        for (sum, bucket) in mem::take(&mut self.sums).into_iter().zip(buckets.iter()) {
            let sum = sum.expect("backward makes the gradients of all units");
            let matrices = bucket.among(&mut params).expect("the model has all units");
            if self.partition.zero() == Zero::Nothing {
                for (param, part) in matrices.into_iter().zip(sum.split(bucket.slices.matrices())?) {
                    param.gradient.set(Grad::Plain(part.reshape(param.weights.shape())?));
                }
                continue;
            }
            let first = bucket.group(ranks).rank() * bucket.slices.slice_len();
            for (param, matrix) in matrices.into_iter().zip(bucket.slices.matrices()) {
                let owned = param.slice();
                if !owned.is_empty() {
                    let start = matrix.start + owned.start - first;
                    let slice = sum.rows(start, start + owned.len())?;
                    param.gradient.set(Grad::Plain(slice.reshape(&param.update_shape())?));
                }
            }
        }
        drop(buckets);
        vectors.into_iter().try_for_each(|vectors| vectors?.finish(&mut params))?;
        ranks.sum_whole_gradients(&mut params)?;
        ranks.sum_replicated_gradients(&mut params)?;
        amaxes.finish(scaling)?;
        self.error.take().map(|error| Ok(error.relative()?)).transpose()
    }
}

impl Drop for Exchange<'_> {
    /// Waits for gathers that a failed pass did not wait for, and puts their buffers back.
    fn drop(&mut self) {
        let mut buckets = self.partition.buckets();
        for (bucket, gather) in self.gathers.drain() {
            // If the group has failed, the pass has already reported it.
            if let (Ok(buffer), false) = (gather.wait(), buckets[bucket].stores_slice()) {
                buckets[bucket].weights = Stored::Buffer(buffer);
            }
        }
        self.frozen.drain().for_each(|(_, gather)| drop(gather.wait()));
    }
}

impl Units for Exchange<'_> {
    fn start(&mut self, params: &[&Param]) -> Result<()> {
        if !self.partition.divides() {
            return Ok(());
        }
        let unit = params[0].identity.id.unit;
        for (i, bucket) in self.partition.buckets().iter_mut().enumerate().filter(|(_, bucket)| bucket.unit == unit) {
            let ranks = bucket.group(self.partition.ranks());
            let gather = match mem::take(&mut bucket.weights) {
                Stored::Buffer(buffer) => Some(Gather::of_buffer(ranks.all_gather(bucket.name(), buffer)?)),
                other => {
                    bucket.weights = other;
                    bucket.gather_slices(params, ranks)?
                }
            };
            self.gathers.extend(gather.map(|gather| (i, gather)));
        }
        for (i, bucket) in self.partition.frozen().iter().enumerate().filter(|(_, bucket)| bucket.unit == unit) {
            self.frozen.insert(i, bucket.start(self.partition.ranks())?);
        }
        Ok(())
    }

    fn fetch(&mut self, params: &[&Param], direction: Direction) -> Result<Loan> {
        let mut loan = Loan::default();
        if !self.partition.divides() {
            return Ok(loan);
        }
        let unit = params[0].identity.id.unit;
        for (i, bucket) in self.partition.buckets().iter_mut().enumerate().filter(|(_, bucket)| bucket.unit == unit) {
            let arrived = match self.gathers.remove(&i) {
                Some(gather) => Some(gather.wait()?.split(bucket.slices.matrices())?),
                None => None,
            };
            let parts = match (&bucket.weights, &arrived) {
                (Stored::Gathered(parts), _) | (_, Some(parts)) => parts,
                _ => {
                    let words = format!("the gather of {} was lost", bucket.name());
                    return Err(Error::Rank { rank: self.partition.ranks().rank(), words });
                }
            };
            for param in params {
                let Some(at) = bucket.number_of(param) else { continue };
                let part = parts[at].clone();
                let weight = match &bucket.matrices[at].cast {
                    Some(cast) => LoanedWeight::Codes(gathered_codes(param, part, cast, direction)?),
                    None => LoanedWeight::Value(part.reshape(param.weights.shape())?),
                };
                loan.add(param.identity.id, weight);
            }
            if let (Some(parts), false) = (arrived, bucket.stores_slice()) {
                bucket.weights = Stored::Gathered(parts);
            }
        }
        for (i, bucket) in self.partition.frozen().iter().enumerate().filter(|(_, bucket)| bucket.unit == unit) {
            bucket.lend(self.frozen.remove(&i).expect("the unit was started"), &mut loan)?;
        }
        Ok(loan)
    }

    fn begin_gradients(&mut self, params: &mut [&mut Param]) -> Result<()> {
        if !self.reduces {
            return Ok(());
        }
        for bucket in self.partition.buckets().iter() {
            let matrices = bucket.among(params).filter(|matrices| !matrices[0].gradient.has_memory());
            let Some(matrices) = matrices else { continue };
            let dtype = matrices[0].gradient.dtype().expect("ranks keep sums");
            let device = matrices[0].weights.device().clone();
            let _scope = device.scope(GRADIENTS);
            let mut buffer = Tensor::empty(&device, &[bucket.slices.padded_len()], dtype)?;
            if self.partition.sends_codes() {
                // A group of values with one scale may extend into padding, so padding must be zero.
                for gap in bucket.slices.padding() {
                    buffer.copy_from(gap.start, &Tensor::zeros(&device, &[gap.len()], dtype)?)?;
                }
            }
            for (param, part) in matrices.into_iter().zip(buffer.split(bucket.slices.matrices())?) {
                let place = part.reshape(param.weights.shape())?;
                param.gradient.place(place);
            }
        }
        Ok(())
    }

    fn end_gradients(&mut self, params: &mut [&mut Param]) -> Result<()> {
        if !self.reduces || !self.reduces_now {
            return Ok(());
        }
        let mut buckets = self.partition.buckets();
        let (stages, mut due) = (self.stages(), 0);
        for (i, bucket) in buckets.iter_mut().enumerate() {
            let Some(matrices) = bucket.among(params) else { continue };
            let gradients = Tensor::join(matrices.into_iter().map(|param| plain(param.gradient.take())).collect())?;
            self.reduce(i, bucket, gradients)?;
            due += stages;
        }
        // One bucket per stage of the exchange may be in progress. More would only take memory.
        for _ in 0..due {
            if self.open.len() > stages {
                self.settle(&buckets)?;
            }
        }
        Ok(())
    }
}

/// Returns the cast of a whole parameter from its gathered `codes` and the scales of this rank's `slice`. For backward, the codes are also
/// transposed.
fn gathered_codes(
    param: &Param,
    codes: Tensor,
    slice: &QuantizedTensor,
    direction: Direction,
) -> Result<QuantizedTensor> {
    let &[rows, columns] = param.weights.shape() else { unreachable!("only matrices are cast") };
    let codes = codes.reshape(&[rows, columns])?;
    let transposed = (direction == Direction::Backward).then(|| transpose(&codes)).transpose()?;
    Ok(QuantizedTensor { codes: Some(codes), transposed, rows, columns, ..slice.clone() })
}

fn plain(grad: Option<Grad>) -> Tensor {
    match grad {
        Some(Grad::Plain(grad)) => grad,
        Some(Grad::Scaled(_)) | None => unreachable!("backward has made it, and ranks keep sums"),
    }
}

/// The reduction of the gradients of vectors in one buffer: the vectors of experts that ranks divide, or all other vectors.
struct Vectors {
    experts: bool,
    sum: Option<Pending>,
}

impl Vectors {
    /// Starts to sum the gradients of the vectors among `params` over the ranks that have the same vectors.
    fn reduce(params: &mut [&mut Param], experts: bool, ranks: &Ranks) -> Result<Vectors> {
        let group = ranks.replicas_of(experts);
        let grads: Vec<_> = Vectors::of(params, experts).map(|param| plain(param.gradient.take())).collect();
        let Some(first) = grads.first() else { return Ok(Vectors { experts, sum: None }) };
        let mut all = Tensor::empty(first.device(), &[grads.iter().map(Tensor::len).sum()], first.dtype())?;
        let mut start = 0;
        for grad in &grads {
            all.copy_from(start, grad)?;
            start += grad.len();
        }
        Ok(Vectors { experts, sum: Some(group.all_reduce("gradients of vectors", Reduce::Sum, all)?) })
    }

    /// Waits for the sum, and gives each vector its part.
    fn finish(self, params: &mut [&mut Param]) -> Result<()> {
        let Some(sum) = self.sum else { return Ok(()) };
        let (all, mut start) = (sum.wait()?, 0);
        for param in Vectors::of(params, self.experts) {
            let end = start + param.weights.shape()[0];
            param.gradient.set(Grad::Plain(all.rows(start, end)?));
            start = end;
        }
        Ok(())
    }

    fn of<'a>(params: &'a mut [&mut Param], experts: bool) -> impl Iterator<Item = &'a mut Param> {
        let is_meant =
            move |param: &&mut Param| !param.identity.is_matrix() && param.identity.is_of_experts() == experts;
        params.iter_mut().map(|param| &mut **param).filter(is_meant)
    }
}
