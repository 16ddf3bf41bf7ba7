use super::ConvWeights;
use crate::cuda::{CudaDevice, Entry, Kernel};
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK, Defines};
use crate::ops::{SegmentStates, Segments, bias};
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "causal_conv", headers: ["segments.cuh", "sigmoid.cuh"], variants: VARIANTS };
    kernel causal_conv(
        y: *mut X, x: *const X, weight: *const X, bias: *const X, at: *const i32, count: i32, states: *mut X, slots: *const i32,
        past: *const i32, rows: i32, channels: i32, strip: i32
    );
    kernel causal_conv_backward(
        dx: *mut X, partial_weight: *mut f32, partial_bias: *mut f32, dy: *const X, x: *const X, weight: *const X, bias: *const X,
        at: *const i32, count: i32, rows: i32, channels: i32, strip: i32
    );
}

macro_rules! variants {
    ($($storage:literal)*) => {
        &[$(
            &[("X", $storage), ("TAPS", "1")],
            &[("X", $storage), ("TAPS", "2")],
            &[("X", $storage), ("TAPS", "3")],
            &[("X", $storage), ("TAPS", "4")],
        )*]
    };
}
const VARIANTS: &[Defines] = variants!("f32" "f16" "bf16");

/// The numbers of rows per thread, largest first. A thread of backward has more rows, because each strip of rows has partial sums.
const STRIPS: [usize; 3] = [16, 4, 1];
const BACKWARD_STRIPS: [usize; 2] = [64, 16];

/// The maximum numbers of threads per block.
const THREADS: u32 = BLOCK;
const BACKWARD_THREADS: u32 = 128;

fn variant(x: &Tensor, taps: usize, entry: Entry) -> Result<Kernel> {
    Ok(SOURCE.kernel(launch::variant(VARIANTS, x.dtype(), &taps.to_string())?, entry))
}

/// The division of rows and channels among threads. A thread has eight channels.
struct Threads {
    /// The number of rows per thread.
    strip: usize,
    grid: [u32; 3],
    block: u32,
}

impl Threads {
    /// Divides `x` among blocks of up to `most` threads. The strips have the largest number of rows that leaves four blocks per multiprocessor.
    fn of(gpu: &CudaDevice, x: &Tensor, most: u32, strips: &[usize]) -> Threads {
        let (rows, eights) = (x.shape()[0], x.shape()[1].div_ceil(8));
        let block = (eights.next_multiple_of(32) as u32).clamp(32, most);
        let columns = eights.div_ceil(block as usize);
        let is_enough = |strip: &&usize| rows.div_ceil(**strip) * columns >= 4 * gpu.sm_count();
        let strip = *strips.iter().find(is_enough).or(strips.last()).expect("a length");
        Threads { strip, grid: [rows.div_ceil(strip) as u32, columns as u32, 1], block }
    }
}

pub(super) fn causal_conv(
    gpu: &CudaDevice,
    x: &Tensor,
    weights: ConvWeights,
    segments: Segments,
    states: Option<SegmentStates>,
    y: &mut Tensor,
) -> Result<()> {
    let [rows, channels] = x.dims("causal_conv: x")?;
    let [.., taps] = weights.weight.dims::<3>("causal_conv: weight")?;
    let Threads { strip, grid, block } = Threads::of(gpu, x, THREADS, &STRIPS);
    let (values, slots, past) = match states {
        Some(SegmentStates { values, slots, past }) => (Some(values), Some(slots), Some(past)),
        None => (None, None, None),
    };
    let (at, count) = (segments.offsets(), segments.count());
    let ConvWeights { weight, bias } = weights;
    let entry = kernel::causal_conv(y, x, weight, bias, at, count, values, slots, past, rows, channels, strip);
    let kernel = variant(x, taps, entry)?;
    // SAFETY: the op has checked that parameters and states fit the `rows · channels` elements of `x` and `y`, and that the segments have slots. Offsets
    // ascend, and slots name states, as the contract demands of the caller.
    unsafe { gpu.launch_early(&kernel, grid, block, 0) }
}

pub(super) fn causal_conv_backward(
    gpu: &CudaDevice,
    [dy, x]: [&Tensor; 2],
    weights: ConvWeights,
    segments: Segments,
    dx: &mut Tensor,
    dweight: &mut Tensor,
    dbias: Option<&mut Tensor>,
) -> Result<()> {
    let [rows, channels] = x.dims("causal_conv_backward: x")?;
    let [.., taps] = weights.weight.dims::<3>("causal_conv_backward: weight")?;
    let Threads { strip, grid, block } = Threads::of(gpu, x, BACKWARD_THREADS, &BACKWARD_STRIPS);
    let partial = |len| Tensor::empty(x.device(), &[grid[0] as usize, len], DType::F32);
    let (mut of_weight, mut of_bias) =
        (partial(channels * taps)?, dbias.as_ref().map(|_| partial(channels)).transpose()?);
    let (at, count) = (segments.offsets(), segments.count());
    let ConvWeights { weight, bias } = weights;
    let entry = kernel::causal_conv_backward(
        dx,
        &mut of_weight,
        of_bias.as_mut(),
        dy,
        x,
        weight,
        bias,
        at,
        count,
        rows,
        channels,
        strip,
    );
    let kernel = variant(x, taps, entry)?;
    // SAFETY: as in `causal_conv`, also for `dy` and `dx`; the partial sums have a row per strip.
    unsafe { gpu.launch(&kernel, grid, block, 0)? };
    bias::add_partial_sums(gpu, &of_weight, dweight)?;
    match (&of_bias, dbias) {
        (Some(of_bias), Some(dbias)) => bias::add_partial_sums(gpu, of_bias, dbias),
        _ => Ok(()),
    }
}
