//! Opening the chosen device, and logging it.

use ottava_lm::Result;
use ottava_lm::config::DeviceChoice;
use ottava_tensor::Device;
use ottava_tensor::cuda::{CudaDevice, GpuModel};

/// Opens the chosen device. `auto` takes a GPU if the driver lists one; a GPU that does not open is an error, so that no run falls back
/// to
/// the CPU silently.
pub fn open(choice: DeviceChoice) -> Result<Device> {
    let device = match choice {
        DeviceChoice::Cpu => Device::Cpu,
        DeviceChoice::Cuda => Device::cuda(0)?,
        DeviceChoice::Auto => match CudaDevice::count() {
            Ok(n) if n > 0 => Device::cuda(0)?,
            _ => Device::Cpu,
        },
    };
    match (&device, choice) {
        (Device::Cpu, DeviceChoice::Auto) => {
            tracing::info!("device: the CPU, with FP8 emulated bit for bit (`ottava doctor` says why no GPU was found)")
        }
        _ => tracing::info!("device: {device}"),
    }
    Ok(device)
}

/// The device to plan for: the chosen one, or a GPU in a dry run if there is none or `gpu_memory` GiB are given.
pub fn plan_for(choice: DeviceChoice, gpu_memory: Option<f64>) -> Result<Device> {
    let h200 = GpuModel::h200();
    if let Some(memory) = gpu_memory {
        let memory = GpuModel::usable((memory * f64::from(1 << 30)) as usize);
        return Ok(Device::dry_gpu(GpuModel { memory, ..h200 }));
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

/// The name of a choice on the command line.
pub fn parse(text: &str) -> Result<DeviceChoice, String> {
    match text {
        "auto" => Ok(DeviceChoice::Auto),
        "cuda" => Ok(DeviceChoice::Cuda),
        "cpu" => Ok(DeviceChoice::Cpu),
        other => Err(format!("`{other}` is not a device; auto, cuda and cpu are")),
    }
}
