use super::{GroupScore, MOST_EXPERTS, MOST_GROUPS, RouterLosses, RouterScores, Routes, Routing};
use crate::cuda::{Arg, CudaDevice};
use crate::ops::declaration::{kernels, pack};
use crate::ops::launch::{self, BLOCK, UNTYPED};
use crate::{DType, Error, Result, Tensor};

kernels! {
    static SOURCE = { file: "router", constants: [MOST_EXPERTS, MOST_GROUPS], variants: UNTYPED };
    kernel route(
        ids: *mut i32, weights: *mut f32, lse: *mut f32, entropy: *mut f32, logits: *const f32, bias: *const f32, counted: *const i32,
        tokens: i32, experts: i32, chosen: i32, how: Routing
    );
    kernel route_backward(
        dlogits: *mut f32, logits: *const f32, lse: *const f32, ids: *const i32, dweights: *const f32, counts: *const i32,
        counted: *const i32, scale: *const f32, balance: f32, z: f32, ranks: i32, tokens: i32, experts: i32, chosen: i32, how: Routing
    );
    kernel count_choices(counts: *mut i32, ids: *const i32, counted: *const i32, tokens: i32, experts: i32, chosen: i32);
    kernel add_counts(counts: *mut i64, now: *const i32, experts: i32);
}

/// The number of tokens per block.
const WARPS: usize = 8;

fn expect_f32(what: &str, logits: &Tensor) -> Result<()> {
    match logits.dtype() {
        DType::F32 => Ok(()),
        got => Err(Error::DType { what: what.into(), expected: "float32".into(), got }),
    }
}

/// Returns the `Routing` of the kernel, its last parameter, as consecutive 64-bit arguments.
fn routing(how: Routing, by_logits: bool) -> Vec<Arg> {
    let groups = how.groups.map_or([0; 3], |groups| {
        [groups.count as u32, groups.chosen as u32, u32::from(groups.by == GroupScore::TwoBest)]
    });
    let epsilon = how.normalise.unwrap_or(0.0) as f32;
    vec![
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
    let passed = routing(how, how.compares_logits(bias));
    let entry = kernel::route(ids, weights, lse, entropy, logits, bias, counted, tokens, experts, how.chosen, passed);
    let grid = [tokens.div_ceil(WARPS).max(1) as u32, 1, 1];
    // SAFETY: `check` has compared all shapes with these sizes, which are within the bounds of the kernel. Each token has a warp.
    unsafe { gpu.launch_early(&SOURCE.kernel(&[], entry), grid, 32 * WARPS as u32, 0) }
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
    let counts = losses.as_ref().map(|losses| losses.counts);
    let counted = losses.as_ref().map(|losses| losses.counted);
    let scale = losses.as_ref().map(|losses| losses.scale);
    let [balance, z] = losses
        .as_ref()
        .map_or([0.0; 2], |losses| [losses.balance * experts as f64 / how.chosen as f64, 2.0 * losses.z]);
    let ranks = counts.map_or(0, |counts| counts.shape()[0]);
    let entry = kernel::route_backward(
        dlogits,
        logits,
        &routes.lse,
        &routes.ids,
        dweights,
        counts,
        counted,
        scale,
        balance,
        z,
        ranks,
        tokens,
        experts,
        how.chosen,
        routing(how, false),
    );
    let grid = [tokens.div_ceil(WARPS).max(1) as u32, 1, 1];
    // SAFETY: as in `route`; ids are experts, as `route` has written them.
    unsafe { gpu.launch(&SOURCE.kernel(&[], entry), grid, 32 * WARPS as u32, 0) }
}

/// The number of blocks that count choices. Each block first counts in shared memory.
const COUNTING: usize = 64;

pub(super) fn count_choices(gpu: &CudaDevice, ids: &Tensor, counted: &Tensor, counts: &mut Tensor) -> Result<()> {
    let [tokens, chosen] = ids.dims("count_choices: ids")?;
    let experts = counts.len();
    let entry = kernel::count_choices(counts, ids, counted, tokens, experts, chosen);
    let grid = [(tokens * chosen).div_ceil(BLOCK as usize).clamp(1, COUNTING) as u32, 1, 1];
    // SAFETY: `counted` has an element for each row of `ids`. The ids are below the length of `counts`, as `route` has written them.
    unsafe { gpu.launch(&SOURCE.kernel(&[], entry), grid, BLOCK, 0) }
}

pub(super) fn add_counts(gpu: &CudaDevice, counts: &mut Tensor, now: &Tensor) -> Result<()> {
    let kernel = SOURCE.kernel(&[], kernel::add_counts(counts, now, now.len()));
    // SAFETY: both tensors have the same number of elements.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, now.len()), BLOCK, 0) }
}
