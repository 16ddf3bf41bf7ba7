//! Work that is enqueued on a device: kernels, matrix products and attention. A dry run records this work.

use super::buffer::DeviceBuffer;
use super::cublaslt::{GemmPointers, GemmSpec};
use super::cudnn::{AttentionBackward, AttentionForward, AttentionPass, AttentionShape, AttentionSums, ScoreFactors};
use super::device::{Backend, CudaDevice};
use super::driver::{Scheduling, Start, encode};
use super::dry::DryGpu;
use super::kernel::{Arg, Kernel, Source};
use super::lock::lock;
use super::profile::Call;
use super::trace::{describe_gemm, describe_kernel};
use crate::capability::{Capability, Feature};
use crate::error::Result;
use std::ffi::c_void;
use std::sync::Arc;

/// The scope of attention's scratch memory in a dry run.
const ATTENTION: &str = "scratch of attention";

impl CudaDevice {
    /// Returns whether the GPU has `feature`.
    pub(crate) fn has(&self, feature: Feature) -> Result<bool> {
        Ok(Capability::find(self.capability())?.features.contains(&feature))
    }

    /// Returns whether the GPU has the features that the kernels of `source` need.
    pub(crate) fn runs(&self, source: &Source) -> bool {
        Capability::find(self.capability()).is_ok_and(|known| known.lacks(source.needs).is_empty())
    }

    /// Enqueues a kernel on a grid of `grid` blocks of `block` threads with `shared_bytes` of dynamic shared memory.
    /// The first use compiles and loads the kernel. An empty grid launches nothing.
    ///
    /// # Safety
    /// With its arguments and on this grid, the kernel accesses only memory of live buffers of this device. The types and the order of the arguments
    /// are checked elsewhere. `kernels!` declares them, a test compares the declarations with the kernel files, and a dry run compares launches with
    /// the declarations.
    pub(crate) unsafe fn launch(&self, kernel: &Kernel, grid: [u32; 3], block: u32, shared_bytes: u32) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_as(Scheduling { start: Start::InOrder, cluster: 1 }, kernel, grid, block, shared_bytes) }
    }

    /// Enqueues a kernel like [`CudaDevice::launch`]. Within [`CudaDevice::with_constant_weights`], the kernel may start before the previously
    /// enqueued work has ended.
    ///
    /// # Safety
    /// The conditions of [`CudaDevice::launch`] must hold. The kernel waits (`wait_for_predecessors`) before it writes, and before it reads memory
    /// other than the constants of the pass.
    pub(crate) unsafe fn launch_early(
        &self,
        kernel: &Kernel,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_early_in_clusters(kernel, grid, 1, block, shared_bytes) }
    }

    /// Enqueues a kernel like [`CudaDevice::launch_early`], in clusters of `cluster` blocks along x: 1, or up to 8 on a GPU with
    /// [`Feature::Clusters`].
    ///
    /// # Safety
    /// The conditions of [`CudaDevice::launch_early`] must hold.
    pub(crate) unsafe fn launch_early_in_clusters(
        &self,
        kernel: &Kernel,
        grid: [u32; 3],
        cluster: u32,
        block: u32,
        shared_bytes: u32,
    ) -> Result<()> {
        let starts_early = self.has_constant_weights() && self.has(Feature::EarlyStart)?;
        let start = if starts_early { Start::Early } else { Start::InOrder };
        // SAFETY: the caller's promise.
        unsafe { self.launch_as(Scheduling { start, cluster }, kernel, grid, block, shared_bytes) }
    }

    unsafe fn launch_as(
        &self,
        how: Scheduling,
        kernel: &Kernel,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
    ) -> Result<()> {
        let gpu = match self.backend() {
            Backend::Gpu(_) if grid.contains(&0) => return Ok(()),
            Backend::Gpu(gpu) => gpu,
            Backend::Dry(dry) => {
                kernel.expect_declared();
                dry.trace.add(|| {
                    describe_kernel(kernel, grid, [how.cluster, block], |address| lock(self.pool()).offset(address))
                });
                if !grid.contains(&0) {
                    kernel.module().expect_on(Capability::find(self.capability())?, self.name())?;
                    lock(&dry.workload).add_kernel(kernel.module());
                }
                return Ok(());
            }
        };
        let function = gpu.function(kernel)?;
        let args = &kernel.args;
        let (mut words, mut starts) = (Vec::with_capacity(args.len()), Vec::with_capacity(args.len()));
        for arg in args {
            starts.push(words.len());
            match *arg {
                Arg::Ptr(value) | Arg::U64(value) => words.push(value),
                Arg::I64(value) => words.push(value as u64),
                Arg::I32(value) => words.push(u64::from(value as u32)),
                Arg::U32(value) => words.push(u64::from(value)),
                Arg::F32(value) => words.push(u64::from(value.to_bits())),
                Arg::Map(map) => words.extend(encode(&map)?),
            }
        }
        let mut pointers: Vec<*mut c_void> =
            starts.into_iter().map(|at| std::ptr::from_mut(&mut words[at]).cast()).collect();
        self.profile.time(&gpu.context, Call::Kernel(kernel.entry), || {
            // SAFETY: the caller made this promise, and a little-endian value is at the start of its word.
            unsafe { gpu.context.launch(&function, how, grid, block, shared_bytes, &mut pointers) }
        })
    }

    /// Enqueues `out[M, N] = a · bᵀ`, plus `addend` if `spec` accumulates. The first call with a spec times the algorithms of cuBLASLt and
    /// synchronises.
    ///
    /// # Safety
    /// The addresses name live memory of this device with the sizes of the spec.
    pub(crate) unsafe fn gemm(self: &Arc<Self>, spec: &GemmSpec, pointers: &GemmPointers) -> Result<()> {
        for scales in spec.fp8_scales() {
            Capability::find(self.capability())?.expect_fp8_product(scales)?;
        }
        let Backend::Gpu(gpu) = self.backend() else {
            self.trace(|| describe_gemm(spec));
            return spec.check();
        };
        self.profile.time(&gpu.context, Call::Gemm(*spec), || {
            // SAFETY: the caller's promise.
            unsafe { lock(&gpu.gemms).run(spec, pointers) }
        })
    }

    /// Enqueues causal attention of `q`, `k` and `v`, which writes `o` and `lse`. Scores are multiplied by `scale`. `lse` is F32.
    ///
    /// # Safety
    /// The addresses name live memory of this device with the sizes of the shape, and are multiples of 16.
    pub(crate) unsafe fn attention_forward(
        self: &Arc<Self>,
        shape: &AttentionShape,
        factors: ScoreFactors,
        pointers: &AttentionForward,
    ) -> Result<()> {
        let _scope = self.tracker().map(|tracker| tracker.scope(ATTENTION));
        self.trace(|| format!("attention forward {shape:?} {factors:?}"));
        let workspace = self.attention_workspace(shape, AttentionPass::Forward)?;
        let Backend::Gpu(gpu) = self.backend() else { return Ok(()) };
        gpu.with_attention(|attention| {
            self.profile.time(&gpu.context, Call::AttentionForward, || {
                // SAFETY: the caller made this promise, and the workspace has the requested size.
                unsafe { attention.forward(shape, factors, pointers, workspace.ptr()) }
            })
        })
    }

    /// Enqueues the gradient of [`CudaDevice::attention_forward`] for `d_o`. It writes `dq`, `dk` and `dv` with the layouts of `q`, `k` and `v`.
    ///
    /// # Safety
    /// The conditions of [`CudaDevice::attention_forward`] must hold.
    pub(crate) unsafe fn attention_backward(
        self: &Arc<Self>,
        shape: &AttentionShape,
        factors: ScoreFactors,
        pointers: &AttentionBackward,
    ) -> Result<()> {
        let _scope = self.tracker().map(|tracker| tracker.scope(ATTENTION));
        self.trace(|| format!("attention backward {shape:?} {factors:?}"));
        let workspace = self.attention_workspace(shape, AttentionPass::Backward)?;
        let row_sum = self.alloc(shape.lse_len() * 4)?;
        let dq_sum = self.alloc(shape.sum_bytes())?;
        let (dk_heads, dv_heads) = (self.alloc(shape.heads_bytes())?, self.alloc(shape.heads_bytes())?);
        let Backend::Gpu(gpu) = self.backend() else { return Ok(()) };
        gpu.with_attention(|attention| {
            self.profile.time(&gpu.context, Call::AttentionBackward, || {
                let [rows, dq, dk_heads, dv_heads] =
                    [&row_sum, &dq_sum, &dk_heads, &dv_heads].map(|buffer| buffer.ptr());
                let sums = AttentionSums { rows, dq, dk_heads, dv_heads };
                // SAFETY: the caller made this promise, and the scratch memory has the requested sizes.
                unsafe { attention.backward(shape, factors, pointers, &sums, workspace.ptr()) }
            })
        })
    }

    fn attention_workspace(self: &Arc<Self>, shape: &AttentionShape, pass: AttentionPass) -> Result<DeviceBuffer> {
        self.alloc(match self.backend() {
            Backend::Gpu(gpu) => gpu.with_attention(|attention| attention.prepare(shape, pass))?,
            Backend::Dry(dry) => {
                lock(&dry.workload).add_attention(shape, pass);
                DryGpu::attention_workspace(shape, pass)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::GpuModel;

    #[test]
    fn a_dry_run_records_each_pass_of_attention_once() {
        let gpu = CudaDevice::dry(GpuModel::h200());
        let shape = AttentionShape::fused([1, 64], 2, 2, 32);
        for pass in [AttentionPass::Forward, AttentionPass::Forward, AttentionPass::Backward] {
            gpu.attention_workspace(&shape, pass).unwrap();
        }
        let planned = gpu.workload().unwrap().attention;
        assert_eq!(planned, [(shape, AttentionPass::Forward), (shape, AttentionPass::Backward)]);
        gpu.prepare(gpu.workload().unwrap());
    }
}
