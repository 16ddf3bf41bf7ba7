//! `quantization_config` of `config.json`, which describes how a folder stores weights in FP8.

use crate::ConfigFile;
use ottava_common::error::Result;
use ottava_tensor::Granularity;
use serde_json::Value;
use std::path::Path;

/// The file with ModelOpt's settings. Older folders have it next to `config.json` instead of `quantization_config`.
pub const MODELOPT_FILE: &str = "hf_quant_config.json";

/// The elements of an FP8 weight `[outputs, inputs]` that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightScales {
    /// All elements.
    Tensor,
    /// The elements of a row (one output).
    Rows,
    /// The elements of a block with these numbers of outputs and inputs.
    Blocks([usize; 2]),
}

/// The format in which a folder stores FP8 weights: E4M3 codes with scales. A weight is its code times a stored scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// The value of `quant_method`.
    pub method: &'static str,
    /// The elements that share a scale.
    pub scales: WeightScales,
}

/// A format in which compressed-tensors stores matrices in four bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp4Pack {
    /// E2M1 codes with E4M3 scales of 16 neighbours, and one scale per matrix.
    Nvfp4,
    /// E2M1 codes with E8M0 scales of 32 neighbours.
    Mxfp4,
}

impl Fp4Pack {
    /// All formats.
    const ALL: [Fp4Pack; 2] = [Fp4Pack::Nvfp4, Fp4Pack::Mxfp4];

    /// Returns the value of `format` in `quantization_config`.
    pub const fn name(self) -> &'static str {
        match self {
            Fp4Pack::Nvfp4 => "nvfp4-pack-quantized",
            Fp4Pack::Mxfp4 => "mxfp4-pack-quantized",
        }
    }

    /// Returns the number of neighbours in a row that share a scale.
    pub const fn block(self) -> usize {
        match self {
            Fp4Pack::Nvfp4 => 16,
            Fp4Pack::Mxfp4 => 32,
        }
    }

    /// Returns the value of `strategy` in the settings of weights.
    pub const fn strategy(self) -> &'static str {
        match self {
            Fp4Pack::Nvfp4 => "tensor_group",
            Fp4Pack::Mxfp4 => "group",
        }
    }
}

impl WeightScales {
    /// Returns the granularity of a cast with such scales, or `None` for blocks of another size than 128x128.
    pub fn granularity(self) -> Option<Granularity> {
        match self {
            WeightScales::Tensor => Some(Granularity::PerTensor),
            WeightScales::Rows => Some(Granularity::PerRow),
            WeightScales::Blocks([128, 128]) => Some(Granularity::Blocks128x128),
            WeightScales::Blocks(_) => None,
        }
    }

    /// Returns the numbers of rows and columns of the scales, for a weight `[outputs, inputs]`.
    pub fn grid(self, [outputs, inputs]: [usize; 2]) -> [usize; 2] {
        match self {
            WeightScales::Tensor => [1, 1],
            WeightScales::Rows => [outputs, 1],
            WeightScales::Blocks([rows, columns]) => [outputs.div_ceil(rows), inputs.div_ceil(columns)],
        }
    }

    /// Returns how many adjacent elements in a row of `inputs` elements share a scale.
    pub fn width(self, inputs: usize) -> usize {
        match self {
            WeightScales::Tensor | WeightScales::Rows => inputs,
            WeightScales::Blocks([_, columns]) => columns,
        }
    }

    /// Returns the index of an element's scale in `grid`, which comes from [`WeightScales::grid`].
    pub fn index(self, grid: [usize; 2], row: usize, column: usize) -> usize {
        match self {
            WeightScales::Tensor => 0,
            WeightScales::Rows => row,
            WeightScales::Blocks([rows, columns]) => row / rows * grid[1] + column / columns,
        }
    }
}

impl Quantization {
    /// The endings of the names of weight scales, in place of `.weight`. A weight is its code times the stored scale.
    pub const WEIGHT_SCALES: [&str; 2] = [".weight_scale_inv", ".weight_scale"];

    /// The endings of the names of input scales that do not depend on the input.
    pub const INPUT_SCALES: [&str; 2] = [".input_scale", ".activation_scale"];

    /// The endings of the names of scales for a KV cache in FP8. ModelOpt, compressed-tensors, AutoFP8 and
    /// vLLM use these names.
    const CACHE_SCALES: [&str; 6] =
        [".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale", ".prob_output_scale"];

    /// Returns whether `config.json` declares the weights of experts as MXFP4 in the layout of gpt-oss.
    pub fn is_mxfp4(config: &ConfigFile) -> Result<bool> {
        if config.optional("model_type", String::new())? != "gpt_oss" {
            return Ok(false);
        }
        let file = config.section("quantization_config")?;
        let method = file.map(|file| file.optional::<Option<String>>("quant_method", None)).transpose()?.flatten();
        Ok(method.as_deref() == Some("mxfp4"))
    }

    /// Returns whether `config.json` declares matrices in NF4, as bitsandbytes stores them.
    ///
    /// Errors for weights of bitsandbytes in 8 bits or in FP4.
    pub fn is_nf4(config: &ConfigFile) -> Result<bool> {
        let Some(file) = config.section("quantization_config")? else { return Ok(false) };
        if file.optional::<Option<String>>("quant_method", None)?.as_deref() != Some("bitsandbytes") {
            return Ok(false);
        }
        let kind: String = file.optional("bnb_4bit_quant_type", "fp4".into())?;
        match file.optional("load_in_4bit", false)? && kind == "nf4" {
            true => Ok(true),
            false => Err(not_read(
                &file,
                "the 8-bit or FP4 format of bitsandbytes (NF4 is read: `load_in_4bit=True, bnb_4bit_quant_type=\"nf4\"`)",
            )),
        }
    }

    /// Returns the format of compressed-tensors in which `config.json` declares matrices in four bits.
    ///
    /// Errors for settings that change what the codes mean.
    pub fn fp4_pack(config: &ConfigFile) -> Result<Option<Fp4Pack>> {
        let Some(file) = config.section("quantization_config")? else { return Ok(None) };
        if file.optional::<Option<String>>("quant_method", None)?.as_deref() != Some("compressed-tensors") {
            return Ok(None);
        }
        let name: String = file.optional("format", String::new())?;
        let Some(format) = Fp4Pack::ALL.into_iter().find(|format| format.name() == name) else { return Ok(None) };
        expect_known(&file, COMPRESSED_KEYS)?;
        expect_dense(&file)?;
        let groups = file.section("config_groups")?.ok_or_else(|| file.error("the key `config_groups` is missing"))?;
        for weights in weights_of_groups(&groups, &[&name])? {
            let (bits, kind) = (weights.required::<u32>("num_bits")?, weights.required::<String>("type")?);
            if (bits, kind.as_str(), weights.optional("symmetric", true)?) != (4, "float", true) {
                return Err(not_read(&weights, &format!("a weight of {bits} bits of type \"{kind}\"")));
            }
            let (block, strategy) = (weights.required("group_size")?, weights.required::<String>("strategy")?);
            if (block, strategy.as_str()) != (format.block(), format.strategy()) {
                return Err(not_read(
                    &weights,
                    &format!("`group_size` {block} with `strategy` \"{strategy}\" in {name}"),
                ));
            }
        }
        Ok(Some(format))
    }

    /// Returns how `config.json` quantizes weights to FP8. Returns `None` if weights are not quantized, or if they are in four bits:
    /// [`Quantization::is_mxfp4`] or [`Quantization::is_nf4`] is true, or [`Quantization::fp4_pack`] has a format.
    ///
    /// Errors if the quantization or one of its settings is not supported.
    pub fn read(config: &ConfigFile) -> Result<Option<Quantization>> {
        let Some(file) = config.section("quantization_config")? else { return Ok(None) };
        if Quantization::is_mxfp4(config)? || Quantization::is_nf4(config)? || Quantization::fp4_pack(config)?.is_some()
        {
            return Ok(None);
        }
        if file.has("quantization") {
            return modelopt(&file);
        }
        let method: String = file.required("quant_method")?;
        match method.as_str() {
            "fp8" => fp8(&file).map(Some),
            "fbgemm_fp8" => {
                expect_known(&file, &["activation_scale_ub", "modules_to_not_convert"])?;
                Ok(Some(Quantization { method: "fbgemm_fp8", scales: WeightScales::Rows }))
            }
            "compressed-tensors" => compressed_tensors(&file),
            "modelopt" => modelopt(&file),
            _ => Err(not_read(&file, &format!("the method `{method}`"))),
        }
    }

    /// Returns the quantization of a model folder. The folder may have [`MODELOPT_FILE`] instead of `quantization_config`.
    pub fn of_folder(folder: &Path) -> Result<Option<Quantization>> {
        let beside = folder.join(MODELOPT_FILE);
        match Quantization::read(&ConfigFile::read(folder)?)? {
            None if beside.is_file() => modelopt(&ConfigFile::read(&beside)?),
            read => Ok(read),
        }
    }

    /// Returns whether a folder has quantization settings, even if they concern only the KV cache.
    pub fn is_stated_in(folder: &Path) -> Result<bool> {
        Ok(folder.join(MODELOPT_FILE).is_file() || ConfigFile::read(folder)?.has("quantization_config"))
    }

    /// Returns whether a tensor of this name is the scale of a weight or an input.
    pub fn is_scale(name: &str) -> bool {
        let endings = Quantization::WEIGHT_SCALES.iter().chain(&Quantization::INPUT_SCALES);
        endings.into_iter().any(|ending| name.ends_with(ending))
    }

    /// Returns whether a tensor of this name is a scale of a KV cache.
    pub fn is_cache_scale(name: &str) -> bool {
        Quantization::CACHE_SCALES.iter().any(|ending| name.ends_with(ending))
    }
}

fn not_read(file: &ConfigFile, what: &str) -> ottava_common::Error {
    file.error(&format!(
        "{what} is not read; FP8 weights of fp8, fbgemm_fp8, compressed-tensors (float-quantized) and modelopt (FP8) are, and FP4 weights of \
         compressed-tensors (nvfp4-pack-quantized, mxfp4-pack-quantized): use the folder of the unquantized model, or save this one with BF16 weights (`dequantize` of transformers)"
    ))
}

/// Errors if a key is set that is neither in `known` nor in [`COMMON_KEYS`], because it may change what weights mean.
fn expect_known(file: &ConfigFile, known: &[&str]) -> Result<()> {
    let is_set = |value: &Value| match value {
        Value::Null | Value::Bool(false) => false,
        Value::Object(values) => !values.is_empty(),
        Value::Array(values) => !values.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => true,
    };
    let unknown = file
        .values()
        .iter()
        .find(|(key, value)| !COMMON_KEYS.contains(&key.as_str()) && !known.contains(&key.as_str()) && is_set(value));
    match unknown {
        Some((key, _)) => Err(not_read(file, &format!("the key `{key}`"))),
        None => Ok(()),
    }
}

/// The keys of all methods that do not change what weights mean. They describe how weights were quantized, which linears are not quantized, the KV
/// cache, and the casts of inputs. In Ottava, the recipe decides the casts of inputs.
const COMMON_KEYS: &[&str] = &[
    "activation_scheme",
    "dequantize",
    "ignore",
    "ignored_layers",
    "kv_cache_quant_algo",
    "kv_cache_quant_method",
    "kv_cache_scheme",
    "modules_to_not_convert",
    "producer",
    "quant_method",
    "quantization_status",
    "run_compressed",
    "version",
];

/// Reads the method `fp8`: blocks, as in DeepSeek and transformers, or one scale per tensor.
fn fp8(file: &ConfigFile) -> Result<Quantization> {
    expect_known(file, &["fmt", "is_checkpoint_fp8_serialized", "scale_fmt", "weight_block_size"])?;
    let format: String = file.optional("fmt", "e4m3".to_string())?;
    if format != "e4m3" {
        return Err(not_read(file, &format!("`fmt` \"{format}\"")));
    }
    let scales = match file.optional("weight_block_size", None)? {
        None => WeightScales::Tensor,
        Some(block) => blocks(file, "weight_block_size", block)?,
    };
    Ok(Quantization { method: "fp8", scales })
}

fn blocks(file: &ConfigFile, key: &str, block: [usize; 2]) -> Result<WeightScales> {
    match block.contains(&0) {
        true => Err(file.error(&format!("`{key}` is {block:?}; both are at least 1"))),
        false => Ok(WeightScales::Blocks(block)),
    }
}

/// Reads the method `compressed-tensors`. Returns `None` if only the KV cache is quantized.
fn compressed_tensors(file: &ConfigFile) -> Result<Option<Quantization>> {
    expect_known(file, COMPRESSED_KEYS)?;
    expect_dense(file)?;
    let format: String = file.optional("format", FLOATS[0].to_string())?;
    let groups = file.section("config_groups")?;
    let is_empty = groups.as_ref().is_none_or(|groups| groups.values().is_empty());
    match (format.as_str(), groups) {
        ("dense", _) if is_empty => Ok(None),
        (format, Some(groups)) if FLOATS.contains(&format) => group_scales(&groups).map(Some),
        (format, None) if FLOATS.contains(&format) => Err(file.error("the key `config_groups` is missing")),
        (format, _) => Err(not_read(file, &format!("`format` \"{format}\""))),
    }
}

/// The keys of compressed-tensors, besides [`COMMON_KEYS`].
const COMPRESSED_KEYS: &[&str] = &["config_groups", "format", "global_compression_ratio", "sparsity_config"];

/// Errors if weights are sparse.
fn expect_dense(file: &ConfigFile) -> Result<()> {
    let sparsity = file.section("sparsity_config")?.map(|sparsity| sparsity.optional("format", "dense".to_string()));
    match sparsity.transpose()?.filter(|format| format != "dense") {
        Some(sparsity) => Err(not_read(file, &format!("`sparsity_config` of the format \"{sparsity}\""))),
        None => Ok(()),
    }
}

/// The formats that store FP8 codes and scales unchanged.
const FLOATS: [&str; 2] = ["float-quantized", "naive-quantized"];

/// Returns the settings of the weights of each group of linears of compressed-tensors. `formats` are the formats that a group may
/// have; the first is the default.
fn weights_of_groups(groups: &ConfigFile, formats: &[&str]) -> Result<Vec<ConfigFile>> {
    let of_group = |name: &String| {
        let group = groups.section(name)?.ok_or_else(|| groups.error(&format!("`{name}` is null")))?;
        expect_known(&group, &["format", "input_activations", "targets", "weights"])?;
        let format: String = group.optional("format", formats[0].to_string())?;
        if !formats.contains(&format.as_str()) {
            return Err(not_read(&group, &format!("`format` \"{format}\"")));
        }
        let weights = group.section("weights")?.ok_or_else(|| group.error("the key `weights` is missing"))?;
        let known = [
            "block_structure",
            "group_size",
            "num_bits",
            "observer",
            "observer_kwargs",
            "scale_dtype",
            "strategy",
            "symmetric",
            "type",
            "zp_dtype",
        ];
        expect_known(&weights, &known)?;
        Ok(weights)
    };
    groups.values().keys().map(of_group).collect()
}

/// Returns the scales of the groups of linears of compressed-tensors. All groups must have the same kind of scales.
fn group_scales(groups: &ConfigFile) -> Result<Quantization> {
    let mut found = None;
    for weights in weights_of_groups(groups, &FLOATS)? {
        let (bits, kind) = (weights.required::<u32>("num_bits")?, weights.required::<String>("type")?);
        if (bits, kind.as_str(), weights.optional("symmetric", true)?) != (8, "float", true) {
            return Err(not_read(&weights, &format!("a weight of {bits} bits of type \"{kind}\"")));
        }
        if weights.values().get("group_size").is_some_and(|size| !size.is_null()) {
            return Err(not_read(&weights, "the key `group_size`"));
        }
        let strategy: String = weights.required("strategy")?;
        let scales = match strategy.as_str() {
            "tensor" => WeightScales::Tensor,
            "channel" => WeightScales::Rows,
            "block" => blocks(&weights, "block_structure", weights.required("block_structure")?)?,
            _ => return Err(not_read(&weights, &format!("`strategy` \"{strategy}\""))),
        };
        if found.is_some_and(|found| found != scales) {
            return Err(not_read(groups, "more than one kind of scales"));
        }
        found = Some(scales);
    }
    let scales = found.ok_or_else(|| groups.error("there is no group"))?;
    Ok(Quantization { method: "compressed-tensors", scales })
}

/// Reads ModelOpt's settings from `config.json` or [`MODELOPT_FILE`]. Returns `None` if only the KV cache is quantized.
fn modelopt(file: &ConfigFile) -> Result<Option<Quantization>> {
    let nested = file.section("quantization")?;
    let file = nested.as_ref().unwrap_or(file);
    expect_known(file, &["config_groups", "exclude_modules", "group_size", "quant_algo"])?;
    let Some(algorithm) = file.values().get("quant_algo").filter(|value| !value.is_null()) else { return Ok(None) };
    let scales = match algorithm.as_str().map(str::to_uppercase).as_deref() {
        Some("FP8") => WeightScales::Tensor,
        Some("FP8_PER_CHANNEL_PER_TOKEN") => WeightScales::Rows,
        Some("FP8_PB_WO") => WeightScales::Blocks([128, 128]),
        _ => return Err(not_read(file, &format!("`quant_algo` {algorithm}"))),
    };
    Ok(Some(Quantization { method: "modelopt", scales }))
}
