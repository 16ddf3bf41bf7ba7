use super::{AmaxReducer, DelayedScaling};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("delayed_scaling");

pub(super) fn delayed_scaling(
    gpu: &CudaDevice,
    amax: &mut Tensor,
    history: &mut Tensor,
    scale: &mut Tensor,
    largest: &Tensor,
    how: DelayedScaling,
) -> Result<()> {
    let [window, n] = history.dims("delayed_scaling: history")?;
    let kernel = Kernel { source: &SOURCE, defines: &[], entry: "delayed_scaling" };
    let args = [
        Arg::Ptr(amax.device_ptr_mut()),
        Arg::Ptr(history.device_ptr_mut()),
        Arg::Ptr(scale.device_ptr_mut()),
        Arg::Ptr(largest.device_ptr()),
        Arg::I32(n as i32),
        Arg::I32(window as i32),
        Arg::I32((how.reducer == AmaxReducer::MostRecent).into()),
        Arg::F32(how.headroom()),
    ];
    // SAFETY: `history` has `window · n` elements, the others `n`.
    unsafe { gpu.launch(&kernel, [n.div_ceil(BLOCK as usize).max(1) as u32, 1, 1], BLOCK, 0, &args) }
}
