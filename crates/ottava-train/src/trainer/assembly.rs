//! Builds a trainer.

use super::Trainer;
use super::building::{open_rows, restored_run};
use super::current_run::CurrentRun;
use super::environment::Environment;
use super::files::RunFiles;
use super::gpu_meter::GpuMeter;
use super::inputs::Inputs;
use super::observers::Observers;
use super::outputs::{History, Outputs, run_record};
use super::rollback_log;
use super::start::{
    Resumed, RunLock, Start, checkpoints, choose_division, expect_shared_folder, find_shared_checkpoint, log_exceptions,
};
use super::stragglers::Stragglers;
use crate::plan::ResolvedRun;
use crate::run::Run;
use crate::tasks::{RunSamples, RunTasks};
use ottava_checkpoint::{Contents, Progress, Saver};
use ottava_common::error::Result;
use ottava_common::interrupt;
use ottava_data::DataState;
use ottava_parallel::Ranks;
use ottava_parallel::optim::LossScale;
use ottava_sentinel::SentinelState;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_tensor::comm::Group;
use std::rc::Rc;
use std::time::Instant;

impl Trainer {
    /// Prepares a run: data, model and optimizer, and their state if the run is resumed.
    pub fn new(config: RunConfig, device: &Device, start: &Start) -> Result<Trainer> {
        Trainer::shared(config, device, start, Group::solo(), None)
    }

    /// Prepares the run on one of several ranks. All ranks call it with equal settings. Rank 0 writes the run's files, into the folder of `lock` if
    /// this folder is already locked.
    ///
    /// If a rank cannot start, all ranks return an error: this rank returns its own error, and the other ranks return a message that names it.
    pub fn shared(
        mut config: RunConfig,
        device: &Device,
        start: &Start,
        world: Group,
        lock: Option<RunLock>,
    ) -> Result<Trainer> {
        choose_division(&mut config, device, &world)?;
        let shape = config.parallel.mesh(world.size())?;
        let ranks = Ranks::new(world, shape, device)?.sending(config.parallel.communication.activation_dtype);
        let ranks = Rc::new(ranks.with_shard_groups(config.parallel.zero_shard_size)?);
        interrupt::forward_to(ranks.stopper());
        let lock = match lock {
            None if ranks.leads() => RunLock::take(&config.output_dir).map(Some),
            taken => Ok(taken),
        };
        let lock = ranks.together("the run's folder", lock)?;
        expect_shared_folder(&config.output_dir, &ranks)?;
        let resumed = find_shared_checkpoint(&config, start, &ranks)?;
        let saved = resumed.as_ref().map(|resumed| RunConfig::saved(&resumed.path, &resumed.progress)).transpose()?;
        if let Some(kept) = saved.as_ref().and_then(|saved| config.keep_batch(saved, shape.data)) {
            tracing::warn!("{kept}");
        }
        let resolved = resolve(config, device, &ranks)?;
        let config = resolved.config.to_run_config();
        // The names of the casts of the resumed run, which had the same settings.
        let mut saved_casts = None;
        if let (Some(Resumed { progress, .. }), Some(saved)) = (&resumed, saved) {
            for (key, before, now) in config.check_resume(&saved)? {
                tracing::warn!("`{key}` was {before} when the checkpoint was saved, and is {now} from here on");
            }
            saved_casts = (saved.precision == config.precision).then(|| progress.scaling_slots.clone());
        }
        let trainer = Inputs::read(&config, resumed.as_ref(), &ranks).and_then(|inputs| {
            let (resolved, device) = (resolved.clone(), device.clone());
            let environment = Environment { config, resolved, device, ranks, inputs };
            Trainer::assemble(environment, resumed, saved_casts, lock)
        });
        trainer.map_err(|error| resolved.explain(error))
    }

    /// Builds the model, the optimizer and the step, and opens the run's files.
    fn assemble(
        environment: Environment,
        mut resumed: Option<Resumed>,
        saved_casts: Option<Vec<String>>,
        lock: Option<RunLock>,
    ) -> Result<Trainer> {
        let Environment { config, ranks, .. } = &environment;
        let folder = &config.output_dir;
        let mut progress = first_progress(&environment, resumed.as_ref())?;
        let (rows, max_steps) = open_rows(&environment, &progress, resumed.as_ref())?;
        let tasks = RunTasks::open(config, &environment.inputs.tokenizer);
        let tasks = ranks.together("the tasks of the run", tasks)?;
        let samples = RunSamples::open(config, &environment.inputs.tokenizer);
        let samples = ranks.together("the samples of the run", samples)?;
        let run = restored_run(&environment, resumed.as_ref());
        let mut run = ranks.together("the model", run)?;
        expect_equal_weights(&run, ranks)?;
        if ranks.leads() {
            log_exceptions(&run.model, saved_casts.as_deref());
        }
        run.quantize_weights()?;
        if let Some(scale) = &progress.loss_scale {
            run.step.set_loss_scale(scale.scale)?;
        }
        let saver = new_saver(&environment, &mut run)?;
        // The run's files are changed only below this line.
        let casts = run.step.partition().casts(&mut run.model)?;
        let record = run_record(&environment, &run, max_steps);
        let open = |lock: RunLock| {
            rollback_log::keep_rollbacks(folder, &progress.sentinel.rollbacks)?;
            let files = RunFiles::open(config, lock, resumed.as_mut(), !casts.is_empty())?;
            record.write(folder)?;
            Ok(files)
        };
        let files = ranks.together("the run's files", lock.map(open).transpose())?;
        let (history, saved_at) = (History::read(folder), Instant::now());
        let gpu_meter = GpuMeter::default();
        let stragglers = Stragglers::default();
        let mut outputs = Outputs { saver, memory: None, files, history, record, gpu_meter, stragglers, saved_at };
        outputs.keep_best(progress.best.as_ref(), config);
        progress.scaling_slots = run.step.partition().cast_names(&run.model);
        let observers = Observers::new(config, &progress.alarms, &casts);
        let schedule = config.schedule(max_steps);
        let run = CurrentRun::new(run);
        Ok(Trainer { outputs, run, schedule, rows, tasks, samples, progress, observers, environment })
    }
}

/// Resolves the settings of a run by its plan, with the same result on all ranks, and prepares the device.
fn resolve(mut config: RunConfig, device: &Device, ranks: &Ranks) -> Result<ResolvedRun> {
    let mut plan = || -> Result<ResolvedRun> {
        config.share(ranks.size())?;
        config.resolve_data()?;
        let sizes = config.decoder_config()?;
        config.expect_positions(&sizes)?;
        let resolved = ResolvedRun::new(&config, &sizes, device)?;
        resolved.expect_fit()?;
        Ok(resolved)
    };
    let planned = plan();
    let mut resolved = ranks.together("the plan", planned)?;
    let is_async = resolved.config.async_save;
    // Checkpoints are saved asynchronously on all ranks or on none.
    let all = !ranks.any("a rank whose host has no memory for a snapshot", !is_async)?;
    resolved.config.async_save = all;
    resolved.prepare_device();
    if let Some(choice) = &resolved.choice {
        tracing::info!("{choice}");
    }
    Ok(resolved)
}

/// Returns the progress of a new run, or of the run that continues from the checkpoint `resumed`.
fn first_progress(environment: &Environment, resumed: Option<&Resumed>) -> Result<Progress> {
    let Environment { config, inputs: Inputs { data, .. }, .. } = environment;
    let mut progress = match resumed {
        Some(Resumed { progress, .. }) => progress.clone(),
        None => Progress::start(DataState::start(&data.sets, config.seed)),
    };
    progress.rows.data = data.key();
    progress.config = config.to_toml();
    progress.loss_scale = progress.loss_scale.or(config.precision.loss_scaling().map(LossScale::new));
    if let Some(Resumed { progress: saved, .. }) = resumed {
        progress.sentinel.rollbacks = rollback_log::history(&config.output_dir, saved)?;
        // If the run returned to this checkpoint after it was saved, the run continues after the rows that it had read before the rollback.
        if let Some(rollback) = progress.sentinel.rollbacks.last().filter(|_| progress.sentinel != saved.sentinel) {
            progress.rows.loader = rollback.data.clone();
            progress.rows.unfinished = None;
        }
    }
    end_comparison(&mut progress.sentinel, environment);
    Ok(progress)
}

/// Returns to the recipe if the run is in BF16 because of a metric and compares no metric any more. No evaluation would return it, and weights may not be
/// stored for BF16.
pub(super) fn end_comparison(decisions: &mut SentinelState, environment: &Environment) {
    let is_over = !environment.config.sentinel.compares_metric() && std::mem::take(&mut decisions.high_by_metric);
    if is_over && environment.ranks.leads() {
        tracing::warn!(
            "the run was in BF16 because a metric was worse by the recipe, and `sentinel.sentinel_metric` is now empty: all products by the recipe again"
        );
    }
}

/// Errors on all ranks unless ranks with the same layers have loaded the same weights.
fn expect_equal_weights(run: &Run, ranks: &Ranks) -> Result<()> {
    let parts = ranks.of_parts("digests of the weights that were loaded", &run.weights_digest)?;
    let digest = parts.into_iter().fold(0, u64::wrapping_add);
    ranks.expect_equal("the digest of the weights that were loaded", &format!("{digest:016x}"))
}

/// Makes the saver of a run. If the host has memory for a snapshot, checkpoints are written in the background.
fn new_saver(Environment { config, resolved, device, .. }: &Environment, run: &mut Run) -> Result<Saver> {
    let mut saver = Saver::new(checkpoints(&config.output_dir), config.checkpoint.save_total_limit);
    if resolved.config.async_save {
        let Run { model, optimizer, step, .. } = run;
        let [bytes, ..] = Contents::new(model, &mut **optimizer, step.partition())?.0.snapshot_bytes();
        tracing::info!("host memory for snapshots of checkpoints: {:.2} GiB", bytes as f64 / f64::from(1 << 30));
        saver.write_behind(device, bytes)?;
    }
    Ok(saver)
}
