use super::{AmaxReducer, DelayedScales, DelayedScaling, NonFinite};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("delayed_scaling");

pub(super) fn delayed_scaling(
    gpu: &CudaDevice,
    amax: &mut Tensor,
    state: &mut DelayedScales,
    how: DelayedScaling,
) -> Result<()> {
    let [window, n] = state.history.dims("delayed_scaling: history")?;
    let kernel = Kernel { source: &SOURCE, defines: &[], entry: "delayed_scaling" };
    let args = [
        Arg::Ptr(amax.device_ptr_mut()),
        Arg::Ptr(state.history.device_ptr_mut()),
        Arg::Ptr(state.scale.device_ptr_mut()),
        Arg::Ptr(state.largest.device_ptr()),
        Arg::Ptr(state.wait.device_ptr_mut()),
        Arg::Ptr(state.non_finite.device_ptr_mut()),
        Arg::I32(n as i32),
        Arg::I32(window as i32),
        Arg::I32((how.reducer == AmaxReducer::MostRecent).into()),
        Arg::I32((how.non_finite == NonFinite::Keep).into()),
        Arg::I32(how.interval as i32),
        Arg::F32(how.headroom()),
    ];
    // SAFETY: `history` has `window · n` elements, the others `n`.
    unsafe { gpu.launch(&kernel, [n.div_ceil(BLOCK as usize).max(1) as u32, 1, 1], BLOCK, 0, &args) }
}
