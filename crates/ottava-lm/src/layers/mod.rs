//! The layers: each file holds forward, what it saves and backward, in that order.

mod attention;
mod block;
mod embedding;
mod head;
mod linear;
mod mlp;
mod norm;

pub use attention::{Attention, AttentionConfig, AttentionSaved, KvCache};
pub use block::{Block, BlockSaved};
pub use embedding::Embedding;
pub use head::Head;
pub use linear::{Linear, LinearConfig, LinearSaved, Smooth};
pub use mlp::{Mlp, MlpSaved};
pub use norm::{Norm, NormSaved};
