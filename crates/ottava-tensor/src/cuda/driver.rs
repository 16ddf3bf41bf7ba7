//! The CUDA driver: one context per device, with its streams, copies, modules and launches.

mod capture;
mod event;
mod launch;
mod memory;
mod module;
mod peer;

pub use event::Event;
pub(super) use launch::{LaunchConfig, Scheduling, Start, encode};
pub(super) use module::{Function, Module};
pub use peer::PeerLink;
pub(super) use peer::{Exported, IpcHandle, ordinal_of, peer_link};

use super::load::{DRIVER, LibraryReport, Problem, SearchPath, SharedLibrary, Wanted, functions};
use super::lock::lock;
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// A driver object: context, stream, event, module, function or graph.
pub(super) type Handle = *mut c_void;

functions! {
    /// The functions of the driver API in use. Names with a suffix are the current versions of older functions.
    struct Api {
        init = cuInit(u32) -> i32;
        driver_version = cuDriverGetVersion(*mut i32) -> i32;
        error_name = cuGetErrorName(i32, *mut *const c_char) -> i32;
        error_string = cuGetErrorString(i32, *mut *const c_char) -> i32;
        device_count = cuDeviceGetCount(*mut i32) -> i32;
        device_get = cuDeviceGet(*mut i32, i32) -> i32;
        device_name = cuDeviceGetName(*mut c_char, i32, i32) -> i32;
        device_uuid = cuDeviceGetUuid_v2(*mut [u8; 16], i32) -> i32;
        device_attribute = cuDeviceGetAttribute(*mut i32, i32, i32) -> i32;
        peer_attribute = cuDeviceGetP2PAttribute(*mut i32, i32, i32, i32) -> i32;
        context_retain = cuDevicePrimaryCtxRetain(*mut Handle, i32) -> i32;
        context_release = cuDevicePrimaryCtxRelease_v2(i32) -> i32;
        context_set = cuCtxSetCurrent(Handle) -> i32;
        stream_create = cuStreamCreateWithPriority(*mut Handle, u32, i32) -> i32;
        stream_priorities = cuCtxGetStreamPriorityRange(*mut i32, *mut i32) -> i32;
        stream_destroy = cuStreamDestroy_v2(Handle) -> i32;
        stream_synchronize = cuStreamSynchronize(Handle) -> i32;
        stream_is_capturing = cuStreamIsCapturing(Handle, *mut i32) -> i32;
        stream_begin_capture = cuStreamBeginCapture_v2(Handle, i32) -> i32;
        stream_end_capture = cuStreamEndCapture(Handle, *mut Handle) -> i32;
        graph_instantiate = cuGraphInstantiateWithFlags(*mut Handle, Handle, u64) -> i32;
        graph_launch = cuGraphLaunch(Handle, Handle) -> i32;
        graph_exec_destroy = cuGraphExecDestroy(Handle) -> i32;
        graph_destroy = cuGraphDestroy(Handle) -> i32;
        event_create = cuEventCreate(*mut Handle, u32) -> i32;
        event_record = cuEventRecord(Handle, Handle) -> i32;
        stream_wait_event = cuStreamWaitEvent(Handle, Handle, u32) -> i32;
        event_synchronize = cuEventSynchronize(Handle) -> i32;
        event_elapsed = cuEventElapsedTime(*mut f32, Handle, Handle) -> i32;
        event_destroy = cuEventDestroy_v2(Handle) -> i32;
        module_load = cuModuleLoadData(*mut Handle, *const c_void) -> i32;
        module_unload = cuModuleUnload(Handle) -> i32;
        module_function = cuModuleGetFunction(*mut Handle, Handle, *const c_char) -> i32;
        function_set = cuFuncSetAttribute(Handle, i32, i32) -> i32;
        launch = cuLaunchKernelEx(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void) -> i32;
        encode_tiled = cuTensorMapEncodeTiled(
            *mut c_void, i32, u32, u64, *const u64, *const u64, *const u32, *const u32, i32, i32, i32, i32,
        ) -> i32;
        memory_info = cuMemGetInfo_v2(*mut usize, *mut usize) -> i32;
        memory_allocate = cuMemAlloc_v2(*mut u64, usize) -> i32;
        memory_free = cuMemFree_v2(u64) -> i32;
        host_allocate = cuMemHostAlloc(*mut *mut c_void, usize, u32) -> i32;
        host_free = cuMemFreeHost(*mut c_void) -> i32;
        copy_to_device = cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle) -> i32;
        copy_to_host = cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle) -> i32;
        copy_on_device = cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle) -> i32;
        fill = cuMemsetD8Async(u64, u8, usize, Handle) -> i32;
        allocation_of = cuMemGetAddressRange_v2(*mut u64, *mut usize, u64) -> i32;
        ipc_export = cuIpcGetMemHandle(*mut IpcHandle, u64) -> i32;
        ipc_open = cuIpcOpenMemHandle_v2(*mut u64, IpcHandle, u32) -> i32;
        ipc_close = cuIpcCloseMemHandle(u64) -> i32;
        write_value = cuStreamWriteValue32_v2(Handle, u64, u32, u32) -> i32;
        wait_value = cuStreamWaitValue32_v2(Handle, u64, u32, u32) -> i32;
    }
}

const SUCCESS: i32 = 0;
const OUT_OF_MEMORY: i32 = 2;
/// The faults of a kernel. After one of them, each call on the context fails (cuda.h, from `CUDA_ERROR_ILLEGAL_ADDRESS`).
const FAULTS: [i32; 12] = [214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719];
const ATTRIBUTE_MULTIPROCESSOR_COUNT: i32 = 16;
const ATTRIBUTE_CAPABILITY_MAJOR: i32 = 75;
const ATTRIBUTE_CAPABILITY_MINOR: i32 = 76;
const STREAM_NON_BLOCKING: u32 = 1;
/// The number of recent launches that a fault message lists.
const REMEMBERED_LAUNCHES: usize = 8;

fn opened() -> &'static Result<Api, Problem> {
    static OPENED: OnceLock<Result<Api, Problem>> = OnceLock::new();
    OPENED.get_or_init(|| {
        let api = SharedLibrary::open(&DRIVER, SearchPath::of_process()).and_then(Api::load)?;
        // SAFETY: the call takes no pointers, and is the first call of the process.
        match unsafe { (api.init)(0) } {
            SUCCESS => Ok(api),
            status => {
                let reason = format!("cuInit: {}", api.describe(status));
                Err(Problem { library: DRIVER.name, reason, remedy: DRIVER.remedy })
            }
        }
    })
}

fn api() -> Result<&'static Api> {
    opened().as_ref().map_err(|problem| problem.clone().into())
}

/// Returns the newest CUDA version that the driver supports, as (major, minor), and `None` without a driver.
pub(super) fn cuda_version() -> Option<(i32, i32)> {
    let api = opened().as_ref().ok()?;
    let mut version = 0;
    // SAFETY: the driver writes one int.
    let status = unsafe { (api.driver_version)(&mut version) };
    (status == SUCCESS).then_some((version / 1000, version % 1000 / 10))
}

/// Returns `library` without the versions that need a newer driver. Names are in the order newest first and end in the CUDA version. Without a
/// driver, each version is kept, because compiling needs no driver.
pub(super) fn supported(library: &Wanted) -> Wanted {
    let too_new = |name: &&&str| {
        let needs = name.rsplit('.').next().and_then(|version| version.parse::<i32>().ok());
        cuda_version().zip(needs).is_some_and(|((major, _), needs)| major < needs)
    };
    let skipped = library.sonames.iter().take_while(too_new).count();
    Wanted { sonames: &library.sonames[skipped.min(library.sonames.len() - 1)..], ..*library }
}

pub(super) fn report() -> LibraryReport {
    LibraryReport::new(
        &DRIVER,
        opened(),
        |api| &api.library,
        |_| cuda_version().map(|(major, minor)| format!("CUDA {major}.{minor}")),
    )
}

/// Returns the number of GPUs that the driver shows this process.
pub(super) fn device_count() -> Result<usize> {
    let api = api()?;
    let mut count = 0;
    // SAFETY: the driver writes one int.
    api.check(unsafe { (api.device_count)(&mut count) }, "cuDeviceGetCount")?;
    Ok(count.max(0) as usize)
}

impl Api {
    fn describe(&self, status: i32) -> String {
        let text = |function: unsafe extern "C" fn(i32, *mut *const c_char) -> i32| {
            let mut text = null();
            // SAFETY: the driver writes a pointer to a constant string, or null.
            unsafe { function(status, &mut text) == SUCCESS && !text.is_null() }
                // SAFETY: the pointer is not null, and the string is constant for the life of the process.
                .then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        match (text(self.error_string), text(self.error_name)) {
            (Some(words), Some(name)) => format!("{words} ({name})"),
            _ => format!("status {status}"),
        }
    }

    fn check(&self, status: i32, call: &str) -> Result<()> {
        match status {
            SUCCESS => Ok(()),
            status => Err(Error::Cuda { library: DRIVER.name, call: call.to_string(), message: self.describe(status) }),
        }
    }
}

/// The streams of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    /// The stream for kernels, products and ordered copies.
    Compute,
    /// The stream for copies from host to device memory that overlap with compute.
    ToDevice,
    /// The stream for copies from device to host memory that overlap with compute.
    ToHost,
    /// The stream for collectives between GPUs, which overlap with compute. It has the highest priority, so that a collective does not wait for the
    /// end of a product.
    Communication,
    /// A stream for messages in one direction between this rank and another rank. These messages must not wait for other communication. The number is
    /// below [`CHANNELS`], and the priority is the highest.
    Channel(usize),
}

/// The number of streams for messages.
pub(super) const CHANNELS: usize = 4;

/// The number of streams for other work.
const COMMON_STREAMS: usize = 4;

impl Stream {
    fn index(self) -> usize {
        match self {
            Stream::Compute => 0,
            Stream::ToDevice => 1,
            Stream::ToHost => 2,
            Stream::Communication => 3,
            Stream::Channel(channel) => COMMON_STREAMS + channel,
        }
    }
}

/// The primary context of one GPU and its streams.
pub(super) struct Context {
    api: &'static Api,
    device: i32,
    context: Handle,
    /// The streams in the order of [`Stream::index`].
    streams: [Handle; COMMON_STREAMS + CHANNELS],
    pub(super) name: String,
    pub(super) uuid: [u8; 16],
    pub(super) capability: (i32, i32),
    pub(super) sm_count: usize,
    /// The launches since the last synchronisation, for fault messages. If launches block, it has only the last launch.
    launches: Mutex<VecDeque<&'static str>>,
    /// Whether each launch waits for its end (`CUDA_LAUNCH_BLOCKING`). If it does, a fault belongs to the last launch.
    pub(super) launches_block: bool,
    /// The start times of the current waits of host threads for the GPU.
    waits: Mutex<Vec<Instant>>,
    /// The first fault of the device. Later errors only say that the context is lost.
    fault: OnceLock<String>,
    /// A lock that is held while products are timed and while attention is planned.
    timing: Mutex<()>,
    /// Whether compute was made to wait for other work than its own since its last kernel.
    compute_waits: AtomicBool,
}

// SAFETY: the driver API may be called from any thread. Each method binds the context to its thread first.
unsafe impl Send for Context {}
// SAFETY: see `Send`. Mutable fields are atomic, a Mutex or a OnceLock.
unsafe impl Sync for Context {}

impl Context {
    /// Opens GPU `ordinal` of the GPUs that the driver shows.
    pub(super) fn open(ordinal: usize) -> Result<Arc<Context>> {
        let api = api()?;
        let count = device_count()?;
        if ordinal >= count {
            return Err(Error::Value(format!("GPU {ordinal} does not exist: the driver shows {count}")));
        }
        let mut device = 0;
        // SAFETY: the driver writes one int.
        api.check(unsafe { (api.device_get)(&mut device, ordinal as i32) }, "cuDeviceGet")?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the driver writes one int.
            api.check(unsafe { (api.device_attribute)(&mut value, which, device) }, "cuDeviceGetAttribute")?;
            Ok::<i32, Error>(value)
        };
        let mut name = [0 as c_char; 256];
        // SAFETY: the driver writes at most 256 bytes and ends them with a zero.
        api.check(unsafe { (api.device_name)(name.as_mut_ptr(), 256, device) }, "cuDeviceGetName")?;
        // SAFETY: the call above ended the name with a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();

        let mut uuid = [0; 16];
        // SAFETY: the driver writes 16 bytes.
        api.check(unsafe { (api.device_uuid)(&mut uuid, device) }, "cuDeviceGetUuid")?;

        let mut opened = Context {
            api,
            device,
            context: null_mut(),
            streams: [null_mut(); COMMON_STREAMS + CHANNELS],
            name,
            uuid,
            capability: (attribute(ATTRIBUTE_CAPABILITY_MAJOR)?, attribute(ATTRIBUTE_CAPABILITY_MINOR)?),
            sm_count: attribute(ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(0) as usize,
            launches: Mutex::default(),
            launches_block: std::env::var_os("CUDA_LAUNCH_BLOCKING")
                .is_some_and(|value| !value.is_empty() && value != "0"),
            waits: Mutex::default(),
            fault: OnceLock::new(),
            timing: Mutex::default(),
            compute_waits: AtomicBool::new(false),
        };
        // SAFETY: the driver writes one handle, and `Drop` releases it.
        api.check(unsafe { (api.context_retain)(&mut opened.context, device) }, "cuDevicePrimaryCtxRetain")?;
        opened.bind()?;
        let (mut usual, mut highest) = (0, 0);
        // SAFETY: the driver writes two ints.
        let status = unsafe { (api.stream_priorities)(&mut usual, &mut highest) };
        api.check(status, "cuCtxGetStreamPriorityRange")?;
        for (i, stream) in opened.streams.iter_mut().enumerate() {
            let priority = if i >= Stream::Communication.index() { highest } else { usual };
            // SAFETY: the context is current, and `Drop` destroys the stream.
            let status = unsafe { (api.stream_create)(stream, STREAM_NON_BLOCKING, priority) };
            api.check(status, "cuStreamCreateWithPriority")?;
        }
        Ok(Arc::new(opened))
    }

    /// Returns the compute stream, for libraries that launch on it.
    pub(super) fn stream(&self) -> Handle {
        self.handle(Stream::Compute)
    }

    /// Returns the handle of a stream, for libraries that launch on it.
    pub(super) fn handle(&self, stream: Stream) -> Handle {
        self.streams[stream.index()]
    }

    /// Makes the context current in this thread. Each library call requires it.
    pub(super) fn bind(&self) -> Result<()> {
        // SAFETY: the context lives until `Drop`.
        self.check(unsafe { (self.api.context_set)(self.context) }, "cuCtxSetCurrent")
    }

    /// Returns an error if `status` is not success. The error includes an earlier fault and the kernels that may have caused the fault.
    pub(super) fn check(&self, status: i32, call: &str) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        let words = self.api.describe(status);
        let message = match self.fault.get() {
            Some(fault) => format!("{words}; the GPU failed earlier: {fault}"),
            None if FAULTS.contains(&status) => self.fault.get_or_init(|| self.describe_fault(&words)).clone(),
            None => words,
        };
        Err(Error::Cuda { library: DRIVER.name, call: call.to_string(), message })
    }

    fn describe_fault(&self, words: &str) -> String {
        let launches: Vec<&str> = lock(&self.launches).iter().copied().collect();
        match launches.as_slice() {
            [] => words.to_string(),
            [kernel] => format!("{words}, in {kernel}"),
            several => format!("{words}, in one of {}; CUDA_LAUNCH_BLOCKING=1 tells which", several.join(", ")),
        }
    }

    /// Returns the first fault of the device.
    pub(super) fn fault(&self) -> Option<&str> {
        self.fault.get().map(String::as_str)
    }

    /// Adds `what` to the launches that a fault message lists.
    pub(super) fn record_launch(&self, what: &'static str) {
        let mut launches = lock(&self.launches);
        if self.launches_block {
            launches.clear();
        }
        if launches.contains(&what) {
            return;
        }
        if launches.len() == REMEMBERED_LAUNCHES {
            launches.pop_front();
        }
        launches.push_back(what);
    }

    /// Excludes planning in other threads while products are timed. Planning loads kernels, and loading may synchronise the context (CUDA C++
    /// Programming Guide, "Lazy Loading"), which would distort the times.
    pub(super) fn lock_timing(&self) -> MutexGuard<'_, ()> {
        lock(&self.timing)
    }

    /// Returns the longest time that a thread of the host has been waiting for the GPU, and `None` if no thread waits.
    pub(super) fn longest_wait(&self) -> Option<Duration> {
        lock(&self.waits).iter().min().map(Instant::elapsed)
    }

    /// Runs a call of the driver that may wait for the GPU.
    fn waiting<T>(&self, call: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        lock(&self.waits).push(began);
        let done = call();
        let mut waits = lock(&self.waits);
        let at = waits.iter().position(|&wait| wait == began).expect("pushed above");
        waits.swap_remove(at);
        done
    }

    /// Waits for the work of the compute stream.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives until `Drop`.
        let status = self.waiting(|| unsafe { (self.api.stream_synchronize)(self.stream()) });
        self.check(status, "cuStreamSynchronize")?;
        lock(&self.launches).clear();
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.context.is_null() {
            return;
        }
        // SAFETY: `open` created these objects, and nothing uses them afterwards. Failures are ignored.
        unsafe {
            (self.api.context_set)(self.context);
            for stream in self.streams.into_iter().filter(|stream| !stream.is_null()) {
                (self.api.stream_destroy)(stream);
            }
            (self.api.context_release)(self.device);
        }
    }
}

/// Returns an error of another CUDA library, with the fault of the device if it has one.
pub(super) fn library_error(context: &Context, library: &'static str, call: &str, mut message: String) -> Error {
    // A library may be the first to report a fault of an earlier kernel. Synchronising finds the name of the fault.
    if context.fault().is_none() {
        let _ = context.is_capturing().map(|capturing| (!capturing).then(|| context.synchronize()));
    }
    if let Some(fault) = context.fault() {
        message = format!("{message}; the GPU failed earlier: {fault}");
    }
    Error::Cuda { library, call: call.to_string(), message }
}
