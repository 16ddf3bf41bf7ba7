//! One GPU: context, memory pool, kernels and libraries. A dry run has no context: calls are checked and memory is counted, nothing is
//! enqueued.

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

/// Loaded modules and their kernels.
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

/// What executes the work of a device.
pub(super) enum Backend {
    /// A GPU of this machine.
    Gpu(Box<Gpu>),
    /// A dry run, which records it.
    Dry(DryGpu),
}

/// State of a GPU of this machine.
pub(super) struct Gpu {
    // Dropped first: its threads use the fields below.
    background: Background,
    cubins: Arc<Cubins>,
    kernels: RwLock<Kernels>,
    pub(super) gemms: Mutex<Gemms>,
    /// Opened by the first attention; nothing else needs cuDNN.
    attention: Arc<Mutex<Option<Attention>>>,
    // Dropped last: the fields above use it.
    pub(super) context: Arc<Context>,
}

impl CudaDevice {
    /// Opens GPU `ordinal` of the visible ones (`CUDA_VISIBLE_DEVICES`).
    ///
    /// Errors: `Error::Library` when the driver, NVRTC or cuBLASLt is missing, `Error::Value` for a GPU that does
    /// not exist. cuDNN is opened by the first attention.
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

    /// A GPU in a dry run: it checks and records calls, and its pool holds addresses without memory.
    pub fn dry(model: GpuModel) -> Arc<CudaDevice> {
        Arc::new(CudaDevice {
            ordinal: 0,
            pool: Mutex::new(Pool::new(Memory::Dry(DryMemory::new(model.memory)), model.memory)),
            model,
            profile: Profile::default(),
            host_bytes: AtomicUsize::new(0),
            library_bytes: AtomicUsize::new(0),
            has_constant_weights: AtomicBool::new(false),
            is_batch_invariant: AtomicBool::new(false),
            backend: Backend::Dry(DryGpu::default()),
        })
    }

    /// The memory accounts of a dry run; `None` on a real GPU.
    pub fn tracker(&self) -> Option<&Arc<MemoryTracker>> {
        self.dry_gpu().map(|dry| &dry.tracker)
    }

    fn dry_gpu(&self) -> Option<&DryGpu> {
        match &self.backend {
            Backend::Gpu(_) => None,
            Backend::Dry(dry) => Some(dry),
        }
    }

    /// Starts a trace of every kernel, product, attention pass, copy and fill of a dry run. A no-op on a real GPU.
    pub fn start_trace(&self) {
        if let Some(dry) = self.dry_gpu() {
            dry.trace.start();
        }
    }

    /// Ends the trace, and returns its lines. A pointer is `*`, with its distance in bytes from the start of its allocation.
    pub fn take_trace(&self) -> Vec<String> {
        self.dry_gpu().map(|dry| dry.trace.take()).unwrap_or_default()
    }

    /// Adds a line to the trace in progress, if there is one.
    pub(super) fn trace(&self, line: impl FnOnce() -> String) {
        if let Some(dry) = self.dry_gpu() {
            dry.trace.add(line);
        }
    }

    /// Kernels and attention passes launched so far in a dry run; `None` on a real GPU.
    pub fn workload(&self) -> Option<Workload> {
        self.dry_gpu().map(|dry| lock(&dry.workload).clone())
    }

    /// Compiles the kernels of `workload` on all cores and plans its attention, in background threads; returns at once. A launch waits
    /// for a compilation in flight. A failed one is repeated by the launch that needs it, which returns the error. A no-op in a dry run.
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

    /// Has matrix products take the library's first working proposal instead of timing all of them: for tests, which then choose alike in
    /// every run. A no-op in a dry run.
    pub fn skip_gemm_timing(&self) {
        if let Some(gpu) = self.gpu() {
            lock(&gpu.gemms).skip_timing();
        }
    }

    /// Runs `work` while collectives or messages of a communicator are in progress: its matrix products leave them the multiprocessors that they
    /// take. Kernels that fill all multiprocessors would not let them start.
    pub fn beside_collectives<R>(&self, work: impl FnOnce() -> R) -> R {
        let Some(gpu) = self.gpu() else { return work() };
        let before = lock(&gpu.gemms).spare(Beside::SPARED);
        let result = work();
        lock(&gpu.gemms).spare(before);
        result
    }

    /// Runs `work`, a pass of inference, in which weights, the indices of the batch, and keys and values of earlier passes are constants.
    /// Kernels may read these while the one before them still runs (`launch_early`). The first kernel of `work` must not start early, so that
    /// all that wrote them has ended by then.
    pub fn with_constant_weights<R>(&self, work: impl FnOnce() -> R) -> R {
        with_set(&self.has_constant_weights, work)
    }

    /// Runs `work`, in which no row of a product and no token of paged attention depends on other rows: kernels are chosen only by what they
    /// have in common. Within it, products of one shape have the same kernel, and paged attention has parts of one length.
    pub fn with_batch_invariance<R>(&self, work: impl FnOnce() -> R) -> R {
        with_set(&self.is_batch_invariant, work)
    }

    /// Whether [`CudaDevice::with_batch_invariance`] is in progress.
    pub(crate) fn is_batch_invariant(&self) -> bool {
        self.is_batch_invariant.load(Ordering::Relaxed)
    }

    /// Whether [`CudaDevice::with_constant_weights`] is in progress.
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

    /// The context of a GPU of this machine.
    pub(super) fn context(&self) -> Option<&Arc<Context>> {
        self.gpu().map(|gpu| &gpu.context)
    }

    /// Properties that a plan needs.
    pub fn model(&self) -> &GpuModel {
        &self.model
    }

    /// Bytes available to tensors: the bytes of the model of GPU, without what libraries have taken since.
    pub fn usable_memory(&self) -> usize {
        self.model.memory.saturating_sub(self.library_bytes.load(Ordering::Relaxed))
    }

    /// Runs `work`, which has a library allocate device memory, and takes that from [`CudaDevice::usable_memory`]. Returns unused memory
    /// of the pool to the driver.
    pub(crate) fn count_library_memory<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.release_memory()?;
        let before = self.memory_info()?.0;
        let done = work()?;
        self.release_memory()?;
        self.library_bytes.fetch_add(before.saturating_sub(self.memory_info()?.0), Ordering::Relaxed);
        Ok(done)
    }

    /// Whether a graph is being captured.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        self.context().map_or(Ok(false), |context| context.is_capturing())
    }

    /// Whether launches should be captured as graphs: not where each launch waits for its end (`CUDA_LAUNCH_BLOCKING`), so
    /// that a fault names its kernel.
    pub fn captures(&self) -> bool {
        self.context().is_none_or(|context| !context.launches_block)
    }

    /// Number of visible GPUs. `Error::Library` without a driver.
    pub fn count() -> Result<usize> {
        driver::device_count()
    }

    /// How GPU `from` reaches the memory of GPU `to`, by their indices among the visible GPUs.
    pub fn peer_link(from: usize, to: usize) -> Result<PeerLink> {
        driver::peer_link(from, to)
    }

    /// Index among the visible GPUs.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The product name, as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.model.name
    }

    /// Compute capability, major and minor; (9, 0) is Hopper.
    pub fn capability(&self) -> (i32, i32) {
        self.model.capability
    }

    /// Number of streaming multiprocessors.
    pub fn sm_count(&self) -> usize {
        self.model.sm_count
    }

    /// The newest CUDA version the driver supports, major and minor.
    pub fn driver_version(&self) -> (i32, i32) {
        driver::cuda_version().unwrap_or_default()
    }

    /// Free and total bytes of device memory.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        lock(&self.pool).backing().memory_info()
    }

    /// Statistics of this process's memory pool.
    pub fn memory(&self) -> MemoryStats {
        lock(&self.pool).stats()
    }

    /// Resets the peak of [`MemoryStats`] to the live bytes.
    pub fn reset_peak_memory(&self) {
        lock(&self.pool).reset_peak();
    }

    /// Returns unused memory to the driver.
    pub fn release_memory(&self) -> Result<()> {
        lock(&self.pool).release_idle()
    }

    /// Bytes of pinned host memory of this device.
    pub fn host_bytes(&self) -> usize {
        self.host_bytes.load(Ordering::Relaxed)
    }

    /// Records an event in the compute stream, for timing.
    pub fn record(&self) -> Result<Event> {
        Event::record(self.context().ok_or_else(|| dry::unsupported("timing"))?)
    }

    /// How long a thread of the host has been waiting for this GPU, the longest; `None` if none waits.
    pub(crate) fn longest_wait(&self) -> Option<Duration> {
        self.context()?.longest_wait()
    }

    /// Joules that the GPU has used since its driver was loaded, a counter that moves every 20 to 100 ms. `None` without NVML, for a GPU that does
    /// not count, and in a dry run.
    pub fn energy(&self) -> Option<f64> {
        self.context().and_then(|context| nvml::energy(context.uuid))
    }

    /// Megahertz at which its multiprocessors run now. `None` without NVML, and in a dry run.
    pub fn clock(&self) -> Option<f64> {
        self.context().and_then(|context| nvml::clock(context.uuid))
    }

    /// Waits for all enqueued work, and returns its error.
    pub fn synchronize(&self) -> Result<()> {
        self.context().map_or(Ok(()), |context| context.synchronize())
    }

    pub(super) fn pool(&self) -> &Mutex<Pool<Memory>> {
        &self.pool
    }

    /// The address of `bytes` that `take` gets from the pool, and their entry in the tracker of a dry run.
    pub(super) fn take_memory(
        &self,
        bytes: usize,
        take: impl FnOnce(&mut Pool<Memory>, usize) -> Result<u64>,
    ) -> Result<(u64, Option<Entry>)> {
        let pointer = take(&mut lock(&self.pool), bytes)?;
        Ok((pointer, self.tracker().map(|tracker| tracker.track(pool::rounded(bytes)))))
    }

    /// Returns memory from [`CudaDevice::take_memory`] to the pool.
    pub(super) fn free_memory(&self, pointer: u64, bytes: usize) {
        lock(&self.pool).give_back(pointer, bytes);
    }

    /// Adds to the bytes of pinned host memory.
    pub(super) fn count_host_bytes(&self, change: isize) {
        self.host_bytes.fetch_add(change as usize, Ordering::Relaxed);
    }

    /// Starts timing every call with events.
    pub fn start_profile(&self) {
        self.profile.start();
    }

    /// Ends the profile, waits, and returns the milliseconds of each call.
    pub fn take_profile(&self) -> Result<Vec<(Call, f64)>> {
        self.profile.take()
    }

    /// The device in an error message.
    pub(super) fn describe(&self) -> String {
        format!("GPU {} ({})", self.ordinal, self.name())
    }
}

impl Gpu {
    /// The kernel, compiled and loaded on first use.
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

/// Gives `work` the attention of a device, opened on first use.
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

/// Runs `work` while `setting` is set.
fn with_set<R>(setting: &AtomicBool, work: impl FnOnce() -> R) -> R {
    let before = setting.swap(true, Ordering::Relaxed);
    let result = work();
    setting.store(before, Ordering::Relaxed);
    result
}

/// The first GPU, the same one for all tests of the process, or `None` with a word about why there is none.
///
/// With `OTTAVA_REQUIRE_GPU` set its absence fails the test, so that a machine with a GPU cannot skip unnoticed.
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
