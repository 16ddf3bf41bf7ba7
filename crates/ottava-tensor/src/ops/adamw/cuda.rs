use super::{AdamWParameter, AdamWWeight, Scalars, stochastic_seed};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, Defines, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("adamw");

/// In the order of [`variant`].
pub(crate) const VARIANTS: &[Defines] = &[
    &[("G", "f32"), ("M", "f32"), ("V", "f32"), ("COPY", "bf16")],
    &[("G", "f32"), ("M", "f32"), ("V", "f32"), ("COPY", "f16")],
    &[("G", "f32"), ("M", "f32"), ("V", "f32"), ("COPY", "bf16"), ("STOCHASTIC", "1")],
    &[("G", "f32"), ("M", "f32"), ("V", "bf16"), ("COPY", "bf16")],
    &[("G", "f32"), ("M", "f32"), ("V", "bf16"), ("COPY", "f16")],
    &[("G", "f32"), ("M", "f32"), ("V", "bf16"), ("COPY", "bf16"), ("STOCHASTIC", "1")],
    &[("G", "f32"), ("M", "bf16"), ("V", "f32"), ("COPY", "bf16")],
    &[("G", "f32"), ("M", "bf16"), ("V", "f32"), ("COPY", "f16")],
    &[("G", "f32"), ("M", "bf16"), ("V", "f32"), ("COPY", "bf16"), ("STOCHASTIC", "1")],
    &[("G", "f32"), ("M", "bf16"), ("V", "bf16"), ("COPY", "bf16")],
    &[("G", "f32"), ("M", "bf16"), ("V", "bf16"), ("COPY", "f16")],
    &[("G", "f32"), ("M", "bf16"), ("V", "bf16"), ("COPY", "bf16"), ("STOCHASTIC", "1")],
    &[("G", "bf16"), ("M", "f32"), ("V", "f32"), ("COPY", "bf16")],
    &[("G", "bf16"), ("M", "f32"), ("V", "f32"), ("COPY", "f16")],
    &[("G", "bf16"), ("M", "f32"), ("V", "f32"), ("COPY", "bf16"), ("STOCHASTIC", "1")],
    &[("G", "bf16"), ("M", "f32"), ("V", "bf16"), ("COPY", "bf16")],
    &[("G", "bf16"), ("M", "f32"), ("V", "bf16"), ("COPY", "f16")],
    &[("G", "bf16"), ("M", "f32"), ("V", "bf16"), ("COPY", "bf16"), ("STOCHASTIC", "1")],
    &[("G", "bf16"), ("M", "bf16"), ("V", "f32"), ("COPY", "bf16")],
    &[("G", "bf16"), ("M", "bf16"), ("V", "f32"), ("COPY", "f16")],
    &[("G", "bf16"), ("M", "bf16"), ("V", "f32"), ("COPY", "bf16"), ("STOCHASTIC", "1")],
    &[("G", "bf16"), ("M", "bf16"), ("V", "bf16"), ("COPY", "bf16")],
    &[("G", "bf16"), ("M", "bf16"), ("V", "bf16"), ("COPY", "f16")],
    &[("G", "bf16"), ("M", "bf16"), ("V", "bf16"), ("COPY", "bf16"), ("STOCHASTIC", "1")],
];

/// Parameters that one launch takes: their table travels with its arguments, of which a kernel has 4 KiB.
const CAPACITY: usize = 56;

/// Elements of one block.
const CHUNK: usize = 1 << 14;

fn variant(parameter: &AdamWParameter) -> usize {
    let narrow = |t: &Tensor| usize::from(t.dtype() == DType::BF16);
    let weight = match &parameter.weight {
        AdamWWeight::Master { copy: Some(copy), .. } => usize::from(copy.dtype() == DType::F16),
        AdamWWeight::Master { copy: None, .. } => 0,
        AdamWWeight::Stochastic { .. } => 2,
    };
    12 * narrow(parameter.grad) + 6 * narrow(parameter.m) + 3 * narrow(parameter.v) + weight
}

pub(super) fn adamw(gpu: &CudaDevice, parameters: &mut [AdamWParameter], norm: &Tensor, how: &Scalars) -> Result<()> {
    for (i, defines) in VARIANTS.iter().enumerate() {
        let mut alike: Vec<_> = parameters.iter_mut().filter(|p| variant(p) == i).collect();
        for parameters in alike.chunks_mut(CAPACITY) {
            launch(gpu, defines, parameters, norm, how)?;
        }
    }
    Ok(())
}

fn launch(
    gpu: &CudaDevice,
    defines: Defines,
    parameters: &mut [&mut AdamWParameter],
    norm: &Tensor,
    how: &Scalars,
) -> Result<()> {
    let mut args = vec![
        Arg::Ptr(norm.device_ptr()),
        Arg::F32(how.max_norm),
        Arg::F32(how.step_size),
        Arg::F32(how.take1),
        Arg::F32(how.beta2),
        Arg::F32(how.take2),
        Arg::F32(how.correction2),
        Arg::F32(how.epsilon),
        Arg::I32(parameters.len() as i32),
        Arg::U64(CHUNK as u64),
    ];
    let scalars = args.len();
    // The last parameter is an array of structs of words, which the driver copies from consecutive arguments.
    let mut end = 0;
    for parameter in parameters {
        let n = parameter.grad.len();
        end += n.div_ceil(CHUNK);
        let (master, copy, seed) = match &mut parameter.weight {
            AdamWWeight::Master { master, copy } => {
                (master.device_ptr_mut(), copy.as_mut().map_or(0, |copy| copy.device_ptr_mut()), 0)
            }
            AdamWWeight::Stochastic { weight, seed } => (0, weight.device_ptr_mut(), stochastic_seed(*seed, how.step)),
        };
        args.extend([
            Arg::Ptr(master),
            Arg::Ptr(copy),
            Arg::Ptr(parameter.m.device_ptr_mut()),
            Arg::Ptr(parameter.v.device_ptr_mut()),
            Arg::Ptr(parameter.grad.device_ptr()),
            Arg::U64(n as u64),
            Arg::U64(end as u64),
            Arg::U64(seed),
            Arg::F32(how.keep(parameter.weight_decay)),
        ]);
    }
    args.resize(scalars + 9 * CAPACITY, Arg::U64(0));
    let kernel = Kernel { source: &SOURCE, defines, entry: "adamw" };
    // SAFETY: the tensors of a parameter have `n` elements of the types in the defines, checked by the op, blocks end with their
    // parameter, `norm` has one element, and the table is full length.
    unsafe { gpu.launch(&kernel, [end as u32, 1, 1], BLOCK, 0, &args) }
}
