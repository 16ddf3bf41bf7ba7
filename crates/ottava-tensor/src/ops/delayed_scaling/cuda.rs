use super::{AmaxReducer, DelayedScales, DelayedScaling, NonFinite};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{BLOCK, UNTYPED};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "delayed_scaling", variants: UNTYPED };
    kernel delayed_scaling(
        amax: *mut f32, history: *mut f32, scale: *mut f32, largest: *const f32, wait: *mut i64, non_finite: *mut i64, n: i32, window: i32,
        most_recent: i32, keep: i32, interval: i32, headroom: f32
    );
}

pub(super) fn delayed_scaling(
    gpu: &CudaDevice,
    amax: &mut Tensor,
    state: &mut DelayedScales,
    how: DelayedScaling,
) -> Result<()> {
    let [window, n] = state.history.dims("delayed_scaling: history")?;
    let DelayedScales { history, scale, largest, wait, non_finite, .. } = state;
    let (most_recent, keep) = (how.reducer == AmaxReducer::MostRecent, how.non_finite == NonFinite::Keep);
    let (interval, headroom) = (how.interval as i32, how.headroom());
    let entry = kernel::delayed_scaling(
        amax,
        history,
        scale,
        &*largest,
        wait,
        non_finite,
        n,
        window,
        most_recent,
        keep,
        interval,
        headroom,
    );
    let kernel = SOURCE.kernel(&[], entry);
    // SAFETY: `history` has `window · n` elements; the other tensors have `n`.
    unsafe { gpu.launch(&kernel, [n.div_ceil(BLOCK as usize).max(1) as u32, 1, 1], BLOCK, 0) }
}
