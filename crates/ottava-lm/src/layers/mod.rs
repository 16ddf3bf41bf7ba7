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
mod stream;
mod sublayer;

pub use attention::{Attention, HeadsSpec, NormScope};
pub use block::{Block, BlockSaved};
pub use branch::{Branch, BranchSaved};
pub use cast::{CastInput, OperandCast, SavedOperand};
pub use embedding::Embedding;
pub use factor::Factor;
pub use head::{Head, HeadConfig, HeadOutput, HeadWeight};
pub use latent_attention::{LatentAttention, LatentSizes, LatentSpec};
pub use linear::{Adapter, ColumnScales, Linear, LinearConfig, ReadWeight, SmoothCasts};
pub use mlp::{Mlp, MlpSpec};
pub use moe::{ExpertsSpec, MixtureOfExperts, RouterLossFactors, SharedExpert};
pub use names::{BranchNorms, HEAD, HEAD_NORMS, LLAMA, Names, Role, SCORE, TensorRole, expert_stack};
pub use norm::{Norm, NormConfig, NormSaved};
pub use stream::{Rotary, Stream};
pub use sublayer::{BranchOperand, Sublayer, SublayerSaved};
