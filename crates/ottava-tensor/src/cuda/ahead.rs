//! Compiling kernels and planning attention ahead of their first use, in background threads.
//!
//! A first training step launches about 30 kernels. NVRTC needs seconds to compile them one after the other. A dry run lists these kernels before the
//! model is loaded, and background threads compile them on all cores while the model is loaded.
//!
//! A dry run records the kernels and attention passes that it launches (`CudaDevice::workload`). `CudaDevice::prepare` takes this list,
//! compiles its kernels and plans its attention passes in the background. A launch waits for a compilation in progress.

use super::cudnn::{AttentionPass, AttentionShape};
use super::kernel::KernelModule;
use super::lock::lock;
use super::nvrtc::{Compilation, compile};
use super::shipped::pack;
use crate::error::Result;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{JoinHandle, available_parallelism};

/// The kernels and attention passes of a run, in the order of first use. A dry run records them
/// ([`CudaDevice::workload`](super::CudaDevice::workload)), and [`CudaDevice::prepare`](super::CudaDevice::prepare) prepares a real device for them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// The sources to compile, with their macros.
    pub kernels: Vec<KernelModule>,
    /// The attention passes to plan.
    pub(super) attention: Vec<(AttentionShape, AttentionPass)>,
}

impl Workload {
    pub(super) fn add_kernel(&mut self, module: KernelModule) {
        if !self.kernels.contains(&module) {
            self.kernels.push(module);
        }
    }

    /// Adds the kernels and attention passes of `other` that this workload lacks.
    pub fn merge(&mut self, other: &Workload) {
        other.kernels.iter().for_each(|module| self.add_kernel(*module));
        other.attention.iter().for_each(|(shape, pass)| self.add_attention(shape, *pass));
    }

    pub(super) fn add_attention(&mut self, shape: &AttentionShape, pass: AttentionPass) {
        if !self.attention.contains(&(*shape, pass)) {
            self.attention.push((*shape, pass));
        }
    }
}

/// Compiles `modules` for `arch` (such as `sm_90a`) on all cores, or reads their cubins from the disk cache. The results are in the order of
/// `modules`. The errors are the errors of [`compile`].
pub fn compile_all(modules: &[KernelModule], arch: &str) -> Vec<Result<Vec<u8>>> {
    modules.par_iter().map(|module| compile(module, arch)).collect()
}

/// Compiles `modules` for `arch` (such as `sm_90a`) and packs their cubins. If `OTTAVA_KERNELS` names the result during a build, the program contains
/// them.
///
/// The errors are the errors of [`compile`].
pub fn pack_kernels(modules: &[KernelModule], arch: &str) -> Result<Vec<u8>> {
    let cubins = compile_all(modules, arch).into_iter().collect::<Result<Vec<_>>>()?;
    let keys = modules.iter().map(|module| Compilation::new(module, arch).key());
    Ok(pack(keys.zip(cubins)))
}

/// The cubin of one module. The cell is empty until the compilation ends, and holds `None` if the compilation failed.
type Cell = Arc<OnceLock<Option<Vec<u8>>>>;

/// The cubins for one architecture. The thread that asks first for a cubin compiles it, and other threads wait for this compilation.
pub(super) struct Cubins {
    arch: String,
    cells: Mutex<HashMap<KernelModule, Cell>>,
}

impl Cubins {
    pub(super) fn new(arch: String) -> Cubins {
        Cubins { arch, cells: Mutex::default() }
    }

    /// Returns the cubin of `module`. The errors are the errors of [`compile`].
    pub(super) fn get(&self, module: &KernelModule) -> Result<Vec<u8>> {
        self.get_with(module, || compile(module, &self.arch))
    }

    fn get_with(&self, module: &KernelModule, build: impl Fn() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let cell = lock(&self.cells).entry(*module).or_default().clone();
        match cell.get_or_init(|| build().ok()) {
            Some(cubin) => Ok(cubin.clone()),
            // Errors are not stored. Each caller compiles again and gets its own error.
            None => build(),
        }
    }
}

/// One piece of background work.
pub(super) type Task = Box<dyn FnOnce() + Send>;

/// The background threads. Dropping this value skips the tasks that have not started and waits for the running tasks, because the process must not
/// exit while a library is running.
#[derive(Default)]
pub(super) struct Background {
    stopped: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Background {
    /// Starts `tasks` in their order, on as many threads as the machine has cores, and returns at once.
    pub(super) fn start(&self, tasks: Vec<Task>) {
        let cores = available_parallelism().map_or(1, usize::from);
        let count = cores.min(tasks.len());
        let queue = Arc::new(Mutex::new(tasks.into_iter()));
        let work = move |queue: &Mutex<std::vec::IntoIter<Task>>, stopped: &AtomicBool| {
            let next = || lock(queue).next().filter(|_| !stopped.load(Ordering::Relaxed));
            while let Some(task) = next() {
                task();
            }
        };
        lock(&self.threads).extend((0..count).map(|_| {
            let (queue, stopped) = (queue.clone(), self.stopped.clone());
            std::thread::spawn(move || work(&queue, &stopped))
        }));
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        for thread in lock(&self.threads).drain(..) {
            // A thread that panics has printed its message. The launch repeats the work.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernel::Source;
    use crate::error::Error;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    static SOURCE: Source = Source::bare("empty", "");
    const MODULE: KernelModule = KernelModule { source: &SOURCE, defines: &[("X", "f32")] };

    #[test]
    fn a_cubin_in_flight_is_waited_for_and_compiled_once() {
        let (cubins, builds, begun) = (Cubins::new("sm_90a".into()), AtomicUsize::new(0), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                cubins.get_with(&MODULE, || {
                    builds.fetch_add(1, Ordering::Relaxed);
                    begun.wait();
                    std::thread::sleep(Duration::from_millis(50));
                    Ok(vec![1])
                })
            });
            begun.wait();
            let cubin = cubins.get_with(&MODULE, || {
                builds.fetch_add(1, Ordering::Relaxed);
                Ok(vec![2])
            });
            assert_eq!((cubin.expect("a cubin"), builds.load(Ordering::Relaxed)), (vec![1], 1));
        });
        let other = KernelModule { defines: &[("X", "bf16")], ..MODULE };
        assert_eq!(cubins.get_with(&other, || Ok(vec![3])).expect("a cubin"), [3]);
    }

    #[test]
    fn every_caller_gets_the_error_of_a_failed_compilation() {
        let cubins = Cubins::new("sm_90a".into());
        for _ in 0..2 {
            let error = cubins.get_with(&MODULE, || Err(Error::Value("wrong".into()))).expect_err("an error");
            assert_eq!(error.to_string(), "wrong");
        }
    }

    #[test]
    fn dropping_waits_for_tasks_that_began_and_skips_the_rest() {
        let cores = available_parallelism().map_or(1, usize::from);
        let (ended, started) = (Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(cores + 1)));
        let background = Background::default();
        let task = |_| -> Task {
            let (ended, started) = (ended.clone(), started.clone());
            Box::new(move || {
                started.wait();
                std::thread::sleep(Duration::from_millis(50));
                ended.fetch_add(1, Ordering::Relaxed);
            })
        };
        background.start((0..3 * cores).map(task).collect());
        started.wait();
        drop(background);
        assert_eq!(ended.load(Ordering::Relaxed), cores);
    }
}
