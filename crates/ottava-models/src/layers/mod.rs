//! The layers: each file holds forward, what it saves and backward, in that order.
//!
//! There is no tape. `forward` of a layer returns what its `backward` needs by value; `backward` is below `forward` in the same file and consumes
//! this value, so memory is freed early. Activations are plain `[tokens, channels]` matrices; the `Context` of a call carries batch, sequence
//! length, positions and scales.
//!
//! A `Block` is a list of residual branches. A `Branch` is `y = x + factor · after(Σ sublayer(before(x)))`: a norm before (pre-norm), a norm after
//! (post-norm), or both, and one or several sublayers. `Names` has a name for each norm of a block, empty if there is none. Several sublayers read
//! one operand, which is cast in the slot of the first sublayer's linear, and each adds its output to the sum of the preceding sublayers. For
//! example, attention and MLP of Command-R read one norm.
//!
//! A `Sublayer` has `input` (the `OperandCast` that reads the operand), `gradient` (the cast that reads `dy` first), `forward`, `save` (forward
//! without its output, for recomputed blocks) and `backward`. `SublayerSaved` hides the type of what a sublayer saves, so that a branch can list
//! sublayers of any type. Two layers are no sublayers: the embedding, whose input has no gradient, and the head, which is fused with the loss, so
//! that all logits are never stored: the head computes logits of 2,048 tokens at a time and replaces them by their gradient in place.
//!
//! No slot is visible outside the layer that owns the cast. `OperandCast` takes the op that produces an operand as a closure, and chooses what the
//! op writes: a value, an amax, or codes. A norm receives an `OperandCast` from the linear that reads it, and never sees the slot
//! (`Norm::forward_for`).
//!
//! In steps of `StepPrecision::High`, all products read values, and `Casts::measure` measures the operands that would have been cast.
//! `ActivatedLinear` (`mlp/activated.rs`) is the linear after an activation, fused with it. With `smooth_swiglu` it has `SmoothCasts`, which scale
//! the columns of the activation and divide the columns of the weight by the same powers of two; this weight depends on the input, so no update
//! casts it.
//!
//! `LatentAttention` is another sublayer: the op `move_columns` assembles queries, keys and values from projected parts into the fused tensor that
//! attention reads, and takes gradients apart. Values are padded to the size of keys. `Attention::new` creates the `AttentionSpec` of its layer,
//! which `attention`, `KvBlocks` and `paged_attention` take.

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
pub use head::{ChunkLoss, Head, HeadConfig, HeadOutput, HeadWeight};
pub use latent_attention::{LatentAttention, LatentSizes, LatentSpec};
pub use linear::{Adapter, ColumnScales, Linear, LinearConfig, ReadWeight, SmoothCasts};
pub use mlp::{Mlp, MlpSpec};
pub use moe::{ExpertsSpec, MixtureOfExperts, RouterLossFactors, SharedExpert};
pub use names::{BranchNorms, HEAD, HEAD_NORMS, LLAMA, Names, Role, SCORE, TensorRole, expert_stack};
pub use norm::{Norm, NormConfig, NormSaved};
pub use stream::{Rotary, Stream};
pub use sublayer::{BranchOperand, Sublayer, SublayerSaved};
