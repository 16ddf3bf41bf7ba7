//! The source of an export: the weights of a model folder, and the recipe and scales of a run.

use ottava_checkpoint::slices::{FOLDER, SliceFiles};
use ottava_checkpoint::{Manifest, WeightFiles, training, with_experts_of};
use ottava_common::error::{Error, Result};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, WeightScales, language_model_config};
use ottava_recipe::param::Description;
use ottava_recipe::{ExceptionsConfig, LinearSite, Precision, Recipe, RecipeName};
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// An opened model folder.
pub struct Source {
    /// The folder.
    pub path: PathBuf,
    /// `config.json`.
    pub config: ConfigFile,
    /// The sizes of the model.
    pub sizes: DecoderConfig,
    /// The weights.
    pub weights: WeightFiles,
    /// The recipe of the run that saved the folder, if the run used FP8; else a recipe that casts nothing.
    pub recipe: Recipe,
    /// A recipe that selects the linears that the user keeps in BF16, independent of the run.
    pub(super) exceptions: Recipe,
    /// The names of the run's casts. A linear without casts was computed in BF16.
    pub casts: BTreeSet<String>,
    /// The scales of delayed scaling, by the name of the cast: `code = cast(x · scale)`.
    pub delayed: BTreeMap<String, f32>,
}

impl Source {
    /// Opens a model folder, such as a checkpoint.
    pub fn open(folder: &Path) -> Result<Source> {
        let config = ConfigFile::read(folder)?;
        let sizes = with_experts_of(language_model_config(&config)?, folder);
        let weights = WeightFiles::open(folder)?;
        let (run, casts) = RunConfig::saved_in(folder)?.unwrap_or_default();
        let precision = run.precision;
        let delayed = match precision.recipe {
            RecipeName::Fp8Delayed => delayed_scales(folder)?,
            _ => BTreeMap::new(),
        };
        let (recipe, exceptions) = (precision.recipe(), exceptions(&Precision::default()));
        let casts = casts.into_iter().collect();
        Ok(Source { path: folder.to_path_buf(), config, sizes, weights, recipe, exceptions, casts, delayed })
    }

    /// Errors unless the folder has the weight of each linear as a matrix `[outputs, inputs]`, which readers of FP8 weights expect.
    pub(super) fn expect_matrices(&self) -> Result<()> {
        let stacks = self.sizes.experts().is_some_and(|experts| experts.stacks.is_some());
        if self.weights.carried().is_wrapper() {
            return Err(self.config.error(
                "folders of vision-language models are exported in BF16 and to GGUF, not with weights in FP8; `--format bf16` exports it",
            ));
        }
        let problem = match (self.sizes.stream.names.transposed, stacks) {
            _ if self.sizes.stream.names.qkv_by_head => "GPT-NeoX stores queries, keys and values head by head",
            (true, _) => "GPT-2 stores its weights transposed",
            (_, true) => "the model stores the weights of all experts of a layer in one tensor",
            (false, false) => return Ok(()),
        };
        Err(self
            .config
            .error(&format!("{problem}, which no reader of FP8 weights expects; `--format bf16` exports it")))
    }

    /// Returns the number of outputs of a linear, by its name in the folder.
    pub(super) fn outputs(&self, linear: &str) -> Result<usize> {
        let name = format!("{linear}.weight");
        let shape = self.weights.info(&name)?.shape;
        shape.first().copied().ok_or_else(|| Error::Model(format!("tensor `{name}` has no rows; it is a matrix")))
    }

    /// Keeps linears in BF16 by `settings`, which are `key=value` of `[precision]`.
    ///
    /// Errors for keys that do more than keep linears in BF16, and for patterns that match no linear.
    pub fn leave(&mut self, settings: &[String]) -> Result<()> {
        let set = RunConfig::default().with_precision(settings)?.precision;
        let precision = only_exceptions(&set);
        if set != precision {
            return Err(Error::Config(
                "an export sets only `high_precision_layers`, `first_layers_bf16` and `last_layers_bf16`; the format decides how linears are cast"
                    .into(),
            ));
        }
        self.exceptions = exceptions(&precision);
        Decoder::describe(&self.sizes, &self.exceptions).map(drop)
    }

    /// Returns the scales of casts for a model of this folder with recipe fp8-delayed and static scales. The scales of inputs come from
    /// `input_scales`, by the name of a linear. The scales of weights come from the run or the folder, if it has one scale per weight.
    pub fn static_scales(&self, input_scales: &BTreeMap<String, f32>) -> Result<BTreeMap<String, f32>> {
        let of_weights = self.delayed.iter().filter(|(name, _)| name.ends_with(".weight"));
        let mut scales: BTreeMap<_, _> = of_weights.map(|(name, scale)| (name.clone(), *scale)).collect();
        let description = Decoder::describe(&self.sizes, &self.recipe)?;
        for (site, _) in &description.linears {
            if let Some(scale) = self.input_scale(&description, site, input_scales) {
                scales.insert(format!("{}.input", site.name), 1.0 / scale);
            }
            if self.weights.quantization().is_some_and(|quantization| quantization.scales == WeightScales::Tensor) {
                let scale_of = |part: &String| Ok(self.weights.scales(&format!("{part}.weight"))?.at(0));
                let parts = site.parts.iter().map(scale_of).collect::<Result<Vec<f32>>>();
                if let Some(scale) =
                    parts.ok().and_then(|parts| parts.iter().all(|p| *p == parts[0]).then_some(parts[0]))
                {
                    scales.insert(format!("{}.weight", site.name), 1.0 / scale);
                }
            }
        }
        Ok(scales)
    }

    /// Returns the scale of the input of linears that engines fuse. The keys of `scales` are names of linears, fused or not. It is the largest of
    /// their scales, so no value saturates that did not saturate before.
    pub(super) fn input_scale(
        &self,
        description: &Description,
        site: &LinearSite,
        scales: &BTreeMap<String, f32>,
    ) -> Option<f32> {
        let owner = description.input_owner(&site.name);
        let names = site.parts.iter().map(String::as_str).chain([owner]);
        names.filter_map(|name| scales.get(name).copied()).reduce(f32::max)
    }

    /// Returns the scales of inputs in the folder, by the name of their linear: `code = cast(x / scale)`. A run with delayed scaling has a scale for
    /// each input that it casts, by the name of the fused linear. A folder with FP8 weights may have a scale for each linear.
    pub fn input_scales(&self) -> Result<BTreeMap<String, f32>> {
        let of_run = self.delayed.iter().filter_map(|(name, scale)| Some((name.strip_suffix(".input")?, 1.0 / scale)));
        let mut scales: BTreeMap<_, _> = of_run.map(|(name, scale)| (name.to_string(), scale)).collect();
        scales.extend(self.weights.input_scales()?);
        Ok(scales)
    }

    /// Returns the linears that a folder with FP8 weights stores in another type.
    pub fn left(&self) -> Result<BTreeSet<String>> {
        let mut left = BTreeSet::new();
        if self.weights.quantization().is_some() {
            for (site, _) in Decoder::describe(&self.sizes, &self.recipe)?.linears {
                for part in site.parts {
                    if !self.weights.is_fp8(&format!("{part}.weight"))? {
                        left.insert(part);
                    }
                }
            }
        }
        Ok(left)
    }
}

/// Returns the defaults with the exceptions of `precision`.
fn only_exceptions(precision: &Precision) -> Precision {
    let ExceptionsConfig { high_precision_layers, first_layers_bf16, last_layers_bf16, .. } =
        precision.exceptions.clone();
    let exceptions =
        ExceptionsConfig { high_precision_layers, first_layers_bf16, last_layers_bf16, ..ExceptionsConfig::default() };
    Precision { exceptions, ..Precision::default() }
}

/// Returns a recipe that casts all linears except the exceptions of `precision`.
fn exceptions(precision: &Precision) -> Recipe {
    let mut all = Precision { recipe: RecipeName::Fp8Current, ..only_exceptions(precision) };
    all.exceptions.skip_slow_linears = false;
    all.recipe()
}

/// Returns the scales that the casts of a checkpoint use in the next step, and with which its weights are cast.
fn delayed_scales(folder: &Path) -> Result<BTreeMap<String, f32>> {
    let Some(manifest) = Manifest::read(folder)? else { return Ok(BTreeMap::new()) };
    let names = training::progress(folder, &manifest)?.scaling_slots;
    let files = SliceFiles::open(&folder.join(FOLDER))?;
    let array = |name: &str| -> Result<Tensor> {
        let info = files.info(name)?;
        Ok(Tensor::from_bytes(&Device::Cpu, &info.shape, info.dtype, &files.read(name)?)?)
    };
    // Before the first update, no scales exist.
    if files.info("scaling.scale").is_err() || array("scaling.updates")?.to_vec::<i64>()? == [0] {
        return Ok(BTreeMap::new());
    }
    let scales = array("scaling.scale")?;
    if scales.dtype() != DType::F32 || scales.len() != names.len() {
        let text =
            format!("{}: `scaling.scale` has {} entries for {} casts", folder.display(), scales.len(), names.len());
        return Err(Error::Checkpoint(text));
    }
    let scales = names.into_iter().zip(scales.to_vec::<f32>()?);
    Ok(scales.filter(|(_, scale)| scale.is_finite() && *scale > 0.0).collect())
}
