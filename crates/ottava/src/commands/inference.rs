//! The options that `eval`, `generate`, `chat` and `serve` share, and loading a model.

use super::lora_modules::{LoraModule, OpenModule};
use super::newest::{warn_of_other_base, with_checkpoint};
use super::sampling_flags::SamplingFlags;
use crate::ranks::{Job, Processes, RankArgs, Role};
use clap::Args;
use ottava_checkpoint::{AdapterFolder, Texts, verify_model};
use ottava_common::{Error, Result, interrupt};
use ottava_engine::{Engine, EngineOptions, Request, Sampling, TextRequest};
use ottava_models::{
    Adapters, ConfigFile, Decoder, DecoderConfig, Labels, classifier, decoder_config, labels_of, language_model_config,
};
use ottava_parallel::{LayerAxes, Partition, Ranks, ReduceFormat, Zero};
use ottava_recipe::lora::Lora;
use ottava_recipe::param::Purpose;
use ottava_recipe::{KvCacheDtype, Precision, RecipeName};
use ottava_settings::{DeviceChoice, RunConfig, parse_recipe};
use ottava_tensor::Device;
use ottava_tensor::comm::MeshShape;
use ottava_train::plan::expect_model_fits;
use ottava_train::trainer::{build, log_exceptions};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// The model's recipe, adapter and device.
#[derive(Args)]
pub struct Inference {
    /// The recipe, such as fp8-current; by default the recipe of the run that saved the model, else bf16. Linears that the run kept in high precision
    /// stay in high precision.
    #[arg(long, value_parser = parse_recipe)]
    recipe: Option<RecipeName>,
    /// Override a setting of `[precision]`: `precision.key=VALUE`, or `key=VALUE`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// A PEFT folder with an adapter of the model, or the folder of a run that trained an adapter (its newest checkpoint is used).
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// Where to run: auto, cuda or cpu.
    #[arg(long, default_value = "auto", value_parser = crate::device::parse)]
    device: DeviceChoice,
}

/// The ranks of an inference, which divide the tensors of the model. When it is dropped, this rank leaves the job before it waits for the processes
/// of the other ranks.
pub struct InferenceRanks {
    ranks: Rc<Ranks>,
    device: Device,
    processes: Processes,
}

impl InferenceRanks {
    /// Joins the ranks of `role`. Each rank uses a device of this `choice`.
    pub fn join(role: Role, choice: DeviceChoice) -> Result<InferenceRanks> {
        let Job { processes, local, comm } = role.join(&RunConfig::default(), None)?;
        let device = crate::device::open_of_rank(choice, &local)?;
        let shape = MeshShape { tensor: comm.size(), ..MeshShape::of_data(1) };
        Ok(InferenceRanks { ranks: Rc::new(Ranks::new(comm, shape, &device)?), device, processes })
    }

    /// Waits until all ranks have loaded, and returns what this rank has `loaded`. If a rank failed, errors on all ranks, so no rank sees only a lost
    /// connection.
    pub fn together<T>(&self, loaded: Result<T>) -> Result<T> {
        self.ranks.together("the model", loaded)
    }

    /// Creates an engine for `model` of `folder`, with a KV cache of equal size on all ranks. Logs if activations are scaled per token against the
    /// recipe.
    ///
    /// Errors on all ranks if options or folders differ between ranks. Folders can differ because a run that trains writes new checkpoints.
    pub fn engine(&self, model: Decoder, folder: &Path, mut options: EngineOptions) -> Result<Engine> {
        self.ranks.expect_equal("the model folder", &folder.display().to_string())?;
        let sizes = self.ranks.gather("the size of the KV cache", [options.kv_cache_tokens as f64])?;
        options.kv_cache_tokens =
            sizes.into_iter().map(|[tokens]| tokens as usize).min().expect("this rank has a size");
        self.ranks.expect_equal("the engine configuration", &format!("{options:?}"))?;
        let engine = Engine::new(model, &options)?;
        if engine.scales_by_token() {
            tracing::info!("each token's activations have their own scales, so that no text depends on others");
        }
        Ok(engine)
    }

    /// On rank 0, lets `engine` lead the other ranks and returns it. On other ranks, follows rank 0 until its end and returns `None`.
    pub fn lead(&self, mut engine: Engine) -> Result<Option<Engine>> {
        if self.leads() {
            engine.lead(self.ranks.clone());
            return Ok(Some(engine));
        }
        engine.follow(&self.ranks)?;
        Ok(None)
    }

    /// Lets signals to this process stop all ranks.
    pub fn forward_signals(&self) {
        interrupt::forward_to(self.ranks.stopper());
    }

    /// Returns the processes of the other ranks, to wait for them after [`Engine::finish`].
    pub fn into_processes(self) -> Processes {
        self.processes
    }

    /// Errors on all ranks if they do not have the same `value` of `what`.
    pub fn expect_equal(&self, what: &str, value: &str) -> Result<()> {
        self.ranks.expect_equal(what, value)
    }

    /// Returns the ranks.
    pub fn ranks(&self) -> &Rc<Ranks> {
        &self.ranks
    }

    /// Returns the device of this rank.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether this process prints results.
    pub fn leads(&self) -> bool {
        self.ranks.leads()
    }

    /// Returns how the ranks divide an evaluation of `model`.
    pub fn partition(&self, model: &mut Decoder) -> Result<Partition> {
        Partition::new(model, self.ranks.clone(), Zero::Nothing, ReduceFormat::Stored, false)
    }

    /// Errors if there are several ranks, because `what` requires one.
    pub fn expect_alone(&self, what: &str) -> Result<()> {
        match self.ranks.size() {
            1 => Ok(()),
            ranks => Err(Error::Config(format!(
                "{what} requires one process, but {ranks} ranks were started; leave --gpus and --ranks out"
            ))),
        }
    }

    /// Waits after the last pass until all ranks have finished.
    pub fn finish(self) -> Result<()> {
        self.ranks.finish()?;
        self.processes.wait()
    }
}

/// Sampling settings, and settings that end a text.
#[derive(Args)]
pub struct Draws {
    #[command(flatten)]
    sampling: SamplingFlags,
    /// The seed of the random numbers.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// End the new text before this string; the option may be given several times.
    #[arg(long)]
    stop: Vec<String>,
    /// The type of cached keys and values: auto (the model's type), bfloat16 or fp8.
    #[arg(long, default_value = "auto")]
    kv_cache_dtype: KvCacheDtype,
}

impl Draws {
    /// Takes the sampling parameters that are not on the command line from `base`.
    pub fn start_from(&mut self, base: Sampling) {
        self.sampling.start_from(base);
    }

    /// Builds request `number`, for up to `max_new_tokens` tokens after `prompt`.
    pub fn request(&self, prompt: Vec<u32>, max_new_tokens: usize, number: u64) -> TextRequest {
        let sampling = Sampling { seed: self.seed.wrapping_add(number), ..self.sampling.sampling().clone() };
        let request = Request { prompt, sampling, max_new_tokens, ..Request::default() };
        TextRequest { request, stop: self.stop.clone(), ..TextRequest::default() }
    }

    /// Returns the options of an engine for `model` and its `draft` model. `lengths` are the tokens of each request, completion included, and
    /// `capacity` is the maximum of tokens of a request.
    pub fn options(
        &self,
        (model, draft): (&Decoder, Option<&Decoder>),
        lengths: &[usize],
        capacity: usize,
    ) -> Result<EngineOptions> {
        EngineOptions::for_lengths(model, draft, lengths.iter().copied(), capacity, self.kv_cache_dtype)
    }
}

/// Scales of casts that stay constant.
pub struct StaticScales {
    /// The scale of each cast, by the name of the cast.
    pub scales: BTreeMap<String, f32>,
    /// The linears that stay in BF16.
    pub left: BTreeSet<String>,
}

impl Inference {
    /// Whether an adapter was named.
    pub fn has_adapter(&self) -> bool {
        self.adapter.is_some()
    }

    /// Returns what `read` finds in the folder of the adapter, or else in the `folder` of the model.
    pub fn find<T>(&self, folder: &Path, read: impl Fn(&Path) -> Result<Option<T>>) -> Result<Option<T>> {
        let of_adapter = self.adapter.as_ref().map(|path| with_checkpoint(path, &read)).transpose()?.flatten();
        of_adapter.map_or_else(|| read(folder), |found| Ok(Some(found)))
    }

    /// Computes the adapter in `folder`.
    pub fn set_adapter(&mut self, folder: PathBuf) {
        self.adapter = Some(folder);
    }

    /// Returns the sizes of the model of `config`. Adapters that were trained with new tokens have a larger vocabulary.
    pub fn sizes(&self, config: &ConfigFile) -> Result<DecoderConfig> {
        let sizes = decoder_config(config)?;
        let Some(adapter) = &self.adapter else { return Ok(sizes) };
        let vocabulary = with_checkpoint(adapter, AdapterFolder::open)?.on(sizes.clone()).vocabulary;
        Ok(DecoderConfig { vocabulary, ..sizes })
    }

    /// Returns the tokenizer and the folder of the chat template for the model of `folder`, whose sizes are `sizes`, with the adapter.
    pub fn texts(&self, folder: &Path, sizes: &DecoderConfig) -> Result<Texts> {
        match &self.adapter {
            None => Texts::of(folder, None, sizes.vocabulary),
            Some(adapter) => with_checkpoint(adapter, |own| Texts::of(folder, Some(own), sizes.vocabulary)),
        }
    }

    /// Returns options with the same device, for another folder with its own recipe.
    pub fn of_folder(&self) -> Inference {
        Inference { recipe: None, settings: Vec::new(), adapter: None, device: self.device }
    }

    /// Loads the model of `folder` in another recipe for comparisons. Linears that are slower in FP8 are also cast. `given` are the scales for
    /// fp8-delayed.
    pub fn load_as(
        &self,
        folder: &Path,
        config: &ConfigFile,
        seq_len: usize,
        name: RecipeName,
        given: Option<&StaticScales>,
    ) -> Result<Decoder> {
        let (run, _) = RunConfig::saved_in(folder)?.unwrap_or_default();
        let mut precision = run.with_precision(&self.settings)?.precision;
        precision.exceptions.high_precision_layers.extend(given.iter().flat_map(|given| given.left.iter().cloned()));
        precision.exceptions.skip_slow_linears = false;
        let recipe = Precision { recipe: name, ..precision }.recipe();
        let (device, sizes) = (crate::device::open(self.device)?, language_model_config(config)?);
        expect_model_fits(folder, &sizes, &recipe, &device, seq_len, 1, &[])?;
        let mut model = build(Some(folder), None, 0, &device, &sizes, |weights| {
            Decoder::new(&sizes, &recipe, &device, Purpose::Infer, seq_len, weights)
        })?;
        if let Some(given) = given {
            model.scaling().set_scales(&given.scales, ".input")?;
        }
        model.quantize_weights()?;
        Ok(model)
    }

    /// Loads the model of `folder` with its weights cast, for sequences up to `seq_len`. Each of `ranks` loads its part. Errors if files of a
    /// checkpoint differ from the manifest, and for a reward model.
    pub fn load(&self, folder: &Path, config: &ConfigFile, seq_len: usize, ranks: &InferenceRanks) -> Result<Decoder> {
        self.load_with(language_model_config, folder, config, seq_len, ranks)
    }

    /// Returns the labels of the model of `config`, with its adapter; `None` for a language model.
    pub fn classifier_labels(&self, config: &ConfigFile) -> Result<Option<Labels>> {
        let open = |folder: &Path| AdapterFolder::open(folder)?.labels();
        let of_adapter = self.adapter.as_ref().map(|path| with_checkpoint(path, open)).transpose()?.flatten();
        let own = labels_of(config)?.map(|labels| labels.names.len());
        of_adapter.or(own).map(|count| self.labels(config, count)).transpose()
    }

    /// Returns the labels of the classifier of `config`, with its adapter, which has `count` labels: the labels of `config`, or of the run that has trained
    /// the adapter.
    pub fn labels(&self, config: &ConfigFile, count: usize) -> Result<Labels> {
        if let Some(labels) = labels_of(config)?.filter(|labels| labels.names.len() == count) {
            return Ok(labels);
        }
        let saved = self.adapter.as_ref().map(|path| with_checkpoint(path, RunConfig::saved_in)).transpose()?.flatten();
        let of_run = saved.map(|(run, _)| run.classification).filter(|own| own.label_names.len() == count);
        Ok(of_run.map_or_else(|| Labels::numbered(count), |own| own.labels()))
    }

    /// Joins the ranks that `args` ask for.
    pub fn ranks(&self, args: &RankArgs) -> Result<InferenceRanks> {
        let (role, device) = self.role(args)?;
        InferenceRanks::join(role, device)
    }

    /// Returns the role of this process and the device of its rank. `args` or a launcher determine the number of ranks.
    pub fn role(&self, args: &RankArgs) -> Result<(Role, DeviceChoice)> {
        let (ranks, device) = args.choose(self.device)?;
        Ok((Role::find(ranks)?, device))
    }

    /// Loads a language model or a reward model; otherwise like [`Inference::load`].
    pub fn load_any(
        &self,
        folder: &Path,
        config: &ConfigFile,
        seq_len: usize,
        ranks: &InferenceRanks,
    ) -> Result<Decoder> {
        self.load_with(decoder_config, folder, config, seq_len, ranks)
    }

    fn load_with(
        &self,
        read: fn(&ConfigFile) -> Result<DecoderConfig>,
        folder: &Path,
        config: &ConfigFile,
        seq_len: usize,
        ranks: &InferenceRanks,
    ) -> Result<Decoder> {
        verify_model(folder)?;
        let open = |adapter: &Path| {
            verify_model(adapter)?;
            if ranks.leads() {
                warn_of_other_base(adapter, folder);
            }
            Ok((AdapterFolder::open(adapter)?, RunConfig::saved_in(adapter)?))
        };
        let adapter = self.adapter.as_ref().map(|path| with_checkpoint(path, open)).transpose()?;
        let (adapter, of_adapter) = adapter.unzip();
        let saved = match of_adapter.flatten() {
            Some(run) => Some(run),
            None => RunConfig::saved_in(folder)?,
        };
        let sizes = match adapter.as_ref().map_or(Ok(None), AdapterFolder::labels)? {
            Some(labels) => read(&classifier(config, None, &Labels::numbered(labels))?)?,
            None => read(config)?,
        };
        let sizes = adapter.as_ref().map_or_else(|| sizes.clone(), |adapter| adapter.on(sizes.clone()));
        self.build(folder, (adapter, &[]), saved, &sizes, seq_len, ranks)
    }

    /// Loads the model of `folder`, and the adapter of each of `modules`. Errors if the runs of two modules have different `[precision]` settings, or
    /// if an adapter does not fit the model.
    pub fn load_beside(
        &self,
        folder: &Path,
        config: &ConfigFile,
        seq_len: usize,
        ranks: &InferenceRanks,
        modules: &[LoraModule],
    ) -> Result<(Decoder, Vec<Adapters>)> {
        verify_model(folder)?;
        let opened = modules.iter().map(LoraModule::open).collect::<Result<Vec<_>>>()?;
        let of_base = RunConfig::saved_in(folder)?;
        // The runs whose settings `--adapter` would read.
        let saved: Vec<_> = opened.iter().map(|module| module.saved.as_ref().or(of_base.as_ref())).collect();
        let default = RunConfig::default();
        let precision = |at: usize| -> Result<Precision> {
            Ok(self.settings_of(saved[at].map_or(&default, |(run, _)| run))?.precision)
        };
        // Without modules, adapters are loaded later.
        let first = if opened.is_empty() { None } else { Some(precision(0)?) };
        for (at, module) in opened.iter().enumerate().skip(1) {
            let other = precision(at)?;
            if let Some(first) = first.as_ref().filter(|first| **first != other) {
                let recipe = |precision: &Precision| precision.recipe.as_str();
                return Err(Error::Config(format!(
                    "--lora-modules: `{}` and `{}` are of runs with different settings in `[precision]` (recipes {} and {}), and one model \
                     is served; set --recipe, and other settings by --set",
                    opened[0].name,
                    module.name,
                    recipe(first),
                    recipe(&other)
                )));
            }
        }
        let saved = saved.first().copied().unwrap_or(of_base.as_ref()).cloned();
        let sizes = DecoderConfig { lora: Some(Lora::of_no_linear()), ..language_model_config(config)? };
        let beside: Vec<Lora> = opened.iter().map(|module| module.folder.lora.clone()).collect();
        let model = self.build(folder, (None, &beside), saved, &sizes, seq_len, ranks)?;
        let load = |OpenModule { name, folder, .. }: OpenModule| -> Result<Adapters> {
            tracing::info!("model {name}: {}", folder.path().display());
            folder.load(&model)
        };
        let adapters = opened.into_iter().map(load).collect::<Result<_>>()?;
        Ok((model, adapters))
    }

    /// Returns the configuration of a run, with `[precision]` changed by the options.
    fn settings_of(&self, saved: &RunConfig) -> Result<RunConfig> {
        let mut run = saved.with_precision(&self.settings)?;
        run.precision.recipe = self.recipe.unwrap_or(run.precision.recipe);
        Ok(run)
    }

    /// Builds the model of `sizes` with the weights of `folder` and `adapter`. Its precision is set by the run that `saved` it and by the options.
    /// Errors if memory does not suffice for the model and the adapters that are loaded `beside` it.
    fn build(
        &self,
        folder: &Path,
        (adapter, beside): (Option<AdapterFolder>, &[Lora]),
        saved: Option<(RunConfig, Vec<String>)>,
        sizes: &DecoderConfig,
        seq_len: usize,
        InferenceRanks { ranks, device, .. }: &InferenceRanks,
    ) -> Result<Decoder> {
        let (run, casts) = saved.unzip();
        let saved = run.unwrap_or_default();
        let run = self.settings_of(&saved)?;
        let same = run.precision == saved.precision;
        let mut plain = saved.clone();
        plain.precision.recipe = run.precision.recipe;
        let known = plain.without_effect();
        for text in run.without_effect().into_iter().filter(|text| !known.contains(text)) {
            tracing::warn!("{text}");
        }
        tracing::info!("recipe: {}", run.precision.recipe.as_str());
        let recipe = run.recipe_on(device);
        expect_model_fits(folder, sizes, &recipe, device, seq_len, ranks.size(), beside)?;
        let mut model = build(Some(folder), adapter, 0, device, sizes, |weights| {
            let axes = Rc::new(LayerAxes::new(ranks.clone()));
            Decoder::for_inference(sizes, &recipe, device, seq_len, weights, axes)
        })?;
        log_exceptions(&model, casts.as_deref().filter(|_| same));
        model.quantize_weights()?;
        Ok(model)
    }
}
