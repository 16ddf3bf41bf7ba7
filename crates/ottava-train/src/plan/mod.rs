//! Plans a run before it starts: casts with their reasons, counts, memory, communication.
//!
//! A plan has no formula for memory. It runs the training code on a device that holds no data (`DryCpu`, or a `CudaDevice` without a context), and
//! reads how much memory this code allocates. So a plan is right for every setting, including settings that are added later. `resolve.rs` resolves
//! `"auto"`, `search.rs` searches the fastest division of the run among ranks, `cost.rs` predicts the time of communication, and `changes.rs`
//! proposes settings for a run that does not fit; `larger.rs` proposes adapters and more GPUs.
//!
//! `ResolvedRun::prepare_device` passes the kernels of the dry run to `CudaDevice::prepare`, which compiles them in the background.

mod attention;
mod changes;
mod communication;
mod cost;
mod experts;
mod gpu;
mod inference;
mod larger;
mod linears;
mod memory;
mod mesh;
mod optimizer;
mod pipeline;
mod resolve;
mod rollouts;
mod search;
#[cfg(test)]
mod tests;
mod timeline;

pub use attention::AttentionPlan;
pub use changes::{Change, Effect, changes};
pub use communication::{CommunicationPlan, UnitPlan};
pub use cost::{Kind, Links, NodeLinks, PipelineCost, PredictedStep, Prediction, Ring, predict};
pub use experts::ExpertsPlan;
pub use gpu::GpuPlan;
pub use inference::{expect_model_fits, expect_random_model_fits, inference_bytes};
pub use linears::LinearPlan;
pub use memory::{MemoryLine, MemoryPlan};
pub use mesh::{AmaxPlan, AxisPlan, MeshPlan};
pub use optimizer::TensorPlan;
pub use pipeline::{PipelinePlan, PipelineRank, StagePlan};
pub use resolve::ResolvedRun;
pub use rollouts::RolloutPlan;
pub use search::{Candidate, Division, Dropped, ParallelSearch, divisions};

use ottava_common::error::Result;
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::param::STEP_RATES;
use ottava_tensor::Device;
use serde::Serialize;

/// The plan of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The number of trained parameters.
    pub parameters: usize,
    /// The number of frozen parameters.
    pub frozen: usize,
    /// The floating-point operations of forward and backward per token.
    pub flops_per_token: f64,
    /// The number of tokens of an optimizer step.
    pub tokens_per_step: u64,
    /// The minimum seconds of a step on Hopper GPUs, without communication. Each GPU is assumed to reach the rate of Llama-2-7B on one H200
    /// ([`STEP_RATES`]), and smaller models take longer. `None` on other devices.
    pub least_step_seconds: Option<f64>,
    /// The kinds of linears.
    pub linears: Vec<LinearPlan>,
    /// A sentence for each reason why linears stay in high precision.
    pub exceptions: Vec<String>,
    /// A sentence about the FP8 codes of the model folder. `None` without adapters, or if the folder has no FP8 codes.
    pub folder_codes: Option<String>,
    /// The kinds of attention layers, each with its backend.
    pub attention: Vec<AttentionPlan>,
    /// The mixtures of experts; `None` if the model has no experts.
    pub experts: Option<ExpertsPlan>,
    /// The generations of reinforcement learning; `None` for another objective.
    pub rollouts: Option<RolloutPlan>,
    /// The trained tensors, each with the optimizer that updates it.
    pub tensors: Vec<TensorPlan>,
    /// A sentence for each `auto` setting, with its resolved value.
    pub choice: Option<String>,
    /// The memory of the run.
    pub memory: MemoryPlan,
    /// The numbers of ranks by axis.
    pub mesh: MeshPlan,
    /// The pipeline; `None` without pipeline parallelism.
    pub pipeline: Option<PipelinePlan>,
    /// The communication of each rank; `None` for one rank.
    pub communication: Option<CommunicationPlan>,
}

impl Plan {
    /// Plans a run of a model of `sizes` on `device`.
    pub fn new(resolved: &ResolvedRun, sizes: &DecoderConfig, device: &Device) -> Result<Plan> {
        let ResolvedRun { config, memory, choice, .. } = resolved;
        let recipe = config.run.recipe_on(device);
        let model = Decoder::describe(sizes, &recipe)?;
        let flops_per_token = model.flops_per_token(config.run.data.max_length);
        let is_hopper = matches!(device, Device::Cuda(gpu) if gpu.model().capability.0 == 9);
        let rate = STEP_RATES[usize::from(recipe.casts.is_none())] * config.run.parallel.ranks() as f64;
        let flops = flops_per_token * config.run.tokens_per_step() as f64 * changes::time_of(config.recompute);
        Ok(Plan {
            parameters: model.parameters,
            frozen: model.frozen,
            flops_per_token,
            least_step_seconds: is_hopper.then_some(flops / rate),
            tokens_per_step: config.run.tokens_per_step(),
            linears: linears::linears(&model, &recipe),
            exceptions: model.exceptions(&recipe),
            folder_codes: linears::folder_codes(&config.run, &recipe)?,
            attention: attention::attention(&model, &recipe, config.run.layout().document_mask, device)?,
            experts: ExpertsPlan::new(&config.run, sizes),
            rollouts: RolloutPlan::new(&config.run, sizes, device)?,
            tensors: optimizer::tensors(config, sizes, device)?,
            choice: choice.clone(),
            memory: memory.clone(),
            mesh: MeshPlan::new(&config.run, sizes, &recipe)?,
            pipeline: PipelinePlan::new(config, &model, memory)?,
            communication: CommunicationPlan::new(config, sizes, device)?,
        })
    }
}
