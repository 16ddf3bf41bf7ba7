//! The choice between an op's CPU reference and its launch on a GPU.

/// Runs the CPU reference of an op, or its launch:
///
/// ```ignore
/// dispatch! { x.device(),
///     cpu => cpu::scale(x, &mut y),
///     gpu => cuda::scale(gpu, x, &mut y)?,
/// }
/// ```
///
/// A dry run of the CPU computes nothing. It counts the scratch memory of the reference, in bytes. If the reference needs scratch memory, a line
/// `scratch => …` before the other lines gives its size.
macro_rules! dispatch {
    ($device:expr, $(scratch => $scratch:expr,)? cpu => $on_cpu:expr, $gpu:ident => $on_gpu:expr $(,)?) => {
        match $device {
            $crate::Device::Cpu => $on_cpu,
            $crate::Device::DryCpu(_tracker) => {
                $(_tracker.scratch($scratch);)?
            }
            $crate::Device::Cuda($gpu) => $on_gpu,
        }
    };
}
pub(super) use dispatch;
