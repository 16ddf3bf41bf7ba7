use super::{GroupScore, MOST_EXPERTS, MOST_GROUPS, RouterLosses, RouterScores, Routes, Routing};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{DType, Error, Result, Tensor};

kernel_source!("router"; MOST_EXPERTS, MOST_GROUPS);

/// Tokens of a block.
const WARPS: usize = 8;

fn kernel(entry: &'static str) -> Kernel {
    Kernel { source: &SOURCE, defines: &[], entry }
}

fn expect_f32(what: &str, logits: &Tensor) -> Result<()> {
    match logits.dtype() {
        DType::F32 => Ok(()),
        got => Err(Error::DType { what: what.into(), expected: "float32".into(), got }),
    }
}

/// `Routing` of the kernel, its last parameter, as consecutive 64-bit arguments.
fn routing(how: Routing, by_logits: bool) -> [Arg; 4] {
    let pack = |low: u32, high: u32| Arg::U64(u64::from(low) | u64::from(high) << 32);
    let groups = how.groups.map_or([0; 3], |groups| {
        [groups.count as u32, groups.chosen as u32, u32::from(groups.by == GroupScore::TwoBest)]
    });
    let epsilon = how.normalise.unwrap_or(0.0) as f32;
    [
        pack((how.scores == RouterScores::Sigmoid).into(), how.normalise.is_some().into()),
        pack(by_logits.into(), groups[0]),
        pack(groups[1], groups[2]),
        pack(epsilon.to_bits(), (how.scale as f32).to_bits()),
    ]
}

pub(super) fn route(
    gpu: &CudaDevice,
    logits: &Tensor,
    bias: Option<&Tensor>,
    how: Routing,
    counted: Option<&Tensor>,
    routes: &mut Routes,
) -> Result<()> {
    let [tokens, experts] = logits.dims("route: logits")?;
    expect_f32("route: logits", logits)?;
    let Routes { ids, weights, lse, entropy } = routes;
    let mut args = [ids, weights, lse, entropy].map(|t| Arg::Ptr(t.device_ptr_mut())).to_vec();
    args.push(Arg::Ptr(logits.device_ptr()));
    args.extend([bias, counted].map(|t| Arg::Ptr(t.map_or(0, Tensor::device_ptr))));
    args.extend([tokens, experts, how.chosen].map(|n| Arg::I32(n as i32)));
    args.extend(routing(how, how.compares_logits(bias)));
    let grid = [tokens.div_ceil(WARPS).max(1) as u32, 1, 1];
    // SAFETY: `check` has compared all shapes with these sizes, which are within the bounds of the kernel; a warp for each token.
    unsafe { gpu.launch_early(&kernel("route"), grid, 32 * WARPS as u32, 0, &args) }
}

pub(super) fn route_backward(
    gpu: &CudaDevice,
    logits: &Tensor,
    routes: &Routes,
    dweights: &Tensor,
    how: Routing,
    losses: Option<RouterLosses>,
    dlogits: &mut Tensor,
) -> Result<()> {
    let [tokens, experts] = logits.dims("route_backward: logits")?;
    expect_f32("route_backward: logits", logits)?;
    let mut args = vec![Arg::Ptr(dlogits.device_ptr_mut())];
    args.extend([logits, &routes.lse, &routes.ids, dweights].map(|t| Arg::Ptr(t.device_ptr())));
    let of_losses = losses.as_ref().map(|losses| [losses.counts, losses.counted, losses.scale]);
    args.extend(of_losses.map_or([0; 3], |tensors| tensors.map(Tensor::device_ptr)).map(Arg::Ptr));
    let factors = losses
        .as_ref()
        .map_or([0.0; 2], |losses| [losses.balance * experts as f64 / how.chosen as f64, 2.0 * losses.z]);
    args.extend(factors.map(|factor| Arg::F32(factor as f32)));
    let ranks = losses.as_ref().map_or(0, |losses| losses.counts.shape()[0]);
    args.extend([ranks, tokens, experts, how.chosen].map(|n| Arg::I32(n as i32)));
    args.extend(routing(how, false));
    let grid = [tokens.div_ceil(WARPS).max(1) as u32, 1, 1];
    // SAFETY: as in `route`; ids are experts, as `route` has written them.
    unsafe { gpu.launch(&kernel("route_backward"), grid, 32 * WARPS as u32, 0, &args) }
}

/// Blocks that count choices, each in shared memory first.
const COUNTING: usize = 64;

pub(super) fn count_choices(gpu: &CudaDevice, ids: &Tensor, counted: &Tensor, counts: &mut Tensor) -> Result<()> {
    let [tokens, chosen] = ids.dims("count_choices: ids")?;
    let mut args = vec![Arg::Ptr(counts.device_ptr_mut())];
    args.extend([ids, counted].map(|t| Arg::Ptr(t.device_ptr())));
    args.extend([tokens, counts.len(), chosen].map(|n| Arg::I32(n as i32)));
    let grid = [(tokens * chosen).div_ceil(BLOCK as usize).clamp(1, COUNTING) as u32, 1, 1];
    // SAFETY: `counted` has an element for each row of `ids`, which are below the length of `counts`, as `route` has written them.
    unsafe { gpu.launch(&kernel("count_choices"), grid, BLOCK, 0, &args) }
}

pub(super) fn add_counts(gpu: &CudaDevice, counts: &mut Tensor, now: &Tensor) -> Result<()> {
    let args = [Arg::Ptr(counts.device_ptr_mut()), Arg::Ptr(now.device_ptr()), Arg::I32(now.len() as i32)];
    // SAFETY: both tensors have as many elements.
    unsafe { gpu.launch(&kernel("add_counts"), launch::elements(gpu, now.len()), BLOCK, 0, &args) }
}
