//! NVML, the driver's monitoring library: the energy that a GPU has used, its load, its clock, and the reasons for a low clock.

use super::driver::Handle;
use super::load::{LibraryReport, Problem, SearchPath, SharedLibrary, Wanted, functions};
use std::ffi::{CStr, CString, c_char};
use std::fmt::Write;
use std::ptr::null_mut;
use std::sync::OnceLock;

const NVML: Wanted = Wanted {
    name: "NVML",
    sonames: &["libnvidia-ml.so.1"],
    landmark: "nvmlInit_v2",
    remedy: "Measures energy and clocks only. It comes with NVIDIA's driver",
};

functions! {
    struct Api {
        init = nvmlInit_v2() -> i32;
        version = nvmlSystemGetNVMLVersion(*mut c_char, u32) -> i32;
        by_uuid = nvmlDeviceGetHandleByUUID(*const c_char, *mut Handle) -> i32;
        energy = nvmlDeviceGetTotalEnergyConsumption(Handle, *mut u64) -> i32;
        clock = nvmlDeviceGetClockInfo(Handle, i32, *mut u32) -> i32;
        utilization = nvmlDeviceGetUtilizationRates(Handle, *mut [u32; 2]) -> i32;
        throttle_reasons = nvmlDeviceGetCurrentClocksThrottleReasons(Handle, *mut u64) -> i32;
    }
}

const SUCCESS: i32 = 0;
/// The `nvmlClockType_t` of the multiprocessors.
const CLOCK_SM: i32 = 1;

/// Returns the library, which is initialised once and never shut down.
fn opened() -> &'static Result<Api, Problem> {
    static OPENED: OnceLock<Result<Api, Problem>> = OnceLock::new();
    OPENED.get_or_init(|| {
        let api = SharedLibrary::open(&NVML, SearchPath::of_process()).and_then(Api::load)?;
        // SAFETY: the call takes no pointers, and is the first call of the process.
        match unsafe { (api.init)() } {
            SUCCESS => Ok(api),
            status => {
                let reason = format!("nvmlInit: status {status}");
                Err(Problem { library: NVML.name, reason, remedy: NVML.remedy })
            }
        }
    })
}

pub(super) fn report() -> LibraryReport {
    LibraryReport::new(
        &NVML,
        opened(),
        |api| &api.library,
        |api| {
            let mut text = [0u8; 80];
            // SAFETY: the library writes at most 80 bytes and ends them with a zero.
            let status = unsafe { (api.version)(text.as_mut_ptr().cast(), text.len() as u32) };
            let text = CStr::from_bytes_until_nul(&text).ok()?;
            (status == SUCCESS).then(|| text.to_string_lossy().into_owned())
        },
    )
}

/// Returns the joules that the GPU with this UUID has used since its driver was loaded. The counter changes every 20 to 100 ms. Returns `None`
/// without NVML and for a GPU without this counter.
pub(super) fn energy(uuid: [u8; 16]) -> Option<f64> {
    let (api, device) = find(uuid)?;
    let mut millijoules = 0;
    // SAFETY: the handle is a handle of the library, which writes one integer.
    let read = unsafe { (api.energy)(device, &mut millijoules) };
    (read == SUCCESS).then_some(millijoules as f64 * 1e-3)
}

/// Returns the current clock in megahertz of the multiprocessors of the GPU with this UUID. Returns `None` without NVML.
pub(super) fn clock(uuid: [u8; 16]) -> Option<f64> {
    let (api, device) = find(uuid)?;
    let mut megahertz = 0;
    // SAFETY: see `energy`.
    let read = unsafe { (api.clock)(device, CLOCK_SM, &mut megahertz) };
    (read == SUCCESS).then_some(f64::from(megahertz))
}

/// Returns the reasons why the clock of the GPU with this UUID is not higher, as bits of `nvmlClocksThrottleReasons`. Returns `None` without NVML.
pub(super) fn throttle_reasons(uuid: [u8; 16]) -> Option<u64> {
    let (api, device) = find(uuid)?;
    let mut reasons = 0;
    // SAFETY: see `energy`.
    let read = unsafe { (api.throttle_reasons)(device, &mut reasons) };
    (read == SUCCESS).then_some(reasons)
}

/// Returns the share of the last sample period (up to a second) in which a kernel ran on the GPU with this UUID. Returns `None` without NVML.
pub(super) fn utilization(uuid: [u8; 16]) -> Option<f64> {
    let (api, device) = find(uuid)?;
    // The percentages of time with a kernel, and with accesses to the GPU's memory.
    let mut percentages = [0; 2];
    // SAFETY: the handle is a handle of the library, which writes a struct of two integers.
    let read = unsafe { (api.utilization)(device, &mut percentages) };
    (read == SUCCESS).then_some(f64::from(percentages[0]) * 1e-2)
}

fn find(uuid: [u8; 16]) -> Option<(&'static Api, Handle)> {
    let api = opened().as_ref().ok()?;
    let text = CString::new(name(uuid)).ok()?;
    let mut device = null_mut();
    // SAFETY: the string ends with a zero. The library writes one handle, which needs no release.
    let found = unsafe { (api.by_uuid)(text.as_ptr(), &mut device) };
    (found == SUCCESS).then_some((api, device))
}

/// Returns a UUID in NVML's format: `GPU-` and hexadecimal digits in five groups.
fn name(uuid: [u8; 16]) -> String {
    let mut text = "GPU".to_string();
    for (i, byte) in uuid.iter().enumerate() {
        let dash = if [0, 4, 6, 8, 10].contains(&i) { "-" } else { "" };
        write!(text, "{dash}{byte:02x}").expect("memory");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::test_device;
    use crate::{DType, Device, Tensor};

    #[test]
    fn uuids_are_written_as_nvml_reads_them() {
        let uuid = [0x8c, 0x7c, 0x7c, 0xe9, 0x0d, 0x45, 0xcc, 0x93, 0x91, 0x56, 0x7c, 0x3d, 0x78, 0xdb, 0xd8, 0xfb];
        assert_eq!(name(uuid), "GPU-8c7c7ce9-0d45-cc93-9156-7c3d78dbd8fb");
    }

    #[test]
    fn a_busy_gpu_uses_energy() {
        let Some(gpu) = test_device() else { return };
        let device = Device::Cuda(gpu.clone());
        let before = gpu.energy().expect("an NVIDIA data centre GPU counts its energy");
        let begin = std::time::Instant::now();
        let from = Tensor::zeros(&device, &[1 << 26], DType::F32).expect("memory");
        let mut to = from.empty_like().expect("memory");
        while begin.elapsed().as_secs_f64() < 0.5 {
            to.copy_from(0, &from).expect("a copy");
            device.synchronize().expect("copies");
        }
        let watts = (gpu.energy().expect("as before") - before) / begin.elapsed().as_secs_f64();
        assert!((50.0..1500.0).contains(&watts), "{watts} W");
        let megahertz = gpu.clock().expect("a clock");
        assert!((300.0..3000.0).contains(&megahertz), "{megahertz} MHz");
    }
}
