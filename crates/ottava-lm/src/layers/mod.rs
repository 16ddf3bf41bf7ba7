//! The layers: each file holds forward, what it saves and backward, in that order.

mod attention;
mod block;
mod branch;
mod cast;
mod embedding;
mod exchange;
mod factor;
mod head;
mod latent_attention;
mod linear;
mod mlp;
mod moe;
mod names;
mod norm;
mod sublayer;

pub use attention::{Attention, AttentionConfig, NormScope, QkNorm};
pub use block::{Block, BlockSaved};
pub use branch::{Branch, BranchSaved};
pub use cast::{CastInput, OperandCast, SavedOperand};
pub use embedding::Embedding;
pub use factor::Factor;
pub use head::{Head, HeadConfig, HeadOutput, HeadWeight};
pub use latent_attention::{LatentAttention, LatentAttentionConfig, LatentSizes};
pub use linear::{Adapter, ColumnScales, Linear, LinearConfig, ReadWeight, SmoothCasts};
pub use mlp::{Mlp, MlpConfig};
pub use moe::{ExpertsConfig, MixtureConfig, MixtureOfExperts, RouterLossFactors, SharedExpert};
pub use names::{HEAD, HEAD_NORMS, LLAMA, Names, Role, SCORE, TensorRole, expert_stack};
pub use norm::{Norm, NormConfig, NormSaved};
pub use sublayer::{BranchOperand, Sublayer, SublayerSaved};
