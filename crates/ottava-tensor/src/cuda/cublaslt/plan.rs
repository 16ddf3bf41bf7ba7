//! A prepared product: its descriptors, the algorithms that the library proposes for it, and its launch.

use super::choices::Algorithm;
use super::library::{Candidate, Lt, WORKSPACE};
use super::spec::{GemmSpec, Major, ScaleMode};
use crate::cuda::driver::{Event, Handle};
use crate::dtype::DType;
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::ptr::null_mut;

/// The device pointers of one product.
#[derive(Clone, Copy)]
pub(crate) struct GemmPointers {
    pub(crate) a: u64,
    pub(crate) b: u64,
    /// The address of F32 multipliers, a multiple of 16. [`ScaleMode`] says how they are used.
    pub(crate) a_scale: u64,
    pub(crate) b_scale: u64,
    /// The address of the addend, which is read only if the spec accumulates. It may be `out`.
    pub(crate) addend: u64,
    pub(crate) out: u64,
}

const NO_CANDIDATE: Candidate =
    Candidate { algorithm: Algorithm::NONE, workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };

const NOT_SUPPORTED: i32 = 15;
const COMPUTE_32F: i32 = 68;
const DESC_TRANSPOSE_A: i32 = 3;
const DESC_TRANSPOSE_B: i32 = 4;
pub(super) const DESC_MULTIPROCESSORS: i32 = 15;
const DESC_A_SCALE_POINTER: i32 = 17;
const DESC_B_SCALE_POINTER: i32 = 18;
const DESC_FAST_ACCUMULATION: i32 = 25;
const DESC_A_SCALE_MODE: i32 = 31;
const DESC_B_SCALE_MODE: i32 = 32;
const PREFERENCE_WORKSPACE: i32 = 1;
const PREFERENCE_REDUCTIONS: i32 = 3;
/// The split-K reduction in F32. The other schemes round partial sums to the output type.
const REDUCTION_IN_F32: u32 = 2;
const PREFERENCE_ALIGNMENTS: [i32; 4] = [5, 6, 7, 8];
const CONFIG_CLUSTER: i32 = 8;
/// The `cublasLtClusterShape_t` of algorithms for GPUs without clusters.
const CLUSTER_NOT_STATED: u16 = 0;
/// The `cublasLtClusterShape_t` of 2 x 1, 1 x 2, 1 x 1, 4 x 1, 2 x 2 and 1 x 4 blocks.
///
/// Other clusters are used only if the library has no proposal with these clusters. If a product has an addend, kernels of cuBLASLt 13.1 for Hopper
/// with clusters of eight blocks fail when the driver switches the GPU between two processes (scripts/stress_gemm.py).
const SMALL_CLUSTERS: [u16; 6] = [3, 5, 2, 4, 6, 8];
/// The number of heuristic results that are timed once.
const PROPOSALS: usize = 32;

/// Returns the `cudaDataType_t` of an element type that GEMMs accept.
fn cuda_type(dtype: DType) -> Result<i32> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(2),
        DType::BF16 => Ok(14),
        DType::E4M3 => Ok(28),
        DType::E5M2 => Ok(29),
        DType::F64 | DType::E8M0 | DType::U8 | DType::I16 | DType::I32 | DType::I64 => {
            Err(Error::DType { what: "gemm".to_string(), expected: "a type of tensor cores".to_string(), got: dtype })
        }
    }
}

/// A descriptor that is destroyed when this value is dropped.
struct Owned {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> i32,
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the create function that belongs to `destroy` returned the handle, and nothing uses it afterwards.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// One prepared product.
pub(super) struct Plan {
    desc: Owned,
    /// The library's first operand, which is `b`.
    first: Owned,
    second: Owned,
    out: Owned,
    scale: ScaleMode,
    beta: f32,
    pub(super) algorithm: Algorithm,
}

impl Plan {
    pub(super) fn new(lt: &Lt, spec: &GemmSpec) -> Result<Plan> {
        let api = lt.api;
        let mut handle = null_mut();
        // SAFETY: the library writes one handle. Sums are F32, and the factor is F32.
        let status = unsafe { (api.desc_create)(&mut handle, COMPUTE_32F, cuda_type(DType::F32)?) };
        lt.check(status, "cublasLtMatmulDescCreate")?;
        let desc = Owned { handle, destroy: api.desc_destroy };
        let layout = |dtype, rows: usize, columns: usize, stride: usize| {
            let mut handle = null_mut();
            // SAFETY: the library writes one handle.
            let status = unsafe {
                (api.layout_create)(&mut handle, cuda_type(dtype)?, rows as u64, columns as u64, stride as i64)
            };
            lt.check(status, "cublasLtMatrixLayoutCreate")?;
            Ok::<Owned, Error>(Owned { handle, destroy: api.layout_destroy })
        };
        // A contiguous row is a column of the column-major library.
        let operand = |dtype, major, outer, stride| match major {
            Major::K => layout(dtype, spec.k, outer, stride),
            Major::MN => layout(dtype, outer, spec.k, stride),
        };
        let plan = Plan {
            first: operand(spec.b, spec.b_layout, spec.n, spec.ldb)?,
            second: operand(spec.a, spec.a_layout, spec.m, spec.lda)?,
            out: layout(spec.out, spec.n, spec.m, spec.ldc)?,
            desc,
            scale: spec.scale,
            beta: if spec.accumulate { 1.0 } else { 0.0 },
            algorithm: Algorithm::NONE,
        };
        // The library computes [N, K] · [K, M], column-major.
        plan.set(lt, DESC_TRANSPOSE_A, &i32::from(spec.b_layout == Major::K))?;
        plan.set(lt, DESC_TRANSPOSE_B, &i32::from(spec.a_layout == Major::MN))?;
        if spec.a.is_fp8() {
            plan.set(lt, DESC_FAST_ACCUMULATION, &i8::from(spec.fast_accumulation))?;
        }
        // Versions before 12.9 lack the attribute and support only per-tensor scales.
        let [a, b] = spec.scale.of_operands();
        if (a, b) != (0, 0) {
            plan.set(lt, DESC_A_SCALE_MODE, &b)?;
            plan.set(lt, DESC_B_SCALE_MODE, &a)?;
        }
        Ok(plan)
    }

    pub(super) fn set<T: Copy>(&self, lt: &Lt, attribute: i32, value: &T) -> Result<()> {
        // SAFETY: the library copies `size_of::<T>()` bytes.
        let status =
            unsafe { (lt.api.desc_set)(self.desc.handle, attribute, (value as *const T).cast(), size_of::<T>()) };
        lt.check(status, "cublasLtMatmulDescSetAttribute")
    }

    pub(super) fn set_scales(&self, lt: &Lt, pointers: &GemmPointers) -> Result<()> {
        match self.scale {
            ScaleMode::None => Ok(()),
            ScaleMode::PerTensor | ScaleMode::PerRow | ScaleMode::Blocks { .. } => {
                self.set(lt, DESC_A_SCALE_POINTER, &pointers.b_scale)?;
                self.set(lt, DESC_B_SCALE_POINTER, &pointers.a_scale)
            }
        }
    }

    /// Returns whether the library accepts a cached algorithm.
    pub(super) fn accepts(&self, lt: &Lt, algorithm: &Algorithm) -> bool {
        let mut result = NO_CANDIDATE;
        // SAFETY: each descriptor lives. The library reads the algorithm and writes the result.
        let status = unsafe {
            let (first, second, out) = (self.first.handle, self.second.handle, self.out.handle);
            (lt.api.check)(lt.handle, self.desc.handle, first, second, out, out, algorithm, &mut result)
        };
        status == 0 && result.workspace <= WORKSPACE
    }

    /// Returns the library's proposals that compete, best first.
    pub(super) fn proposals(&self, lt: &Lt, spec: &GemmSpec, alignment: u32) -> Result<Vec<Algorithm>> {
        let found = self.heuristics(lt, spec, alignment)?;
        let small: Vec<Algorithm> =
            found.iter().filter_map(|algorithm| self.with_small_cluster(lt, algorithm)).collect();
        Ok(if small.is_empty() { found } else { small })
    }

    /// Returns all proposals of the library, best first.
    fn heuristics(&self, lt: &Lt, spec: &GemmSpec, alignment: u32) -> Result<Vec<Algorithm>> {
        let mut handle = null_mut();
        // SAFETY: the library writes one handle.
        lt.check(unsafe { (lt.api.preference_create)(&mut handle) }, "cublasLtMatmulPreferenceCreate")?;
        let preference = Owned { handle, destroy: lt.api.preference_destroy };
        let (workspace, reductions) = (WORKSPACE, REDUCTION_IN_F32);
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the library copies `bytes` from `value`.
            let status = unsafe { (lt.api.preference_set)(preference.handle, attribute, value, bytes) };
            lt.check(status, "cublasLtMatmulPreferenceSetAttribute")
        };
        set(PREFERENCE_WORKSPACE, (&raw const workspace).cast(), size_of::<usize>())?;
        set(PREFERENCE_REDUCTIONS, (&raw const reductions).cast(), size_of::<u32>())?;
        for attribute in PREFERENCE_ALIGNMENTS {
            set(attribute, (&raw const alignment).cast(), size_of::<u32>())?;
        }
        let (mut found, mut count) = ([NO_CANDIDATE; PROPOSALS], 0);
        // SAFETY: each descriptor lives, and the library writes at most `PROPOSALS` results.
        let status = unsafe {
            let (first, second, out) = (self.first.handle, self.second.handle, self.out.handle);
            let (desc, preference, wanted) = (self.desc.handle, preference.handle, PROPOSALS as i32);
            (lt.api.heuristics)(
                lt.handle,
                desc,
                first,
                second,
                out,
                out,
                preference,
                wanted,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if status == NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        lt.check(status, &format!("cublasLtMatmulAlgoGetHeuristic of {spec:?}"))?;
        let found = found.into_iter().take(count.max(0) as usize).filter(|candidate| candidate.state == 0);
        Ok(found.map(|candidate| candidate.algorithm).collect())
    }

    /// Returns the algorithm if its cluster is one of [`SMALL_CLUSTERS`], otherwise the algorithm with a smaller cluster. Returns `None` if the
    /// library accepts none of the smaller clusters.
    fn with_small_cluster(&self, lt: &Lt, algorithm: &Algorithm) -> Option<Algorithm> {
        if has_small_cluster(lt, algorithm) {
            return Some(*algorithm);
        }
        SMALL_CLUSTERS.into_iter().find_map(|cluster| {
            let mut smaller = *algorithm;
            // SAFETY: the library reads two bytes and changes the algorithm.
            let status = unsafe {
                (lt.api.config_set)(&mut smaller, CONFIG_CLUSTER, (&raw const cluster).cast(), size_of::<u16>())
            };
            (status == 0 && self.accepts(lt, &smaller)).then_some(smaller)
        })
    }

    /// Enqueues the product with `algorithm`.
    ///
    /// # Safety
    /// The conditions of `Gemms::run` must hold.
    pub(super) unsafe fn enqueue(
        &self,
        lt: &Lt,
        algorithm: &Algorithm,
        pointers: &GemmPointers,
        workspace: u64,
    ) -> Result<()> {
        let alpha = 1.0f32;
        lt.context.record_launch("gemm");
        // SAFETY: the caller's promise covers the pointers, and the factors are read before the call returns.
        let status = unsafe {
            (lt.api.matmul)(
                lt.handle,
                self.desc.handle,
                (&raw const alpha).cast(),
                pointers.b,
                self.first.handle,
                pointers.a,
                self.second.handle,
                (&raw const self.beta).cast(),
                pointers.addend,
                self.out.handle,
                pointers.out,
                self.out.handle,
                algorithm,
                workspace,
                WORKSPACE,
                lt.context.stream(),
            )
        };
        if status == 0 { Ok(()) } else { lt.check(status, "cublasLtMatmul") }
    }

    /// Returns the total milliseconds of `runs` runs, after one untimed run.
    ///
    /// # Safety
    /// The conditions of `Gemms::run` must hold.
    pub(super) unsafe fn time(
        &self,
        lt: &Lt,
        algorithm: &Algorithm,
        pointers: &GemmPointers,
        workspace: u64,
        runs: usize,
    ) -> Result<f32> {
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(lt, algorithm, pointers, workspace)? };
        let start = Event::record(&lt.context)?;
        for _ in 0..runs {
            // SAFETY: the caller's promise.
            unsafe { self.enqueue(lt, algorithm, pointers, workspace)? };
        }
        start.milliseconds_until(&Event::record(&lt.context)?)
    }
}

/// Returns whether the algorithm has no clusters or one of [`SMALL_CLUSTERS`].
fn has_small_cluster(lt: &Lt, algorithm: &Algorithm) -> bool {
    let (mut cluster, mut written) = (CLUSTER_NOT_STATED, 0);
    // SAFETY: the library reads the algorithm and writes two bytes and their number.
    let status = unsafe {
        (lt.api.config_get)(algorithm, CONFIG_CLUSTER, (&raw mut cluster).cast(), size_of::<u16>(), &mut written)
    };
    // Versions before 12 have no attribute for clusters.
    status != 0 || cluster == CLUSTER_NOT_STATED || SMALL_CLUSTERS.contains(&cluster)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::cublaslt::Gemms;
    use crate::cuda::device::test_device;

    #[test]
    fn algorithms_have_small_clusters() {
        let Some(gpu) = test_device() else { return };
        let gemms = Gemms::open(gpu.context().expect("a GPU")).expect("cuBLASLt");
        let mut replaced = 0;
        for (m, n, k) in [(240, 960, 576), (20480, 576, 576), (3072, 576, 20480), (8192, 4096, 4096), (64, 4096, 11008)]
        {
            for (dtype, out, accumulate) in [(DType::E4M3, DType::BF16, true), (DType::BF16, DType::F32, false)] {
                let spec = GemmSpec {
                    m,
                    n,
                    k,
                    a: dtype,
                    b: dtype,
                    out,
                    a_layout: Major::K,
                    b_layout: Major::K,
                    lda: k,
                    ldb: k,
                    ldc: n,
                    scale: if dtype.is_fp8() { ScaleMode::PerTensor } else { ScaleMode::None },
                    fast_accumulation: false,
                    accumulate,
                };
                if spec.scale != ScaleMode::None && gpu.capability() < (8, 9) {
                    continue;
                }
                let plan = Plan::new(&gemms.library, &spec).expect("a plan");
                let found = plan.heuristics(&gemms.library, &spec, 256).expect("proposals");
                let used = plan.proposals(&gemms.library, &spec, 256).expect("proposals");
                assert!(!used.is_empty(), "{spec:?}");
                assert!(used.iter().all(|algorithm| has_small_cluster(&gemms.library, algorithm)), "{spec:?}");
                replaced += found.iter().filter(|algorithm| !has_small_cluster(&gemms.library, algorithm)).count();
            }
        }
        assert!(
            replaced > 0 || gpu.capability() != (9, 0),
            "none of these products has a proposal with a large cluster"
        );
    }
}
