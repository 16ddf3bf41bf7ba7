//! What forward keeps for backward and what backward computes again: a value, which the layers interpret.

use serde::{Deserialize, Serialize};

/// How much is computed again. Each keeps less than the one before; results are the same bits under all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// Everything that backward reads is kept.
    #[default]
    None,
    /// The operands that norms, SwiGLU and attention gave the linears: normalised, activated or cast again from what made them.
    NormSwiglu,
    /// Those, and Q, K and V: projected and rotated again. The attention itself is not run again.
    Attention,
    /// Everything but the input of each block, which is run forward again.
    Full,
}

impl Recompute {
    /// All policies, from the one that keeps most.
    pub const ALL: [Recompute; 4] = [Recompute::None, Recompute::NormSwiglu, Recompute::Attention, Recompute::Full];

    /// The spelling in configuration files.
    pub const fn as_str(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::NormSwiglu => "norm-swiglu",
            Recompute::Attention => "attention",
            Recompute::Full => "full",
        }
    }

    /// Whether the operands of linears are made again.
    pub fn operands(self) -> bool {
        self >= Recompute::NormSwiglu
    }

    /// Whether Q, K and V are.
    pub fn qkv(self) -> bool {
        self >= Recompute::Attention
    }

    /// Whether whole blocks are.
    pub fn blocks(self) -> bool {
        self == Recompute::Full
    }
}

/// How what backward reads beside the operands of products is kept: the inputs of SwiGLU and of norms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SavedActivations {
    /// As forward had them.
    #[default]
    Exact,
    /// In E4M3 with a power of two for each 16 neighbours. Forward does not notice; gradients change a little, and so does what is made
    /// again of them.
    Float8,
}
