//! The inputs that a run reads before its first step: tokens, tokenizer and model folder.

use super::start::{Resumed, Start, build, find_checkpoint};
use crate::objective::{self, Opening, Rows};
use crate::run::Run;
use ottava_checkpoint::{AdapterFolder, FolderTemplate, Progress, training, verify_model};
use ottava_common::error::{Error, Result};
use ottava_data::{RowShare, Tokenizer, TrainingData};
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::Ranks;
use ottava_recipe::param::Purpose;
use ottava_settings::{ResolvedConfig, RunConfig, WeightInit};
use ottava_tensor::Device;
use std::rc::Rc;

/// The inputs of a run.
pub(super) struct Inputs {
    pub(super) tokenizer: Tokenizer,
    pub(super) data: TrainingData,
    pub(super) template: FolderTemplate,
    pub(super) sizes: DecoderConfig,
}

impl Inputs {
    /// Reads the inputs of a run, which may have `resumed`. One of the `ranks` prepares the tokens, then all read them.
    pub(super) fn read(config: &RunConfig, resumed: Option<&Resumed>, ranks: &Ranks) -> Result<Inputs> {
        let prepared = || -> Result<_> {
            let tokenizer = Tokenizer::load(config.model.tokenizer_path())?;
            let data = config.prepare_data(&tokenizer)?;
            Ok((tokenizer, data))
        };
        let first = ranks.leads().then(prepared).transpose();
        let first = ranks.together("preparing the data", first)?;
        let read = first.map_or_else(prepared, Ok).and_then(|read| Inputs::check(config, resumed, read, ranks));
        let inputs = ranks.together("reading the data", read)?;
        ranks.expect_equal("the key of the data", &inputs.data.key())?;
        ranks.expect_equal("the model", &format!("{:?}", inputs.sizes))?;
        Ok(inputs)
    }

    /// What follows from tokenizer and tokens, checked.
    fn check(
        config: &RunConfig,
        resumed: Option<&Resumed>,
        (tokenizer, data): (Tokenizer, TrainingData),
        ranks: &Ranks,
    ) -> Result<Inputs> {
        if let Some(resumed) = resumed.filter(|resumed| resumed.progress.data != data.key()) {
            return Err(Error::Data(format!(
                "the data or the tokenizer have changed since {} was saved; put them back, or start a new run with `model.path` set to the checkpoint",
                resumed.path.display()
            )));
        }
        if ranks.leads() {
            tracing::info!("{}", tokenizer.describe_edges());
            // Where documents are not cut, the rows of the objective say how many are left out.
            let cuts = config.objective().properties().cuts_documents;
            for set in data.sets.iter().filter(|_| cuts) {
                if let Some(sentence) = set.statistics.describe_fit(&data.layout) {
                    tracing::warn!("{}{sentence}", set.label());
                }
            }
        }
        let mut template =
            FolderTemplate::read(&config.model.path, config.model.tokenizer_path(), tokenizer.eos_ids())?
                .with_chat_template(&config.data.chat.chat_template_path)?;
        template.config = config.model_config(tokenizer.padding_id())?;
        let sizes = config.trained_sizes(&template.config)?;
        tokenizer.check_fits(sizes.vocabulary)?;
        // A checkpoint of adapters has nothing else of the model.
        if let Some(resumed) = resumed.filter(|_| sizes.lora.is_none()) {
            resumed.expect_model(config, &sizes)?;
        }
        Ok(Inputs { tokenizer, data, template, sizes })
    }
}

/// The rows of the run from the place of `progress` on, and the number of its steps. What a `resumed` run still needs of the model that it has started
/// from is computed here, before the model that it resumes takes its memory.
pub(super) fn open_rows(
    config: &ResolvedConfig,
    inputs: &Inputs,
    progress: &Progress,
    resumed: Option<&Resumed>,
    device: &Device,
    ranks: &Rc<Ranks>,
) -> Result<(Box<dyn Rows>, u64)> {
    let run = config.to_run_config();
    let Inputs { data, template, sizes, .. } = inputs;
    let mut state = progress.loader.clone();
    if let Some(Resumed { path, progress }) = resumed
        && !run.has_shares_of(&RunConfig::saved(path, progress)?)
    {
        state.restart_shares();
    }
    let (rank, world) = ranks.rows();
    let share = RowShare { rank, world };
    let opening = Opening { config: &run, model: &template.config, data, state: &state, share };
    let mut rows = objective::of(&run).open(&opening)?;
    let max_steps = max_steps(&run, rows.examples());
    rows.plan_reference(max_steps);
    if resumed.is_some() {
        rows.read_reference(progress.reference.as_deref())?;
        if rows.needs_reference() {
            let start = build_run(config, sizes, device, None, data.max_documents(), ranks);
            let mut start = ranks.together("the model of the start", start)?;
            start.quantize_weights()?;
            rows.compute_reference(&mut start.model, &start.step)?;
        }
    }
    Ok((rows, max_steps))
}

/// Model, optimizer and step, with the weights of the model's folder or of the checkpoint that is `resumed`, and the digest of these weights. Rows
/// hold at most `documents` each, or are one.
fn build_run(
    config: &ResolvedConfig,
    sizes: &DecoderConfig,
    device: &Device,
    resumed: Option<&Resumed>,
    documents: Option<usize>,
    ranks: &Rc<Ranks>,
) -> Result<Run> {
    let (with_lora, ResolvedConfig { run, .. }) = (sizes.lora.is_some(), config);
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
        Run::new(config, sizes, device, weights, ranks.clone())?.with_documents(documents)
    })
}

/// [`build_run`] with the optimizer states and scales of the checkpoint that is `resumed`.
pub(super) fn restored_run(
    config: &ResolvedConfig,
    sizes: &DecoderConfig,
    device: &Device,
    resumed: Option<&Resumed>,
    documents: Option<usize>,
    ranks: &Rc<Ranks>,
) -> Result<Run> {
    let mut run = build_run(config, sizes, device, resumed, documents, ranks)?;
    if let Some(Resumed { path, progress }) = resumed {
        training::restore(path, progress, &mut run.model, &mut *run.optimizer)?;
    }
    Ok(run)
}

/// The whole model of the checkpoint of a run that `start` names, for inference.
pub(super) fn model_of(config: &RunConfig, sizes: &DecoderConfig, device: &Device, start: &Start) -> Result<Decoder> {
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

/// Steps of the run: as many as were asked for, or as its epochs have, each with this many examples.
fn max_steps(config: &RunConfig, examples: f64) -> u64 {
    let t = &config.training;
    let of_epochs = || (examples * t.num_train_epochs / t.sequences() as f64).floor().max(1.0) as u64;
    let max_steps = t.max_steps.unwrap_or_else(of_epochs);
    let shaped = config.schedule(max_steps).warmup_steps + config.lr_scheduler.kind.decay_steps();
    if shaped > max_steps {
        tracing::warn!("warm-up and decay take {shaped} steps and the run has {max_steps}: the schedule is cut short");
    }
    max_steps
}
