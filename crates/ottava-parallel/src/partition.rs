//! ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): the parts of a model's matrices that each rank stores and updates.
//!
//! Each rank trains the whole model on different rows. Because vectors (norms and biases) are small, each rank updates each vector.
//!
//! Between steps, a rank stores the slices that it updates: master weights, moments, and weights or codes. Before a block runs, its weights
//! are gathered from all ranks, as codes if products read only codes. Frozen weights are divided only in stage 3, because all ranks gather frozen
//! weights in the form in which they are stored.

use crate::bucket::{Bucket, BucketWrite, Stored};
use crate::frozen::FrozenBucket;
use crate::optim::{self, Optimizer, Prepared};
use crate::pipeline::StagePlaces;
use crate::reduction::ReduceFormat;
use crate::zero::Zero;
use crate::{Ranks, Shared};
use ottava_common::error::{Error, Result};
use ottava_models::Decoder;
use ottava_recipe::mode::Mode;
use ottava_recipe::param::{Loan, LoanedWeight, Param, UnitId, WeightCast, Writer};
use ottava_recipe::scaling::{Casts, MergeCounts};
use ottava_tensor::comm::{Axis, Group, Reduce};
use ottava_tensor::{DType, HostTransfer, Tensor};
use std::cell::{RefCell, RefMut};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::rc::Rc;

/// The bytes that ranks exchange for a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferBytes {
    /// The bytes of the buffer that ranks gather.
    pub gathered: u64,
    /// The bytes of FP8 codes in this buffer, which each rank transposes.
    pub codes: u64,
    /// The bytes of the buffer of gradients that ranks reduce.
    pub reduced: u64,
    /// The bytes of this rank's slice of gradients, if ranks also reduce slices between shard groups; else 0.
    pub slice: u64,
    /// Whether each forward and each backward gathers. Otherwise only the first forward of a step gathers.
    pub gathers_in_each_pass: bool,
}

/// The division of a model among the ranks of a run.
pub struct Partition {
    ranks: Rc<Ranks>,
    zero: Zero,
    reduction: ReduceFormat,
    /// The buckets. Empty for a single rank.
    buckets: RefCell<Vec<Bucket>>,
    /// The buckets of frozen weights in ZeRO stage 3. Empty before weights are loaded.
    frozen: RefCell<Vec<FrozenBucket>>,
    /// The slots of the casts of expert weights, if ranks divide experts.
    expert_slots: BTreeSet<usize>,
    /// The slots of the casts of weights that all ranks of the tensor axis have whole.
    whole_slots: BTreeSet<usize>,
    /// The places of the stages' values, if there are several stages. Set in the first step.
    norm_places: RefCell<Option<StagePlaces>>,
}

impl Partition {
    /// Returns the partition of a single rank, which stores everything.
    pub fn solo() -> Partition {
        let (ranks, buckets, frozen) = (Rc::new(Ranks::solo()), RefCell::default(), RefCell::default());
        let norm_places = RefCell::default();
        let (zero, reduction) = (Zero::Nothing, ReduceFormat::Stored);
        let (expert_slots, whole_slots) = (BTreeSet::new(), BTreeSet::new());
        Partition { ranks, zero, reduction, buckets, frozen, expert_slots, whole_slots, norm_places }
    }

    /// Divides `model` among `ranks`, before its weights are loaded and its optimizer is created. Gradients are sent in the format
    /// `reduction`. Set `values` if steps in high precision also read the weights of FP8 products.
    ///
    /// Errors with [`Error::Config`] for formats and placements of weights that cannot be divided.
    pub fn new(
        model: &mut Decoder,
        ranks: Rc<Ranks>,
        zero: Zero,
        reduction: ReduceFormat,
        values: bool,
    ) -> Result<Partition> {
        let (mut buckets, mut expert_slots) = (Vec::new(), BTreeSet::new());
        // Ranks of the tensor axis add the gradients of elements that several of these ranks have.
        let divides_tensors = ranks.place(Axis::Tensor).is_divided();
        let is_shared =
            |param: &&mut Param| param.identity.replicas() > 1 || divides_tensors && param.identity.is_whole();
        model.parameters().into_iter().filter(is_shared).for_each(|param| param.gradient.keep_sums());
        let is_whole = |param: &&mut Param| divides_tensors && param.identity.is_whole();
        let slot_of = |param: &Param| param.cast().map(WeightCast::slot);
        let whole_slots = model.all_parameters().into_iter().filter(is_whole).filter_map(|param| slot_of(param));
        let whole_slots = whole_slots.collect();
        if ranks.sharing(Shared::Replicas).size() > 1 {
            let (units, scaling) = model.units_and_scaling();
            for mut params in units {
                params.retain(|param| param.is_trained());
                let Some(first) = params.first() else { continue };
                let unit = first.identity.id.unit;
                let of_experts = params.iter().filter(|param| param.identity.is_of_experts());
                expert_slots.extend(of_experts.filter_map(|param| slot_of(param)));
                let kinds = [(false, false), (false, true), (true, false), (true, true)];
                // Experts that no other rank has are treated as on a single rank.
                for (experts, codes) in kinds.into_iter().filter(|(experts, _)| ranks.replicas_of(*experts).size() > 1)
                {
                    let casts = scaling.casts(Mode::TRAINING);
                    let mut matrices = Vec::new();
                    let is_of_kind =
                        |param: &Param| param.identity.is_matrix() && param.identity.is_of_experts() == experts;
                    for param in params.iter_mut().filter(|param| is_of_kind(param)) {
                        let as_codes = zero >= Zero::OptimizerStates && !values && param.is_read_as_codes(&casts)?;
                        if as_codes == codes {
                            matrices.push(&mut **param);
                        }
                    }
                    if !matrices.is_empty() {
                        buckets.push(Bucket::new(unit, matrices, codes, &ranks, zero, reduction)?);
                    }
                }
            }
        }
        let (buckets, frozen, norm_places) = (RefCell::new(buckets), RefCell::default(), RefCell::default());
        Ok(Partition { ranks, zero, reduction, buckets, frozen, expert_slots, whole_slots, norm_places })
    }

    /// Returns the ranks of the run.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Returns the ranks of the run, for an owner that outlives the partition's borrow.
    pub fn shared_ranks(&self) -> Rc<Ranks> {
        self.ranks.clone()
    }

    /// Returns the ZeRO stage.
    pub fn zero(&self) -> Zero {
        self.zero
    }

    /// Returns the format in which ranks send gradients.
    pub(super) fn reduction(&self) -> ReduceFormat {
        self.reduction
    }

    /// Returns whether ranks send gradients as FP8 codes.
    pub fn sends_codes(&self) -> bool {
        self.ranks.sharing(Shared::Gradients).size() > 1 && self.reduction != ReduceFormat::Stored
    }

    /// Returns the bytes that ranks gather and reduce for each unit of the model, in the order of forward.
    pub fn buffer_bytes(&self) -> Vec<BufferBytes> {
        let (buckets, frozen) = (self.buckets(), self.frozen());
        let last = buckets.iter().map(|bucket| bucket.unit.0).chain(frozen.iter().map(|bucket| bucket.unit.0)).max();
        let mut units = vec![BufferBytes::default(); last.map_or(0, |last| last + 1)];
        for bucket in frozen.iter() {
            let unit = &mut units[bucket.unit.0];
            unit.gathers_in_each_pass = true;
            unit.gathered += bucket.gathered_bytes() as u64;
        }
        for bucket in buckets.iter() {
            let unit = &mut units[bucket.unit.0];
            if self.divides() {
                unit.gathers_in_each_pass |= bucket.stores_slice();
                unit.gathered += bucket.gathered_bytes() as u64;
                unit.codes += if bucket.gathers_codes() { bucket.gathered_bytes() as u64 } else { 0 };
            }
            unit.reduced += bucket.reduced_bytes(self.reduction, bucket.group(&self.ranks).size()) as u64;
            if self.ranks.slice_replicas().size() > 1 {
                unit.slice += bucket.gradient_slice_bytes() as u64;
            }
        }
        units
    }

    /// Returns whether ranks divide anything (ZeRO stage 1 or more).
    pub fn divides(&self) -> bool {
        self.zero > Zero::Nothing && self.ranks.shard_group(false).size() > 1
    }

    /// Returns whether ranks keep the gathered weights of `param` until the update, as codes or as values.
    pub(super) fn keeps_gathered(&self, param: &Param, as_codes: bool) -> bool {
        let keeps = |bucket: &Bucket| !bucket.stores_slice() && bucket.gathers_codes() == as_codes;
        self.buckets().iter().any(|bucket| bucket.number_of(param).is_some() && keeps(bucket))
    }

    /// Returns whether codes are written on the device and then copied to host memory. Then parameters are updated and cast in parts, so that few
    /// codes are on the device at a time.
    fn offloads_codes(&self) -> bool {
        self.buckets().iter().any(Bucket::offloads_codes)
    }

    pub(super) fn norm_places(&self) -> &RefCell<Option<StagePlaces>> {
        &self.norm_places
    }

    /// Returns the buckets.
    pub(super) fn buckets(&self) -> RefMut<'_, Vec<Bucket>> {
        self.buckets.borrow_mut()
    }

    /// Returns the buckets of frozen weights that ranks divide.
    pub(super) fn frozen(&self) -> RefMut<'_, Vec<FrozenBucket>> {
        self.frozen.borrow_mut()
    }

    /// Updates the weights with reduced gradients, and casts them for the next step. Each rank updates its slices.
    pub fn update(&self, model: &mut Decoder, optimizer: &mut dyn Optimizer, norm: &Tensor) -> Result<()> {
        let (mut params, scaling) = model.parameters_and_scaling();
        // Scales are updated first, so that new weights are cast with the new scales.
        scaling.update()?;
        let mut casts = scaling.casts(Mode::TRAINING);
        let shared = self.ranks.sharing(Shared::Replicas).size() > 1 || self.ranks.place(Axis::Tensor).is_divided();
        let transforms = shared && params.iter().any(|param| optimizer.transforms(param));
        let in_parts = transforms || self.offloads_codes();
        let amaxes = match in_parts {
            true => None,
            false => self.amaxes(&mut params, 0, optimizer, &Prepared::default(), norm)?,
        };
        // The parameters that the next forward reads first are updated first, and gathered while the other parameters are updated. If amaxes of all
        // parameters are reduced together, this order is not used.
        let is_early = |param: &&mut Param| {
            self.buckets().iter().any(|bucket| self.is_early(bucket) && bucket.number_of(param).is_some())
        };
        let early = match amaxes {
            Some(_) => 0,
            None => params.iter().rposition(is_early).map_or(0, |last| last + 1),
        };
        let mut ends = if in_parts { self.ends_of_parts(&params) } else { Vec::new() };
        ends.extend([early, params.len()]);
        ends.sort_unstable();
        ends.dedup();
        let (mut start, mut prepared, mut gathers) = (0, Prepared { amaxes, ..Prepared::default() }, Vec::new());
        // The codes of a part are copied to host memory while the next part is updated.
        let mut leaving = Vec::new();
        for end in ends.into_iter().filter(|&end| end > 0) {
            let part = &mut params[start..end];
            if transforms {
                prepared = self.prepare(part, start, optimizer, norm)?;
            } else if in_parts {
                prepared.amaxes = self.amaxes(part, start, optimizer, &Prepared::default(), norm)?;
            }
            let left = self.update_part(part, start, optimizer, &mut casts, norm, std::mem::take(&mut prepared))?;
            std::mem::replace(&mut leaving, left).into_iter().try_for_each(HostTransfer::wait)?;
            start = end;
            if end == early {
                for (i, bucket) in self.buckets().iter_mut().enumerate().filter(|(_, bucket)| self.is_early(bucket)) {
                    let group = bucket.group(&self.ranks);
                    let buffer = bucket.weights.take(group.rank())?;
                    gathers.push((i, group.all_gather(bucket.name(), buffer)?));
                }
            }
        }
        leaving.into_iter().try_for_each(HostTransfer::wait)?;
        for (i, gather) in gathers {
            let bucket = &mut self.buckets()[i];
            bucket.weights = Stored::Gathered(gather.wait()?.split(bucket.slices.matrices())?);
        }
        Ok(())
    }

    /// Returns the amaxes of [`optim::find_amaxes`] over all ranks that divide a parameter, or `None` if ranks divide nothing.
    pub(super) fn amaxes(
        &self,
        params: &mut [&mut Param],
        start: usize,
        optimizer: &mut dyn Optimizer,
        prepared: &Prepared,
        norm: &Tensor,
    ) -> Result<Option<Tensor>> {
        let divided = [Axis::Tensor, Axis::Expert].map(|axis| self.ranks.place(axis).is_divided());
        if !self.divides() && divided == [false; 2] {
            return Ok(None);
        }
        let own = optim::find_amaxes(optimizer, params, start, prepared, norm)?;
        let group = self.ranks.sharing(Shared::Elements);
        own.map(|own| Ok(group.all_reduce("amaxes of master weights and moments", Reduce::Max, own)?.wait()?))
            .transpose()
    }

    /// Updates and casts `params`. Returns the copies of codes to host memory. The first of `params` is parameter number `start` of the model.
    fn update_part(
        &self,
        params: &mut [&mut Param],
        start: usize,
        optimizer: &mut dyn Optimizer,
        casts: &mut Casts,
        norm: &Tensor,
        prepared: Prepared,
    ) -> Result<Vec<HostTransfer>> {
        let writer = if optimizer.fuses_casts() { Writer::CastingUpdate } else { Writer::Update };
        let writes = self.begin_write(params, casts, writer)?;
        optim::update(optimizer, params, start, casts, norm, prepared)?;
        self.finish_write(writes, params, casts)
    }

    /// Returns whether the update starts the gather of a bucket for the next forward. It does for the embedding and the first block, because no
    /// earlier block can hide their gathers.
    fn is_early(&self, bucket: &Bucket) -> bool {
        bucket.unit < UnitId(2) && self.zero > Zero::Nothing && !bucket.stores_slice()
    }

    /// Casts all weights with the current scales, like [`Decoder::quantize_weights`] on one rank.
    pub fn quantize_weights(&self, model: &mut Decoder) -> Result<()> {
        if !self.divides() {
            return model.quantize_weights();
        }
        let (mut params, scaling) = model.parameters_and_scaling();
        let mut casts = scaling.casts(Mode::TRAINING);
        let in_parts = self.offloads_codes();
        let (mut start, mut ends) = (0, if in_parts { self.ends_of_parts(&params) } else { Vec::new() });
        ends.push(params.len());
        for end in ends {
            let part = &mut params[start..end];
            let writes = self.begin_write(part, &casts, Writer::Cast)?;
            self.finish_write(writes, part, &mut casts)?.into_iter().try_for_each(HostTransfer::wait)?;
            start = end;
        }
        // Experts that no other rank has are not sliced.
        params.iter_mut().filter(|param| !param.is_sliced()).try_for_each(|param| param.quantize(&mut casts))?;
        scaling.forget_losses()
    }

    /// Drops the weights that an evaluation has gathered, before a step, because a captured step always runs the same gathers. Weights that
    /// the last update gathered stay.
    pub fn begin_step(&self) -> Result<()> {
        for bucket in self.buckets().iter_mut().filter(|bucket| !self.is_early(bucket)) {
            if matches!(bucket.weights, Stored::Gathered(_)) {
                bucket.weights = Stored::Buffer(bucket.weights.take(bucket.group(&self.ranks).rank())?);
            }
        }
        Ok(())
    }

    /// Runs [`Bucket::begin_write`] on each divided bucket that has matrices among `params`. Returns the writes with the indices of their buckets.
    fn begin_write(
        &self,
        params: &mut [&mut Param],
        casts: &Casts,
        writer: Writer,
    ) -> Result<Vec<(usize, BucketWrite)>> {
        let mut writes = Vec::new();
        for (i, bucket) in self.buckets().iter_mut().enumerate().filter(|_| self.divides()) {
            let Some(matrices) = bucket.among(params) else { continue };
            let write = bucket.begin_write(matrices, casts, bucket.group(&self.ranks), writer)?;
            writes.extend(write.map(|write| (i, write)));
        }
        Ok(writes)
    }

    /// Computes the scales of the next casts, and ends the `writes` of [`Partition::begin_write`]. Returns the copies of codes to host memory.
    fn finish_write(
        &self,
        writes: Vec<(usize, BucketWrite)>,
        params: &mut [&mut Param],
        casts: &mut Casts,
    ) -> Result<Vec<HostTransfer>> {
        let mut block_amaxes = HashMap::new();
        // Experts of other ranks have other blocks, so block amaxes are reduced over ranks with the same experts. A scale per tensor is shared by all experts.
        let (all, of_experts) = (self.ranks.shard_group(false), self.ranks.shard_group(true));
        for (is_local, group) in [(false, all), (true, of_experts)] {
            let mut amaxes = Vec::new();
            for (i, param) in params.iter_mut().enumerate().filter(|(_, param)| param.is_sliced()) {
                let has_block_scales = param.cast().is_some_and(WeightCast::has_block_scales);
                if (param.identity.is_of_experts() && has_block_scales) == is_local {
                    amaxes.extend(param.slice_amaxes(casts)?.map(|amaxes| (i, amaxes)));
                }
            }
            for (i, amaxes) in largest_over(group, amaxes)? {
                let of_blocks = params[i].set_scales(amaxes, casts)?;
                block_amaxes.extend(of_blocks.map(|amaxes| (params[i].identity.id, amaxes)));
            }
        }
        let mut buckets = self.buckets();
        let end = |(i, write): (usize, BucketWrite)| {
            let bucket = &mut buckets[i];
            let matrices = bucket.among(params).expect("the write began with these parameters");
            bucket.finish_write(write, matrices, &mut block_amaxes, casts)
        };
        writes.into_iter().map(end).collect()
    }

    /// Returns the weights of all slices of `param`, in the compute type. All ranks must call it for the same parameters in the same order.
    pub fn value(&self, param: &Param) -> Result<Tensor> {
        if !param.is_sliced() {
            return param.weights.value();
        }
        let buckets = self.buckets();
        let find = |bucket: &'_ Bucket| bucket.number_of(param);
        let (bucket, at) =
            buckets.iter().find_map(|bucket| Some((bucket, find(bucket)?))).expect("a sliced parameter is in a bucket");
        let ranks = self.ranks.shard_group(param.identity.is_of_experts());
        let (rank, size) = (ranks.rank(), ranks.size());
        let owned: Vec<_> = (0..size).map(|rank| bucket.slices.owned(rank).swap_remove(at)).collect();
        let longest = owned.iter().map(Range::len).max().unwrap_or(0);
        let mut slices = Tensor::zeros(param.weights.device(), &[size * longest], param.weights.dtype())?;
        HostTransfer::upload_into(&mut slices, &[(&param.weights.value()?, rank * longest)])?.wait()?;
        let slices = ranks.all_gather(param.identity.name(), slices)?.wait()?;
        let mut whole =
            Tensor::empty(slices.device(), &[param.weights.shape().iter().product()], param.weights.dtype())?;
        for (rank, owned) in owned.into_iter().enumerate().filter(|(_, owned)| !owned.is_empty()) {
            whole.copy_from(owned.start, &slices.rows(rank * longest, rank * longest + owned.len())?)?;
        }
        whole.reshape(param.weights.shape()).map_err(Error::from)
    }

    /// Sends the `value` of rank `owner` to all ranks of this rank's pipeline, in place.
    pub fn share_with_stages(&self, name: &str, owner: usize, value: Tensor) -> Result<Tensor> {
        Ok(self.ranks.group(&[Axis::Pipeline]).broadcast(name, owner, value)?.wait()?)
    }

    /// Gathers the layers of this rank, for inference. Without a pipeline, these are all layers. The model cannot be trained afterwards.
    pub fn gather(&self, model: &mut Decoder) -> Result<()> {
        for param in model.parameters().into_iter().filter(|param| param.is_sliced()) {
            let whole = self.value(param)?;
            param.put_whole(LoanedWeight::Value(whole));
        }
        let mut params = model.all_parameters();
        for bucket in self.frozen().drain(..) {
            let mut whole = Loan::default();
            bucket.lend(bucket.start(&self.ranks)?, &mut whole)?;
            for (id, weight) in whole.into_weights() {
                let param =
                    params.iter_mut().find(|param| param.identity.id == id).expect("a bucket has weights of the model");
                param.put_whole(weight);
            }
        }
        Ok(())
    }
}

/// Computes the maxima of several tensors over the ranks of a group, in one collective.
fn largest_over(group: &Group, mut amaxes: Vec<(usize, Tensor)>) -> Result<Vec<(usize, Tensor)>> {
    let Some((_, first)) = amaxes.first() else { return Ok(amaxes) };
    let total = amaxes.iter().map(|(_, amaxes)| amaxes.len()).sum();
    let (mut all, mut at) = (Tensor::empty(first.device(), &[total], DType::F32)?, 0);
    for (_, amaxes) in &amaxes {
        all.copy_from(at, amaxes)?;
        at += amaxes.len();
    }
    let all = group.all_reduce("amaxes of weights", Reduce::Max, all)?.wait()?;
    at = 0;
    for (_, amaxes) in &mut amaxes {
        let end = at + amaxes.len();
        amaxes.copy_from(0, &all.rows(at, end)?)?;
        at = end;
    }
    Ok(amaxes)
}

impl MergeCounts for Partition {
    fn counts(&self, slot: usize, name: &str) -> bool {
        // Inputs, gradients, and slices of weights that are gathered as codes differ between ranks. All ranks cast the other weights whole, so only
        // one rank counts them.
        if !name.ends_with(".weight") {
            return true;
        }
        let is_first = self.ranks.replicas_of(self.expert_slots.contains(&slot)).rank() == 0;
        let is_copy = self.whole_slots.contains(&slot) && self.ranks.place(Axis::Tensor).rank > 0;
        let casts_slices = self.buckets().iter().any(|bucket| bucket.casts_slices_in(slot));
        let counts_slices = casts_slices && self.ranks.slice_replicas().rank() == 0;
        !is_copy && (is_first || counts_slices)
    }

    fn sum(&self, counts: &[i64]) -> Result<Vec<i64>> {
        self.ranks.sum(Shared::Model, "counts of casts", counts)
    }

    fn sum_by_slot(&self, counts: &[i64]) -> Result<Vec<i64>> {
        self.ranks.sum(Shared::Replicas, "counts of each cast", counts)
    }
}
