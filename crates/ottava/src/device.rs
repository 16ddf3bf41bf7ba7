//! From the choice of a device to the device, said aloud.

use ottava_lm::Result;
use ottava_lm::config::DeviceChoice;
use ottava_tensor::Device;
use ottava_tensor::cuda::CudaDevice;

/// Opens the chosen device. `auto` takes a GPU where the driver shows one; a GPU that is there and does not open is an error, so that
/// nobody trains on the CPU unawares.
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

/// The name of a choice on the command line.
pub fn parse(text: &str) -> Result<DeviceChoice, String> {
    match text {
        "auto" => Ok(DeviceChoice::Auto),
        "cuda" => Ok(DeviceChoice::Cuda),
        "cpu" => Ok(DeviceChoice::Cpu),
        other => Err(format!("`{other}` is not a device; auto, cuda and cpu are")),
    }
}
