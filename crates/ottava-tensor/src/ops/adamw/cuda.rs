use super::{AdamWParameter, AdamWWeight, CastStatistics, WeightCast};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, Defines, kernel_source};
use crate::ops::{CastScale, quantize};
use crate::{DType, Result, Tensor};

kernel_source!(SOURCE, "adamw", "destination.cuh");

/// For types of gradient and moments, each kind of weight with each kind of its codes, in the order of [`variant`].
macro_rules! variants {
    ($($g:literal, $s:literal;)*) => {
        &[$(
            [
                weights!($g, $s, "e4m3", "PerTensor"),
                weights!($g, $s, "e5m2", "PerTensor"),
                weights!($g, $s, "e4m3", "Blocks128x128"),
            ],
        )*]
    };
}

macro_rules! weights {
    ($g:literal, $s:literal, $format:literal, $sharing:literal) => {
        [
            &[("G", $g), ("S", $s), ("W", "f32"), ("X", "f32"), ("FORMAT", $format), ("SHARING", $sharing)],
            &[("G", $g), ("S", $s), ("W", "f32"), ("X", "f16"), ("FORMAT", $format), ("SHARING", $sharing)],
            &[("G", $g), ("S", $s), ("W", "f32"), ("X", "bf16"), ("FORMAT", $format), ("SHARING", $sharing)],
            &[("G", $g), ("S", $s), ("W", "bf16"), ("X", "bf16"), ("FORMAT", $format), ("SHARING", $sharing)],
        ]
    };
}

pub(crate) const VARIANTS: &[[[Defines; 4]; 3]] = variants! {
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

/// What one launch does alike: how it is compiled, whether it writes codes, and how they are scaled.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    /// Places in [`VARIANTS`].
    types: usize,
    codes: usize,
    weight: usize,
    casts: bool,
    /// The bits of `epsilon`, and `power_of_two`, of scales that blocks give themselves.
    scaling: (u32, bool),
}

fn kind(parameter: &AdamWParameter) -> Kind {
    let narrow = |t: &Tensor| usize::from(t.dtype() == DType::BF16);
    let weight = match &parameter.weight {
        AdamWWeight::Master { copy: None, .. } => 0,
        AdamWWeight::Master { copy: Some(copy), .. } => 1 + narrow(copy),
        AdamWWeight::Stochastic { .. } => 3,
    };
    // Which codes are never written does not matter.
    let (codes, scaling) = match &parameter.cast {
        Some(WeightCast::Codes { scale: CastScale::Own(_, how), .. }) => (2, (how.epsilon.to_bits(), how.power_of_two)),
        Some(WeightCast::Codes { into, .. }) => (usize::from(into.format == DType::E5M2), (0, false)),
        Some(WeightCast::Amax(_)) | None => (0, (0, false)),
    };
    let casts = matches!(parameter.cast, Some(WeightCast::Codes { .. }));
    Kind { types: 2 * narrow(parameter.grad) + narrow(parameter.m), codes, weight, casts, scaling }
}

pub(super) fn adamw(
    gpu: &CudaDevice,
    parameters: &mut [AdamWParameter],
    statistics: &mut CastStatistics,
    norm: &Tensor,
    scalars: &Tensor,
) -> Result<()> {
    let mut kinds: Vec<_> = parameters.iter().map(kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for of_these in kinds {
        let defines = VARIANTS[of_these.types][of_these.codes][of_these.weight];
        let mut alike: Vec<_> = parameters.iter_mut().filter(|p| kind(p) == of_these).collect();
        let common = [Arg::Ptr(norm.device_ptr()), Arg::Ptr(scalars.device_ptr())];
        if of_these.casts {
            for parameters in alike.chunks_mut(CAST_PARTS) {
                update_and_cast(gpu, defines, parameters, statistics, common, of_these.scaling)?;
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
    (epsilon, power_of_two): (u32, bool),
) -> Result<()> {
    let dtype = parameters[0].weight.read().dtype();
    let mut args = vec![norm, scalars];
    let measured =
        [&mut statistics.amax, &mut statistics.saturated, &mut statistics.underflowed, &mut statistics.elements];
    args.extend(measured.map(|t| Arg::Ptr(t.device_ptr_mut())));
    args.extend([
        Arg::F32(f32::from_bits(epsilon)),
        Arg::F32(quantize::blocks::bound(dtype)),
        Arg::I32(power_of_two.into()),
    ]);
    let table = args.len();
    let two = |low: usize, high: usize| Arg::U64(low as u64 | (high as u64) << 32);
    let (mut end, mut shared) = (0, 0);
    for parameter in parameters {
        args.extend(tensors(parameter));
        let Some(WeightCast::Codes { scale, slot, into }) = &mut parameter.cast else {
            unreachable!("the parameters of this launch are cast")
        };
        let [across, down, _] = quantize::tiles(into.rows, into.columns, 1);
        end += across as usize * down as usize;
        shared = quantize::tile_bytes(1, into.granularity, dtype);
        let copies = [&mut into.codes, &mut into.transposed];
        args.extend(copies.map(|t| Arg::Ptr(t.as_mut().map_or(0, Tensor::device_ptr_mut))));
        let scale_inv = into.scale_inv.device_ptr_mut();
        args.extend(match (scale, &mut into.transposed_scale_inv) {
            (CastScale::Given(scale), _) => [Arg::Ptr(scale_inv), Arg::Ptr(scale.device_ptr())],
            (_, Some(transposed)) => [Arg::Ptr(scale_inv), Arg::Ptr(transposed.device_ptr_mut())],
            // Of the one copy that there is.
            (_, None) => [Arg::Ptr(scale_inv); 2],
        });
        args.extend([two(into.rows, into.columns), two(*slot, end)]);
    }
    args.resize(table + 13 * CAST_PARTS, Arg::U64(0));
    let kernel = Kernel { source: &SOURCE, defines, entry: "adamw_cast" };
    // SAFETY: as for `update`; codes and scales have the sizes that their granularity gives for the matrix, and the statistics an entry
    // `slot`, checked by the op.
    unsafe { gpu.launch(&kernel, [end as u32, 1, 1], BLOCK, shared, &args) }
}
