use super::{CompressedTensor, GROUP};
use crate::cuda::{CudaDevice, Entry};
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "compress", variants: launch::STORAGE };
    kernel compress(codes: *mut e4m3, scale_inv: *mut u8, x: *const X, rows: u64, columns: i32);
    kernel decompress(codes: *const e4m3, scale_inv: *const u8, y: *mut X, rows: u64, columns: i32);
}

pub(super) fn compress(gpu: &CudaDevice, x: &Tensor, y: &mut CompressedTensor) -> Result<()> {
    let [rows, columns] = x.dims("compress: x")?;
    launch(gpu, x.dtype(), [rows, columns], kernel::compress(&mut y.codes, &mut y.scale_inv, x, rows, columns))
}

pub(super) fn decompress(gpu: &CudaDevice, x: &CompressedTensor, y: &mut Tensor) -> Result<()> {
    let ([rows, columns], dtype) = (y.dims("compress: x")?, y.dtype());
    launch(gpu, dtype, [rows, columns], kernel::decompress(&x.codes, &x.scale_inv, y, rows, columns))
}

fn launch(gpu: &CudaDevice, dtype: DType, [rows, columns]: [usize; 2], entry: Entry) -> Result<()> {
    let kernel = SOURCE.kernel(launch::storage(dtype)?, entry);
    // SAFETY: values and codes have `rows · columns` elements, and each started `GROUP` of a row has a scale.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, rows * columns.div_ceil(GROUP)), BLOCK, 0) }
}
