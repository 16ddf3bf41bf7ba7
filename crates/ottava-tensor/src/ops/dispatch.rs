//! The choice between an op's CPU reference and its launch on a GPU.

/// `dispatch!(device, on the CPU, |gpu| on a GPU)`: an op's CPU reference, or its launch. A dry run of the CPU computes nothing. It counts the scratch
/// memory of the reference, a third argument in bytes: `dispatch!(device, on the CPU, scratch, |gpu| on a GPU)`.
macro_rules! dispatch {
    ($device:expr, $on_cpu:expr, |$gpu:ident| $on_gpu:expr) => {
        match $device {
            $crate::Device::Cpu => $on_cpu,
            $crate::Device::DryCpu(_) => {}
            $crate::Device::Cuda($gpu) => $on_gpu,
        }
    };
    ($device:expr, $on_cpu:expr, $scratch:expr, |$gpu:ident| $on_gpu:expr) => {
        match $device {
            $crate::Device::Cpu => $on_cpu,
            $crate::Device::DryCpu(tracker) => tracker.scratch($scratch),
            $crate::Device::Cuda($gpu) => $on_gpu,
        }
    };
}
pub(super) use dispatch;
