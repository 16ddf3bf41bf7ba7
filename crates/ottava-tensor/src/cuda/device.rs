//! One GPU: its context, memory pool, kernels and libraries. A dry run has no context: it checks calls and counts memory, and enqueues nothing.

use super::ahead::{Background, Cubins, Task, Workload};
use super::beside::Beside;
use super::cublaslt::Gemms;
use super::cudnn::Attention;
use super::driver::{self, Context, Event, Function, Module, PeerLink};
use super::dry::{self, DryGpu, DryMemory, GpuModel, Memory};
use super::kernel::{Kernel, KernelModule};
use super::lock::lock;
use super::nvml;
use super::nvrtc::{self, arch_of};
use super::pool::{self, Backing, MemoryStats, Pool};
use super::profile::{Call, Profile};
use crate::capability::Capability;
use crate::error::Result;
use crate::tracker::{Entry, MemoryTracker};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

/// The loaded modules and their kernels.
#[derive(Default)]
struct Kernels {
    modules: HashMap<KernelModule, Arc<Module>>,
    functions: HashMap<(KernelModule, &'static str), Function>,
}

/// A GPU.
pub struct CudaDevice {
    ordinal: usize,
    model: GpuModel,
    pool: Mutex<Pool<Memory>>,
    pub(super) profile: Profile,
    host_bytes: AtomicUsize,
    library_bytes: AtomicUsize,
    has_constant_weights: AtomicBool,
    is_batch_invariant: AtomicBool,
    backend: Backend,
}

/// The executor of the work of a device.
pub(super) enum Backend {
    /// A GPU of this machine.
    Gpu(Box<Gpu>),
    /// A dry run, which records the work.
    Dry(DryGpu),
}

/// The state of a GPU of this machine.
pub(super) struct Gpu {
    // The threads are dropped first, because they use the fields below.
    background: Background,
    cubins: Arc<Cubins>,
    kernels: RwLock<Kernels>,
    pub(super) gemms: Mutex<Gemms>,
    /// The cuDNN library, which the first attention opens. Only attention needs cuDNN.
    attention: Arc<Mutex<Option<Attention>>>,
    // The context is dropped last, because the fields above use it.
    pub(super) context: Arc<Context>,
}

impl CudaDevice {
    /// Opens GPU `ordinal` of the visible GPUs (`CUDA_VISIBLE_DEVICES`).
    ///
    /// Errors: `Error::Library` if the driver, NVRTC or cuBLASLt is missing, `Error::Value` if the GPU does not exist. The first attention opens
    /// cuDNN.
    pub fn open(ordinal: usize) -> Result<Arc<CudaDevice>> {
        let context = Context::open(ordinal)?;
        nvrtc::require()?;
        let gemms = Mutex::new(Gemms::open(&context)?);
        let memory = GpuModel::usable_of_free(context.memory_info()?.0);
        Ok(Arc::new(CudaDevice {
            ordinal,
            model: GpuModel {
                name: context.name.clone(),
                capability: context.capability,
                sm_count: context.sm_count,
                memory,
            },
            pool: Mutex::new(Pool::new(Memory::Driver(context.clone()), memory)),
            profile: Profile::default(),
            host_bytes: AtomicUsize::new(0),
            library_bytes: AtomicUsize::new(0),
            has_constant_weights: AtomicBool::new(false),
            is_batch_invariant: AtomicBool::new(false),
            backend: Backend::Gpu(Box::new(Gpu {
                background: Background::default(),
                cubins: Arc::new(Cubins::new(arch_of(context.capability))),
                kernels: RwLock::default(),
                gemms,
                attention: Arc::default(),
                context,
            })),
        }))
    }

    /// Creates a GPU for a dry run. It checks and records calls, and its pool has addresses without memory.
    pub fn dry(model: GpuModel) -> Arc<CudaDevice> {
        let memory = model.memory;
        CudaDevice::dry_with(model, memory)
    }

    /// Creates a GPU for a dry run like [`CudaDevice::dry`], with `memory` bytes, which may be more than the bytes of `model`.
    pub fn dry_with(model: GpuModel, memory: usize) -> Arc<CudaDevice> {
        Arc::new(CudaDevice {
            ordinal: 0,
            pool: Mutex::new(Pool::new(Memory::Dry(DryMemory::new(memory)), memory)),
            model,
            profile: Profile::default(),
            host_bytes: AtomicUsize::new(0),
            library_bytes: AtomicUsize::new(0),
            has_constant_weights: AtomicBool::new(false),
            is_batch_invariant: AtomicBool::new(false),
            backend: Backend::Dry(DryGpu::default()),
        })
    }

    /// Returns the memory accounts of a dry run, and `None` on a real GPU.
    pub fn tracker(&self) -> Option<&Arc<MemoryTracker>> {
        self.dry_gpu().map(|dry| &dry.tracker)
    }

    fn dry_gpu(&self) -> Option<&DryGpu> {
        match &self.backend {
            Backend::Gpu(_) => None,
            Backend::Dry(dry) => Some(dry),
        }
    }

    /// Starts a trace of each kernel, product, attention pass, copy and fill of a dry run. It does nothing on a real GPU.
    pub fn start_trace(&self) {
        if let Some(dry) = self.dry_gpu() {
            dry.trace.start();
        }
    }

    /// Ends the trace and returns its lines. A line shows a pointer as `*` with its distance in bytes from the start of its allocation.
    pub fn take_trace(&self) -> Vec<String> {
        self.dry_gpu().map(|dry| dry.trace.take()).unwrap_or_default()
    }

    /// Adds a line to the trace if a trace is in progress.
    pub(super) fn trace(&self, line: impl FnOnce() -> String) {
        if let Some(dry) = self.dry_gpu() {
            dry.trace.add(line);
        }
    }

    /// Returns the kernels and attention passes that a dry run has launched, and `None` on a real GPU.
    pub fn workload(&self) -> Option<Workload> {
        self.dry_gpu().map(|dry| lock(&dry.workload).clone())
    }

    /// Compiles the kernels of `workload` and plans its attention passes in background threads on all cores, and returns at once. A launch waits for
    /// a compilation in progress. If a compilation failed, the launch repeats it and returns the error. `prepare` does nothing in a dry run.
    pub fn prepare(&self, workload: Workload) {
        let Some(gpu) = self.gpu() else { return };
        let (attention, context) = (gpu.attention.clone(), gpu.context.clone());
        let plan: Task = Box::new(move || {
            for (shape, pass) in &workload.attention {
                if let Err(error) = with_attention(&attention, &context, |attention| attention.prepare(shape, *pass)) {
                    tracing::debug!("attention was not planned ahead: {error}");
                }
            }
        });
        let compile = workload.kernels.into_iter().map(|module| -> Task {
            let cubins = gpu.cubins.clone();
            Box::new(move || {
                if let Err(error) = cubins.get(&module) {
                    tracing::debug!("{} was not compiled ahead: {error}", module.source.name);
                }
            })
        });
        gpu.background.start(std::iter::once(plan).chain(compile).collect());
    }

    /// Makes matrix products use the algorithms that this program contains for known shapes, and else the library's first working proposal, instead of timing
    /// the proposals. So each process with the same library chooses the same algorithms on GPUs of one model. It does nothing in a dry run.
    pub fn skip_gemm_timing(&self) {
        if let Some(gpu) = self.gpu() {
            lock(&gpu.gemms).skip_timing();
        }
    }

    /// Runs `work` while collectives or messages of a communicator are in progress. The matrix products of `work` leave multiprocessors to these
    /// calls, which could not start while kernels fill all multiprocessors.
    pub fn beside_collectives<R>(&self, work: impl FnOnce() -> R) -> R {
        let Some(gpu) = self.gpu() else { return work() };
        let before = lock(&gpu.gemms).spare(Beside::SPARED);
        let result = work();
        lock(&gpu.gemms).spare(before);
        result
    }

    /// Runs `work`, one pass of inference. In `work`, the weights, the indices of the batch, and the keys and values of earlier passes are constants.
    /// Kernels may read these constants while the previous kernel still runs (`launch_early`). The first kernel of `work` must not start early,
    /// because the kernels that wrote the constants must have ended.
    pub fn with_constant_weights<R>(&self, work: impl FnOnce() -> R) -> R {
        with_set(&self.has_constant_weights, work)
    }

    /// Runs `work`, in which the result of a row of a product of two operands in rows, or of a token of attention, does not depend on other rows. Products
    /// with the same shape of a row have the same order of sums, and attention divides the keys into parts of one length.
    pub fn with_batch_invariance<R>(&self, work: impl FnOnce() -> R) -> R {
        with_set(&self.is_batch_invariant, work)
    }

    /// Returns a guard that has the effect of [`CudaDevice::with_batch_invariance`] until it is dropped.
    pub fn batch_invariance(self: &Arc<Self>) -> BatchInvariance {
        let before = self.is_batch_invariant.swap(true, Ordering::Relaxed);
        BatchInvariance { gpu: self.clone(), before }
    }

    /// Returns whether [`CudaDevice::with_batch_invariance`] is in progress.
    pub(crate) fn is_batch_invariant(&self) -> bool {
        self.is_batch_invariant.load(Ordering::Relaxed)
    }

    /// Returns whether [`CudaDevice::with_constant_weights`] is in progress.
    pub(crate) fn has_constant_weights(&self) -> bool {
        self.has_constant_weights.load(Ordering::Relaxed)
    }

    pub(super) fn backend(&self) -> &Backend {
        &self.backend
    }

    fn gpu(&self) -> Option<&Gpu> {
        match &self.backend {
            Backend::Gpu(gpu) => Some(gpu),
            Backend::Dry(_) => None,
        }
    }

    /// Returns the context of a GPU of this machine, and `None` in a dry run.
    pub(super) fn context(&self) -> Option<&Arc<Context>> {
        self.gpu().map(|gpu| &gpu.context)
    }

    /// Returns the properties of the GPU that a plan needs.
    pub fn model(&self) -> &GpuModel {
        &self.model
    }

    /// Returns the number of bytes available to tensors: the memory of the GPU model minus the memory that libraries have allocated since.
    pub fn usable_memory(&self) -> usize {
        self.model.memory.saturating_sub(self.library_bytes.load(Ordering::Relaxed))
    }

    /// Returns unused memory of the pool to the driver, then runs `work`, in which a library allocates device memory. Subtracts the allocated memory
    /// from [`CudaDevice::usable_memory`].
    pub(crate) fn count_library_memory<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.release_memory()?;
        let before = self.memory_info()?.0;
        let done = work()?;
        self.release_memory()?;
        self.library_bytes.fetch_add(before.saturating_sub(self.memory_info()?.0), Ordering::Relaxed);
        Ok(done)
    }

    /// Returns whether a graph is being captured.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        self.context().map_or(Ok(false), |context| context.is_capturing())
    }

    /// Returns whether launches should be captured as graphs. They should not if each launch waits for its end (`CUDA_LAUNCH_BLOCKING`), because then
    /// a fault names its kernel.
    pub fn captures(&self) -> bool {
        self.context().is_none_or(|context| !context.launches_block)
    }

    /// Returns the number of visible GPUs. Without a driver, this is `Error::Library`.
    pub fn count() -> Result<usize> {
        driver::device_count()
    }

    /// Returns how GPU `from` reaches the memory of GPU `to`. The numbers are indices among the visible GPUs.
    pub fn peer_link(from: usize, to: usize) -> Result<PeerLink> {
        driver::peer_link(from, to)
    }

    /// Returns the index of the GPU among the visible GPUs.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Returns the product name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.model.name
    }

    /// Returns the compute capability, major and minor. Hopper is (9, 0).
    pub fn capability(&self) -> (i32, i32) {
        self.model.capability
    }

    /// Returns the number of streaming multiprocessors.
    pub fn sm_count(&self) -> usize {
        self.model.sm_count
    }

    /// Returns the newest CUDA version that the driver supports, major and minor.
    pub fn driver_version(&self) -> (i32, i32) {
        driver::cuda_version().unwrap_or_default()
    }

    /// Returns the free and total bytes of device memory.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        lock(&self.pool).backing().memory_info()
    }

    /// Returns the statistics of this process's memory pool.
    pub fn memory(&self) -> MemoryStats {
        lock(&self.pool).stats()
    }

    /// Resets the peak of [`MemoryStats`] to the number of live bytes.
    pub fn reset_peak_memory(&self) {
        lock(&self.pool).reset_peak();
    }

    /// Returns unused memory to the driver.
    pub fn release_memory(&self) -> Result<()> {
        lock(&self.pool).release_idle()
    }

    /// Returns the number of bytes of pinned host memory of this device.
    pub fn host_bytes(&self) -> usize {
        self.host_bytes.load(Ordering::Relaxed)
    }

    /// Records an event in the compute stream, for timing.
    pub fn record(&self) -> Result<Event> {
        Event::record(self.context().ok_or_else(|| dry::unsupported("timing"))?)
    }

    /// Returns the longest time that a thread of the host has been waiting for this GPU, and `None` if no thread waits.
    pub(crate) fn longest_wait(&self) -> Option<Duration> {
        self.context()?.longest_wait()
    }

    /// Returns the joules that the GPU has used since its driver was loaded. The counter changes every 20 to 100 ms. Returns `None` without NVML, for
    /// a GPU without this counter, and in a dry run.
    pub fn energy(&self) -> Option<f64> {
        self.context().and_then(|context| nvml::energy(context.uuid))
    }

    /// Returns the share of the last sample period (up to a second) in which a kernel ran. Returns `None` without NVML and in a dry run.
    pub fn utilization(&self) -> Option<f64> {
        self.context().and_then(|context| nvml::utilization(context.uuid))
    }

    /// Returns the current clock of the multiprocessors in megahertz. Returns `None` without NVML and in a dry run.
    pub fn clock(&self) -> Option<f64> {
        self.context().and_then(|context| nvml::clock(context.uuid))
    }

    /// Returns the reasons why the clock is not higher, as bits of `nvmlClocksThrottleReasons` of NVML, for example 4 for the power limit. Returns `None`
    /// without NVML and in a dry run.
    pub fn throttle_reasons(&self) -> Option<u64> {
        self.context().and_then(|context| nvml::throttle_reasons(context.uuid))
    }

    /// Waits for the enqueued work, and returns its error.
    pub fn synchronize(&self) -> Result<()> {
        self.context().map_or(Ok(()), |context| context.synchronize())
    }

    pub(super) fn pool(&self) -> &Mutex<Pool<Memory>> {
        &self.pool
    }

    /// Returns the address of `bytes` bytes that `take` gets from the pool, and their entry in the tracker of a dry run.
    pub(super) fn take_memory(
        &self,
        bytes: usize,
        take: impl FnOnce(&mut Pool<Memory>, usize) -> Result<u64>,
    ) -> Result<(u64, Option<Entry>)> {
        let pointer = take(&mut lock(&self.pool), bytes)?;
        Ok((pointer, self.tracker().map(|tracker| tracker.track(pool::rounded(bytes)))))
    }

    /// Asks the pool.
    pub(super) fn with_pool<T>(&self, ask: impl FnOnce(&mut Pool<Memory>) -> T) -> T {
        ask(&mut lock(&self.pool))
    }

    /// Returns memory of [`CudaDevice::take_memory`] to the pool.
    pub(super) fn free_memory(&self, pointer: u64, bytes: usize) {
        lock(&self.pool).give_back(pointer, bytes);
    }

    /// Adds `change` to the number of bytes of pinned host memory.
    pub(super) fn count_host_bytes(&self, change: isize) {
        self.host_bytes.fetch_add(change as usize, Ordering::Relaxed);
    }

    /// Starts timing each call with events.
    pub fn start_profile(&self) {
        self.profile.start();
    }

    /// Ends the profile, waits for the enqueued work, and returns the milliseconds of each call.
    pub fn take_profile(&self) -> Result<Vec<(Call, f64)>> {
        self.profile.take()
    }

    /// Returns the name of the device for an error message.
    pub(super) fn describe(&self) -> String {
        format!("GPU {} ({})", self.ordinal, self.name())
    }
}

impl Gpu {
    /// Returns the kernel, which is compiled and loaded on first use.
    pub(super) fn function(&self, kernel: &Kernel) -> Result<Function> {
        let module_key = kernel.module();
        let known = self.kernels.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = known.functions.get(&(module_key, kernel.entry)) {
            return Ok(function.clone());
        }
        drop(known);
        let mut kernels = self.kernels.write().unwrap_or_else(PoisonError::into_inner);
        let module = match kernels.modules.get(&module_key) {
            Some(module) => module.clone(),
            None => {
                let (gpu, version) = (&self.context.name, self.context.capability);
                module_key.expect_on(Capability::find(version)?, gpu)?;
                let cubin = self.cubins.get(&module_key)?;
                let module = Arc::new(Module::load(&self.context, &cubin, kernel.source.name)?);
                kernels.modules.insert(module_key, module.clone());
                module
            }
        };
        let function = module.function(kernel.entry)?;
        kernels.functions.insert((module_key, kernel.entry), function.clone());
        Ok(function)
    }

    pub(super) fn with_attention<R>(&self, work: impl FnOnce(&mut Attention) -> Result<R>) -> Result<R> {
        with_attention(&self.attention, &self.context, work)
    }
}

/// Calls `work` with the attention of a device, which is opened on first use.
fn with_attention<R>(
    attention: &Mutex<Option<Attention>>,
    context: &Arc<Context>,
    work: impl FnOnce(&mut Attention) -> Result<R>,
) -> Result<R> {
    let mut attention = lock(attention);
    work(match &mut *attention {
        Some(attention) => attention,
        none => none.insert(Attention::open(context)?),
    })
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}

/// Runs `work` while `setting` is true.
/// The result of [`CudaDevice::batch_invariance`].
pub struct BatchInvariance {
    gpu: Arc<CudaDevice>,
    before: bool,
}

impl Drop for BatchInvariance {
    fn drop(&mut self) {
        self.gpu.is_batch_invariant.store(self.before, Ordering::Relaxed);
    }
}

fn with_set<R>(setting: &AtomicBool, work: impl FnOnce() -> R) -> R {
    let before = setting.swap(true, Ordering::Relaxed);
    let result = work();
    setting.store(before, Ordering::Relaxed);
    result
}

/// Returns the first GPU, which is shared by the tests of the process. Returns `None` if no GPU is available, and prints the reason.
///
/// If `OTTAVA_REQUIRE_GPU` is set and no GPU is available, the test fails: a machine with a GPU cannot skip the test unnoticed.
#[cfg(test)]
pub(crate) fn test_device() -> Option<Arc<CudaDevice>> {
    static DEVICE: std::sync::OnceLock<Result<Arc<CudaDevice>>> = std::sync::OnceLock::new();
    match DEVICE.get_or_init(|| CudaDevice::open(0)) {
        Ok(device) => {
            crate::testing::use_gpu_alone();
            Some(device.clone())
        }
        Err(error) if std::env::var_os("OTTAVA_REQUIRE_GPU").is_some() => panic!("no GPU: {error}"),
        Err(error) => {
            eprintln!("skipped: no GPU: {error}");
            None
        }
    }
}
