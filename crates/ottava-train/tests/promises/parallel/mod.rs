//! Ranks that divide data, layers, tokens, experts or weights train as one rank does.

pub mod context;
pub mod divided;
pub mod expert_ranks;
pub mod expert_tensor;
pub mod hierarchical;
pub mod latent_ranks;
pub mod mesh;
pub mod offloaded_ranks;
pub mod pipeline;
pub mod ranks;
pub mod recurrent_ranks;
pub mod reopen;
pub mod sent;
pub mod sharded;
pub mod shared_values;
pub mod tensor;
