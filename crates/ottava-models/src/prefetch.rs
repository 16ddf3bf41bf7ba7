//! Runs the blocks of a stage in forward and backward. Offloaded and divided weights are fetched one block ahead.

use crate::layers::Block;
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::param::{Direction, Loan, LoanedWeight, Param, Units};
use ottava_tensor::{Device, HostTransfer, MemoryKind, Tensor};

/// The transfers in progress for one block: its weights, and its input in backward.
struct Prefetch {
    loan: Loan,
    copies: Vec<Tensor>,
    transfer: HostTransfer,
}

/// Starts to copy the weights of `block` that are in host memory, and its `input` if given.
fn start(block: &Block, input: Option<&Tensor>, units: &mut dyn Units) -> Result<Prefetch> {
    let params = parameters_of(block);
    units.start(&params)?;
    // On a CPU no weight is copied, because device memory is host memory.
    let is_in_host_memory = |param: &Param| param.weights.read_from().memory_kind() == MemoryKind::Host;
    let offloaded: Vec<_> = params.iter().filter(|param| param.is_offloaded() && is_in_host_memory(param)).collect();
    let weights = offloaded.iter().map(|param| param.weights.read_from());
    let tensors: Vec<&Tensor> = input.into_iter().chain(weights).collect();
    let (mut copies, transfer) = HostTransfer::upload(&tensors)?;
    let weights = copies.split_off(usize::from(input.is_some())).into_iter().map(LoanedWeight::Stored);
    let mut loan = Loan::default();
    offloaded.iter().zip(weights).for_each(|(param, weight)| loan.add(param.identity.id, weight));
    Ok(Prefetch { loan, copies, transfer })
}

impl Prefetch {
    /// Waits for the weights of `block` and for the copied input.
    fn wait(self, block: &Block, direction: Direction, units: &mut dyn Units) -> Result<(Loan, Vec<Tensor>)> {
        let Prefetch { mut loan, copies, transfer } = self;
        transfer.wait()?;
        loan.extend(units.fetch(&parameters_of(block), direction)?);
        Ok((loan, copies))
    }
}

fn parameters_of(block: &Block) -> Vec<&Param> {
    let mut params = Vec::new();
    block.parameters(&mut |param| params.push(param));
    params
}

/// Runs `work` on each block, from the first to the last.
pub(super) fn forward_blocks(
    blocks: &[Block],
    context: &mut Context,
    units: &mut dyn Units,
    mut work: impl FnMut(usize, &Block, &mut Context) -> Result<()>,
) -> Result<()> {
    let mut prefetch = blocks.first().map(|block| start(block, None, units)).transpose()?;
    for (i, block) in blocks.iter().enumerate() {
        let next = blocks.get(i + 1).map(|block| start(block, None, units)).transpose()?;
        let started = std::mem::replace(&mut prefetch, next).expect("each block is fetched");
        let (loan, _) = started.wait(block, Direction::Forward, units)?;
        work(i, block, &mut context.with_weights(&loan))?;
    }
    Ok(())
}

/// Runs `work` on each block, from the last to the first. If `inputs` is not empty, `work` gets a device copy of the block's entry.
pub(super) fn backward_blocks(
    blocks: &mut [Block],
    inputs: &[Tensor],
    context: &mut Context,
    units: &mut dyn Units,
    mut work: impl FnMut(usize, &mut Block, Option<Tensor>, &mut Context, &mut dyn Units) -> Result<()>,
) -> Result<()> {
    let mut prefetch = blocks.last().map(|block| start(block, inputs.last(), units)).transpose()?;
    for i in (0..blocks.len()).rev() {
        let next = i.checked_sub(1).map(|before| start(&blocks[before], inputs.get(before), units)).transpose()?;
        let started = std::mem::replace(&mut prefetch, next).expect("each block is fetched");
        let (loan, mut copies) = started.wait(&blocks[i], Direction::Backward, units)?;
        work(i, &mut blocks[i], copies.pop(), &mut context.with_weights(&loan), units)?;
    }
    Ok(())
}

/// Buffers in host memory that hold the inputs of blocks from forward to backward.
#[derive(Default)]
pub(super) struct ResidualBuffers {
    wanted: bool,
    /// Sets of buffers that are not in use. No set is freed, because a captured step refers to the buffers that it used.
    free: Vec<Vec<Tensor>>,
}

impl ResidualBuffers {
    /// Creates the pool of buffers. The pool provides buffers only if they are `wanted` and the device is a GPU.
    pub(super) fn new(wanted: bool, device: &Device) -> ResidualBuffers {
        ResidualBuffers { wanted: wanted && matches!(device, Device::Cuda(_)), free: Vec::new() }
    }

    /// Takes buffers for one micro-batch: one tensor like `x` for each of `blocks` blocks. Returns none if inputs stay on the device.
    pub(super) fn take(&mut self, blocks: usize, x: &Tensor) -> Result<Vec<Tensor>> {
        if !self.wanted {
            return Ok(Vec::new());
        }
        match self.free.iter().position(|set| set[0].shape() == x.shape()) {
            Some(place) => Ok(self.free.swap_remove(place)),
            None => {
                let buffer = |_| Tensor::zeros_in(x.device(), x.shape(), x.dtype(), MemoryKind::Host);
                Ok((0..blocks).map(buffer).collect::<Result<_, _>>()?)
            }
        }
    }

    /// Gives a set of buffers back after backward has read it.
    pub(super) fn give_back(&mut self, set: Vec<Tensor>) {
        if !set.is_empty() {
            self.free.push(set);
        }
    }
}
