//! cuBLASLt: matrix products. The fastest algorithm for each shape is chosen by timing and cached on disk.
//!
//! The library is column-major. A row-major `out[M, N] = a · bᵀ` is its column-major `outᵀ[N, M] = b · aᵀ`, so `b`
//! becomes its first operand and `a` its second.
//!
//! Algorithms are timed once per shape and types. They are timed under load, because the power limit determines which algorithm is fastest in
//! training. Choices are cached by GPU and library version, and choices for known models are in `measured/`. Algorithms with clusters of more than
//! four blocks are left out (`with_small_cluster` in `plan.rs`), because their kernels fail while two processes share a GPU.

mod choices;
mod library;
mod plan;
mod spec;

pub(super) use library::{report, require};
pub(crate) use plan::GemmPointers;
pub use spec::{GemmSpec, Major, ScaleMode};

use super::driver::Context;
use crate::error::{Error, Result};
use choices::{Algorithm, Choices};
use library::{Lt, WORKSPACE};
use plan::{DESC_MULTIPROCESSORS, Plan};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// The alignment of scales in bytes that cuBLASLt 13.1 requires. It refuses an alignment of 4.
const SCALE_ALIGNMENT: u64 = 16;
/// The number of proposals that are timed under load: the fastest of all proposals.
const FINALISTS: usize = 6;
/// The number of times that each finalist is timed under load.
const ROUNDS: usize = 2;
/// The milliseconds of load before the first round. After this time, the power limit determines the clock. The first timing of all proposals counts
/// as load. Because loading kernels interrupts it, at least `SETTLE` milliseconds of uninterrupted load follow.
const WARM_UP: f32 = 80.0;
const SETTLE: f32 = 20.0;
/// The milliseconds of each timing under load.
const TURN: f32 = 12.0;
/// The factor by which a finalist may be slower than the fastest finalist after a round. A slower finalist is not timed again: it could win only if
/// two timings of one algorithm under load differed by more than 10 %.
const HOPELESS: f32 = 1.1;
/// The duration in milliseconds below which products do not load the chip. They are timed with a fixed number of runs.
const SMALL: f32 = 0.05;
const RUNS_OF_SMALL: usize = 5;

/// A product, the alignment of its addresses, and the number of multiprocessors that it leaves to other kernels.
type PlanKey = (GemmSpec, u32, usize);

/// The cuBLASLt library on one device, with its prepared products.
pub(super) struct Gemms {
    library: Lt,
    workspace: u64,
    plans: HashMap<PlanKey, Plan>,
    choices: Choices,
    /// The number of multiprocessors that products leave to other kernels.
    spared: usize,
    /// Whether proposals are timed.
    timed: bool,
}

// SAFETY: handles and descriptors may move between threads. A Mutex guards `Gemms`, and one thread uses it at a time.
unsafe impl Send for Gemms {}

impl Drop for Gemms {
    fn drop(&mut self) {
        // SAFETY: `open` allocated the memory, and freeing it waits for running products. A failure is ignored.
        let _ = unsafe { self.library.context.free(self.workspace) };
    }
}

impl Gemms {
    pub(super) fn open(context: &Arc<Context>) -> Result<Gemms> {
        let library = Lt::open(context)?;
        let choices = Choices::load(&library.api.version_text(), &context.name);
        let Some(workspace) = context.allocate(WORKSPACE)? else {
            let (free, total) = context.memory_info()?;
            return Err(Error::OutOfMemory { requested: WORKSPACE, free, total });
        };
        Ok(Gemms { library, workspace, plans: HashMap::new(), choices, spared: 0, timed: true })
    }

    /// From now on, uses the choices that this program contains, and for other products the library's first working proposal, without timing. Reads and
    /// stores no choice on disk.
    pub(super) fn skip_timing(&mut self) {
        self.timed = false;
    }

    /// Sets the number of multiprocessors that later products leave to kernels of other streams. Returns the previous number.
    pub(super) fn spare(&mut self, multiprocessors: usize) -> usize {
        std::mem::replace(&mut self.spared, multiprocessors)
    }

    /// Enqueues a product. The first call of each spec, alignment and number of spared multiprocessors times the library's proposals.
    ///
    /// # Safety
    /// The pointers must name device memory of the spec's shapes and types.
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

    /// Builds the descriptors and chooses an algorithm: the cached algorithm if the library still accepts it, otherwise the fastest algorithm.
    ///
    /// # Safety
    /// The conditions of [`Gemms::run`] must hold.
    unsafe fn prepare(&mut self, spec: &GemmSpec, alignment: u32, pointers: &GemmPointers) -> Result<Plan> {
        spec.check()?;
        let mut plan = Plan::new(&self.library, spec)?;
        if self.spared > 0 {
            let left = self.library.context.sm_count.saturating_sub(self.spared).max(1);
            plan.set(&self.library, DESC_MULTIPROCESSORS, &(left as i32))?;
        }
        plan.set_scales(&self.library, pointers)?;
        let key = Choices::key(spec, alignment, self.spared);
        if let Some(algorithm) = self.choices.get(&key, self.timed)
            && plan.accepts(&self.library, &algorithm)
        {
            plan.algorithm = algorithm;
            return Ok(plan);
        }
        if self.library.context.is_capturing()? {
            return Err(Error::Value(format!("gemm {spec:?} must run once before it is captured in a graph")));
        }
        let proposals = plan.proposals(&self.library, spec, alignment)?;
        // Timing must not accumulate into `out`. The driver provides scratch memory, which is freed after timing. If the driver has too little
        // memory, the first proposal is used: timing never makes a run fail.
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
        let start = Instant::now();
        // SAFETY: the caller made this promise, and a scratch buffer has the size of `out`.
        let (totals, refusal) = unsafe { self.time(&plan, proposals, &target)? };
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

    /// Times `proposals` with the operands of `target`. Returns the total milliseconds of the finalists, and the error of a proposal that did not run.
    ///
    /// # Safety
    /// The conditions of [`Gemms::run`] must hold.
    unsafe fn time(
        &self,
        plan: &Plan,
        proposals: Vec<Algorithm>,
        target: &GemmPointers,
    ) -> Result<(Vec<Timed>, Option<Error>)> {
        // All proposals are timed once. Then the fastest proposals are timed under load in rounds: a drift of the clock affects each finalist alike.
        let _timing = self.library.context.lock_timing();
        let mut refusal = None;
        let mut field = Vec::new();
        for algorithm in proposals {
            // SAFETY: the caller made this promise.
            match unsafe { plan.time(&self.library, &algorithm, target, self.workspace, 1) } {
                Ok(time) => field.push((time, algorithm)),
                Err(error) => refusal = Some(error),
            }
            if !self.timed && !field.is_empty() {
                break;
            }
        }
        // Each proposal ran twice, the first time untimed.
        let load = 2.0 * field.iter().map(|(time, _)| time).sum::<f32>();
        field.sort_by(|a, b| a.0.total_cmp(&b.0));
        field.truncate(FINALISTS);
        // The total milliseconds of the remaining finalists.
        let mut totals: Vec<Timed> = field.iter().map(|(_, algorithm)| (0.0, *algorithm)).collect();
        if let [(time, leader), _, ..] = field.as_slice() {
            let runs = |span: f32| if *time < SMALL { RUNS_OF_SMALL } else { (span / time).ceil() as usize };
            let warm_up = (WARM_UP - load).max(SETTLE);
            // SAFETY: as above.
            unsafe { plan.time(&self.library, leader, target, self.workspace, runs(warm_up))? };
            for _ in 0..ROUNDS {
                for (total, algorithm) in &mut totals {
                    // SAFETY: as above.
                    *total += unsafe { plan.time(&self.library, algorithm, target, self.workspace, runs(TURN))? };
                }
                let fastest = totals.iter().map(|(total, _)| *total).fold(f32::INFINITY, f32::min);
                totals.retain(|(total, _)| *total <= fastest * HOPELESS);
            }
        }
        Ok((totals, refusal))
    }
}

/// The milliseconds of an algorithm.
type Timed = (f32, Algorithm);

/// Memory from the driver that is freed after timing.
struct Scratch<'a> {
    context: &'a Context,
    address: u64,
}

impl Scratch<'_> {
    /// Takes `bytes` of memory. Returns `None` if the driver has too little memory.
    fn take(context: &Context, bytes: usize) -> Result<Option<Scratch<'_>>> {
        Ok(context.allocate(bytes)?.map(|address| Scratch { context, address }))
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        // SAFETY: `take` allocated the memory, and nothing uses it after the synchronisation. A failure is ignored.
        let _ = self.context.synchronize().and_then(|()| unsafe { self.context.free(self.address) });
    }
}

/// Returns the largest power of two that divides each address, in the classes that algorithms distinguish: 256, 16, or less.
fn alignment(addresses: &[u64]) -> u32 {
    let all = addresses.iter().fold(256, |all, address| all | address);
    match 1u64 << all.trailing_zeros() {
        256.. => 256,
        16.. => 16,
        exact => exact as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_fall_into_classes() {
        let cases = [(0x100, 0x200, 256), (0x100, 0x40, 16), (0x100, 0x8, 8), (0x102, 0x100, 2), (0x101, 0x100, 1)];
        for (a, b, expected) in cases {
            assert_eq!(alignment(&[a, b]), expected, "{a:#x} {b:#x}");
        }
    }
}
