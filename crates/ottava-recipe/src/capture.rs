//! Capture of steps as CUDA graphs: the state of the capture, and how the next step is launched.
//!
//! Evaluations and checkpoints between steps use memory of the pool, so a block that a graph uses may be taken by another owner. Then
//! `Graph::is_valid` returns false, and the step is captured again.

use ottava_tensor::Device;
use ottava_tensor::cuda::Graph;

/// The state of the capture for one kind of step.
pub enum Capture {
    /// Steps are launched call by call, because there is no GPU, launches are blocking, or capture failed.
    Never,
    /// One more step runs first, which compiles kernels and times products.
    AfterThisStep,
    /// The next step is captured.
    Due,
    /// Later steps replay this graph.
    Done(Graph),
}

/// How a step is launched, ordered from the most careful way. All ranks use the smallest value among what the ranks are ready for.
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

    /// Returns what all ranks do. `ready` are the numbers of what each rank is ready for.
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

    /// Returns what the next step can do. Between steps, memory may be used by others, for example an evaluation. If it has not been freed again, the
    /// step is captured again.
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
