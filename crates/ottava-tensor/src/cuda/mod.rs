//! CUDA: one device with its context, stream, memory pool, kernels and libraries, found at run time.
//!
//! Nothing here links to CUDA. Each library is opened when first needed and each failure is an
//! [`Error`](crate::Error) that says what is missing. All work of a device goes through one stream, in the order of
//! the calls, but for copies between the two memories (`transfer.rs`). In a dry run a device is all of this but the context: calls are checked, memory is counted, nothing is enqueued.

mod ahead;
mod buffer;
mod cublaslt;
mod cudnn;
mod driver;
mod dry;
mod graph;
mod kernel;
mod load;
mod nvrtc;
mod pinned;
mod pool;
mod profile;
#[cfg(test)]
mod tests;
mod trace;
mod transfer;

pub use ahead::{Workload, compile_all};
pub use buffer::DeviceBuffer;
pub(crate) use cublaslt::GemmPointers;
pub use cublaslt::{GemmSpec, Major, ScaleMode};
pub(crate) use cudnn::{AttentionBackward, AttentionForward};
pub use cudnn::{AttentionShape, plan_attention};
pub use driver::Event;
pub use dry::GpuModel;
pub use graph::Graph;
pub(crate) use kernel::DEFAULT_SHARED_BYTES;
pub use kernel::{Arg, Defines, Kernel, KernelModule, Source};
pub use load::{LIBRARY_PATH_VARIABLE, LibraryReport, inventory};
pub use nvrtc::{CACHE_VARIABLE, arch_of, compile};
pub use pinned::PinnedBuffer;
pub use pool::MemoryStats;
pub use profile::Call;
pub(crate) use transfer::Transfer;

use crate::error::Result;
use crate::ledger::Ledger;
use ahead::{Background, Cubins, Task};
use cublaslt::Gemms;
use cudnn::{Attention, Pass};
use driver::{Context, Function, Module, lock};
use dry::{DryGpu, DryMemory, Memory};
use pool::{Backing, Pool};
use profile::Profile;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// What a dry run calls the memory that attention takes while it runs.
const ATTENTION: &str = "scratch of attention";

/// Modules loaded so far and kernels found in them.
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
    profile: Profile,
    host_bytes: AtomicUsize,
    does: Does,
}

/// What becomes of the work that a device is given.
enum Does {
    Run(Box<Running>),
    /// Nothing.
    Count(DryGpu),
}

/// What runs work on a GPU that is there.
struct Running {
    // First: its threads use what comes below.
    background: Background,
    cubins: Arc<Cubins>,
    kernels: RwLock<Kernels>,
    gemms: Mutex<Gemms>,
    /// Opened by the first attention: nothing else needs cuDNN.
    attention: Arc<Mutex<Option<Attention>>>,
    // Last, so that what uses the context goes first.
    context: Arc<Context>,
}

impl CudaDevice {
    /// Opens GPU `ordinal` of those the driver shows (`CUDA_VISIBLE_DEVICES` chooses and orders them).
    ///
    /// Errors: `Error::Library` when the driver, NVRTC or cuBLASLt is missing, `Error::Value` for a GPU that does
    /// not exist. cuDNN is looked for when attention first runs.
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
            pool: Mutex::new(Pool::new(Memory::Driver(context.clone()))),
            profile: Profile::default(),
            host_bytes: AtomicUsize::new(0),
            does: Does::Run(Box::new(Running {
                background: Background::default(),
                cubins: Arc::new(Cubins::new(arch_of(context.capability))),
                kernels: RwLock::default(),
                gemms,
                attention: Arc::default(),
                context,
            })),
        }))
    }

    /// A GPU that is not there: it takes all work and does nothing, and its pool holds memory that does not exist.
    pub fn dry(model: GpuModel) -> Arc<CudaDevice> {
        Arc::new(CudaDevice {
            ordinal: 0,
            pool: Mutex::new(Pool::new(Memory::Dry(DryMemory::new(model.memory)))),
            model,
            profile: Profile::default(),
            host_bytes: AtomicUsize::new(0),
            does: Does::Count(DryGpu::default()),
        })
    }

    /// Who holds how much of its memory, in a dry run.
    pub fn ledger(&self) -> Option<&Arc<Ledger>> {
        self.dry_gpu().map(|dry| &dry.ledger)
    }

    fn dry_gpu(&self) -> Option<&DryGpu> {
        match &self.does {
            Does::Run(_) => None,
            Does::Count(dry) => Some(dry),
        }
    }

    /// What was launched so far, in a dry run. `None` on a GPU that is there.
    pub fn workload(&self) -> Option<Workload> {
        self.dry_gpu().map(|dry| lock(&dry.workload).clone())
    }

    /// Compiles the kernels of `workload` on all cores and plans its attention, and returns at once: the work goes on in other threads.
    /// A call whose preparation is under way waits for it. A preparation that fails is done again by the call that needs it, which
    /// reports the error. Does nothing in a dry run.
    pub fn prepare(&self, workload: Workload) {
        let Some(running) = self.running() else { return };
        let (attention, context) = (running.attention.clone(), running.context.clone());
        let plan: Task = Box::new(move || {
            for (shape, pass) in &workload.attention {
                if let Err(error) = with_attention(&attention, &context, |attention| attention.prepare(shape, *pass)) {
                    tracing::debug!("attention was not planned ahead: {error}");
                }
            }
        });
        let compile = workload.kernels.into_iter().map(|module| -> Task {
            let cubins = running.cubins.clone();
            Box::new(move || {
                if let Err(error) = cubins.get(&module) {
                    tracing::debug!("{} was not compiled ahead: {error}", module.source.name);
                }
            })
        });
        running.background.start(std::iter::once(plan).chain(compile).collect());
    }

    fn running(&self) -> Option<&Running> {
        match &self.does {
            Does::Run(running) => Some(running),
            Does::Count(_) => None,
        }
    }

    /// The context of a GPU that is there.
    fn context(&self) -> Option<&Arc<Context>> {
        self.running().map(|running| &running.context)
    }

    /// What a plan must know of it.
    pub fn model(&self) -> &GpuModel {
        &self.model
    }

    /// How many GPUs the driver shows. `Error::Library` without a driver.
    pub fn count() -> Result<usize> {
        driver::device_count()
    }

    /// The device's place among those the driver shows.
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

    /// How many blocks of threads can make progress at once: the streaming multiprocessors.
    pub fn sm_count(&self) -> usize {
        self.model.sm_count
    }

    /// The newest CUDA version the driver supports, major and minor.
    pub fn driver_version(&self) -> (i32, i32) {
        driver::cuda_version().unwrap_or_default()
    }

    /// Bytes of device memory that are free for anyone, and bytes in all.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        lock(&self.pool).backing().memory_info()
    }

    /// What this process's pool holds.
    pub fn memory(&self) -> MemoryStats {
        lock(&self.pool).stats()
    }

    /// Starts a new peak of [`MemoryStats`] at what is live now.
    pub fn reset_peak_memory(&self) {
        lock(&self.pool).reset_peak();
    }

    /// Gives memory that no buffer uses back to the driver, as for another process.
    pub fn release_memory(&self) -> Result<()> {
        lock(&self.pool).release_idle()
    }

    /// `bytes` of uninitialised device memory, aligned to 256 bytes at least. `Error::OutOfMemory` when there is none.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Result<DeviceBuffer> {
        let pointer = lock(&self.pool).allocate(bytes)?;
        let entry = self.ledger().map(|ledger| ledger.enter(pool::rounded(bytes)));
        Ok(DeviceBuffer::new(self.clone(), pointer, bytes, entry))
    }

    /// `bytes` of zeros in the host's memory, which kernels read and write over the bus as they do device memory, only slower.
    /// `Error::HostMemory` when there is none.
    pub fn alloc_host(self: &Arc<Self>, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::new(self, bytes)
    }

    /// Bytes of the host's memory that tensors of this device hold.
    pub fn host_bytes(&self) -> usize {
        self.host_bytes.load(Ordering::Relaxed)
    }

    /// Marks the present end of the stream, for timing.
    pub fn record(&self) -> Result<Event> {
        Event::record(self.context().ok_or_else(|| dry::not_there("timing"))?)
    }

    /// Waits until everything enqueued has run, and reports what went wrong in it.
    pub fn synchronize(&self) -> Result<()> {
        self.context().map_or(Ok(()), |context| context.synchronize())
    }

    /// Enqueues a kernel on a grid of `grid` blocks of `block` threads with `shared_bytes` of dynamic shared memory.
    /// The first use compiles and loads it. An empty grid does nothing.
    ///
    /// # Safety
    /// `args` are of the kernel's parameter types in order, and with them, on this grid, the kernel touches only
    /// memory of live buffers of this device.
    pub(crate) unsafe fn launch(
        &self,
        kernel: &Kernel,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        args: &[Arg],
    ) -> Result<()> {
        let running = match &self.does {
            Does::Run(_) if grid.contains(&0) => return Ok(()),
            Does::Run(running) => running,
            Does::Count(dry) => {
                self.trace_kernel(kernel, grid, block, args);
                if !grid.contains(&0) {
                    lock(&dry.workload).add_kernel(kernel.module());
                }
                return Ok(());
            }
        };
        let function = running.function(kernel)?;
        let mut values: Vec<u64> = args.iter().map(|arg| arg.bits()).collect();
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        self.profiled(Call::Kernel(kernel.entry), || {
            // SAFETY: the caller's promise; little-endian values stand at the start of their eight bytes.
            unsafe { running.context.launch(&function, grid, block, shared_bytes, &mut pointers) }
        })
    }

    /// Enqueues `out[M, N] = a · bᵀ`, plus `addend` where `spec` accumulates. The first call of a spec times the library's
    /// algorithms and waits for the device.
    ///
    /// # Safety
    /// The addresses name live memory of this device, as large as the spec makes it.
    pub(crate) unsafe fn gemm(self: &Arc<Self>, spec: &GemmSpec, pointers: &GemmPointers) -> Result<()> {
        let Some(running) = self.running() else {
            self.trace(|| trace::describe_gemm(spec));
            return spec.check();
        };
        self.profiled(Call::Gemm(*spec), || {
            // SAFETY: the caller's promise.
            unsafe { lock(&running.gemms).run(spec, pointers) }
        })
    }

    /// Enqueues causal attention: `o` and `lse` of `q`, `k` and `v`, with scores multiplied by `scale`. BF16, `lse` F32.
    ///
    /// # Safety
    /// The addresses name live memory of this device, as large as the shape makes it, and are multiples of 16.
    pub(crate) unsafe fn attention_forward(
        self: &Arc<Self>,
        shape: &AttentionShape,
        scale: f32,
        pointers: &AttentionForward,
    ) -> Result<()> {
        let _scope = self.ledger().map(|ledger| ledger.scope(ATTENTION));
        self.trace(|| format!("attention forward {shape:?} scale={scale}"));
        let workspace = self.attention_workspace(shape, Pass::Forward)?;
        let Some(running) = self.running() else { return Ok(()) };
        running.with_attention(|attention| {
            self.profiled(Call::AttentionForward, || {
                // SAFETY: the caller's promise, and a workspace of the size asked for.
                unsafe { attention.forward(shape, scale, pointers, workspace.ptr()) }
            })
        })
    }

    /// Enqueues the gradient of [`CudaDevice::attention_forward`]: `dq`, `dk` and `dv` of `d_o`, laid out as `q`, `k`, `v`.
    ///
    /// # Safety
    /// As for [`CudaDevice::attention_forward`].
    pub(crate) unsafe fn attention_backward(
        self: &Arc<Self>,
        shape: &AttentionShape,
        scale: f32,
        pointers: &AttentionBackward,
    ) -> Result<()> {
        let _scope = self.ledger().map(|ledger| ledger.scope(ATTENTION));
        self.trace(|| format!("attention backward {shape:?} scale={scale}"));
        let workspace = self.attention_workspace(shape, Pass::Backward)?;
        let row_sum = self.alloc(shape.lse_len() * 4)?;
        let dq_sum = self.alloc(if shape.deterministic { 0 } else { shape.lse_len() * shape.head_dim * 4 })?;
        let Some(running) = self.running() else { return Ok(()) };
        running.with_attention(|attention| {
            self.profiled(Call::AttentionBackward, || {
                // SAFETY: the caller's promise, and scratch memory of the sizes asked for.
                unsafe { attention.backward(shape, scale, pointers, [row_sum.ptr(), dq_sum.ptr()], workspace.ptr()) }
            })
        })
    }

    fn attention_workspace(self: &Arc<Self>, shape: &AttentionShape, pass: Pass) -> Result<DeviceBuffer> {
        self.alloc(match &self.does {
            Does::Run(running) => running.with_attention(|attention| attention.prepare(shape, pass))?,
            Does::Count(dry) => {
                lock(&dry.workload).add_attention(shape, pass);
                DryGpu::attention_workspace(shape, pass)
            }
        })
    }

    /// Called by a buffer on its way out.
    fn give_back(&self, pointer: u64, bytes: usize) {
        lock(&self.pool).give_back(pointer, bytes);
    }

    /// The device in an error message.
    fn describe(&self) -> String {
        format!("GPU {} ({})", self.ordinal, self.name())
    }
}

impl Running {
    /// The kernel, compiled and loaded on first use.
    fn function(&self, kernel: &Kernel) -> Result<Function> {
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

    fn with_attention<R>(&self, work: impl FnOnce(&mut Attention) -> Result<R>) -> Result<R> {
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

/// The first GPU, the same one for all tests of the process, or `None` with a word about why there is none.
///
/// With `OTTAVA_REQUIRE_GPU` set its absence fails the test, so that a machine with a GPU cannot skip unnoticed.
#[cfg(test)]
pub(crate) fn test_device() -> Option<Arc<CudaDevice>> {
    static DEVICE: std::sync::OnceLock<Result<Arc<CudaDevice>>> = std::sync::OnceLock::new();
    match DEVICE.get_or_init(|| CudaDevice::open(0)) {
        Ok(device) => Some(device.clone()),
        Err(error) if std::env::var_os("OTTAVA_REQUIRE_GPU").is_some() => panic!("no GPU: {error}"),
        Err(error) => {
            eprintln!("skipped: no GPU: {error}");
            None
        }
    }
}
