//! The stages of a pipeline, and the idle time of its schedule.

use super::cost::PipelineCost;
use super::memory::MemoryPlan;
use ottava_common::error::Result;
use ottava_models::Span;
use ottava_parallel::{Schedule, divide};
use ottava_recipe::param::Description;
use ottava_settings::ResolvedConfig;
use serde::Serialize;

/// The pipeline of a run.
#[derive(Clone, Debug, Serialize)]
pub struct PipelinePlan {
    /// The schedule of a step.
    pub schedule: Schedule,
    /// The idle time of the ranks, divided by their compute time, if all stages take equal time.
    pub bubble: f64,
    /// The time of the most expensive stage, divided by the mean of the stages. The other stages are slowed by this factor.
    pub imbalance: f64,
    /// The stages, in the order of forward.
    pub stages: Vec<StagePlan>,
    /// The ranks, in the order of the pipeline.
    pub ranks: Vec<PipelineRank>,
}

/// A stage of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StagePlan {
    /// The place in the pipeline of the rank that runs this stage.
    pub rank: usize,
    /// The number of the first block, and of the first block after this stage.
    pub blocks: [usize; 2],
    /// Whether the stage starts with the embedding.
    pub embedding: bool,
    /// Whether the stage ends with the head.
    pub head: bool,
    /// The stage's share of the estimated time of all stages.
    pub cost: f64,
}

/// A rank of the pipeline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PipelineRank {
    /// The maximum number of micro-batches whose activations the rank holds at once. A micro-batch counts once for each of its stages on this rank.
    pub in_flight: usize,
    /// The peak of memory of the rank.
    pub peak_bytes: u64,
}

impl PipelinePlan {
    /// Returns the properties of the pipeline that the cost model needs.
    pub fn cost(&self) -> PipelineCost {
        PipelineCost { bubble: self.bubble, imbalance: self.imbalance }
    }

    /// Plans the pipeline of `config` for a `model`. Returns `None` without pipeline parallelism.
    pub(super) fn new(
        config: &ResolvedConfig,
        model: &Description,
        memory: &MemoryPlan,
    ) -> Result<Option<PipelinePlan>> {
        let run = &config.run;
        let schedule = run.parallel.schedule(run.training.gradient_accumulation_steps)?;
        if schedule.ranks == 1 {
            return Ok(None);
        }
        let costs = config.layer_costs(model);
        let all = costs.head + costs.blocks.iter().sum::<f64>();
        let stage = |(number, span): (usize, Span)| {
            let blocks: f64 = costs.blocks[span.blocks.clone()].iter().sum();
            StagePlan {
                rank: number % schedule.ranks,
                blocks: [span.blocks.start, span.blocks.end],
                embedding: span.embedding,
                head: span.head,
                cost: (blocks + if span.head { costs.head } else { 0.0 }) / all,
            }
        };
        let stages: Vec<_> = divide(&costs, schedule.all_stages())?.into_iter().enumerate().map(stage).collect();
        let most = stages.iter().map(|stage| stage.cost).fold(0.0, f64::max);
        let rank =
            |(rank, &peak_bytes): (usize, &u64)| PipelineRank { in_flight: schedule.most_in_flight(rank), peak_bytes };
        let ranks = memory.stage_bytes.iter().enumerate().map(rank).collect();
        let (bubble, imbalance) = (schedule.bubble(), most * stages.len() as f64);
        Ok(Some(PipelinePlan { schedule, bubble, imbalance, stages, ranks }))
    }
}
