//! Updates all parameters. Parameters in host memory are fetched and written back in groups, overlapped with updates of parameters on the
//! device. The optimizer casts new weights, or they are cast after its update.
//!
//! Offloaded states and master weights are fetched in groups of 256 MiB. While one group is updated, the next group is fetched and the last two
//! groups are written back. If ranks have slices with scales (`Scaled`), states are fetched twice per update, first for the amaxes:
//! `Partition::update` finds the amaxes of all parameters, and computes their maximum over ranks, before it updates a parameter. If the norm of the
//! gradients is not finite, nothing is written.
//!
//! New weights are cast in one of three ways. AdamW casts them with the new scales in its own pass (`Optimizer::fuses_casts`). A weight that is
//! scaled by its own amax is cast after this pass, by `Param::finish_update`. If an optimizer does not cast weights, `Param::quantize` casts them
//! after the update.

use super::optimizer::{Optimizer, StateTensor, Updated, read_and_optimizer_tensors};
use ottava_common::error::Result;
use ottava_recipe::param::{Param, UpdateCast};
use ottava_recipe::scaling::Casts;
use ottava_tensor::{DType, HostTransfer, MemoryKind, Tensor, discard_mirrors};
use std::collections::VecDeque;

/// The values that ranks compute together before an update of parameters.
#[derive(Default)]
pub struct Prepared {
    /// The amaxes of [`find_amaxes`], reduced over the slices of each parameter. If they are missing, the update computes them.
    pub amaxes: Option<Tensor>,
    /// The transformed directions of [`directions`], by parameter. If they are missing, the update computes them from whole parameters.
    pub directions: Vec<Option<Tensor>>,
}

/// Returns the amaxes that [`update`] needs, or that [`directions`] needs if `prepared` has no directions. The amaxes (F32) cover the elements that
/// this process updates, in the order of `params`; the first of `params` is parameter number `start` of the model. Returns `None` if no amax is
/// needed. Changes nothing else.
///
/// With slices, the maximum over all slices of a parameter is the amax of the whole parameter. Offloaded tensors are fetched here, and
/// again for the update.
pub fn find_amaxes(
    optimizer: &mut dyn Optimizer,
    params: &mut [&mut Param],
    start: usize,
    prepared: &Prepared,
    norm: &Tensor,
) -> Result<Option<Tensor>> {
    let mut amaxes = zero_amaxes(optimizer, params)?;
    if amaxes.is_empty() {
        return Ok(None);
    }
    let mut scaled = updated(optimizer, params, start, &mut amaxes, &prepared.directions);
    scaled.retain(|updated| updated.amaxes.is_some());
    in_groups(optimizer, scaled, discard, |optimizer, group| optimizer.find_amaxes(group, norm))?;
    Ok(Some(Tensor::join(amaxes)?))
}

/// Returns the directions of `params` over the elements that this process updates. Entries are `None` for parameters without such elements, and for
/// parameters whose update transforms no matrices. Updates the optimizer's states. The first of `params` is parameter number `start` of the model.
///
/// `amaxes` are the amaxes of [`Prepared`]. Offloaded tensors are fetched here, and again for the update.
pub fn directions(
    optimizer: &mut dyn Optimizer,
    params: &mut [&mut Param],
    start: usize,
    amaxes: Option<Tensor>,
    norm: &Tensor,
) -> Result<Vec<Option<Tensor>>> {
    let (known, mut found) = (amaxes.is_some(), vec![None; params.len()]);
    let mut amaxes = known_or_zero(optimizer, params, amaxes)?;
    let mut transformed = updated(optimizer, params, start, &mut amaxes, &[]);
    transformed.retain(|updated| optimizer.transforms(updated.param));
    in_groups(optimizer, transformed, write_back, |optimizer, group| {
        if !known {
            optimizer.find_amaxes(group, norm)?;
        }
        optimizer.directions(group, norm)?;
        group.iter_mut().for_each(|updated| found[updated.index - start] = updated.direction.take());
        Ok(())
    })?;
    Ok(found)
}

/// Updates `params` with gradients of the global `norm`, and casts the new weights for the next step. If the norm is not finite, no weight changes.
/// The first of `params` is parameter number `start` of the model.
pub fn update(
    optimizer: &mut dyn Optimizer,
    params: &mut [&mut Param],
    start: usize,
    casts: &mut Casts,
    norm: &Tensor,
    Prepared { amaxes, directions }: Prepared,
) -> Result<()> {
    let known = amaxes.is_some();
    let mut amaxes = known_or_zero(optimizer, params, amaxes)?;
    let all = updated(optimizer, params, start, &mut amaxes, &directions);
    drop(directions);
    in_groups(optimizer, all, write_back, |optimizer, mut group| {
        // A parameter whose direction is computed here is updated alone, so that only one direction takes memory.
        let is_alone = |updated: &Updated| optimizer.transforms(updated.param) && updated.direction.is_none();
        let parts: Vec<usize> = group.chunk_by(|a, b| !is_alone(a) && !is_alone(b)).map(<[_]>::len).collect();
        for length in parts {
            let (part, rest) = group.split_at_mut(length);
            update_part(optimizer, part, casts, norm, known)?;
            group = rest;
        }
        Ok(())
    })
}

/// Updates a part of a group. If a direction must be computed, the part has only one parameter.
fn update_part(
    optimizer: &mut dyn Optimizer,
    part: &mut [Updated],
    casts: &mut Casts,
    norm: &Tensor,
    known: bool,
) -> Result<()> {
    let fuses_casts = optimizer.fuses_casts();
    for updated in part.iter_mut().filter(|_| fuses_casts) {
        updated.cast = updated.param.begin_update(casts)?;
    }
    if !known {
        optimizer.find_amaxes(part, norm)?;
    }
    if optimizer.transforms(part[0].param) && part[0].direction.is_none() {
        optimizer.directions(part, norm)?;
        transform_whole(optimizer, &mut part[0])?;
        optimizer.find_amaxes(part, norm)?;
    }
    optimizer.update(part, casts, norm)?;
    part.iter_mut().try_for_each(|Updated { param, cast, .. }| match fuses_casts {
        true => param.finish_update(std::mem::take(cast), casts),
        // Ranks cast slices in the buffer from which they are gathered.
        false if param.is_sliced() => Ok(()),
        false => param.quantize(casts),
    })
}

/// Transforms the direction of a parameter that this process updates whole.
fn transform_whole(optimizer: &dyn Optimizer, Updated { param, direction, .. }: &mut Updated) -> Result<()> {
    let whole = direction.take().expect("the optimizer has set it");
    let mut transformed = whole.empty_like()?;
    let mut first = 0;
    for shard in &param.identity.shards {
        let end = first + shard.shape()[0];
        transformed.copy_from(first, &optimizer.transform(&whole.rows(first, end)?)?)?;
        first = end;
    }
    *direction = Some(transformed);
    Ok(())
}

/// Returns the reduced `amaxes` by parameter, or zeros if no amaxes were computed.
fn known_or_zero(optimizer: &dyn Optimizer, params: &[&mut Param], amaxes: Option<Tensor>) -> Result<Vec<Tensor>> {
    match amaxes {
        Some(amaxes) => by_parameter(optimizer, params, amaxes),
        None => zero_amaxes(optimizer, params),
    }
}

/// Returns zeros for each parameter with amaxes.
fn zero_amaxes(optimizer: &dyn Optimizer, params: &[&mut Param]) -> Result<Vec<Tensor>> {
    match params.iter().map(|param| optimizer.amaxes_of(param)).sum() {
        0 => Ok(Vec::new()),
        count => by_parameter(optimizer, params, Tensor::zeros(params[0].weights.device(), &[count], DType::F32)?),
    }
}

/// Splits `amaxes` into one tensor for each parameter that has amaxes.
fn by_parameter(optimizer: &dyn Optimizer, params: &[&mut Param], amaxes: Tensor) -> Result<Vec<Tensor>> {
    let mut end = 0;
    let places = params.iter().map(|param| optimizer.amaxes_of(param)).filter(|&count| count > 0).map(|count| {
        end += count;
        end - count..end
    });
    Ok(amaxes.split(&places.collect::<Vec<_>>())?)
}

/// Returns the parameters of `params` that have an element which this process updates. The first of `params` is number `start`. `directions`
/// has a direction for each of `params`, or is empty.
fn updated<'a, 'p>(
    optimizer: &dyn Optimizer,
    params: &'a mut [&'p mut Param],
    start: usize,
    amaxes: &'a mut [Tensor],
    directions: &[Option<Tensor>],
) -> Vec<Updated<'a, 'p>> {
    let mut amaxes = amaxes.iter_mut();
    let with_amaxes = params.iter_mut().enumerate().map(|(at, param)| {
        let amaxes = if optimizer.amaxes_of(param) > 0 { amaxes.next() } else { None };
        Updated {
            param,
            index: start + at,
            amaxes,
            cast: UpdateCast::default(),
            direction: directions.get(at).cloned().flatten(),
        }
    });
    with_amaxes.filter(|updated| !updated.param.slice().is_empty()).collect()
}

/// Returns all tensors of each parameter of `group`: weights and states, on the device or in host memory.
fn tensors<'g>(optimizer: &'g mut dyn Optimizer, group: &'g mut [Updated]) -> Vec<Vec<&'g mut Tensor>> {
    let mut states = optimizer.states().into_iter().enumerate();
    let of = |updated: &'g mut Updated| {
        let (_, kept) = states.find(|(index, _)| *index == updated.index).expect(IN_ORDER);
        let (read, kept) = read_and_optimizer_tensors(&mut updated.param.weights, kept);
        read.into_iter().chain(kept.into_iter().map(|StateTensor { tensor, .. }| tensor)).collect()
    };
    group.iter_mut().map(of).collect()
}

/// The reason why an optimizer finds the states of a group's parameters in one pass.
pub(super) const IN_ORDER: &str = "the parameters of a group are in the order of the model";

/// Runs `work` on all parameters. Parameters with tensors in host memory are fetched in groups, and `leave` writes each group back or discards
/// it.
fn in_groups<'a, 'p>(
    optimizer: &mut dyn Optimizer,
    mut all: Vec<Updated<'a, 'p>>,
    leave: fn(&mut dyn Optimizer, Vec<Updated>) -> Result<HostTransfer>,
    mut work: impl FnMut(&mut dyn Optimizer, &mut [Updated<'a, 'p>]) -> Result<()>,
) -> Result<()>
where
    'p: 'a,
{
    let on_host = |tensors: Vec<&mut Tensor>| -> usize {
        tensors.iter().filter(|tensor| tensor.memory_kind() == MemoryKind::Host).map(|tensor| tensor.bytes()).sum()
    };
    let bytes: Vec<usize> = tensors(optimizer, &mut all).into_iter().map(on_host).collect();
    let (mut on_device, mut offloaded) = (Vec::new(), Groups::default());
    for (updated, bytes) in all.into_iter().zip(bytes) {
        match bytes {
            0 => on_device.push(updated),
            bytes => offloaded.push(updated, bytes),
        }
    }
    // Parameters on the device are updated in slices that overlap with the transfers.
    let slice = on_device.len().div_ceil(offloaded.groups.len() + 1).max(1);
    let mut slices = on_device.chunks_mut(slice);
    let mut groups = offloaded.groups.into_iter();
    let mut next = groups.next().map(|group| PrefetchedGroup::fetch(optimizer, group)).transpose()?;
    let mut leaving = VecDeque::new();
    while let Some(PrefetchedGroup { mut group, transfer }) = next {
        next = groups.next().map(|group| PrefetchedGroup::fetch(optimizer, group)).transpose()?;
        work(optimizer, slices.next().unwrap_or_default())?;
        transfer.wait()?;
        work(optimizer, &mut group)?;
        leaving.push_back(leave(optimizer, group)?);
        if leaving.len() > Groups::LEAVING {
            leaving.pop_front().map_or(Ok(()), HostTransfer::wait)?;
        }
    }
    slices.try_for_each(|slice| work(optimizer, slice))?;
    Ok(leaving.into_iter().try_for_each(HostTransfer::wait)?)
}

fn write_back(optimizer: &mut dyn Optimizer, mut group: Vec<Updated>) -> Result<HostTransfer> {
    Ok(HostTransfer::write_back(tensors(optimizer, &mut group).into_iter().flatten())?)
}

fn discard(optimizer: &mut dyn Optimizer, mut group: Vec<Updated>) -> Result<HostTransfer> {
    discard_mirrors(tensors(optimizer, &mut group).into_iter().flatten());
    Ok(HostTransfer::default())
}

/// Parameters with tensors in host memory, in groups that are fetched together.
#[derive(Default)]
struct Groups<'a, 'p> {
    groups: Vec<Vec<Updated<'a, 'p>>>,
    /// The number of bytes of the last group.
    bytes: usize,
}

impl<'a, 'p> Groups<'a, 'p> {
    /// The maximum number of bytes of a group, unless a single parameter has more. It is large enough to amortize the start of copies, and small
    /// enough for several groups on the device.
    const BYTES: usize = 256 << 20;
    /// The number of groups that may be in write-back while another group is updated. Groups differ in size: with one, transfers would wait for large
    /// groups.
    const LEAVING: usize = 2;

    fn push(&mut self, updated: Updated<'a, 'p>, bytes: usize) {
        if self.groups.is_empty() || self.bytes + bytes > Groups::BYTES {
            self.groups.push(Vec::new());
            self.bytes = 0;
        }
        self.bytes += bytes;
        self.groups.last_mut().expect("there is one now").push(updated);
    }
}

/// A group that is being fetched to the device.
struct PrefetchedGroup<'a, 'p> {
    group: Vec<Updated<'a, 'p>>,
    transfer: HostTransfer,
}

impl<'a, 'p> PrefetchedGroup<'a, 'p> {
    fn fetch(optimizer: &mut dyn Optimizer, mut group: Vec<Updated<'a, 'p>>) -> Result<PrefetchedGroup<'a, 'p>> {
        let transfer = HostTransfer::fetch(tensors(optimizer, &mut group).into_iter().flatten())?;
        Ok(PrefetchedGroup { group, transfer })
    }
}
