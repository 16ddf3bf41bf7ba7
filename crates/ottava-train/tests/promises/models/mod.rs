//! Families and their blocks, compared with PyTorch and transformers.

pub mod configurations;
pub mod delta_casts;
pub mod experts;
pub mod families;
pub mod family_gradients;
pub mod family_referee;
pub mod gallery;
pub mod gpt_oss;
pub mod real_model;
pub mod recorded;
pub mod referee;
pub mod router_losses;
