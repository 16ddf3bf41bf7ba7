//! Builds the rows and the model of a run, for a new run or from a checkpoint.

use super::environment::Environment;
use super::inputs::Inputs;
use super::start::{Resumed, Start, build, find_checkpoint};
use crate::objective::{self, Opening, Rows};
use crate::run::Run;
use ottava_checkpoint::{AdapterFolder, Progress, training, verify_model};
use ottava_common::error::Result;
use ottava_data::RowShare;
use ottava_models::Decoder;
use ottava_recipe::param::Purpose;
use ottava_settings::{ResolvedConfig, RunConfig, WeightInit};

/// Opens the rows of the run at the position of `progress`, and returns them with the number of steps. For a `resumed` run, this first computes what
/// the run still needs from its initial model. The initial model is freed before the resumed model is built.
pub(super) fn open_rows(
    environment: &Environment,
    progress: &Progress,
    resumed: Option<&Resumed>,
) -> Result<(Box<dyn Rows>, u64)> {
    let Environment { config, ranks, inputs: Inputs { data, template, .. }, .. } = environment;
    let mut state = progress.rows.loader.clone();
    if let Some(Resumed { path, progress }) = resumed
        && !config.has_shares_of(&RunConfig::saved(path, progress)?)
    {
        state.restart_shares();
    }
    let (rank, world) = ranks.rows();
    let share = RowShare { rank, world };
    let (step, unfinished) = (progress.step, progress.rows.unfinished.as_ref());
    let model = &template.config;
    let opening = Opening { config, model, data, state: &state, share, ranks, step, unfinished };
    let mut rows = ranks.together("the rows of the run", objective::of(config).open(&opening))?;
    let max_steps = max_steps(config, rows.examples());
    rows.plan_reference(max_steps);
    if resumed.is_some() {
        rows.read_reference(progress.rows.reference.as_deref())?;
        if rows.needs_reference() {
            let mut start = ranks.together("the model of the start", build_run(environment, None))?;
            start.quantize_weights()?;
            rows.compute_reference(&mut start.model, &start.step)?;
        }
    }
    Ok((rows, max_steps))
}

/// Builds the model, the optimizer and the step, with the weights of the model's folder or of the checkpoint `resumed`.
fn build_run(environment: &Environment, resumed: Option<&Resumed>) -> Result<Run> {
    let Environment { resolved, device, ranks, inputs: Inputs { data, sizes, .. }, .. } = environment;
    let (with_lora, ResolvedConfig { run, .. }) = (sizes.lora.is_some(), &resolved.config);
    let init_from = Some(&run.lora.init_from).filter(|path| resumed.is_none() && !path.as_os_str().is_empty());
    if let Some(folder) = init_from {
        verify_model(folder)?;
    }
    let adapter = resumed.map(|resumed| &resumed.path).or(init_from).filter(|_| with_lora);
    let adapter = adapter.map(|folder| AdapterFolder::open(folder)).transpose()?;
    let weights = match (resumed.filter(|_| !with_lora), run.model.init) {
        (Some(resumed), _) => Some(resumed.path.as_path()),
        (None, WeightInit::Pretrained) => {
            verify_model(&run.model.path)?;
            Some(run.model.path.as_path())
        }
        (None, WeightInit::Random) => None,
    };
    build(weights, adapter, run.seed, device, sizes, |weights| {
        Run::new(&resolved.config, sizes, device, weights, ranks.clone())?.with_documents(data.max_documents())
    })
}

/// Builds the run, and restores optimizer states and scales from the checkpoint `resumed`.
pub(super) fn restored_run(environment: &Environment, resumed: Option<&Resumed>) -> Result<Run> {
    let mut run = build_run(environment, resumed)?;
    if let Some(Resumed { path, progress }) = resumed {
        training::restore(path, progress, &mut run.model, &mut *run.optimizer)?;
    }
    Ok(run)
}

/// Loads for inference the whole model of the checkpoint that `start` names.
pub(super) fn model_of(environment: &Environment, start: &Start) -> Result<Decoder> {
    let Environment { config, device, inputs: Inputs { sizes, .. }, .. } = environment;
    let Some(Resumed { path, progress }) = find_checkpoint(config, start)? else {
        unreachable!("a search that finds nothing is an error")
    };
    let (has_lora, base) = (sizes.lora.is_some(), Some(config.model.path.as_path()));
    let base = base.filter(|_| config.model.init == WeightInit::Pretrained);
    let adapter = has_lora.then(|| AdapterFolder::open(&path)).transpose()?;
    let weights = if has_lora { base } else { Some(path.as_path()) };
    let recipe = config.recipe_on(device);
    let mut model = build(weights, adapter, config.seed, device, sizes, |weights| {
        Decoder::new(sizes, &recipe, device, Purpose::Infer, config.data.max_length, weights)
    })?;
    training::restore_scales(&path, &progress, &mut model)?;
    model.quantize_weights()?;
    Ok(model)
}

/// Returns the number of steps of the run: `max_steps` of the settings, or the steps of its epochs if each epoch has this many examples.
fn max_steps(config: &RunConfig, examples: f64) -> u64 {
    let t = &config.training;
    let of_epochs = || (examples * t.num_train_epochs / t.sequences() as f64).floor().max(1.0) as u64;
    let max_steps = t.max_steps.unwrap_or_else(of_epochs);
    if let Some(told) = config.few_steps(examples, max_steps) {
        tracing::warn!("{told}");
    }
    let shaped = config.schedule(max_steps).warmup_steps + config.lr_scheduler.kind.decay_steps();
    if shaped > max_steps {
        tracing::warn!("warm-up and decay take {shaped} steps and the run has {max_steps}: the schedule is cut short");
    }
    let start = config.ema.start;
    if config.ema.decay != 0.0 && start > max_steps {
        tracing::warn!("`ema.start` is {start} and the run has {max_steps} steps: no average of weights begins");
    }
    max_steps
}
