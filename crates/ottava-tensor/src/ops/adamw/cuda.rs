use super::{AdamWParameter, CastStatistics, Moments, WeightCast};
#[cfg(test)]
use crate::cuda::KernelModule;
use crate::cuda::{Arg, CudaDevice, Entry};
use crate::ops::declaration::{kernels, pack};
use crate::ops::launch::{BLOCK, Defines};
use crate::ops::parameter::{Gradient, SLICE_UNIT, UpdatedWeight, WeightCopy};
use crate::ops::{CastScale, quantize};
use crate::{DType, ExpandedTensor, Result, Tensor};
use std::collections::BTreeMap;
use std::sync::LazyLock;

kernels! {
    static SOURCE = {
        file: "adamw",
        headers: ["stored.cuh", "expanded.cuh", "destination.cuh", "parameter.cuh", "adamw/elements.cuh"],
        constants: [PARTS, CAST_PARTS, SLICE_UNIT],
        variants: &variants()
    };
    kernel adamw, adamw_amaxes(norm: *const f32, scalars: *const Scalars, chunk: u64, parts: Parts);
    kernel adamw_powers(norm: *const f32, count: i32, parts: Parts);
    kernel adamw_cast(
        norm: *const f32, scalars: *const Scalars, amax: *mut f32, saturated: *mut u64, underflowed: *mut u64, elements: *mut u64,
        epsilon: f32, bound: f32, power_of_two: i32, parts: CastParts
    );
}

/// The maximum number of parameters per launch. Their table is a kernel argument, and a kernel has at most 4 KiB of arguments.
const PARTS: usize = 33;
/// The maximum number of parameters per launch that casts.
const CAST_PARTS: usize = 28;

/// The types of gradients.
const GRADIENTS: [&str; 3] = ["f32", "bf16", "e4m3"];
/// The storage formats of moments.
const MOMENTS: [&str; 4] = ["Float32", "Bfloat16", "ScaledMoments", "Expanded"];
/// The storage formats of weights.
const WEIGHTS: [&str; 4] = ["Master", "ScaledMaster", "Split", "Chance"];
/// The types in which layers read weights.
const READ: [&str; 3] = ["f32", "f16", "bf16"];
/// The formats and granularities of codes.
const CODES: [[&str; 2]; 3] = [["e4m3", "PerTensor"], ["e5m2", "PerTensor"], ["e4m3", "Blocks128x128"]];

/// One compilation of the kernels, as indices into the lists above.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Variant {
    gradient: usize,
    moments: usize,
    weights: usize,
    read: usize,
    codes: usize,
}

impl Variant {
    fn all() -> impl Iterator<Item = Variant> {
        let sizes = [GRADIENTS.len(), MOMENTS.len(), WEIGHTS.len(), READ.len(), CODES.len()];
        (0..sizes.iter().product()).map(move |mut i: usize| {
            let [codes, read, weights, moments, gradient] = [4, 3, 2, 1, 0].map(|k: usize| {
                let place = i % sizes[k];
                i /= sizes[k];
                place
            });
            Variant { gradient, moments, weights, read, codes }
        })
    }

    fn defines(self) -> Defines {
        static TABLE: LazyLock<Vec<[(&str, &str); 6]>> = LazyLock::new(|| {
            Variant::all()
                .map(|v| {
                    let [format, sharing] = CODES[v.codes];
                    [
                        ("G", GRADIENTS[v.gradient]),
                        ("MOMENTS", MOMENTS[v.moments]),
                        ("WEIGHTS", WEIGHTS[v.weights]),
                        ("X", READ[v.read]),
                        ("FORMAT", format),
                        ("SHARING", sharing),
                    ]
                })
                .collect()
        });
        let Variant { gradient, moments, weights, read, codes } = self;
        let at = (((gradient * MOMENTS.len() + moments) * WEIGHTS.len() + weights) * READ.len() + read) * CODES.len();
        &TABLE[at + codes]
    }
}

/// Returns a subset of all variants. It covers every pair of storage formats with BF16 weights and E4M3 codes, and every cast of every copy of F32
/// master weights.
fn variants() -> Vec<Defines> {
    let plain = |v: &Variant| (v.gradient, v.moments, v.weights) == (0, 0, 0);
    let pairs = |v: &Variant| v.gradient == (v.moments + v.weights) % GRADIENTS.len() && (v.read, v.codes) == (2, 0);
    Variant::all().filter(|v| plain(v) || pairs(v)).map(Variant::defines).collect()
}

/// Returns the module that a launch for `parameter` compiles.
#[cfg(test)]
pub(super) fn module(parameter: &AdamWParameter) -> KernelModule {
    KernelModule { source: &SOURCE, defines: kind(parameter).variant.defines() }
}

/// The number of elements per block of an update without a cast.
const CHUNK: usize = 1 << 15;

/// Properties that the parameters of one launch share.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    variant: Variant,
    casts: bool,
    /// `epsilon` (as bits) and `power_of_two` of block scales.
    scaling: (u32, bool),
}

fn kind(parameter: &AdamWParameter) -> Kind {
    let narrow = |t: &Tensor| usize::from(t.dtype() == DType::BF16);
    let gradient = match parameter.grad {
        Gradient::Plain(grad) => narrow(grad),
        Gradient::Scaled(_) => 2,
    };
    let moments = match &parameter.moments {
        Moments::Plain { m, .. } => narrow(m),
        Moments::Scaled { .. } => 2,
        Moments::Expanded { .. } => 3,
    };
    let weights = match &parameter.weight {
        UpdatedWeight::Master { .. } => 0,
        UpdatedWeight::Scaled { .. } => 1,
        UpdatedWeight::Split { .. } => 2,
        UpdatedWeight::Stochastic { .. } => 3,
    };
    let read = match parameter.weight.read_dtype() {
        DType::F32 => 0,
        DType::F16 => 1,
        _ => 2,
    };
    // Without codes, any variant works.
    let (codes, scaling) = match &parameter.cast {
        Some(WeightCast::Codes { scale: CastScale::Own(_, how), .. }) => (2, (how.epsilon.to_bits(), how.power_of_two)),
        Some(WeightCast::Codes { into, .. }) => (usize::from(into.format == DType::E5M2), (0, false)),
        Some(WeightCast::Amax(_)) | None => (0, (0, false)),
    };
    let casts = matches!(parameter.cast, Some(WeightCast::Codes { .. }));
    Kind { variant: Variant { gradient, moments, weights, read, codes }, casts, scaling }
}

/// Calls `launch` for the `parameters` of each kind, with at most as many parameters as the table of a launch holds: [`CAST_PARTS`] if `cast` is set
/// and the kind casts, otherwise [`PARTS`].
fn launches<'a, 'p>(
    parameters: impl Iterator<Item = &'a mut AdamWParameter<'p>>,
    cast: bool,
    mut launch: impl FnMut(Kind, &mut [&'a mut AdamWParameter<'p>]) -> Result<()>,
) -> Result<()>
where
    'p: 'a,
{
    let mut alike = BTreeMap::<Kind, Vec<_>>::new();
    for parameter in parameters {
        alike.entry(kind(parameter)).or_default().push(parameter);
    }
    for (kind, mut parameters) in alike {
        let at_once = if cast && kind.casts { CAST_PARTS } else { PARTS };
        parameters.chunks_mut(at_once).try_for_each(|parameters| launch(kind, parameters))?;
    }
    Ok(())
}

pub(super) fn adamw_amaxes(
    gpu: &CudaDevice,
    parameters: &mut [AdamWParameter],
    norm: &Tensor,
    scalars: &Tensor,
) -> Result<()> {
    let with_scales = parameters.iter_mut().filter(|parameter| parameter.has_powers());
    launches(with_scales, false, |kind, parameters| {
        update(gpu, kind.variant.defines(), parameters, |parts| kernel::adamw_amaxes(norm, scalars, CHUNK, parts))
    })
}

pub(super) fn adamw(
    gpu: &CudaDevice,
    parameters: &mut [AdamWParameter],
    statistics: &mut CastStatistics,
    norm: &Tensor,
    scalars: &Tensor,
) -> Result<()> {
    launches(parameters.iter_mut(), true, |kind, parameters| {
        let defines = kind.variant.defines();
        match kind.casts {
            true => update_and_cast(gpu, defines, parameters, statistics, [norm, scalars], kind.scaling)?,
            false => update(gpu, defines, parameters, |parts| kernel::adamw(norm, scalars, CHUNK, parts))?,
        }
        if parameters[0].has_powers() {
            let entry = kernel::adamw_powers(norm, parameters.len(), table(parameters).0);
            let kernel = SOURCE.kernel(defines, entry);
            // SAFETY: as for `update`; a launch has at most as many parameters as threads.
            unsafe { gpu.launch(&kernel, [1, 1, 1], 64, 0)? };
        }
        Ok(())
    })
}

/// Returns the `Tensors` of elements.cuh as consecutive 64-bit arguments.
fn tensors(parameter: &mut AdamWParameter) -> [Arg; WORDS] {
    let copied = |copy: &mut WeightCopy| copy.stored().map_or(0, Tensor::device_ptr_mut);
    let (weight, copy, rest) = match &mut parameter.weight {
        UpdatedWeight::Master { master, copy } => (master.device_ptr_mut(), copied(copy), 0),
        UpdatedWeight::Scaled { master, copy } => {
            (master.values.device_ptr_mut(), copied(copy), master.scale_inv.device_ptr_mut())
        }
        UpdatedWeight::Split { weight, rest } => (weight.device_ptr_mut(), 0, rest.device_ptr_mut()),
        UpdatedWeight::Stochastic { weight } => (weight.device_ptr_mut(), 0, 0),
    };
    let [m, v] = match parameter.moments {
        Moments::Plain { m, v } => [[m.device_ptr_mut(), 0], [v.device_ptr_mut(), 0]],
        Moments::Scaled { m, v } => [m, v].map(|x| [x.values.device_ptr_mut(), x.scale_inv.device_ptr_mut()]),
        Moments::Expanded { m, v } => [m, v].map(|x| [x.codes.device_ptr_mut(), x.groups.device_ptr_mut()]),
    };
    let grad_scale = match parameter.grad {
        Gradient::Plain(_) => 0,
        Gradient::Scaled(grad) => grad.scale_inv.device_ptr(),
    };
    [
        Arg::Ptr(weight),
        Arg::Ptr(copy),
        Arg::Ptr(m[0]),
        Arg::Ptr(v[0]),
        Arg::Ptr(parameter.grad.values().device_ptr()),
        Arg::U64(parameter.seed),
        Arg::U64(parameter.weight_decay.to_bits()),
        Arg::Ptr(rest),
        Arg::Ptr(m[1]),
        Arg::Ptr(v[1]),
        Arg::Ptr(grad_scale),
        Arg::Ptr(parameter.amaxes.as_mut().map_or(0, |amaxes| amaxes.device_ptr_mut())),
    ]
}

const WORDS: usize = 12;

/// Returns the `Parts` of adamw.cu, and the number of blocks.
fn table(parameters: &mut [&mut AdamWParameter]) -> (Vec<Arg>, usize) {
    let (mut args, mut end) = (Vec::with_capacity((WORDS + 3) * PARTS), 0);
    for parameter in parameters {
        let n = parameter.grad.values().len();
        let (rows, columns) = match parameter.grad.values().shape() {
            [rows, columns] => (*rows, *columns),
            _ => (1, n),
        };
        // As in `Piece` of adamw.cu.
        end += match parameter.moments {
            Moments::Expanded { .. } if columns % ExpandedTensor::GROUP > 0 => rows * columns.div_ceil(CHUNK),
            _ => n.div_ceil(CHUNK),
        };
        args.extend(tensors(parameter));
        let amax = match &mut parameter.cast {
            Some(WeightCast::Amax(amax)) => amax.device_ptr_mut(),
            _ => 0,
        };
        args.extend([
            Arg::Ptr(amax),
            pack(rows as u32, columns as u32),
            pack(end as u32, (parameter.offset / SLICE_UNIT) as u32),
        ]);
    }
    args.resize((WORDS + 3) * PARTS, Arg::U64(0));
    (args, end)
}

fn update(
    gpu: &CudaDevice,
    defines: Defines,
    parameters: &mut [&mut AdamWParameter],
    entry: impl FnOnce(Vec<Arg>) -> Entry,
) -> Result<()> {
    let (table, blocks) = table(parameters);
    let kernel = SOURCE.kernel(defines, entry(table));
    // SAFETY: the op has checked that the tensors of a parameter have as many elements as its rows and columns say, of the types in the defines. The
    // blocks of a parameter end with it, `norm` has one element, amaxes that are used have three, and the table has its full length.
    unsafe { gpu.launch(&kernel, [blocks as u32, 1, 1], BLOCK, 0) }
}

fn update_and_cast(
    gpu: &CudaDevice,
    defines: Defines,
    parameters: &mut [&mut AdamWParameter],
    statistics: &mut CastStatistics,
    [norm, scalars]: [&Tensor; 2],
    (epsilon, power_of_two): (u32, bool),
) -> Result<()> {
    let dtype = parameters[0].weight.read_dtype();
    let mut parts = Vec::with_capacity((WORDS + 6) * CAST_PARTS);
    let (mut end, mut shared) = (0, 0);
    for parameter in parameters {
        parts.extend(tensors(parameter));
        let Some(WeightCast::Codes { scale, slot, into }) = &mut parameter.cast else {
            unreachable!("the parameters of this launch are cast")
        };
        let [across, down, _] = quantize::tiles(into.rows, into.columns, 1);
        end += across as usize * down as usize;
        shared = quantize::tile_bytes(1, into.granularity, dtype);
        let copies = [&mut into.codes, &mut into.transposed];
        parts.extend(copies.map(|t| Arg::Ptr(t.as_mut().map_or(0, Tensor::device_ptr_mut))));
        let scale_inv = into.scale_inv.device_ptr_mut();
        parts.extend(match (scale, &mut into.transposed_scale_inv) {
            (CastScale::Given(scale), _) => [Arg::Ptr(scale_inv), Arg::Ptr(scale.device_ptr())],
            (_, Some(transposed)) => [Arg::Ptr(scale_inv), Arg::Ptr(transposed.device_ptr_mut())],
            // A single copy has one set of scales.
            (_, None) => [Arg::Ptr(scale_inv); 2],
        });
        parts.extend([pack(into.rows as u32, into.columns as u32), pack(*slot as u32, end as u32)]);
    }
    parts.resize((WORDS + 6) * CAST_PARTS, Arg::U64(0));
    let CastStatistics { amax, saturated, underflowed, elements, .. } = statistics;
    let (epsilon, bound) = (f32::from_bits(epsilon), quantize::blocks::bound(dtype));
    let entry =
        kernel::adamw_cast(norm, scalars, amax, saturated, underflowed, elements, epsilon, bound, power_of_two, parts);
    let kernel = SOURCE.kernel(defines, entry);
    // SAFETY: as for `update`; the op has checked that codes and scales have the sizes that their granularity requires for the matrix, and that the
    // statistics have an entry `slot`.
    unsafe { gpu.launch(&kernel, [end as u32, 1, 1], BLOCK, shared) }
}
