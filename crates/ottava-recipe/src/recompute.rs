//! The settings that decide which values forward saves and which values backward recomputes. Layers interpret them.
//!
//! For an operand that is not saved, `SavedOperand` keeps the scale of its cast. Backward recomputes the operand with
//! `OperandCast::reproduce_columns`, `reproduce_both` or `recast_columns`, and does not measure it again. The backward kernel of the
//! activation also writes the activation's transposed codes, so no policy saves these codes. Recomputing a block skips its last product, because
//! backward does not read the result. Every policy gives the same bits (`tests/promises/step/recompute.rs`).
//!
//! Saving activations in FP8 changes gradients, so it is a separate setting and not a policy of recomputation (`ops/compress/` of `ottava-tensor`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The values that backward recomputes. Each policy saves less than the previous policy. The policies give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// Saves everything that backward reads.
    #[default]
    None,
    /// Recomputes the operands of linears: the outputs of norms and SwiGLU, and the cast of attention's output.
    NormSwiglu,
    /// Also recomputes Q, K and V: projection and rotation, but not attention itself.
    Attention,
    /// Saves only the input of each block and recomputes its forward.
    Full,
}

impl Recompute {
    /// All policies. The first one saves the most.
    pub const ALL: [Recompute; 4] = [Recompute::None, Recompute::NormSwiglu, Recompute::Attention, Recompute::Full];

    /// Returns the spelling in configuration files.
    pub const fn as_str(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::NormSwiglu => "norm-swiglu",
            Recompute::Attention => "attention",
            Recompute::Full => "full",
        }
    }

    /// Returns whether the operands of linears are recomputed.
    pub fn operands(self) -> bool {
        self >= Recompute::NormSwiglu
    }

    /// Returns whether Q, K and V are recomputed.
    pub fn qkv(self) -> bool {
        self >= Recompute::Attention
    }

    /// Returns whether whole blocks are recomputed.
    pub fn blocks(self) -> bool {
        self == Recompute::Full
    }
}

/// Format of the saved inputs of SwiGLU and of norms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SavedActivations {
    /// The values of forward.
    #[default]
    Exact,
    /// E4M3 with a power of two per 16 neighbours. Forward does not change. Gradients change slightly, as do the operands that are recomputed from
    /// these codes.
    Float8,
}
