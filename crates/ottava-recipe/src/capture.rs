//! Capture of steps as CUDA graphs: the state of the capture, and how the next step is launched.
//!
//! Evaluations and checkpoints between steps use memory of the pool, so a block that a graph uses may be taken by another owner. Then
//! `Graph::is_valid` returns false, and the step is captured again.

use ottava_tensor::Device;
use ottava_tensor::cuda::Graph;

/// The state of the capture for one kind of step.
pub enum Capture {
    /// Steps are launched call by call, because the device is not a GPU, launches are blocking, or the capture failed.
    Never,
    /// One more step runs first, which compiles kernels and times products.
    AfterThisStep,
    /// The next step is captured.
    Due,
    /// Later steps replay this graph.
    Done(Graph),
}

/// The way in which a step is launched. The order begins with the most careful way. The ranks make the smallest of the launches for which they are
/// ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Launch {
    /// Launches call by call, in this and all later steps.
    Eager,
    /// Launches call by call, before the capture.
    WarmUp,
    /// Captures the step into a graph, which is then replayed.
    Capture,
    /// Replays a graph.
    Replay,
}

impl Launch {
    const ALL: [Launch; 4] = [Launch::Eager, Launch::WarmUp, Launch::Capture, Launch::Replay];

    /// Returns the launch that each rank makes. `ready` has the number of the launch for which each rank is ready.
    pub fn agreed(ready: impl Iterator<Item = f64>) -> Launch {
        ready.map(|ready| Launch::ALL[ready as usize]).min().unwrap_or(Launch::Eager)
    }
}

impl Capture {
    /// Returns the state of capture on `device` before the first step.
    pub fn on(device: &Device) -> Capture {
        match device {
            Device::Cuda(gpu) if gpu.captures() => Capture::AfterThisStep,
            Device::Cpu | Device::DryCpu(_) | Device::Cuda(_) => Capture::Never,
        }
    }

    /// Returns the launch for which the next step is ready. Between steps, other work such as an evaluation may use the memory of the graph. If this
    /// memory is still in use, the step is captured again.
    pub fn ready_for(&mut self) -> Launch {
        match self {
            Capture::Never => Launch::Eager,
            Capture::AfterThisStep => Launch::WarmUp,
            Capture::Due => Launch::Capture,
            Capture::Done(graph) => match graph.is_valid() {
                true => Launch::Replay,
                false => Launch::Capture,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_launch_a_step_alike() {
        let agreed = |ready: &[Launch]| Launch::agreed(ready.iter().map(|&ready| f64::from(ready as u8)));
        for launch in Launch::ALL {
            assert_eq!(agreed(&[launch]), launch);
            // If one rank never captures, all ranks launch eagerly. If the graph of one rank is no longer valid, all ranks capture.
            assert_eq!(agreed(&[launch, Launch::Eager]), Launch::Eager);
            assert_eq!(agreed(&[Launch::Capture, launch]), launch.min(Launch::Capture));
        }
        assert_eq!(agreed(&[Launch::Replay, Launch::WarmUp, Launch::Capture]), Launch::WarmUp);
        assert_eq!(Capture::Never.ready_for(), Launch::Eager);
        assert_eq!(Capture::AfterThisStep.ready_for(), Launch::WarmUp);
    }
}
