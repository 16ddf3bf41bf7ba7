use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, kernel_source};
use crate::ops::quantize::{fp8_variant, tiles};
use crate::ops::{CastStatistics, CurrentScaling};
use crate::quantized::{Granularity, QuantizedTensor};
use crate::{DType, Error, Result, Tensor};

kernel_source!(SOURCE, "quantize_blocks", "destination.cuh");

pub(super) fn quantize_blocks(
    gpu: &CudaDevice,
    x: &Tensor,
    how: CurrentScaling,
    out: &mut QuantizedTensor,
    statistics: &mut CastStatistics,
    slot: usize,
) -> Result<()> {
    let (defines, grid) = (fp8_variant(x, out.format)?, tiles(out.rows, out.columns, 1));
    let (rows, columns, slot) = (out.rows, out.columns, slot as u64);
    let pointer = |t: &mut Option<Tensor>| t.as_mut().map_or(0, Tensor::device_ptr_mut);
    let pitch = |t: &Option<Tensor>| Arg::I32(t.as_ref().map_or(0, |t| t.shape()[1] as i32));
    let scale_inv = match &mut out.transposed_scale_inv {
        Some(transposed) => [out.scale_inv.device_ptr_mut(), transposed.device_ptr_mut()],
        None if out.codes.is_some() => [out.scale_inv.device_ptr_mut(), 0],
        None => [0, out.scale_inv.device_ptr_mut()],
    };
    let mut amaxes = [None, None];
    let entry = match out.granularity {
        Granularity::Blocks1x128 => "quantize_1x128",
        Granularity::Blocks128x128 => "quantize_128x128",
        Granularity::Mx => {
            return Err(Error::Value("quantize_blocks: MX is emulated on the CPU; Hopper has no MX products".into()));
        }
        Granularity::PerRow | Granularity::PerTensor => {
            let zeros = |wanted: bool, n| {
                wanted.then(|| Tensor::zeros(x.device(), &[QuantizedTensor::padded(n)], DType::F32)).transpose()
            };
            amaxes = [zeros(out.codes.is_some(), rows)?, zeros(out.transposed.is_some(), columns)?];
            let kernel = Kernel { source: &SOURCE, defines, entry: "amaxes" };
            let [of_rows, of_columns] = amaxes.each_mut().map(|t| Arg::Ptr(pointer(t)));
            let sizes = [Arg::I32(rows as i32), Arg::I32(columns as i32)];
            let args = [of_rows, of_columns, Arg::Ptr(x.device_ptr()), sizes[0], sizes[1]];
            // SAFETY: `x` is `rows · columns` elements; an amax has as many as there are rows or columns, or is null.
            unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args)? };
            "quantize_rows"
        }
    };
    let args = [
        Arg::Ptr(pointer(&mut out.codes)),
        Arg::Ptr(pointer(&mut out.transposed)),
        Arg::Ptr(scale_inv[0]),
        Arg::Ptr(scale_inv[1]),
        Arg::Ptr(statistics.amax.device_ptr_mut() + 4 * slot),
        Arg::Ptr(statistics.saturated.device_ptr_mut() + 8 * slot),
        Arg::Ptr(statistics.underflowed.device_ptr_mut() + 8 * slot),
        Arg::Ptr(statistics.elements.device_ptr_mut() + 8 * slot),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(pointer(&mut amaxes[0])),
        Arg::Ptr(pointer(&mut amaxes[1])),
        Arg::I32(rows as i32),
        Arg::I32(columns as i32),
        pitch(&out.codes),
        pitch(&out.transposed),
        Arg::F32(how.epsilon),
        Arg::F32(super::bound(x.dtype())),
        Arg::I32(how.power_of_two.into()),
    ];
    let kernel = Kernel { source: &SOURCE, defines, entry };
    // SAFETY: the contract allocated codes and scales of the shapes that the granularity gives for `rows` and `columns`, and checked
    // the statistics; `x` is `rows · columns` elements.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args) }
}
