use super::Sections;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("repeat_columns");

/// Runs `entry`, which has one thread per column of the matrix that is not repeated, of `x` or `y`.
pub(super) fn launch(
    gpu: &CudaDevice,
    entry: &'static str,
    x: &Tensor,
    y: &mut Tensor,
    sections: &Sections,
) -> Result<()> {
    let rows = x.shape()[0];
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry };
    let sizes = sections.of.iter().flat_map(|section| [section.columns, section.block, section.times]);
    let sizes = sizes.map(|n| Arg::I32(n as i32)).collect::<Vec<_>>();
    let pointers = [Arg::Ptr(y.device_ptr_mut()), Arg::Ptr(x.device_ptr()), Arg::U64(rows as u64)];
    let args = [pointers.as_slice(), &sizes].concat();
    // SAFETY: one tensor has the columns of the sections and the other the repeated ones, in as many rows, checked by the op.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, rows * sections.columns), BLOCK, 0, &args) }
}
