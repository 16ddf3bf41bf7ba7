//! Capture of steps as CUDA graphs: how far it is, and how the next step is launched.
//!
//! Evaluations and saves between steps use memory of the pool, so a block that a graph uses may have another owner. Then `Graph::is_valid` returns
//! false, and the step is captured again.

use ottava_tensor::Device;
use ottava_tensor::cuda::Graph;

/// How far the capture of one kind of step is.
pub enum Capture {
    /// Steps are launched call by call: there is no GPU, its launches are to block, or capture failed.
    Never,
    /// One step has to run first: it compiles kernels and times products.
    AfterThisStep,
    /// The next step is captured.
    Due,
    /// Later steps replay this graph.
    Done(Graph),
}

/// How a step is launched, the most careful way first. Ranks take the first of what they are ready for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Launch {
    /// Call by call, now and in all later steps.
    Eager,
    /// Call by call, before the capture.
    WarmUp,
    /// Into a graph, which is then replayed.
    Capture,
    /// By a graph.
    Replay,
}

impl Launch {
    const ALL: [Launch; 4] = [Launch::Eager, Launch::WarmUp, Launch::Capture, Launch::Replay];

    /// What all ranks do, from the number of what each is ready for.
    pub fn agreed(ready: impl Iterator<Item = f64>) -> Launch {
        ready.map(|ready| Launch::ALL[ready as usize]).min().unwrap_or(Launch::Eager)
    }
}

impl Capture {
    /// The capture of steps on `device`, before the first step.
    pub fn on(device: &Device) -> Capture {
        match device {
            Device::Cuda(gpu) if gpu.captures() => Capture::AfterThisStep,
            Device::Cpu | Device::DryCpu(_) | Device::Cuda(_) => Capture::Never,
        }
    }

    /// What the next step can do. Memory is given to others between steps, as for an evaluation; where it has not come back, the step is
    /// captured anew.
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
            // A rank that never captures makes all eager, and one whose graph is not valid any more makes all capture.
            assert_eq!(agreed(&[launch, Launch::Eager]), Launch::Eager);
            assert_eq!(agreed(&[Launch::Capture, launch]), launch.min(Launch::Capture));
        }
        assert_eq!(agreed(&[Launch::Replay, Launch::WarmUp, Launch::Capture]), Launch::WarmUp);
        assert_eq!(Capture::Never.ready_for(), Launch::Eager);
        assert_eq!(Capture::AfterThisStep.ready_for(), Launch::WarmUp);
    }
}
