//! cuBLASLt: matrix products. The fastest algorithm of each shape is chosen by timing and cached on disk.
//!
//! The library is column-major. A row-major `out[M, N] = a · bᵀ` is its column-major `outᵀ[N, M] = b · aᵀ`, so `b`
//! becomes its first operand and `a` its second.
//!
//! Algorithms are timed once per shape and types, under load, since the power limit determines which algorithm is fastest in training. Choices are
//! cached by GPU and library version; choices for known models are in `measured/`. Algorithms with clusters of more than four blocks are left out
//! (`with_small_cluster`): their kernels fail while two processes share a GPU.

mod choices;
mod spec;

use super::driver::{Context, Event, Handle, library_error, supported};
use super::load::{CUBLASLT, LibraryReport, Problem, SearchPath, SharedLibrary, dotted, functions};
use crate::dtype::DType;
use crate::error::{Error, Result};
use choices::{Algorithm, Choices};
pub use spec::{GemmSpec, Major, ScaleMode};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Device pointers of one product.
#[derive(Clone, Copy)]
pub(crate) struct GemmPointers {
    pub(crate) a: u64,
    pub(crate) b: u64,
    /// F32 multipliers at multiples of 16, used as the [`ScaleMode`] says.
    pub(crate) a_scale: u64,
    pub(crate) b_scale: u64,
    /// Added if the spec accumulates, else not read; may be `out`.
    pub(crate) addend: u64,
    pub(crate) out: u64,
}

/// An algorithm and what it needs (`cublasLtMatmulHeuristicResult_t`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Candidate {
    algorithm: Algorithm,
    workspace: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

const NO_CANDIDATE: Candidate =
    Candidate { algorithm: Algorithm::NONE, workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };

functions! {
    struct Api {
        version = cublasLtGetVersion() -> usize;
        status_string = cublasLtGetStatusString(i32) -> *const c_char;
        create = cublasLtCreate(*mut Handle) -> i32;
        destroy = cublasLtDestroy(Handle) -> i32;
        desc_create = cublasLtMatmulDescCreate(*mut Handle, i32, i32) -> i32;
        desc_destroy = cublasLtMatmulDescDestroy(Handle) -> i32;
        desc_set = cublasLtMatmulDescSetAttribute(Handle, i32, *const c_void, usize) -> i32;
        layout_create = cublasLtMatrixLayoutCreate(*mut Handle, i32, u64, u64, i64) -> i32;
        layout_destroy = cublasLtMatrixLayoutDestroy(Handle) -> i32;
        preference_create = cublasLtMatmulPreferenceCreate(*mut Handle) -> i32;
        preference_destroy = cublasLtMatmulPreferenceDestroy(Handle) -> i32;
        preference_set = cublasLtMatmulPreferenceSetAttribute(Handle, i32, *const c_void, usize) -> i32;
        heuristics = cublasLtMatmulAlgoGetHeuristic(
            Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut Candidate, *mut i32,
        ) -> i32;
        config_get = cublasLtMatmulAlgoConfigGetAttribute(*const Algorithm, i32, *mut c_void, usize, *mut usize) -> i32;
        config_set = cublasLtMatmulAlgoConfigSetAttribute(*mut Algorithm, i32, *const c_void, usize) -> i32;
        check = cublasLtMatmulAlgoCheck(
            Handle, Handle, Handle, Handle, Handle, Handle, *const Algorithm, *mut Candidate,
        ) -> i32;
        matmul = cublasLtMatmul(
            Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64, Handle,
            *const Algorithm, u64, usize, Handle,
        ) -> i32;
    }
}

const NOT_SUPPORTED: i32 = 15;
const COMPUTE_32F: i32 = 68;
const DESC_TRANSPOSE_A: i32 = 3;
const DESC_TRANSPOSE_B: i32 = 4;
const DESC_MULTIPROCESSORS: i32 = 15;
const DESC_A_SCALE_POINTER: i32 = 17;
const DESC_B_SCALE_POINTER: i32 = 18;
const DESC_FAST_ACCUMULATION: i32 = 25;
const DESC_A_SCALE_MODE: i32 = 31;
const DESC_B_SCALE_MODE: i32 = 32;
const PREFERENCE_WORKSPACE: i32 = 1;
const PREFERENCE_REDUCTIONS: i32 = 3;
/// Split-K reduction in F32; the other schemes round partial sums to the output type.
const REDUCTION_IN_F32: u32 = 2;
const PREFERENCE_ALIGNMENTS: [i32; 4] = [5, 6, 7, 8];
/// Workspace that NVIDIA recommends for Hopper, in bytes.
const WORKSPACE: usize = 32 << 20;
/// Alignment of scales that cuBLASLt 13.1 requires, in bytes; it refuses 4.
const SCALE_ALIGNMENT: u64 = 16;
const CONFIG_CLUSTER: i32 = 8;
/// `cublasLtClusterShape_t` of algorithms for GPUs without clusters.
const CLUSTER_NOT_STATED: u16 = 0;
/// `cublasLtClusterShape_t` of 2 x 1, 1 x 2, 1 x 1, 4 x 1, 2 x 2 and 1 x 4 blocks.
///
/// Other clusters are used only where the library has none of these. With an addend, kernels of cuBLASLt 13.1 for Hopper with clusters of eight
/// blocks fail when the driver switches the GPU between two processes (scripts/stress_gemm.py).
const SMALL_CLUSTERS: [u16; 6] = [3, 5, 2, 4, 6, 8];
/// Number of heuristic results that are timed once, and of the fastest of them that are timed under load.
const PROPOSALS: usize = 32;
const FINALISTS: usize = 6;
/// How often each finalist is timed under load.
const ROUNDS: usize = 2;
/// Milliseconds of load before the first round, after which the power limit sets the clock. The first timing of all proposals counts as
/// load; because loading kernels interrupts it, at least `SETTLE` milliseconds follow without a pause.
const WARM_UP: f32 = 80.0;
const SETTLE: f32 = 20.0;
/// Milliseconds of each timing under load.
const TURN: f32 = 12.0;
/// A finalist that is slower than the fastest by more than this factor after a round is not timed again. It could only win if two timings
/// of
/// one algorithm under load differed by more than 10 %.
const HOPELESS: f32 = 1.1;
/// Products shorter than this many milliseconds do not load the chip, and are timed with a fixed number of runs.
const SMALL: f32 = 0.05;
const RUNS_OF_SMALL: usize = 5;

/// `cudaDataType_t` of an element type that GEMMs take.
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

fn opened() -> &'static Result<Api, Problem> {
    static OPENED: OnceLock<Result<Api, Problem>> = OnceLock::new();
    OPENED.get_or_init(|| SharedLibrary::open(&supported(&CUBLASLT), SearchPath::of_process()).and_then(Api::load))
}

/// Opens cuBLASLt. Errors if it is missing.
pub(super) fn require() -> Result<()> {
    api().map(|_| ())
}

fn api() -> Result<&'static Api> {
    opened().as_ref().map_err(|problem| problem.clone().into())
}

impl Api {
    fn version_text(&self) -> String {
        // SAFETY: plain call.
        dotted(unsafe { (self.version)() })
    }
}

pub(super) fn report() -> LibraryReport {
    LibraryReport::new(&CUBLASLT, opened(), |api| &api.library, |api| Some(api.version_text()))
}

/// A product, the alignment of its addresses, and the multiprocessors that it leaves to other kernels.
type PlanKey = (GemmSpec, u32, usize);

/// cuBLASLt on one device, with its prepared products.
pub(super) struct Gemms {
    library: Lt,
    workspace: u64,
    plans: HashMap<PlanKey, Plan>,
    choices: Choices,
    /// The multiprocessors that products leave to other kernels.
    spared: usize,
    /// Whether proposals compete for speed.
    timed: bool,
}

// SAFETY: handles and descriptors may move between threads; `Gemms` is used by one at a time, behind a Mutex.
unsafe impl Send for Gemms {}

impl Drop for Gemms {
    fn drop(&mut self) {
        // SAFETY: allocated in `open`; freeing waits for running products. A failure is ignored.
        let _ = unsafe { self.library.context.free(self.workspace) };
    }
}

/// The library handle and its context.
struct Lt {
    api: &'static Api,
    handle: Handle,
    context: Arc<Context>,
}

impl Drop for Lt {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: created in `Gemms::open`, not used again.
        unsafe { (self.api.destroy)(self.handle) };
    }
}

impl Gemms {
    pub(super) fn open(context: &Arc<Context>) -> Result<Gemms> {
        let api = api()?;
        context.bind()?;
        let mut library = Lt { api, handle: null_mut(), context: context.clone() };
        // SAFETY: the library writes one handle, which `Drop` destroys.
        let status = unsafe { (api.create)(&mut library.handle) };
        library.check(status, "cublasLtCreate")?;
        let choices = Choices::load(&api.version_text(), &context.name);
        let Some(workspace) = context.allocate(WORKSPACE)? else {
            let (free, total) = context.memory_info()?;
            return Err(Error::OutOfMemory { requested: WORKSPACE, free, total });
        };
        Ok(Gemms { library, workspace, plans: HashMap::new(), choices, spared: 0, timed: true })
    }

    /// Takes the library's first working proposal from now on, without timing, and stores no choice.
    pub(super) fn skip_timing(&mut self) {
        self.timed = false;
    }

    /// Sets the number of multiprocessors that later products leave to kernels of other streams. Returns the number before.
    pub(super) fn spare(&mut self, multiprocessors: usize) -> usize {
        std::mem::replace(&mut self.spared, multiprocessors)
    }

    /// Enqueues a product. The first call of each spec, alignment and number of spared multiprocessors times the library's proposals.
    ///
    /// # Safety
    /// The pointers name device memory of the spec's shapes and types.
    pub(super) unsafe fn run(&mut self, spec: &GemmSpec, pointers: &GemmPointers) -> Result<()> {
        let alignment = alignment(&[pointers.a, pointers.b, pointers.addend, pointers.out]);
        if spec.scale != ScaleMode::None {
            for (name, scale) in [("a", pointers.a_scale), ("b", pointers.b_scale)] {
                if scale == 0 || !scale.is_multiple_of(SCALE_ALIGNMENT) {
                    let need = format!("a multiple of {SCALE_ALIGNMENT}");
                    return Err(Error::Value(format!("gemm: the scale of {name} lies at {scale:#x}, expected {need}")));
                }
            }
        }
        self.library.context.bind()?;
        let key = (*spec, alignment, self.spared);
        if !self.plans.contains_key(&key) {
            // SAFETY: the caller's promise.
            let plan = unsafe { self.prepare(spec, alignment, pointers)? };
            self.plans.insert(key, plan);
        }
        let plan = &self.plans[&key];
        plan.set_scales(&self.library, pointers)?;
        // SAFETY: the caller's promise.
        unsafe { plan.enqueue(&self.library, &plan.algorithm, pointers, self.workspace) }
    }

    /// Builds the descriptors and chooses an algorithm: the cached one if the library still accepts it, else the fastest.
    ///
    /// # Safety
    /// As for [`Gemms::run`].
    unsafe fn prepare(&mut self, spec: &GemmSpec, alignment: u32, pointers: &GemmPointers) -> Result<Plan> {
        spec.check()?;
        let mut plan = Plan::new(&self.library, spec)?;
        if self.spared > 0 {
            let left = self.library.context.sm_count.saturating_sub(self.spared).max(1);
            plan.set(&self.library, DESC_MULTIPROCESSORS, &(left as i32))?;
        }
        plan.set_scales(&self.library, pointers)?;
        let key = Choices::key(spec, alignment, self.spared);
        if let Some(algorithm) = self.choices.get(&key)
            && plan.accepts(&self.library, &algorithm)
        {
            plan.algorithm = algorithm;
            return Ok(plan);
        }
        if self.library.context.is_capturing()? {
            return Err(Error::Value(format!("gemm {spec:?} must run once before it is captured in a graph")));
        }
        let proposals = plan.proposals(&self.library, spec, alignment)?;
        // Timing must not accumulate into `out`. The scratch comes from the driver and is freed after timing; if there is none, the first
        // proposal is used, so that timing never makes a run fail.
        let in_place = spec.accumulate && pointers.addend == pointers.out;
        let bytes = spec.m * spec.ldc * spec.out.size();
        let scratch = in_place.then(|| Scratch::take(&self.library.context, bytes)).transpose()?;
        let target = match (&scratch, proposals.as_slice()) {
            (None, _) => *pointers,
            (Some(Some(scratch)), _) => GemmPointers { addend: scratch.address, out: scratch.address, ..*pointers },
            (Some(None), [first, ..]) => {
                tracing::warn!(
                    "{key}: not timed, {bytes} bytes of scratch are not free; the library's first proposal is used"
                );
                plan.algorithm = *first;
                return Ok(plan);
            }
            (Some(None), []) => *pointers,
        };
        // All proposals once, then the fastest under load, in rounds so that a drift of the clock affects all alike.
        let _timing = self.library.context.lock_timing();
        let start = Instant::now();
        let mut refusal = None;
        let mut field = Vec::new();
        for algorithm in proposals {
            // SAFETY: as the caller promised, and a scratch buffer has the size of `out`.
            match unsafe { plan.time(&self.library, &algorithm, &target, self.workspace, 1) } {
                Ok(time) => field.push((time, algorithm)),
                Err(error) => refusal = Some(error),
            }
            if !self.timed && !field.is_empty() {
                break;
            }
        }
        // Each ran twice, once untimed.
        let load = 2.0 * field.iter().map(|(time, _)| time).sum::<f32>();
        field.sort_by(|a, b| a.0.total_cmp(&b.0));
        field.truncate(FINALISTS);
        // Total milliseconds of the remaining finalists.
        let mut totals: Vec<(f32, Algorithm)> = field.iter().map(|(_, algorithm)| (0.0, *algorithm)).collect();
        if let [(time, leader), _, ..] = field.as_slice() {
            let runs = |span: f32| if *time < SMALL { RUNS_OF_SMALL } else { (span / time).ceil() as usize };
            let warm_up = (WARM_UP - load).max(SETTLE);
            // SAFETY: as above.
            unsafe { plan.time(&self.library, leader, &target, self.workspace, runs(warm_up))? };
            for _ in 0..ROUNDS {
                for (total, algorithm) in &mut totals {
                    // SAFETY: as above.
                    *total += unsafe { plan.time(&self.library, algorithm, &target, self.workspace, runs(TURN))? };
                }
                let fastest = totals.iter().map(|(total, _)| *total).fold(f32::INFINITY, f32::min);
                totals.retain(|(total, _)| *total <= fastest * HOPELESS);
            }
        }
        match (totals.iter().min_by(|a, b| a.0.total_cmp(&b.0)), refusal) {
            (Some((_, algorithm)), _) => {
                let times: Vec<f32> = totals.iter().map(|(total, _)| *total).collect();
                tracing::debug!("{key}: chosen in {:.0?}, finalists took {times:?} ms", start.elapsed());
                plan.algorithm = *algorithm;
                if self.timed {
                    self.choices.insert(key, *algorithm);
                }
                Ok(plan)
            }
            (None, Some(error)) => Err(error),
            (None, None) => {
                let hint =
                    if spec.a.is_fp8() { "; for FP8, rows and addresses should be multiples of 16 bytes" } else { "" };
                Err(Error::Value(format!("cuBLASLt has no algorithm for {spec:?} at {alignment}-byte addresses{hint}")))
            }
        }
    }
}

/// Memory from the driver, freed after timing.
struct Scratch<'a> {
    context: &'a Context,
    address: u64,
}

impl Scratch<'_> {
    /// `None` if the driver has not enough.
    fn take(context: &Context, bytes: usize) -> Result<Option<Scratch<'_>>> {
        Ok(context.allocate(bytes)?.map(|address| Scratch { context, address }))
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated in `take`, unused after the synchronisation. A failure is ignored.
        let _ = self.context.synchronize().and_then(|()| unsafe { self.context.free(self.address) });
    }
}

impl Lt {
    fn check(&self, status: i32, call: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant string for any status.
        let text = unsafe { (self.api.status_string)(status) };
        let message = if text.is_null() {
            format!("status {status}")
        } else {
            // SAFETY: not null, and constant.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(library_error(&self.context, CUBLASLT.name, call, message))
    }
}

/// The largest power of two that divides all addresses, in the classes that algorithms distinguish: 256, 16, or less.
fn alignment(addresses: &[u64]) -> u32 {
    let all = addresses.iter().fold(256, |all, address| all | address);
    match 1u64 << all.trailing_zeros() {
        256.. => 256,
        16.. => 16,
        exact => exact as u32,
    }
}

/// A descriptor, destroyed when dropped.
struct Owned {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> i32,
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: created by the function that `destroy` belongs to, and not used again.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// One prepared product.
struct Plan {
    desc: Owned,
    /// The library's first operand: `b`.
    first: Owned,
    second: Owned,
    out: Owned,
    scale: ScaleMode,
    beta: f32,
    algorithm: Algorithm,
}

impl Plan {
    fn new(lt: &Lt, spec: &GemmSpec) -> Result<Plan> {
        let api = lt.api;
        let mut handle = null_mut();
        // SAFETY: the library writes one handle; F32 sums, and an F32 factor.
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
        // A contiguous row is a column for the library.
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
        // Versions before 12.9 lack the attribute, and support per-tensor scales only.
        let [a, b] = spec.scale.of_operands();
        if (a, b) != (0, 0) {
            plan.set(lt, DESC_A_SCALE_MODE, &b)?;
            plan.set(lt, DESC_B_SCALE_MODE, &a)?;
        }
        Ok(plan)
    }

    fn set<T: Copy>(&self, lt: &Lt, attribute: i32, value: &T) -> Result<()> {
        // SAFETY: the library copies `size_of::<T>()` bytes.
        let status =
            unsafe { (lt.api.desc_set)(self.desc.handle, attribute, (value as *const T).cast(), size_of::<T>()) };
        lt.check(status, "cublasLtMatmulDescSetAttribute")
    }

    fn set_scales(&self, lt: &Lt, pointers: &GemmPointers) -> Result<()> {
        match self.scale {
            ScaleMode::None => Ok(()),
            ScaleMode::PerTensor | ScaleMode::PerRow | ScaleMode::Blocks { .. } => {
                self.set(lt, DESC_A_SCALE_POINTER, &pointers.b_scale)?;
                self.set(lt, DESC_B_SCALE_POINTER, &pointers.a_scale)
            }
        }
    }

    /// Whether the library accepts a cached algorithm.
    fn accepts(&self, lt: &Lt, algorithm: &Algorithm) -> bool {
        let mut result = NO_CANDIDATE;
        // SAFETY: all descriptors live; the library reads the algorithm and writes the result.
        let status = unsafe {
            let (first, second, out) = (self.first.handle, self.second.handle, self.out.handle);
            (lt.api.check)(lt.handle, self.desc.handle, first, second, out, out, algorithm, &mut result)
        };
        status == 0 && result.workspace <= WORKSPACE
    }

    /// The library's proposals that compete, best first.
    fn proposals(&self, lt: &Lt, spec: &GemmSpec, alignment: u32) -> Result<Vec<Algorithm>> {
        let found = self.heuristics(lt, spec, alignment)?;
        let small: Vec<Algorithm> =
            found.iter().filter_map(|algorithm| self.with_small_cluster(lt, algorithm)).collect();
        Ok(if small.is_empty() { found } else { small })
    }

    /// All proposals of the library, best first.
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
        // SAFETY: all descriptors live; the library writes at most `PROPOSALS` results.
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

    /// The algorithm, with a smaller cluster if its own is none of [`SMALL_CLUSTERS`]; `None` if the library has none.
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

    /// # Safety
    /// As for [`Gemms::run`].
    unsafe fn enqueue(&self, lt: &Lt, algorithm: &Algorithm, pointers: &GemmPointers, workspace: u64) -> Result<()> {
        let alpha = 1.0f32;
        lt.context.record_launch("gemm");
        // SAFETY: the caller's promise for the pointers; factors are read before the call returns.
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

    /// Milliseconds of `runs` runs, after one untimed run.
    ///
    /// # Safety
    /// As for [`Gemms::run`].
    unsafe fn time(
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

/// Whether the cluster of an algorithm is one of [`SMALL_CLUSTERS`], or it has none.
fn has_small_cluster(lt: &Lt, algorithm: &Algorithm) -> bool {
    let (mut cluster, mut written) = (CLUSTER_NOT_STATED, 0);
    // SAFETY: the library reads the algorithm and writes two bytes and their number.
    let status = unsafe {
        (lt.api.config_get)(algorithm, CONFIG_CLUSTER, (&raw mut cluster).cast(), size_of::<u16>(), &mut written)
    };
    // Versions before 12 know no clusters.
    status != 0 || cluster == CLUSTER_NOT_STATED || SMALL_CLUSTERS.contains(&cluster)
}

#[cfg(test)]
mod tests {
    use super::*;
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

    #[test]
    fn alignments_fall_into_classes() {
        let cases = [(0x100, 0x200, 256), (0x100, 0x40, 16), (0x100, 0x8, 8), (0x102, 0x100, 2), (0x101, 0x100, 1)];
        for (a, b, expected) in cases {
            assert_eq!(alignment(&[a, b]), expected, "{a:#x} {b:#x}");
        }
    }
}
