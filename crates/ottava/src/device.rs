//! Opening the chosen device, and logging it.

use ottava_common::{Error, Result};
use ottava_settings::DeviceChoice;
use ottava_tensor::Device;
use ottava_tensor::cuda::{CudaDevice, GpuModel};

/// Opens the chosen device. `auto` chooses a GPU if the driver lists one. If this GPU does not open, it is an error, so no run falls back to the CPU
/// silently.
pub fn open(choice: DeviceChoice) -> Result<Device> {
    open_of_rank(choice, &Local::ALONE)
}

/// The rank of a process among the processes of its machine. It determines the GPU of the process.
pub struct Local {
    /// The local rank, counted from 0.
    pub rank: usize,
    /// Whether the launcher may have made only one GPU visible to each process.
    pub may_see_one: bool,
}

impl Local {
    /// The only process of a job.
    pub const ALONE: Local = Local { rank: 0, may_see_one: false };

    /// Returns the ordinal of this process's GPU among `visible` GPUs.
    fn ordinal(&self, visible: usize) -> Result<usize> {
        match self.rank {
            _ if visible == 1 && self.may_see_one => Ok(0),
            rank if rank < visible => Ok(rank),
            rank => Err(Error::Config(format!(
                "this process is number {rank} of its machine, counted from 0, and {visible} GPUs are visible; start one process per GPU, \
                 or change CUDA_VISIBLE_DEVICES"
            ))),
        }
    }
}

/// Whether `choice` selects a GPU on this machine.
pub fn is_gpu(choice: DeviceChoice) -> bool {
    match choice {
        DeviceChoice::Cpu => false,
        DeviceChoice::Cuda => true,
        DeviceChoice::Auto => matches!(CudaDevice::count(), Ok(1..)),
    }
}

/// Returns the number of GPUs that this machine has.
///
/// Errors if the driver cannot be used. The error also says how the command runs on the CPU.
pub fn count_gpus() -> Result<usize> {
    CudaDevice::count().map_err(or_on_the_cpu)
}

/// Adds to the error of a missing library that the CPU needs none.
fn or_on_the_cpu(error: ottava_tensor::Error) -> Error {
    match error {
        ottava_tensor::Error::Library { library, reason, remedy } => ottava_tensor::Error::Library {
            library,
            reason,
            remedy: format!("{remedy}; or, for the CPU, use --device cpu and no --gpus"),
        },
        other => other,
    }
    .into()
}

/// Opens the device of one of several processes; otherwise like [`open`].
pub fn open_of_rank(choice: DeviceChoice, local: &Local) -> Result<Device> {
    let device = match is_gpu(choice) {
        true => Device::cuda(match CudaDevice::count() {
            Ok(visible @ 1..) => local.ordinal(visible)?,
            // There is no GPU. Opening ordinal 0 returns the error that says why.
            _ => 0,
        })
        .map_err(or_on_the_cpu)?,
        false => Device::Cpu,
    };
    match (&device, choice) {
        (Device::Cpu, DeviceChoice::Auto) => {
            tracing::info!("device: the CPU, with FP8 emulated bit for bit (`ottava doctor` says why no GPU was found)")
        }
        _ => tracing::info!("device: {device}"),
    }
    Ok(device)
}

/// Returns the device to plan for: the GPU `named`, a GPU with `gpu_memory` GiB, or the chosen device. A GPU that this machine lacks is a dry run.
pub fn plan_for(choice: DeviceChoice, named: Option<&str>, gpu_memory: Option<f64>) -> Result<Device> {
    let h200 = GpuModel::h200();
    if named.is_some() || gpu_memory.is_some() {
        let mut model = named.map_or(Ok(h200), GpuModel::named)?;
        if let Some(memory) = gpu_memory {
            model.memory = GpuModel::usable((memory * f64::from(1 << 30)) as usize);
        }
        return Ok(Device::dry_gpu(model));
    }
    match (choice, CudaDevice::count()) {
        (DeviceChoice::Cuda, Err(_) | Ok(0)) => {
            tracing::info!(
                "there is no GPU here: the plan is for an H200 with 139.8 GiB; --gpu-memory names another size"
            );
            Ok(Device::dry_gpu(h200))
        }
        _ => open(choice),
    }
}

/// Parses a device choice of the command line.
pub fn parse(text: &str) -> Result<DeviceChoice, String> {
    match text {
        "auto" => Ok(DeviceChoice::Auto),
        "cuda" => Ok(DeviceChoice::Cuda),
        "cpu" => Ok(DeviceChoice::Cpu),
        other => Err(format!("`{other}` is not a device; auto, cuda and cpu are")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_on_the_machine_chooses_the_gpu() {
        let gpu = |rank, may_see_one, visible| Local { rank, may_see_one }.ordinal(visible);
        assert_eq!(gpu(1, true, 2).unwrap(), 1);
        assert_eq!(gpu(3, true, 1).unwrap(), 0, "a launcher shows each task its GPU");
        for (rank, may_see_one, visible) in [(1, false, 1), (2, true, 2)] {
            let message = gpu(rank, may_see_one, visible).unwrap_err().to_string();
            assert!(message.contains(&format!("number {rank} of its machine")), "{message}");
            assert!(message.contains(&format!("{visible} GPUs are visible")), "{message}");
        }
    }
}
