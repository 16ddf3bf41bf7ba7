//! The source of an export: the weights of a model folder and, for a run, its recipe and scales.

use crate::checkpoint::slices::{FOLDER, SliceFiles};
use crate::checkpoint::{Manifest, WeightFiles, training};
use crate::config::RunConfig;
use crate::error::{Error, Result};
use crate::models::{ConfigFile, Decoder, DecoderConfig, WeightScales, language_model_config};
use crate::param::Description;
use crate::recipe::{LinearSite, Precision, Recipe, RecipeName};
use ottava_tensor::{DType, Device, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// An opened model folder.
pub struct Source {
    /// The folder.
    pub path: PathBuf,
    /// `config.json`.
    pub config: ConfigFile,
    /// Sizes of the model.
    pub sizes: DecoderConfig,
    /// The weights.
    pub weights: WeightFiles,
    /// The recipe of the run that saved the folder, if one with FP8 did; else one that casts nothing.
    pub recipe: Recipe,
    /// A recipe whose exceptions stay in BF16, whatever the run has cast.
    pub(super) exceptions: Recipe,
    /// The names of the casts of that run: a linear without them was computed in BF16.
    pub casts: BTreeSet<String>,
    /// Scales of delayed scaling, by the name of the cast: `code = cast(x · scale)`.
    pub delayed: BTreeMap<String, f32>,
}

impl Source {
    /// Opens a model folder, as a checkpoint is one.
    pub fn open(folder: &Path) -> Result<Source> {
        let config = ConfigFile::read(folder)?;
        let sizes = language_model_config(&config)?;
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

    /// Errors if the folder does not have the weight of each linear as a matrix `[outputs, inputs]`, which readers of FP8 weights expect.
    pub(super) fn expect_matrices(&self) -> Result<()> {
        let stacks = self.sizes.experts().is_some_and(|experts| experts.stacked);
        let problem = match (self.sizes.stream.names.transposed, stacks) {
            (true, _) => "GPT-2 stores its weights transposed",
            (_, true) => "gpt-oss stores the weights of all experts of a layer in one tensor",
            (false, false) => return Ok(()),
        };
        Err(self
            .config
            .error(&format!("{problem}, which no reader of FP8 weights expects; `--format bf16` exports it")))
    }

    /// The outputs of a linear, by its name in the folder.
    pub(super) fn outputs(&self, linear: &str) -> Result<usize> {
        let name = format!("{linear}.weight");
        let shape = self.weights.info(&name)?.shape;
        shape.first().copied().ok_or_else(|| Error::Model(format!("tensor `{name}` has no rows; it is a matrix")))
    }

    /// Leaves linears in BF16 by `settings`, `key=value` of `[precision]`.
    ///
    /// Errors for keys that say otherwise how to cast, and for patterns that match no linear.
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

    /// Scales of casts for a model of this folder with recipe fp8-delayed whose scales are set: of inputs from `input_scales`, by the name of a
    /// linear, and of weights those of the run or the folder, if it has one for each.
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

    /// The scale of the input of linears that engines fuse, from scales by the name of a linear, fused or not: the largest, so that no value
    /// saturates that did not.
    pub(super) fn input_scale(
        &self,
        description: &Description,
        site: &LinearSite,
        scales: &BTreeMap<String, f32>,
    ) -> Option<f32> {
        let owner = description.input_owner(site, self.sizes.shares_operands());
        let names = site.parts.iter().map(String::as_str).chain([owner]);
        names.filter_map(|name| scales.get(name).copied()).reduce(f32::max)
    }

    /// The scales of inputs that the folder has, by the name of their linear: `code = cast(x / scale)`. A run with delayed scaling has one
    /// for each input that it casts, by the name of the fused linear; a folder with FP8 weights may have one for each linear.
    pub fn input_scales(&self) -> Result<BTreeMap<String, f32>> {
        let of_run = self.delayed.iter().filter_map(|(name, scale)| Some((name.strip_suffix(".input")?, 1.0 / scale)));
        let mut scales: BTreeMap<_, _> = of_run.map(|(name, scale)| (name.to_string(), scale)).collect();
        scales.extend(self.weights.input_scales()?);
        Ok(scales)
    }

    /// The linears of a folder with FP8 weights that it has in another type.
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

/// Defaults with the exceptions of `precision`.
fn only_exceptions(precision: &Precision) -> Precision {
    let Precision { high_precision_layers, first_layers_bf16, last_layers_bf16, .. } = precision.clone();
    Precision { high_precision_layers, first_layers_bf16, last_layers_bf16, ..Precision::default() }
}

/// A recipe that casts all linears but the exceptions of `precision`.
fn exceptions(precision: &Precision) -> Recipe {
    let all = Precision { recipe: RecipeName::Fp8Current, skip_slow_linears: false, ..only_exceptions(precision) };
    all.recipe()
}

/// The scales that a checkpoint's casts have in the coming step, with which its weights are cast.
fn delayed_scales(folder: &Path) -> Result<BTreeMap<String, f32>> {
    let Some(manifest) = Manifest::read(folder)? else { return Ok(BTreeMap::new()) };
    let names = training::progress(folder, &manifest)?.scaling_slots;
    let files = SliceFiles::open(&folder.join(FOLDER))?;
    let array = |name: &str| -> Result<Tensor> {
        let info = files.info(name)?;
        Ok(Tensor::from_bytes(&Device::Cpu, &info.shape, info.dtype, &files.read(name)?)?)
    };
    // Before the first update there are no scales.
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
