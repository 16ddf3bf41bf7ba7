//! The way through a decoder's blocks, with what lies in the host's memory fetched one block ahead.

use crate::error::Result;
use crate::layer::{Context, Layer};
use crate::layers::Block;
use ottava_tensor::{Crossing, Device, Home, Tensor, evict};

/// Which way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Backward,
}

/// Does `work` with each block, and with its entry of `residuals` where there are any. Weights that lie in the host's memory are on the
/// device meanwhile, and in backward the residuals are; those of the next block are on their way.
pub(super) fn through(
    pass: Pass,
    blocks: &mut [Block],
    residuals: &mut [Tensor],
    context: &mut Context,
    mut work: impl FnMut(usize, &mut Block, Option<&mut Tensor>, &mut Context) -> Result<()>,
) -> Result<()> {
    let order: Vec<usize> = match pass {
        Pass::Forward => (0..blocks.len()).collect(),
        Pass::Backward => (0..blocks.len()).rev().collect(),
    };
    let fetch = |blocks: &mut [Block], residuals: &mut [Tensor], i: Option<&usize>| match i {
        Some(&i) => Crossing::fetch(visits(pass, &mut blocks[i], residuals.get_mut(i))),
        None => Ok(Crossing::default()),
    };
    let mut coming = fetch(blocks, residuals, order.first())?;
    for (turn, &i) in order.iter().enumerate() {
        let next = fetch(blocks, residuals, order.get(turn + 1))?;
        std::mem::replace(&mut coming, next).wait()?;
        work(i, &mut blocks[i], residuals.get_mut(i), context)?;
        evict(visits(pass, &mut blocks[i], residuals.get_mut(i)));
    }
    Ok(())
}

/// What comes to the device for a block.
fn visits<'a>(pass: Pass, block: &'a mut Block, residual: Option<&'a mut Tensor>) -> Vec<&'a mut Tensor> {
    let mut all: Vec<_> = residual.filter(|_| pass == Pass::Backward).into_iter().collect();
    block.parameters(&mut |param| all.extend(param.away_mut()));
    all
}

/// The inputs of blocks, kept in the host's memory from forward to backward.
#[derive(Default)]
pub(super) struct Residuals {
    wanted: bool,
    /// For each shape of micro-batches that has come, one for each block. A recorded step may name any of them, so none goes.
    slots: Vec<Vec<Tensor>>,
}

impl Residuals {
    /// None, unless they are `wanted` on a device that has a memory of its own.
    pub(super) fn new(wanted: bool, device: &Device) -> Residuals {
        Residuals { wanted: wanted && matches!(device, Device::Cuda(_)), slots: Vec::new() }
    }

    /// Room for as many as there are `blocks`, each like `x`.
    pub(super) fn slots(&mut self, blocks: usize, x: &Tensor) -> Result<&mut [Tensor]> {
        if !self.wanted {
            return Ok(&mut []);
        }
        let known = self.slots.iter().position(|slots| slots[0].shape() == x.shape());
        let place = match known {
            Some(place) => place,
            None => {
                let slot = |_| Tensor::zeros_in(x.device(), x.shape(), x.dtype(), Home::Host);
                self.slots.push((0..blocks).map(slot).collect::<Result<_, _>>()?);
                self.slots.len() - 1
            }
        };
        Ok(&mut self.slots[place])
    }
}
