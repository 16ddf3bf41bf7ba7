//! Checkpoints: Hugging Face model folders with training state, written atomically.

pub mod adapter;
mod adapter_config;
pub mod atomic;
mod best;
mod formats;
pub mod live;
mod manifest;
pub mod merge;
pub mod model;
mod mxfp4;
pub mod safetensors;
pub mod safetensors_write;
pub mod save;
pub mod slices;
mod stacks;
pub mod training;
pub mod weight_files;

pub use adapter::{AdapterFolder, LinearAdapter};
pub use atomic::{
    CheckpointFile, CheckpointWriter, FileStart, abandon_after, delete_old, holds_checkpoints, latest_complete,
    latest_complete_until, remove_leftovers,
};
pub use best::Best;
pub use live::LiveTensors;
pub use manifest::{Manifest, Verify, verify, verify_model};
pub use merge::merge;
pub use model::{AdaptedWeights, FolderTemplate, FolderWeights, RandomWeights};
pub use safetensors::{ModelFiles, TensorInfo};
pub use safetensors_write::{write_file, write_model, write_tensors};
pub use save::{Saved, Saver};
pub use training::{Contents, Progress};
pub use weight_files::WeightFiles;
