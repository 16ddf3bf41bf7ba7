//! Updates all parameters: those on the device, and in groups those that are fetched from host memory and written back, overlapped with
//! updates. New weights are cast by the optimizer, or after it.

use super::optimizer::{Optimizer, StateTensor, Updated, read_and_optimizer_tensors};
use crate::error::Result;
use crate::param::Param;
use crate::scaling::Casts;
use ottava_tensor::{DType, HostTransfer, MemoryKind, Tensor, discard_mirrors};
use std::collections::VecDeque;

/// The amaxes that [`update`] needs, over the elements that this process updates: F32, in the order of `params`; `None` if there are none.
/// Changes nothing else.
///
/// With slices, the maximum over all slices of a parameter is the amax of the whole parameter. Offloaded tensors are fetched for this, and
/// again for the update.
pub fn find_amaxes(optimizer: &mut dyn Optimizer, params: &mut [&mut Param], norm: &Tensor) -> Result<Option<Tensor>> {
    let mut amaxes = zero_amaxes(optimizer, params)?;
    if amaxes.is_empty() {
        return Ok(None);
    }
    let mut scaled = updated(optimizer, params, 0, &mut amaxes);
    scaled.retain(|updated| updated.amaxes.is_some());
    in_groups(optimizer, scaled, discard, |optimizer, group| optimizer.find_amaxes(group, norm))?;
    Ok(Some(Tensor::join(amaxes)?))
}

/// Updates `params`, the first of which is parameter number `start` of the model, with gradients of the global `norm`, and casts the new
/// weights for the next step. If the norm is not finite, no weight changes.
///
/// `amaxes` are those of [`find_amaxes`], reduced over the slices of each parameter; without them they are computed here.
pub fn update(
    optimizer: &mut dyn Optimizer,
    params: &mut [&mut Param],
    start: usize,
    casts: &mut Casts,
    norm: &Tensor,
    amaxes: Option<Tensor>,
) -> Result<()> {
    let known = amaxes.is_some();
    let mut amaxes = match amaxes {
        Some(amaxes) => by_parameter(optimizer, params, amaxes)?,
        None => zero_amaxes(optimizer, params)?,
    };
    let all = updated(optimizer, params, start, &mut amaxes);
    let fuses_casts = optimizer.fuses_casts();
    in_groups(optimizer, all, write_back, |optimizer, group| {
        for updated in group.iter_mut().filter(|_| fuses_casts) {
            updated.cast = updated.param.begin_update(casts)?;
        }
        if !known {
            optimizer.find_amaxes(group, norm)?;
        }
        optimizer.update(group, casts, norm)?;
        group.iter_mut().try_for_each(|Updated { param, .. }| match fuses_casts {
            true => param.finish_update(casts),
            // Ranks cast slices where they are gathered.
            false if param.is_sliced() => Ok(()),
            false => param.quantize(casts),
        })
    })
}

/// Zeros for each parameter with amaxes.
fn zero_amaxes(optimizer: &dyn Optimizer, params: &[&mut Param]) -> Result<Vec<Tensor>> {
    match params.iter().map(|param| optimizer.amaxes_of(param)).sum() {
        0 => Ok(Vec::new()),
        count => by_parameter(optimizer, params, Tensor::zeros(params[0].weights.device(), &[count], DType::F32)?),
    }
}

/// A tensor of the amaxes of each parameter that has some.
fn by_parameter(optimizer: &dyn Optimizer, params: &[&mut Param], amaxes: Tensor) -> Result<Vec<Tensor>> {
    let mut end = 0;
    let places = params.iter().map(|param| optimizer.amaxes_of(param)).filter(|&count| count > 0).map(|count| {
        end += count;
        end - count..end
    });
    Ok(amaxes.split(&places.collect::<Vec<_>>())?)
}

/// Those of `params` of which this process updates at least one element; the first of `params` is number `start`.
fn updated<'a, 'p>(
    optimizer: &dyn Optimizer,
    params: &'a mut [&'p mut Param],
    start: usize,
    amaxes: &'a mut [Tensor],
) -> Vec<Updated<'a, 'p>> {
    let mut amaxes = amaxes.iter_mut();
    let with_amaxes = params.iter_mut().zip(start..).map(|(param, index)| {
        let amaxes = if optimizer.amaxes_of(param) > 0 { amaxes.next() } else { None };
        Updated { param, index, amaxes, cast: None }
    });
    with_amaxes.filter(|updated| !updated.param.slice().is_empty()).collect()
}

/// All tensors of each parameter of `group`, weights and states, on the device or in host memory.
fn tensors<'g>(optimizer: &'g mut dyn Optimizer, group: &'g mut [Updated]) -> Vec<Vec<&'g mut Tensor>> {
    let mut states = optimizer.states().into_iter().enumerate();
    let of = |updated: &'g mut Updated| {
        let (_, kept) = states.find(|(index, _)| *index == updated.index).expect(IN_ORDER);
        let (read, kept) = read_and_optimizer_tensors(&mut updated.param.weights, kept);
        read.into_iter().chain(kept.into_iter().map(|StateTensor { tensor, .. }| tensor)).collect()
    };
    group.iter_mut().map(of).collect()
}

/// Why an optimizer finds the states of each parameter of a group in one pass.
pub(super) const IN_ORDER: &str = "the parameters of a group are in the order of the model";

/// Runs `work` on all parameters. Those with tensors in host memory are fetched in groups, and `leave` writes each group back or discards
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
    /// Bytes of the last group.
    bytes: usize,
}

impl<'a, 'p> Groups<'a, 'p> {
    /// Bytes of a group, unless a single parameter has more: large enough to amortize the start of copies, and small enough for several
    /// groups on the device.
    const BYTES: usize = 256 << 20;
    /// Groups that may be in write-back while another is updated. Groups differ in size; with one, transfers would wait for large groups.
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
