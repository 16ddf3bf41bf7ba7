use super::{Accumulation, Addend, Operand};
use crate::cuda::{Arg, CudaDevice, GemmPointers, GemmSpec, Kernel, Major, ScaleMode};
use crate::granularity::Granularity;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::ops::skinny::Skinny;
use crate::{Result, Tensor};
use std::sync::Arc;

kernel_source!("gemm");

pub(super) fn gemm(
    gpu: &Arc<CudaDevice>,
    a: Operand,
    b: Operand,
    out: &mut Tensor,
    accumulation: Accumulation,
    addend: Addend,
) -> Result<()> {
    let [m, n] = out.dims("gemm: out")?;
    let ((x, x_transposed), (y, y_transposed)) = (a.matrix("gemm: a")?, b.matrix("gemm: b")?);
    if a.size("gemm: a")?.1 == 0 {
        return match addend {
            Addend::None => out.fill_zero(),
            Addend::Out => Ok(()),
            Addend::Tensor(c) => out.copy_from(0, c),
        };
    }
    if let Some(product) = Skinny::of(gpu, a, b, [m, n], out.dtype()) {
        return product.enqueue(gpu, out, addend);
    }
    let rows_and_k = |t: &Tensor, transposed: bool| match transposed {
        true => (t.shape()[1], t.shape()[0]),
        false => (t.shape()[0], t.shape()[1]),
    };
    let ((rows, k), (columns, _)) = (rows_and_k(x, x_transposed), rows_and_k(y, y_transposed));
    let major = |transposed| if transposed { Major::MN } else { Major::K };
    let padded = (rows, columns) != (m, n);
    let spec = GemmSpec {
        m: rows,
        n: columns,
        k,
        a: x.dtype(),
        b: y.dtype(),
        out: out.dtype(),
        a_layout: major(x_transposed),
        b_layout: major(y_transposed),
        lda: x.shape()[1],
        ldb: y.shape()[1],
        ldc: columns,
        scale: scale_mode(a, b),
        fast_accumulation: accumulation == Accumulation::Fast && x.dtype().is_fp8(),
        accumulate: !padded && !matches!(addend, Addend::None),
    };
    let scale = |operand: Operand| operand.scale_inv().map_or(0, |(scale_inv, _)| scale_inv.device_ptr());
    let mut temporary = None;
    if padded {
        temporary = Some(Tensor::empty(out.device(), &[rows, columns], out.dtype())?);
        if let Addend::Tensor(c) = addend {
            out.copy_from(0, c)?;
        }
    }
    let into = temporary.as_mut().unwrap_or(out).device_ptr_mut();
    let addend_at = if let (Addend::Tensor(c), false) = (addend, padded) { c.device_ptr() } else { into };
    let (a, b, a_scale, b_scale) = (x.device_ptr(), y.device_ptr(), scale(a), scale(b));
    let pointers = GemmPointers { a, b, a_scale, b_scale, addend: addend_at, out: into };
    // SAFETY: the spec's sizes and leading dimensions are those of the tensors whose addresses are passed, and the contract checked
    // the shapes of scales; what is added has the shape of `out`.
    unsafe { gpu.gemm(&spec, &pointers)? };
    match temporary {
        Some(temporary) => crop(gpu, &temporary, out, !matches!(addend, Addend::None)),
        None => Ok(()),
    }
}

fn scale_mode(a: Operand, b: Operand) -> ScaleMode {
    match (a.scale_inv(), b.scale_inv()) {
        (Some((_, Granularity::PerTensor)), _) => ScaleMode::PerTensor,
        (Some((_, Granularity::PerRow)), _) => ScaleMode::PerRow,
        (Some((_, a)), Some((_, b))) => ScaleMode::Blocks { a, b },
        _ => ScaleMode::None,
    }
}

fn crop(gpu: &CudaDevice, padded: &Tensor, out: &mut Tensor, add: bool) -> Result<()> {
    let [rows, columns] = out.dims("gemm: out")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(out.dtype())?, entry: "crop" };
    let args = [
        Arg::Ptr(out.device_ptr_mut()),
        Arg::Ptr(padded.device_ptr()),
        Arg::I32(columns as i32),
        Arg::I32(padded.shape()[1] as i32),
        Arg::I32(add.into()),
    ];
    // SAFETY: `padded` has at least as many rows and columns as `out`, and both the type in the defines.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], BLOCK, 0, &args) }
}
