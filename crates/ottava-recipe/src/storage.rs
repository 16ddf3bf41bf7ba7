//! Storage formats of weights, gradients and moments, as settings that parameters and the optimizer interpret.
//!
//! `param` stores weights and gradients in these formats, and `Moments` of the op `adamw` stores the states. If FP8 products read codes of an F16
//! master, no BF16 copy is stored. Casts read the F16 value (`Fp8Output::cast_scaled`).

use ottava_tensor::{DType, ExpandedTensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A choice of formats for master weights, gradients and moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Storage {
    /// Master weights, gradients and moments in float32.
    #[default]
    Float32,
    /// As in MS-AMP: master weights in float16 with a scale, gradients of the blocks' matrices in E4M3.
    MsampO1,
    /// "msamp-o1" with the first moment in E4M3 and the second in float16.
    MsampO2,
    /// "msamp-o2" with FP8 codes of weights kept for the whole step.
    MsampO3,
    /// No master weights, gradients in bfloat16, both moments in 8 bits with expanded ranges (COAT).
    Coat,
    /// No master weights, gradients and moments in bfloat16, updates rounded stochastically.
    Bfloat16,
}

impl Storage {
    /// All choices.
    pub const ALL: [Storage; 6] =
        [Storage::Float32, Storage::MsampO1, Storage::MsampO2, Storage::MsampO3, Storage::Coat, Storage::Bfloat16];

    /// Returns the spelling in configuration files.
    pub const fn as_str(self) -> &'static str {
        match self {
            Storage::Float32 => "float32",
            Storage::MsampO1 => "msamp-o1",
            Storage::MsampO2 => "msamp-o2",
            Storage::MsampO3 => "msamp-o3",
            Storage::Coat => "coat",
            Storage::Bfloat16 => "bfloat16",
        }
    }

    /// Returns the storage formats.
    pub const fn formats(self) -> Formats {
        let (masters, gradients, states) = match self {
            Storage::Float32 => (Masters::Float32, Gradients::Float32, States::Float32),
            Storage::MsampO1 => (Masters::Float16, Gradients::Float8, States::Float32),
            Storage::MsampO2 | Storage::MsampO3 => (Masters::Float16, Gradients::Float8, States::Float8),
            Storage::Coat => (Masters::None, Gradients::Bfloat16, States::Coat),
            Storage::Bfloat16 => (Masters::None, Gradients::Bfloat16, States::Bfloat16),
        };
        Formats { masters, gradients, states }
    }

    /// Returns whether FP8 codes of weights are stored for the whole step. Otherwise each product casts the weight that it reads.
    pub const fn weight_codes(self) -> bool {
        !matches!(self, Storage::MsampO1 | Storage::MsampO2)
    }
}

/// A share of the blocks, counted from the last one, in thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share(u32);

impl Share {
    /// No block.
    pub const NONE: Share = Share(0);

    /// Returns `share` rounded to thousandths and clamped to 0 to 1.
    pub fn new(share: f64) -> Share {
        Share((share.clamp(0.0, 1.0) * 1000.0).round() as u32)
    }

    /// Returns whether the share includes block `i` of `n`. A parameter outside the blocks (`None`) is included only in a share of 1.
    pub fn covers(self, block: Option<(usize, usize)>) -> bool {
        match block {
            Some((i, n)) => (n - i) * 1000 <= self.0 as usize * n,
            None => self.0 >= 1000,
        }
    }
}

/// Storage formats of weights, gradients and moments. Vectors use F32 instead of a format with a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formats {
    /// Format of master weights.
    pub masters: Masters,
    /// Format of the gradients of the blocks' matrices. Gradients of other parameters are F32.
    pub gradients: Gradients,
    /// Format of the moments.
    pub states: States,
}

/// Format of master weights in a model that computes in 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Masters {
    /// 4 bytes.
    Float32,
    /// 2 bytes, with one power of two per matrix.
    Float16,
    /// 2 bytes that complete the BF16 weights to F32.
    Remainder,
    /// No master weights: BF16 weights are rounded stochastically.
    None,
}

/// Format of the gradients of matrices between micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Gradients {
    /// 4 bytes.
    Float32,
    /// 2 bytes.
    Bfloat16,
    /// E4M3, with one power of two per matrix; cast after each micro-batch. If there are several ranks, they send E4M3 with one power of two per 128
    /// values.
    Float8,
}

impl Gradients {
    /// Returns the spelling in configuration files.
    pub const fn as_str(self) -> &'static str {
        match self {
            Gradients::Float32 => "float32",
            Gradients::Bfloat16 => "bfloat16",
            Gradients::Float8 => "float8",
        }
    }
}

/// Format of the moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum States {
    /// 4 bytes each.
    Float32,
    /// 2 bytes each, rounded stochastically.
    Bfloat16,
    /// The first in E4M3, the second in F16, each with one power of two per matrix.
    Float8,
    /// Both in 8 bits with expanded ranges, in groups of 128.
    Coat,
}

impl Formats {
    /// Returns why ranks cannot share the update of a parameter of this shape with these formats, or `None` if they can.
    pub fn slice_problem(self, shape: &[usize]) -> Option<String> {
        let columns = shape[shape.len() - 1];
        (self.states == States::Coat && !columns.is_multiple_of(ExpandedTensor::GROUP)).then(|| {
            format!(
                "`optimizer.state_dtype` is `coat`, whose groups of {} values do not divide rows of {columns}; set `parallel.zero` to 0",
                ExpandedTensor::GROUP
            )
        })
    }

    /// Returns whether the update of a slice can also cast the slice. A cast treats the slice as a matrix of tiles. Groups of moments must lie within
    /// the real rows, and stochastic rounding needs the position of each element, so neither allows such a matrix.
    pub fn slice_casts(self) -> bool {
        self.masters != Masters::None && matches!(self.states, States::Float32 | States::Float8)
    }

    /// Returns whether master weights or moments have one scale for a whole parameter.
    pub fn has_scales(self) -> bool {
        self.masters == Masters::Float16 || self.states == States::Float8
    }

    /// Returns the reason why a model that computes in `compute` cannot train with these formats, and `None` if it can.
    pub fn problem(self, compute: DType) -> Option<String> {
        match (self.masters, compute) {
            (Masters::None, DType::F16) => Some(
                "`optimizer.master_weights` is `none` here; recipe fp16 needs them, since float16 cannot hold small updates".into(),
            ),
            (Masters::Remainder, compute) if compute != DType::BF16 => Some(format!(
                "`optimizer.master_weights` is `remainder`, which only weights in bfloat16 have; this recipe computes in {compute}"
            )),
            _ => None,
        }
    }

    /// Returns the formats of parameters that are not matrices.
    pub const fn of_vectors(self) -> Formats {
        let masters = match self.masters {
            Masters::Float16 => Masters::Float32,
            other => other,
        };
        let states = match self.states {
            States::Float8 | States::Coat => States::Float32,
            other => other,
        };
        Formats { masters, gradients: Gradients::Float32, states }
    }
}
