use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::UNTYPED;
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "argmax", constants: [BLOCKS], variants: UNTYPED };
    kernel argmax(at: *mut i32, x: *const f32, columns: i32);
}

/// The number of blocks per row, and the number of threads per block.
const BLOCKS: u32 = 8;
const THREADS: u32 = 512;

pub(super) fn argmax(gpu: &CudaDevice, x: &Tensor, at: &mut Tensor) -> Result<()> {
    let [rows, columns] = x.dims("argmax: x")?;
    let kernel = SOURCE.kernel(&[], kernel::argmax(at, x, columns));
    // SAFETY: `x` has `rows · columns` elements, and `at` has `rows`.
    unsafe { gpu.launch_early(&kernel, [BLOCKS, rows as u32, 1], THREADS, 0) }
}
