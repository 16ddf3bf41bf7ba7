//! The table `[parallel]`: the axes of the ranks, and the ZeRO stage.

use crate::communication::CommunicationConfig;
use ottava_common::error::{Error, Result};
use ottava_parallel::{Schedule, ScheduleKind, Zero};
use ottava_recipe::storage::Gradients;
use ottava_tensor::comm::MeshShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The maximum number of ranks of a job.
const MAX_RANKS: usize = 1 << 16;

/// The `[parallel]` table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelConfig {
    /// Whether a search chooses `data`, `tensor`, `pipeline`, `context`, `expert` and `zero`: the fastest division that fits in memory,
    /// predicted by dry runs and a cost model (docs/parallelism.md). Needs `training.global_batch_size`.
    pub auto: bool,
    /// Data-parallel ranks, which divide the rows of a step; 0 means the number of all ranks divided by the sizes of the axes tensor,
    /// pipeline and context. `ottava plan` plans for the number of ranks in this key.
    pub data: usize,
    /// Tensor-parallel ranks. Each matrix is sharded; each expert of a mixture is on one rank.
    pub tensor: usize,
    /// Pipeline-parallel ranks, which divide the layers into stages balanced by estimated time. Needs `zero` 0 or 1.
    pub pipeline: usize,
    /// Order of forward and backward passes in a pipeline: "1f1b", "gpipe", "interleaved" or "zero-bubble" (docs/parallelism.md).
    pub pipeline_schedule: ScheduleKind,
    /// Stages per pipeline rank: 1, or 2 or more with "interleaved".
    pub pipeline_stages: usize,
    /// Context-parallel ranks, which divide the tokens of a row.
    pub context: usize,
    /// Expert-parallel ranks, which divide the experts of each layer and exchange tokens. The expert axis subdivides data x context
    /// (docs/mixture-of-experts.md).
    pub expert: usize,
    /// ZeRO stage, which selects what is divided among ranks: 0 nothing, 1 master weights and optimizer states, 2 also gradients accumulated
    /// over micro-batches, 3 also weights and their FP8 codes.
    pub zero: Zero,
    /// Ranks that divide with `zero`, such as the ranks of a host; 0 means all ranks of data x context. It divides their number. With fewer
    /// ranks, several groups store the same slices: gathers stay within a group, and gradients of slices are summed over groups once per
    /// step. FSDP calls this HYBRID_SHARD, DeepSpeed `mics_shard_size`.
    pub zero_shard_size: usize,
    /// Steps between comparisons of replicas. With `zero = 0`, ranks compare all weights and optimizer states; otherwise, they compare the
    /// weights and optimizer states of norms and biases, and with `zero_shard_size` the slices that several groups store. They also compare amax and scale of each FP8 cast. A difference ends the job with
    /// exit code 5. 0 turns these comparisons off; loaded weights are always compared once, at the start.
    pub check_replicas: u64,
    /// Steps between searches for slow ranks; 0 turns them off. Each rank times the same products, without other ranks. A warning names a
    /// rank whose time is above `straggler_ratio` times the median of all ranks in three searches in a row.
    pub straggler_steps: u64,
    /// The time of a slow rank's products, divided by the median of all ranks.
    pub straggler_ratio: f64,
    /// How ranks communicate.
    pub communication: CommunicationConfig,
}

impl Default for ParallelConfig {
    fn default() -> ParallelConfig {
        ParallelConfig {
            auto: false,
            data: 0,
            tensor: 1,
            pipeline: 1,
            pipeline_schedule: ScheduleKind::default(),
            pipeline_stages: 1,
            context: 1,
            expert: 1,
            zero: Zero::default(),
            zero_shard_size: 0,
            check_replicas: 100,
            straggler_steps: 0,
            straggler_ratio: 1.3,
            communication: CommunicationConfig::default(),
        }
    }
}

impl ParallelConfig {
    /// Returns the mesh of a job of `ranks` ranks.
    ///
    /// Errors with [`Error::Config`] if `data` contradicts the number of ranks and the other axes, or if the search has not chosen the sizes yet.
    pub fn mesh(&self, ranks: usize) -> Result<MeshShape> {
        if self.auto {
            return Err(Error::Config(
                "`parallel.auto` is true, and only `ottava train` and `ottava plan` search for a division; set it to false".into(),
            ));
        }
        let ParallelConfig { data, tensor, pipeline, context, expert, .. } = *self;
        let data = if data == 0 { ranks / (tensor * pipeline * context).max(1) } else { data };
        let shape = MeshShape { data, context, tensor, pipeline, expert };
        if shape.ranks() == ranks {
            let all = data * context;
            let divisors = [("expert", expert.max(1)), ("zero_shard_size", self.shard_size(all))];
            return match divisors.into_iter().find(|(_, size)| !all.is_multiple_of(*size)) {
                None => Ok(shape),
                Some((key, size)) => Err(Error::Config(format!(
                    "`parallel.{key}` is {size}, and the axes data and context have {all} ranks, which it divides; set it to a divisor of {all}"
                ))),
            };
        }
        let others = tensor * pipeline * context;
        if others > 1 && !ranks.is_multiple_of(others) {
            return Err(Error::Config(format!(
                "the axes of [parallel] other than data take {others} ranks, and {ranks} were started; start a multiple of {others}, with --gpus or --ranks"
            )));
        }
        Err(Error::Config(format!(
            "`parallel.data` is {data}, and {ranks} ranks were started; leave it out, or start as many"
        )))
    }

    /// Returns the number of ranks that divide slices with ZeRO, among `sharing` ranks of data x context.
    pub fn shard_size(&self, sharing: usize) -> usize {
        if self.zero_shard_size == 0 { sharing } else { self.zero_shard_size }
    }

    /// Returns the number of ranks of the planned job.
    pub fn ranks(&self) -> usize {
        self.planned_data() * self.tensor * self.pipeline * self.context
    }

    /// Returns the maximum number of ranks over which a gradient is reduced, like [`Ranks::reducing`](ottava_parallel::Ranks::reducing).
    pub fn reducing(&self) -> usize {
        self.planned_data() * self.context * self.tensor
    }

    /// Returns the size of the data axis of the planned job. If `data` is 0, this is the smallest size at which the size of the expert axis and
    /// `zero_shard_size` divide data x context.
    pub fn planned_data(&self) -> usize {
        // `zero_shard_size` is a multiple of the size of the expert axis.
        let divisor = self.expert.max(self.zero_shard_size);
        let smallest = (1..=divisor).find(|data| (data * self.context).is_multiple_of(divisor));
        if self.data == 0 { smallest.unwrap_or(1) } else { self.data }
    }

    /// Returns a sentence about the first axis without ranks, or with more ranks than a job may have.
    fn axis_problem(&self) -> Option<String> {
        let axes =
            [("tensor", self.tensor), ("pipeline", self.pipeline), ("context", self.context), ("expert", self.expert)];
        if let Some((key, _)) = axes.into_iter().find(|(_, size)| *size == 0) {
            return Some(format!("`parallel.{key}` is 0; an axis has at least one rank, so set it to 1"));
        }
        let sizes =
            [("data", self.data), ("pipeline_stages", self.pipeline_stages), ("zero_shard_size", self.zero_shard_size)];
        if let Some((key, size)) = axes.into_iter().chain(sizes).find(|(_, size)| *size > MAX_RANKS) {
            return Some(format!("`parallel.{key}` is {size}; it is at most {MAX_RANKS}"));
        }
        // Each factor is at most 2^16, so the product is exact.
        let ranks = [self.data.max(1), self.tensor, self.pipeline, self.context].map(|size| size as u128);
        let ranks: u128 = ranks.into_iter().product();
        (ranks > MAX_RANKS as u128)
            .then(|| format!("the axes of [parallel] take {ranks} ranks; a job has at most {MAX_RANKS}"))
    }

    /// Returns why context ranks cannot divide sequences of `max_length` tokens; `None` if they can. Shorter sequences of an evaluation have a
    /// multiple of 16 tokens.
    pub(super) fn context_problem(&self, max_length: usize) -> Option<String> {
        let ranks = self.context;
        match ranks {
            1 => None,
            _ if !(ranks.is_power_of_two() && ranks <= 16) => {
                Some(format!("`parallel.context` is {ranks}; set it to 1, 2, 4, 8 or 16"))
            }
            _ if !max_length.is_multiple_of(ranks) => Some(format!(
                "`data.max_length` is {max_length}, which the {ranks} ranks of `parallel.context` do not divide evenly; set it to a multiple of {ranks}"
            )),
            _ => None,
        }
    }

    /// Returns the schedule of a step with `micro_batches` micro-batches.
    ///
    /// Returns the errors of [`Schedule::check`].
    pub fn schedule(&self, micro_batches: usize) -> Result<Schedule> {
        let ParallelConfig { pipeline: ranks, pipeline_schedule: kind, pipeline_stages: stages, .. } = *self;
        if ranks == 1 {
            return Ok(Schedule::of_one_rank(micro_batches));
        }
        let schedule = Schedule { kind, ranks, stages, micro_batches };
        schedule.check()?;
        Ok(schedule)
    }

    /// Returns a sentence about a `zero_shard_size` that no number of ranks makes possible.
    fn shard_problem(&self) -> Option<String> {
        let (size, expert) = (self.zero_shard_size, self.expert);
        match size {
            0 => None,
            _ if self.auto => Some(
                "`parallel.zero_shard_size` is set, and `parallel.auto` is true, which divides among all ranks of data x context; leave one of them out"
                    .into(),
            ),
            _ if self.zero == Zero::Nothing => Some(format!(
                "`parallel.zero_shard_size` is {size}, and `parallel.zero` is 0, which divides nothing; set `zero` to 1, 2 or 3, or leave `zero_shard_size` out"
            )),
            1 => Some("`parallel.zero_shard_size` is 1, which divides nothing; set `parallel.zero` to 0 instead, or the size to 2 or more".into()),
            _ if !size.is_multiple_of(expert) => Some(format!(
                "`parallel.zero_shard_size` is {size}, and `parallel.expert` is {expert}; a group that divides has each expert, so set the size to a multiple of {expert}"
            )),
            _ => None,
        }
    }

    /// Returns the first conflict of settings, or `None`. `gradients` is the format of stored gradients.
    pub(super) fn problem(&self, gradients: Gradients, scales_loss: bool) -> Option<String> {
        let ParallelConfig { tensor, pipeline, context, expert, zero, .. } = *self;
        if self.auto && ([tensor, pipeline, context, expert] != [1; 4] || zero != Zero::Nothing) {
            return Some(
                "`parallel.auto` is true, which chooses `tensor`, `pipeline`, `context`, `expert` and `zero`; leave them out, or set it to false".into(),
            );
        }
        if let Some(problem) = self.axis_problem() {
            return Some(problem);
        }
        if let Some(problem) = self.shard_problem() {
            return Some(problem);
        }
        if !(self.straggler_ratio > 1.0 && self.straggler_ratio.is_finite()) {
            return Some(format!(
                "`parallel.straggler_ratio` is {}; set it to a number above 1, such as 1.3",
                self.straggler_ratio
            ));
        }
        if self.pipeline_stages == 0 {
            return Some("`parallel.pipeline_stages` is 0; each rank of a pipeline has at least one stage".into());
        }
        if self.pipeline > 1 && self.zero > Zero::OptimizerStates {
            return Some(format!(
                "`parallel.zero` is {}, which reduces gradients in every micro-batch, and a pipeline of {} ranks reduces none before the end of a step; set it to 0 or 1",
                u8::from(self.zero),
                self.pipeline
            ));
        }
        let sends_activations = self.auto || [tensor, pipeline, expert] != [1; 3];
        self.communication.problem(gradients, scales_loss, sends_activations)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_that_do_not_fit_are_refused_by_their_keys() {
        let problem = |config: ParallelConfig| config.problem(Gradients::Float32, false).unwrap_or_default();
        assert_eq!(problem(ParallelConfig { data: 8, ..Default::default() }), "");
        assert_eq!(problem(ParallelConfig { tensor: 2, ..Default::default() }), "");
        assert_eq!(problem(ParallelConfig { expert: 2, ..Default::default() }), "");
        assert_eq!(problem(ParallelConfig { pipeline: 2, zero: Zero::OptimizerStates, ..Default::default() }), "");
        let divided = problem(ParallelConfig { pipeline: 2, zero: Zero::Gradients, ..Default::default() });
        assert!(divided.starts_with("`parallel.zero` is 2, which reduces gradients in every micro-batch"), "{divided}");
        assert!(problem(ParallelConfig { pipeline: 0, ..Default::default() }).starts_with("`parallel.pipeline` is 0;"));
        assert_eq!(problem(ParallelConfig { context: 4, ..Default::default() }), "");
        let of_length = |context, length| {
            ParallelConfig { context, ..Default::default() }.context_problem(length).unwrap_or_default()
        };
        assert_eq!((of_length(1, 13), of_length(4, 20)), (String::new(), String::new()));
        assert_eq!(of_length(3, 12), "`parallel.context` is 3; set it to 1, 2, 4, 8 or 16");
        assert!(of_length(4, 18).starts_with("`data.max_length` is 18, which the 4 ranks"), "{}", of_length(4, 18));
        assert!(problem(ParallelConfig { expert: 0, ..Default::default() }).starts_with("`parallel.expert` is 0;"));
        for size in [65_537, 1 << 31, 1 << 53, (1 << 63) - 1, usize::MAX] {
            let of = ParallelConfig::default();
            assert!(problem(ParallelConfig { data: size, ..of }).starts_with("`parallel.data` is"), "{size}");
            assert!(problem(ParallelConfig { tensor: size, ..of }).starts_with("`parallel.tensor` is"), "{size}");
            assert!(problem(ParallelConfig { pipeline: size, ..of }).starts_with("`parallel.pipeline` is"), "{size}");
            assert!(problem(ParallelConfig { expert: size, ..of }).starts_with("`parallel.expert` is"), "{size}");
        }
        let many = ParallelConfig { data: 1 << 16, tensor: 1 << 16, pipeline: 1 << 16, ..Default::default() };
        assert!(problem(many).contains("take 281474976710656 ranks; a job has at most 65536"), "{}", problem(many));
    }

    #[test]
    fn shard_sizes_that_do_not_fit_are_refused_with_the_remedy() {
        let of = ParallelConfig { zero: Zero::Weights, data: 8, zero_shard_size: 4, ..Default::default() };
        let problem = |config: ParallelConfig| config.problem(Gradients::Float32, false).unwrap_or_default();
        assert_eq!((problem(of), of.mesh(8).unwrap()), (String::new(), MeshShape::of_data(8)));
        assert!(
            problem(ParallelConfig { zero: Zero::Nothing, ..of }).contains("is 4, and `parallel.zero` is 0, which")
        );
        assert!(problem(ParallelConfig { zero_shard_size: 1, ..of }).contains("is 1, which divides nothing"));
        assert!(problem(ParallelConfig { expert: 8, ..of }).contains("set the size to a multiple of 8"));
        assert!(problem(ParallelConfig { zero_shard_size: 1 << 20, ..of }).contains("it is at most 65536"));
        for ratio in [1.0, 0.0, f64::NAN, f64::INFINITY] {
            assert!(problem(ParallelConfig { straggler_ratio: ratio, ..of }).contains("straggler_ratio"), "{ratio}");
        }
        let auto = ParallelConfig { auto: true, zero_shard_size: 4, ..Default::default() };
        assert!(problem(auto).starts_with("`parallel.zero_shard_size` is set, and `parallel.auto` is true"));
        let error = ParallelConfig { zero_shard_size: 3, ..of }.mesh(8).unwrap_err().to_string();
        assert!(error.starts_with("`parallel.zero_shard_size` is 3, and the axes data and context have 8"), "{error}");
        assert_eq!((of.shard_size(8), ParallelConfig::default().shard_size(8)), (4, 8));
        assert_eq!(ParallelConfig { data: 0, context: 2, ..of }.planned_data(), 2);
    }

    #[test]
    fn the_data_axis_has_the_ranks_that_the_others_leave() {
        let of = |data, tensor| ParallelConfig { data, tensor, ..Default::default() };
        assert_eq!(of(0, 1).mesh(6).unwrap(), MeshShape::of_data(6));
        assert_eq!(of(0, 2).mesh(6).unwrap(), MeshShape { tensor: 2, ..MeshShape::of_data(3) });
        assert_eq!((of(3, 2).ranks(), of(0, 1).ranks()), (6, 1));
        let experts = |data, context, expert| ParallelConfig { data, context, expert, ..Default::default() };
        assert_eq!(experts(0, 1, 2).mesh(4).unwrap(), MeshShape { expert: 2, ..MeshShape::of_data(4) });
        assert_eq!((experts(0, 1, 4).ranks(), experts(0, 2, 4).ranks(), experts(8, 1, 4).ranks()), (4, 4, 8));
        let error = experts(0, 1, 4).mesh(6).unwrap_err().to_string();
        assert!(error.starts_with("`parallel.expert` is 4, and the axes data and context have 6 ranks"), "{error}");
        let error = of(0, 4).mesh(6).unwrap_err().to_string();
        assert!(
            error.starts_with("the axes of [parallel] other than data take 4 ranks, and 6 were started"),
            "{error}"
        );
        let error = of(4, 1).mesh(6).unwrap_err().to_string();
        assert_eq!(error, "`parallel.data` is 4, and 6 ranks were started; leave it out, or start as many");
    }
}
