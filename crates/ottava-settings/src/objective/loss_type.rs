//! The losses of preferences by TRL's names.

use ottava_data::PreferenceKind;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;

/// A loss of preferences, as TRL names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossType {
    /// DPO.
    Sigmoid,
    /// DPO with flipped preferences.
    Robust,
    /// The hinge loss of the margin.
    Hinge,
    /// IPO.
    Ipo,
    /// DPO of means over tokens.
    SigmoidNorm,
    /// EXO.
    ExoPair,
    /// NCA.
    NcaPair,
    /// BCO.
    BcoPair,
    /// SPPO with certain preferences.
    SppoHard,
    /// AOT of pairs.
    Aot,
    /// AOT without comparing chosen and rejected completions in pairs.
    AotUnpaired,
    /// APO-zero.
    ApoZero,
    /// APO-down.
    ApoDown,
    /// DiscoPOP.
    Discopop,
    /// The negative log-likelihood of the chosen completions.
    Sft,
    /// CPO: DPO without a reference model, and the negative log-likelihood of the chosen completions.
    Cpo,
    /// SimPO.
    Simpo,
    /// ORPO.
    Orpo,
    /// The loss of a reward model.
    BradleyTerry,
    /// KTO, of completions with labels.
    Kto,
    /// APO-zero, of completions with labels.
    ApoZeroUnpaired,
}

/// The key that some losses read.
const SMOOTHING: &[&str] = &["label_smoothing"];
const WEIGHTS: &[&str] = &["desirable_weight", "undesirable_weight"];

impl LossType {
    /// All losses.
    pub(crate) const ALL: [LossType; 21] = [
        LossType::Sigmoid,
        LossType::Robust,
        LossType::Hinge,
        LossType::Ipo,
        LossType::SigmoidNorm,
        LossType::ExoPair,
        LossType::NcaPair,
        LossType::BcoPair,
        LossType::SppoHard,
        LossType::Aot,
        LossType::AotUnpaired,
        LossType::ApoZero,
        LossType::ApoDown,
        LossType::Discopop,
        LossType::Sft,
        LossType::Cpo,
        LossType::Simpo,
        LossType::Orpo,
        LossType::BradleyTerry,
        LossType::Kto,
        LossType::ApoZeroUnpaired,
    ];

    /// The name as in `preference.loss_type`, the kind of preferences, and the keys of `[preference]` that this loss reads and not all
    /// losses read.
    fn row(self) -> (&'static str, PreferenceKind, &'static [&'static str]) {
        use PreferenceKind::{Labels, Pairs};
        match self {
            LossType::Sigmoid => ("sigmoid", Pairs, SMOOTHING),
            LossType::Robust => ("robust", Pairs, SMOOTHING),
            LossType::Hinge => ("hinge", Pairs, &[]),
            LossType::Ipo => ("ipo", Pairs, &[]),
            LossType::SigmoidNorm => ("sigmoid_norm", Pairs, &[]),
            LossType::ExoPair => ("exo_pair", Pairs, SMOOTHING),
            LossType::NcaPair => ("nca_pair", Pairs, &[]),
            LossType::BcoPair => ("bco_pair", Pairs, &[]),
            LossType::SppoHard => ("sppo_hard", Pairs, &[]),
            LossType::Aot => ("aot", Pairs, SMOOTHING),
            LossType::AotUnpaired => ("aot_unpaired", Pairs, SMOOTHING),
            LossType::ApoZero => ("apo_zero", Pairs, &[]),
            LossType::ApoDown => ("apo_down", Pairs, &[]),
            LossType::Discopop => ("discopop", Pairs, &["discopop_tau"]),
            LossType::Sft => ("sft", Pairs, &[]),
            LossType::Cpo => ("cpo", Pairs, &["label_smoothing", "cpo_alpha"]),
            LossType::Simpo => ("simpo", Pairs, &["label_smoothing", "simpo_gamma"]),
            LossType::Orpo => ("orpo", Pairs, &[]),
            LossType::BradleyTerry => ("bradley_terry", Pairs, &["center_rewards_coefficient"]),
            LossType::Kto => ("kto", Labels, WEIGHTS),
            LossType::ApoZeroUnpaired => ("apo_zero_unpaired", Labels, WEIGHTS),
        }
    }

    /// The name as in `preference.loss_type`.
    pub(crate) fn as_str(self) -> &'static str {
        self.row().0
    }

    /// The kind of preferences that the loss compares.
    pub(crate) fn kind(self) -> PreferenceKind {
        self.row().1
    }

    /// Whether the loss is one of a method without a reference model.
    pub(crate) fn has_no_reference(self) -> bool {
        matches!(self, LossType::Cpo | LossType::Simpo | LossType::Orpo)
    }

    /// Whether the loss reads this key of `[preference]`; not all losses do.
    pub(crate) fn reads(self, key: &str) -> bool {
        self.row().2.contains(&key)
    }
}

/// The losses of a run, at least one: in a file, a name or a list of names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LossTypes(Vec<LossType>);

impl LossTypes {
    /// All losses, in the order of `preference.loss_weights`.
    pub fn all(&self) -> &[LossType] {
        &self.0
    }

    /// The names of the losses, for a message.
    pub(crate) fn names(&self) -> String {
        self.0.iter().map(|loss| loss.as_str()).collect::<Vec<_>>().join(" + ")
    }
}

impl From<LossType> for LossTypes {
    fn from(loss: LossType) -> LossTypes {
        LossTypes(vec![loss])
    }
}

impl PartialEq<LossType> for LossTypes {
    fn eq(&self, loss: &LossType) -> bool {
        self.0 == [*loss]
    }
}

impl JsonSchema for LossTypes {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "LossTypes".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let one = generator.subschema_for::<LossType>();
        json_schema!({"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]})
    }
}

impl Serialize for LossTypes {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0.as_slice() {
            [one] => one.serialize(to),
            several => several.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for LossTypes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<LossTypes, D::Error> {
        let names = match toml::Value::deserialize(from)? {
            toml::Value::Array(names) => names,
            name => vec![name],
        };
        // An error of a name lists the names.
        let losses = names.into_iter().map(LossType::deserialize).collect::<Result<Vec<_>, _>>();
        let losses = losses.map_err(|error| D::Error::custom(error.message()))?;
        if losses.is_empty() {
            return Err(D::Error::custom("a list of losses names at least one"));
        }
        Ok(LossTypes(losses))
    }
}
