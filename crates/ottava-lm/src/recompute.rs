//! What forward keeps for backward and what backward computes again: a value, which the layers interpret.

use crate::error::{Error, Result};
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

impl std::str::FromStr for Recompute {
    type Err = Error;
    fn from_str(text: &str) -> Result<Recompute> {
        Recompute::ALL.into_iter().find(|policy| policy.as_str() == text).ok_or_else(|| {
            let names = Recompute::ALL.map(Recompute::as_str).join(", ");
            Error::Config(format!("`{text}` is not a recomputation policy; there are {names}"))
        })
    }
}
