//! Rotary positions of a model and their scaling for long contexts, read from and written to `config.json`.

mod by_layer;
mod frequencies;
#[cfg(test)]
mod tests;

use crate::ConfigFile;
use crate::layers::QueryGrowth;
use ottava_common::error::Result;
use serde_json::{Map, Value, json};

pub(crate) use by_layer::{by_layer_types, without_ropes};
pub use frequencies::RopeLengths;

/// The angles of rotary positions.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeScaling {
    /// The base of the geometric series of wavelengths.
    pub theta: f64,
    /// The share of a head that is rotated, from the first element on.
    pub partial: f64,
    /// The scaling for long contexts.
    pub kind: RopeKind,
    /// DeepSeek's constant by which attention scores grow with the logarithm of the stretch.
    pub mscale_all_dim: Option<f64>,
    /// The growth of queries with their position that the keys of the positions describe.
    pub growth: Option<QueryGrowth>,
}

/// The kinds of scaling.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeKind {
    /// No scaling.
    Default,
    /// All wavelengths are multiplied by one factor. Chen et al. 2023, arXiv:2306.15595.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Long wavelengths are multiplied by a factor, short wavelengths are unchanged, and a ramp connects them: Llama 3.1.
    Llama3 {
        /// The factor for long wavelengths.
        factor: f64,
        /// The number of turns in the original context below which a wavelength is long.
        low_freq_factor: f64,
        /// The number of turns in the original context above which a wavelength is short.
        high_freq_factor: f64,
        /// The context of the model before stretching.
        original_max_positions: f64,
    },
    /// The base grows with the length of sequences beyond `max_position_embeddings` (NTK-aware scaling, "dynamic").
    Dynamic {
        /// The factor by which the length grows.
        factor: f64,
    },
    /// YaRN: like Llama 3.1, but with a ramp over dimensions, and with scaled cosines and sines. Peng et al. 2023, arXiv:2309.00071.
    Yarn(Yarn),
    /// A factor for each wavelength, and scaled cosines and sines. Sequences within the original context have one list of factors, longer sequences
    /// another. Ding et al. 2024, arXiv:2402.13753.
    LongRope(LongRope),
    /// The wavelengths of whole heads, of which only the shortest are used: the other pairs of a head are not rotated. `partial` is the share of pairs
    /// that are rotated. As in Gemma 4.
    Proportional {
        /// The factor of all wavelengths.
        factor: f64,
    },
}

/// Constants of YaRN.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// The factor for long wavelengths.
    pub factor: f64,
    /// The context of the model before stretching.
    pub original_max_positions: f64,
    /// The factor of cosines and sines. If it is missing, it is computed from the other constants.
    pub attention_factor: Option<f64>,
    /// The first constant for computing the factor of cosines and sines, as in DeepSeek's models.
    pub mscale: Option<f64>,
    /// The second constant for computing the factor of cosines and sines, as in DeepSeek's models.
    pub mscale_all_dim: Option<f64>,
    /// The number of turns in the original context above which dimensions are not stretched.
    pub beta_fast: f64,
    /// The number of turns in the original context below which dimensions are stretched by the whole factor.
    pub beta_slow: f64,
    /// Whether the ends of the ramp are rounded to whole dimensions.
    pub truncate: bool,
}

/// Constants of LongRoPE.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// The factors of wavelengths for sequences within the original context.
    pub short: Vec<f64>,
    /// The factors of wavelengths for longer sequences.
    pub long: Vec<f64>,
    /// The context of the model before stretching.
    pub original_max_positions: f64,
    /// The factor by which the context grows.
    pub factor: f64,
    /// The factor of cosines and sines. If it is missing, it is computed from `factor`.
    pub attention_factor: Option<f64>,
}

impl Default for RopeScaling {
    fn default() -> RopeScaling {
        RopeScaling::plain(10_000.0)
    }
}

const LAYER_TYPES: &str = "layer_types";
const PARTIAL: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";
/// The key of the growth of queries, in `rope_parameters`.
pub(crate) const GROWTH: &str = "llama_4_scaling_beta";
/// The keys of `rope_parameters`, if layers with a window have different rotary positions.
const NESTED: [&str; 2] = ["full_attention", "sliding_attention"];

impl RopeScaling {
    /// Returns rotary positions without scaling.
    pub fn plain(theta: f64) -> RopeScaling {
        RopeScaling { theta, partial: 1.0, kind: RopeKind::Default, mscale_all_dim: None, growth: None }
    }

    /// Errors with a sentence if heads with `dim` elements that can be rotated cannot have these positions.
    pub(super) fn check(&self, dim: usize) -> Result<(), String> {
        let (partial, rotated) = (self.partial, self.rotated(dim));
        if partial == 1.0 && !rotated.is_multiple_of(2) {
            return Err(format!("`head_dim` {rotated} is odd; rotary positions pair its halves"));
        }
        if !(partial > 0.0 && partial <= 1.0) || rotated == 0 || !rotated.is_multiple_of(2) {
            let rotates = "rotary positions rotate an even number of elements";
            return Err(format!("`partial_rotary_factor` {partial} of `head_dim` {dim} is {rotated}; {rotates}"));
        }
        self.kind.check(rotated)
    }

    /// Reads `rope_theta` with `rope_scaling` or `rope_parameters`.
    ///
    /// Errors if a kind of scaling is not implemented, if layers have different rotary positions, or if `rope_scaling` and `rope_parameters`
    /// contradict each other: transformers would read only `rope_scaling`.
    pub fn read(file: &ConfigFile) -> Result<RopeScaling> {
        let scaling = file.section("rope_scaling")?.filter(|scaling| !scaling.values().is_empty());
        let parameters = file.section("rope_parameters")?;
        // transformers ignores the keys of layer types that the model does not have.
        let types: Vec<String> = file.optional(LAYER_TYPES, Vec::new())?;
        let has_type = |key: &str| file.has_default(LAYER_TYPES) || types.iter().any(|kind| kind == key);
        let nested = |section: &ConfigFile| NESTED.into_iter().find(|key| section.has(key));
        let section = scaling.as_ref().or(parameters.as_ref());
        if let Some((section, key)) = section.and_then(|s| Some((s, nested(s)?))).filter(|(_, key)| has_type(key)) {
            return Err(section.error(&format!(
                "the key `{key}` is for rotary positions by kinds of layers, which are implemented for Gemma 3 and OLMo 3"
            )));
        }
        let theta = file.optional("rope_theta", 10_000.0)?;
        let read = |section: Option<&ConfigFile>| RopeScaling::of_section(file, section, theta);
        let Some(scaling) = scaling else { return read(parameters.as_ref()) };
        let found = read(Some(&scaling))?;
        match parameters.filter(|parameters| file.has("rope_parameters") && nested(parameters).is_none()) {
            Some(parameters) => {
                let agrees = |other: RopeScaling| {
                    let stretches = other.kind != RopeKind::Default && other.kind != found.kind;
                    !stretches && other.theta == found.theta && other.partial == found.partial
                };
                match !read(Some(&parameters)).is_ok_and(agrees) {
                    true => Err(file.error(
                        "`rope_scaling` and `rope_parameters` say different rotary positions; put the keys of `rope_scaling` into \
                         `rope_parameters`, and remove it",
                    )),
                    false => Ok(found),
                }
            }
            None => Ok(found),
        }
    }

    /// Reads one object of `rope_parameters` or `rope_scaling` of `file`.
    pub(crate) fn of_section(file: &ConfigFile, section: Option<&ConfigFile>, theta: f64) -> Result<RopeScaling> {
        let partial = file.optional(PARTIAL, 1.0)?;
        let rope = match section {
            None => RopeScaling { partial, ..RopeScaling::plain(theta) },
            Some(section) => RopeScaling {
                theta: section.optional("rope_theta", theta)?,
                partial: section.optional(PARTIAL, partial)?,
                kind: RopeKind::read(file, section)?,
                mscale_all_dim: section.optional("mscale_all_dim", None)?,
                growth: read_growth(file, section)?,
            },
        };
        rope.of_whole_heads(file)
    }

    /// Errors if a scaled model rotates a part of each head. Only families whose defaults contain the key may do so. transformers ignores the key for
    /// other families without scaling, and fails for other families with scaling.
    fn of_whole_heads(self, file: &ConfigFile) -> Result<RopeScaling> {
        if file.has_default(PARTIAL) || self.partial == 1.0 {
            return Ok(self);
        }
        match self.kind {
            RopeKind::Default => Ok(RopeScaling { partial: 1.0, ..self }),
            _ => Err(file.error(&format!(
                "`{PARTIAL}` is {}, and rotary positions that are stretched rotate whole heads of this model; remove it",
                self.partial
            ))),
        }
    }

    /// Writes the keys of `config.json` in both spellings, for old and new readers, if the kind has two. If `local` is given, `self` belongs to the layers that see the
    /// whole context, and `local` belongs to the layers with a window.
    pub fn write(&self, local: Option<&RopeScaling>, values: &mut Map<String, Value>) {
        let parameters = |rope: &RopeScaling| {
            let mut parameters = rope.kind.keys();
            parameters["rope_theta"] = json!(rope.theta);
            if let Some(mscale) = rope.mscale_all_dim {
                parameters["mscale_all_dim"] = json!(mscale);
            }
            if rope.partial != 1.0 {
                parameters[PARTIAL] = json!(rope.partial);
            }
            if let Some(QueryGrowth { beta, original_max_positions, .. }) = rope.growth {
                parameters[GROWTH] = json!(beta);
                parameters[ORIGINAL] = json!(original_max_positions as u64);
            }
            parameters
        };
        let of_model = match local {
            Some(local) => json!({ NESTED[0]: parameters(self), NESTED[1]: parameters(local) }),
            None => parameters(self),
        };
        if matches!(self.kind, RopeKind::Proportional { .. }) {
            // This kind has no old spelling, and transformers would read an old spelling for all layers.
            values.insert("rope_parameters".into(), of_model);
            return;
        }
        if let Some(local) = local {
            values.insert("rope_local_base_freq".into(), json!(local.theta));
        }
        if self.partial != 1.0 {
            values.insert(PARTIAL.into(), json!(self.partial));
        }
        values.insert("rope_parameters".into(), of_model);
        values.insert("rope_theta".into(), json!(self.theta));
        let scaling = if self.kind == RopeKind::Default { Value::Null } else { parameters(self) };
        values.insert("rope_scaling".into(), scaling);
    }
}

/// Reads the growth of queries from a section of `file`, if the family of `file` has it.
fn read_growth(file: &ConfigFile, section: &ConfigFile) -> Result<Option<QueryGrowth>> {
    let beta: Option<f64> = if file.has_default(GROWTH) { section.optional(GROWTH, None)? } else { None };
    let Some(beta) = beta.filter(|beta| *beta != 0.0) else { return Ok(None) };
    let original_max_positions = section.required(ORIGINAL)?;
    match beta.is_finite() && original_max_positions > 0.0 {
        true => Ok(Some(QueryGrowth { beta, original_max_positions, first: 0 })),
        false => Err(section.error(&format!("`{GROWTH}` is {beta}, for `{ORIGINAL}` {original_max_positions}"))),
    }
}

impl RopeKind {
    /// Returns the factor of the scaling, if it has one.
    pub fn factor(&self) -> Option<f64> {
        match self {
            RopeKind::Default => None,
            RopeKind::Linear { factor }
            | RopeKind::Llama3 { factor, .. }
            | RopeKind::Dynamic { factor }
            | RopeKind::Proportional { factor } => Some(*factor),
            RopeKind::Yarn(yarn) => Some(yarn.factor),
            RopeKind::LongRope(long) => Some(long.factor),
        }
    }

    fn read(file: &ConfigFile, section: &ConfigFile) -> Result<RopeKind> {
        // A key next to the object has precedence over the key in the object.
        let original = || -> Result<f64> {
            match (file.optional(ORIGINAL, None)?, section.optional(ORIGINAL, None)?) {
                (Some(original), _) | (None, Some(original)) => Ok(original),
                (None, None) => file.required("max_position_embeddings"),
            }
        };
        let growth = || -> Result<f64> { Ok(file.required::<f64>("max_position_embeddings")? / original()?) };
        let or = |key: &str, default: f64| -> Result<f64> {
            // transformers treats 0 like a missing key.
            section.optional::<f64>(key, default).map(|value| if value == 0.0 { default } else { value })
        };
        let old_name = section.optional("type", "default".to_string())?;
        Ok(match section.optional("rope_type", old_name)?.as_str() {
            // Positions of text are equal in all dimensions of "mrope".
            "default" | "mrope" => RopeKind::Default,
            "linear" => RopeKind::Linear { factor: section.required("factor")? },
            "proportional" => {
                let (factor, partial) = (section.optional("factor", 1.0)?, file.optional(PARTIAL, 1.0)?);
                // If all pairs of a head are rotated, "proportional" equals "linear".
                match section.optional(PARTIAL, partial)? == 1.0 && !file.has_default(PARTIAL) {
                    true => RopeKind::Linear { factor },
                    false => RopeKind::Proportional { factor },
                }
            }
            "llama3" => RopeKind::Llama3 {
                factor: section.required("factor")?,
                low_freq_factor: section.required("low_freq_factor")?,
                high_freq_factor: section.required("high_freq_factor")?,
                original_max_positions: original()?,
            },
            "dynamic" => RopeKind::Dynamic { factor: section.required("factor")? },
            "longrope" => RopeKind::LongRope(LongRope {
                short: section.required("short_factor")?,
                long: section.required("long_factor")?,
                original_max_positions: original()?,
                factor: section.optional("factor", None)?.map_or_else(growth, Ok)?,
                attention_factor: section.optional("attention_factor", None)?,
            }),
            "yarn" => RopeKind::Yarn(Yarn {
                factor: section.optional("factor", None)?.map_or_else(growth, Ok)?,
                original_max_positions: original()?,
                attention_factor: section.optional("attention_factor", None)?,
                mscale: section.optional("mscale", None)?,
                mscale_all_dim: section.optional("mscale_all_dim", None)?,
                beta_fast: or("beta_fast", 32.0)?,
                beta_slow: or("beta_slow", 1.0)?,
                truncate: section.optional("truncate", true)?,
            }),
            other => {
                let text = format!(
                    "the rope type `{other}` is not implemented; default, linear, llama3, dynamic, yarn, longrope and proportional are"
                );
                return Err(section.error(&text));
            }
        })
    }

    /// Returns the keys of `rope_scaling`.
    fn keys(&self) -> Value {
        let mut keys = match self {
            RopeKind::Default => json!({"rope_type": "default"}),
            RopeKind::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeKind::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
            RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                ORIGINAL: *original_max_positions as u64,
            }),
            RopeKind::Yarn(yarn) => json!({
                "rope_type": "yarn",
                "factor": yarn.factor,
                ORIGINAL: yarn.original_max_positions as u64,
                "attention_factor": yarn.attention_factor,
                "mscale": yarn.mscale,
                "mscale_all_dim": yarn.mscale_all_dim,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
            }),
            // transformers warns of a factor, which it reads all the same.
            RopeKind::Proportional { factor } => {
                json!({"rope_type": "proportional", "factor": (*factor != 1.0).then_some(factor)})
            }
            RopeKind::LongRope(long) => json!({
                "rope_type": "longrope",
                "short_factor": long.short,
                "long_factor": long.long,
                ORIGINAL: long.original_max_positions as u64,
                "factor": long.factor,
                "attention_factor": long.attention_factor,
            }),
        };
        keys.as_object_mut().expect("an object was made above").retain(|_, value| !value.is_null());
        keys
    }

    /// Errors with a sentence if a constant is out of range. `rotated` is the number of rotated elements of a head.
    pub(super) fn check(&self, rotated: usize) -> Result<(), String> {
        let positive: Vec<(&str, f64)> = match self {
            RopeKind::Default => vec![],
            RopeKind::Linear { factor } | RopeKind::Dynamic { factor } | RopeKind::Proportional { factor } => {
                vec![("factor", *factor)]
            }
            RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => vec![
                ("factor", *factor),
                ("low_freq_factor", *low_freq_factor),
                ("high_freq_factor", *high_freq_factor),
                (ORIGINAL, *original_max_positions),
            ],
            RopeKind::Yarn(yarn) => [
                ("attention_factor", yarn.attention_factor),
                // transformers treats 0 like a missing key.
                ("mscale", yarn.mscale.filter(|mscale| *mscale != 0.0)),
                ("mscale_all_dim", yarn.mscale_all_dim.filter(|mscale| *mscale != 0.0)),
                ("factor", Some(yarn.factor)),
                (ORIGINAL, Some(yarn.original_max_positions)),
                ("beta_fast", Some(yarn.beta_fast)),
                ("beta_slow", Some(yarn.beta_slow)),
            ]
            .into_iter()
            .filter_map(|(key, value)| Some((key, value?)))
            .collect(),
            RopeKind::LongRope(long) => {
                for (key, factors) in [("short_factor", &long.short), ("long_factor", &long.long)] {
                    if factors.len() != rotated / 2 {
                        return Err(format!("`{key}` has {} factors, and a head {} pairs", factors.len(), rotated / 2));
                    }
                }
                let growth = [("factor", Some(long.factor)), ("attention_factor", long.attention_factor)];
                let growth = growth.into_iter().filter_map(|(key, value)| Some((key, value?)));
                let lists = [("short_factor", &long.short), ("long_factor", &long.long)];
                let factors = lists.into_iter().flat_map(|(key, list)| list.iter().map(move |value| (key, *value)));
                factors.chain(growth).chain([(ORIGINAL, long.original_max_positions)]).collect()
            }
        };
        match positive.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            Some((key, value)) => Err(format!("`{key}` is {value}; it is a number above 0")),
            None => Ok(()),
        }
    }
}
