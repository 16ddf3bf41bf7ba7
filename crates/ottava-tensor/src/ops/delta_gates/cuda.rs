use super::{DeltaGates, GateGradient, GateInput};
use crate::cuda::CudaDevice;
use crate::ops::bias;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "delta_gates", headers: ["softplus.cuh"], constants: [CHUNK], variants: launch::STORAGE };
    kernel delta_gates(
        g: *mut f32, beta: *mut f32, b: *const X, a: *const X, a_log: *const f32, dt_bias: *const f32, n: u64, heads: i32
    );
    kernel delta_gates_backward(
        db: *mut X, da: *mut X, partial_a_log: *mut f32, partial_dt_bias: *mut f32, dg: *const f32, dbeta: *const f32, a: *const X,
        a_log: *const f32, dt_bias: *const f32, g: *const f32, beta: *const f32, tokens: i32, heads: i32
    );
}

/// The number of tokens per partial sum.
const CHUNK: usize = 64;

pub(super) fn delta_gates(gpu: &CudaDevice, input: GateInput, gates: &mut DeltaGates) -> Result<()> {
    let GateInput { b, a, a_log, dt_bias } = input;
    let DeltaGates { g, beta } = gates;
    let entry = kernel::delta_gates(g, beta, b, a, a_log, dt_bias, b.len(), a_log.len());
    let kernel = SOURCE.kernel(launch::storage(b.dtype())?, entry);
    // SAFETY: the op has checked that `a`, `b` and both gates have `b.len()` elements, and that the parameters have one for each head.
    unsafe { gpu.launch_early(&kernel, launch::elements(gpu, b.len()), BLOCK, 0) }
}

pub(super) fn delta_gates_backward(
    gpu: &CudaDevice,
    d: &DeltaGates,
    input: GateInput,
    gates: &DeltaGates,
    gradient: &mut GateGradient,
    [da_log, ddt_bias]: [&mut Tensor; 2],
) -> Result<()> {
    let GateInput { b, a, a_log, dt_bias } = input;
    let [tokens, heads] = b.dims("delta_gates_backward: b")?;
    let chunks = tokens.div_ceil(CHUNK);
    let partial = || Tensor::empty(b.device(), &[chunks, heads], DType::F32);
    let (mut of_a_log, mut of_dt_bias) = (partial()?, partial()?);
    let entry = kernel::delta_gates_backward(
        &mut gradient.b,
        &mut gradient.a,
        &mut of_a_log,
        &mut of_dt_bias,
        &d.g,
        &d.beta,
        a,
        a_log,
        dt_bias,
        &gates.g,
        &gates.beta,
        tokens,
        heads,
    );
    let kernel = SOURCE.kernel(launch::storage(b.dtype())?, entry);
    let grid = [chunks as u32, heads.div_ceil(32) as u32, 1];
    // SAFETY: as in `delta_gates`, also for the gradients; the partial sums have a row per chunk of tokens.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0)? };
    bias::add_partial_sums(gpu, &of_a_log, da_log)?;
    bias::add_partial_sums(gpu, &of_dt_bias, ddt_bias)
}
