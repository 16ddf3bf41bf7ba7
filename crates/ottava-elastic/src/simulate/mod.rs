//! A simulator of a job that loses ranks and hosts. It drives the state machines of this crate with a clock, with failures drawn from rates, and
//! with the times of an [`Inputs`].
//!
//! Events are discrete. Between two failures nothing depends on chance, so training advances in one piece: only the last two snapshots and the newest
//! checkpoint before a failure are told to the state machines, since every snapshot overwrites an older one. The same seed gives the same outcome.

mod advance;
mod clock;
mod formulas;
mod inputs;
mod job;
mod outcome;
mod published;
mod training;

pub use formulas::{Disk, memory_goodput, spares};
pub use inputs::{Cause, Inputs, Saves, Scope, Snapshots, Stragglers, Times};
pub use job::run;
pub use outcome::{Outcome, Spread, Summary};
pub use published::{BROAD_PER_1000_GPU_DAYS, LLAMA_3, Published, per_1000_gpu_days, published};

/// Runs the job of `inputs` with the seeds from 0 to `seeds`, in as many threads as the machine has processors, and summarizes the outcomes.
pub fn run_seeds(inputs: &Inputs, seeds: u64) -> Summary {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64).clamp(1, seeds.max(1));
    let of_thread =
        |thread: u64| (thread..seeds).step_by(threads as usize).map(|seed| (seed, run(inputs, seed))).collect();
    let mut outcomes: Vec<(u64, Outcome)> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || of_thread(thread))).collect();
        let of_threads = running.into_iter().flat_map(|thread| -> Vec<_> { thread.join().expect("a simulation ends") });
        of_threads.collect()
    });
    // Sums of rounded numbers depend on their order.
    outcomes.sort_by_key(|(seed, _)| *seed);
    Summary::new(&outcomes.into_iter().map(|(_, outcome)| outcome).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests;
