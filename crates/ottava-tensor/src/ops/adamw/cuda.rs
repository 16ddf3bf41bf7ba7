use super::{AdamWParameter, AdamWWeight, CastStatistics, WeightCast};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, Defines, kernel_source};
use crate::ops::quantize::tiles;
use crate::{DType, Result, Tensor};

kernel_source!(SOURCE, "adamw", "destination.cuh");

/// For types of gradient and moments, each kind of weight with each format of its codes, in the order of [`variant`].
macro_rules! variants {
    ($($g:literal, $s:literal;)*) => {
        &[$(
            [
                &[("G", $g), ("S", $s), ("W", "f32"), ("X", "f32"), ("FORMAT", "e4m3")],
                &[("G", $g), ("S", $s), ("W", "f32"), ("X", "f32"), ("FORMAT", "e5m2")],
                &[("G", $g), ("S", $s), ("W", "f32"), ("X", "f16"), ("FORMAT", "e4m3")],
                &[("G", $g), ("S", $s), ("W", "f32"), ("X", "f16"), ("FORMAT", "e5m2")],
                &[("G", $g), ("S", $s), ("W", "f32"), ("X", "bf16"), ("FORMAT", "e4m3")],
                &[("G", $g), ("S", $s), ("W", "f32"), ("X", "bf16"), ("FORMAT", "e5m2")],
                &[("G", $g), ("S", $s), ("W", "bf16"), ("X", "bf16"), ("FORMAT", "e4m3")],
                &[("G", $g), ("S", $s), ("W", "bf16"), ("X", "bf16"), ("FORMAT", "e5m2")],
            ],
        )*]
    };
}

pub(crate) const VARIANTS: &[[Defines; 8]] = variants! {
    "f32", "f32";
    "f32", "bf16";
    "bf16", "f32";
    "bf16", "bf16";
};

/// Parameters that one launch takes: their table travels with its arguments, of which a kernel has 4 KiB.
const PARTS: usize = 48;
const CAST_PARTS: usize = 38;

/// Elements of one block, where nothing is cast to tiles.
const CHUNK: usize = 1 << 14;

/// What one launch does alike: how it is compiled, and whether it writes codes.
fn variant(parameter: &AdamWParameter) -> (usize, usize, bool) {
    let narrow = |t: &Tensor| usize::from(t.dtype() == DType::BF16);
    let weight = match &parameter.weight {
        AdamWWeight::Master { copy: None, .. } => 0,
        AdamWWeight::Master { copy: Some(copy), .. } => 1 + narrow(copy),
        AdamWWeight::Stochastic { .. } => 3,
    };
    let types = 2 * narrow(parameter.grad) + narrow(parameter.m);
    match &parameter.cast {
        Some(WeightCast::Codes { into, .. }) => (types, 2 * weight + usize::from(into.format == DType::E5M2), true),
        // Which format these never write does not matter.
        Some(WeightCast::Amax(_)) | None => (types, 2 * weight, false),
    }
}

pub(super) fn adamw(
    gpu: &CudaDevice,
    parameters: &mut [AdamWParameter],
    statistics: &mut CastStatistics,
    norm: &Tensor,
    scalars: &Tensor,
) -> Result<()> {
    let mut kinds: Vec<_> = parameters.iter().map(variant).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds {
        let (types, weight, casts) = kind;
        let defines = VARIANTS[types][weight];
        let mut alike: Vec<_> = parameters.iter_mut().filter(|p| variant(p) == kind).collect();
        let common = [Arg::Ptr(norm.device_ptr()), Arg::Ptr(scalars.device_ptr())];
        if casts {
            for parameters in alike.chunks_mut(CAST_PARTS) {
                update_and_cast(gpu, defines, parameters, statistics, common)?;
            }
        } else {
            for parameters in alike.chunks_mut(PARTS) {
                update(gpu, defines, parameters, common)?;
            }
        }
    }
    Ok(())
}

/// `Tensors` in the kernel: the words of its members, which the driver copies from consecutive arguments.
fn tensors(parameter: &mut AdamWParameter) -> [Arg; 7] {
    let (weight, copy, seed) = match &mut parameter.weight {
        AdamWWeight::Master { master, copy } => {
            (master.device_ptr_mut(), copy.as_mut().map_or(0, |copy| copy.device_ptr_mut()), 0)
        }
        AdamWWeight::Stochastic { weight, seed } => (weight.device_ptr_mut(), 0, *seed),
    };
    [
        Arg::Ptr(weight),
        Arg::Ptr(copy),
        Arg::Ptr(parameter.m.device_ptr_mut()),
        Arg::Ptr(parameter.v.device_ptr_mut()),
        Arg::Ptr(parameter.grad.device_ptr()),
        Arg::U64(seed),
        Arg::U64(parameter.weight_decay.to_bits()),
    ]
}

fn update(
    gpu: &CudaDevice,
    defines: Defines,
    parameters: &mut [&mut AdamWParameter],
    [norm, scalars]: [Arg; 2],
) -> Result<()> {
    let mut args = vec![norm, scalars, Arg::U64(CHUNK as u64)];
    let table = args.len();
    let mut end = 0;
    for parameter in parameters {
        let n = parameter.grad.len();
        end += n.div_ceil(CHUNK);
        args.extend(tensors(parameter));
        let amax = match &mut parameter.cast {
            Some(WeightCast::Amax(amax)) => amax.device_ptr_mut(),
            _ => 0,
        };
        args.extend([Arg::Ptr(amax), Arg::U64(n as u64), Arg::U64(end as u64)]);
    }
    args.resize(table + 10 * PARTS, Arg::U64(0));
    let kernel = Kernel { source: &SOURCE, defines, entry: "adamw" };
    // SAFETY: the tensors of a parameter have `n` elements of the types in the defines, checked by the op, blocks end with their
    // parameter, `norm` has one element, and the table is full length.
    unsafe { gpu.launch(&kernel, [end as u32, 1, 1], BLOCK, 0, &args) }
}

fn update_and_cast(
    gpu: &CudaDevice,
    defines: Defines,
    parameters: &mut [&mut AdamWParameter],
    statistics: &mut CastStatistics,
    [norm, scalars]: [Arg; 2],
) -> Result<()> {
    let mut args = vec![norm, scalars];
    let measured =
        [&mut statistics.amax, &mut statistics.saturated, &mut statistics.underflowed, &mut statistics.elements];
    args.extend(measured.map(|t| Arg::Ptr(t.device_ptr_mut())));
    let table = args.len();
    let two = |low: usize, high: usize| Arg::U64(low as u64 | (high as u64) << 32);
    let mut end = 0;
    for parameter in parameters {
        args.extend(tensors(parameter));
        let Some(WeightCast::Codes { scale, slot, into }) = &mut parameter.cast else {
            unreachable!("the parameters of this launch are cast")
        };
        let [across, down, _] = tiles(into.rows, into.columns, 1);
        end += across as usize * down as usize;
        let copies = [&mut into.codes, &mut into.transposed];
        args.extend(copies.map(|t| Arg::Ptr(t.as_mut().map_or(0, Tensor::device_ptr_mut))));
        args.extend([Arg::Ptr(into.scale_inv.device_ptr_mut()), Arg::Ptr(scale.device_ptr())]);
        args.extend([two(into.rows, into.columns), two(*slot, end)]);
    }
    args.resize(table + 13 * CAST_PARTS, Arg::U64(0));
    let kernel = Kernel { source: &SOURCE, defines, entry: "adamw_cast" };
    // SAFETY: as for `update`; codes have the padded sizes of the matrix, and the statistics an entry `slot`, checked by the op.
    unsafe { gpu.launch(&kernel, [end as u32, 1, 1], BLOCK, 0, &args) }
}
