//! The layers. Each file has forward, the values that forward saves, and backward, in this order.
//!
//! The layers record no tape. `forward` of a layer returns the values for its `backward`, and the caller owns them. `backward` is below `forward` in
//! the same file and consumes these values, so that memory is freed early. Activations are plain `[tokens, channels]` matrices. The `Context` of a
//! call carries batch, sequence length, positions and scales.
//!
//! A `Block` is a list of residual branches. A `Branch` is `y = x + factor · after(Σ sublayer(before(x)))`: one or several sublayers, with a norm
//! before (pre-norm), a norm after (post-norm), or both. In encoders such as BERT, a norm follows the residual connection instead. `Names` has the name of each norm of a block, or `None` if the block lacks the norm. Several
//! sublayers of a branch read the same operand: for example, attention and MLP of Command-R read one norm. The operand is cast in the slot of the
//! first sublayer's linear. Each sublayer adds its output to the sum of the preceding sublayers.
//!
//! A `Sublayer` has `input` (the `OperandCast` that reads the operand), `gradient` (the cast that reads `dy` first), `forward`, `save` (forward
//! without its output, for recomputed blocks) and `backward`. `SublayerSaved` hides the type of the values that a sublayer saves, so that a branch
//! can list sublayers of any type. Two layers are not sublayers: the embedding, because its input has no gradient, and the head, because it is fused
//! with the loss. The head computes logits of 2,048 tokens at a time and replaces them by their gradient in place, so all logits are never stored.
//!
//! No slot is visible outside the layer that owns the cast. `OperandCast` takes the op that produces an operand as a closure, and chooses what the
//! op writes: a value, an amax, or codes. A norm receives an `OperandCast` from the linear that reads it, and never sees the slot
//! (`Norm::forward_for`).
//!
//! In steps of `StepPrecision::High`, all products read values, and `Casts::measure` measures the operands that would have been cast.
//! `ActivatedLinear` (`mlp/activated.rs`) is the linear after an activation, fused with the activation. With `smooth_swiglu`, its `SmoothCasts`
//! multiply the columns of the activation by powers of two, and divide the columns of the weight by the same powers. The divided weight depends on
//! the input, so updates do not cast it.
//!
//! `DeltaNet` and `Mamba` are recurrent layers in place of attention, or beside it: a causal convolution and the gated delta rule or a state space. Each
//! is a `Mixer` in the frame `Recurrent`. They record a `RecurrentSpec`, and in inference they read and replace the states of sequences, which are in
//! slots.
//!
//! Layers may read values of earlier layers beside the residual stream: the keys and values of another attention (`attention/sharing.rs`), and
//! per-layer embeddings (`layer_embeddings.rs`). These values are in the `SharedValues` of the `Context`, with the gradients by them.
//!
//! Encoders have an `EmbeddingTail` after the embedding, and classifiers with an encoder have a `Pooler` before the head.
//!
//! `LatentAttention` is another sublayer. Its op `move_columns` assembles projected parts of queries, keys and values into the fused tensor that
//! attention reads, and splits gradients into these parts. Values are padded to the size of keys. `Attention::new` creates the `AttentionSpec` of
//! its layer, which `attention`, `KvBlocks` and `paged_attention` take.

mod adaptable;
mod attention;
mod block;
mod block_scale;
mod branch;
mod cast;
mod columns;
mod delta_net;
mod embedding;
mod embedding_tail;
mod exchange;
mod factor;
mod gated_embedding;
mod head;
mod latent_attention;
mod layer_embeddings;
mod linear;
mod mamba;
mod mlp;
mod moe;
mod names;
mod norm;
mod normed;
mod pooler;
mod recurrent;
mod scaled;
mod stream;
mod sublayer;

pub use adaptable::{Adaptable, LayerAdapter};
pub use attention::{Attention, HeadsSpec, KeysAndValues, NormScope, QueryGrowth};
pub use block::{Block, BlockSaved};
pub use block_scale::BlockScale;
pub use branch::{Branch, BranchSaved};
pub use cast::{CastInput, OperandCast, SavedOperand};
pub use delta_net::{DeltaNetSpec, ProjectionLayout};
pub use embedding::Embedding;
pub use embedding_tail::{EmbeddingTail, EmbeddingTailSaved, EmbeddingTailSpec};
pub use factor::Factor;
pub use gated_embedding::{GatedEmbedding, GatedEmbeddingSpec};
pub use head::{ChunkLoss, Head, HeadConfig, HeadOutput, HeadWeight, ScoreSpec, join_vocabulary};
pub use latent_attention::{LatentAttention, LatentSizes, LatentSpec};
pub use layer_embeddings::{LayerEmbeddings, LayerEmbeddingsSaved, LayerEmbeddingsSpec};
pub use linear::{Adapter, ColumnScales, Linear, LinearConfig, ReadWeight, SmoothCasts};
pub use mamba::MambaSpec;
pub use mlp::{Mlp, MlpSpec, XieluMlp, XieluSpec};
pub use moe::{ChoiceBias, ExpertInput, ExpertsSpec, MixtureOfExperts, RouterLossFactors, RouterScales, SharedExpert};
pub use names::{
    BranchNorms, EXPERT_PARAMETERS, ExpertStacks, LLAMA, Names, Role, SCORE, TensorRole, VALUE, expert_stack,
};
pub(crate) use names::{RECURRENT_OUTPUT, ROBERTA_SCORES, within};
pub use norm::{Norm, NormConfig, NormSaved};
pub use normed::NormedSublayer;
pub use pooler::{Pooler, PoolerSaved, PoolerSpec};
pub use scaled::ScaledSublayer;
pub use stream::{Positions, Rotary, Stream};
pub use sublayer::{BranchOperand, Sublayer, SublayerSaved};
