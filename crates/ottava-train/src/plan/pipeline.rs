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
    /// The time that the ranks are idle, divided by their compute time, if all stages take equal time.
    pub bubble: f64,
    /// The most expensive stage, divided by the mean: the factor by which it slows the others.
    pub imbalance: f64,
    /// The stages, in the order of forward.
    pub stages: Vec<StagePlan>,
    /// The ranks, in the order of the pipeline.
    pub ranks: Vec<PipelineRank>,
}

/// A stage of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StagePlan {
    /// The place of its rank in the pipeline.
    pub rank: usize,
    /// The first block, and the first one after it.
    pub blocks: [usize; 2],
    /// Whether it starts with the embedding.
    pub embedding: bool,
    /// Whether it ends with the head.
    pub head: bool,
    /// Its share of the estimated time of all stages.
    pub cost: f64,
}

/// A rank of the pipeline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PipelineRank {
    /// The most micro-batches whose activations it holds at once, each in one of its stages.
    pub in_flight: usize,
    /// The peak of its memory.
    pub peak_bytes: u64,
}

impl PipelinePlan {
    /// What the cost model reads of it.
    pub fn cost(&self) -> PipelineCost {
        PipelineCost { bubble: self.bubble, imbalance: self.imbalance }
    }

    /// The pipeline of `config` for a `model`; `None` without one.
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
