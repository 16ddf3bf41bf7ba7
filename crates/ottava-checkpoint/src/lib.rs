//! Checkpoints: Hugging Face model folders with training state, written atomically.
//!
//! ```
//! use ottava_checkpoint::RandomWeights;
//! use ottava_recipe::param::{FolderTensor, Init, WeightSource};
//! use ottava_tensor::Device;
//!
//! // Values depend on the seed and the name of a tensor alone, so each rank can draw its own slice.
//! let mut weights = RandomWeights { seed: 1, device: Device::Cpu };
//! let tensor = FolderTensor::new("model.norm.weight".into(), vec![8]);
//! let mut draw = |elements| weights.read(&tensor, elements, Init::Normal(0.02))?.to_vec::<f32>().map_err(Into::into);
//! let (all, slice): (Result<_, ottava_common::Error>, _) = (draw(0..8), draw(2..4));
//! assert_eq!(all?[2..4], slice?);
//! # Ok::<(), ottava_common::Error>(())
//! ```
//!
//! A checkpoint is a Hugging Face model folder. The subfolder `training/` has everything else: optimizer states and scales as named tensors, and an
//! index that maps the elements of each tensor to files (`slices.rs`). So any number of processes can read a checkpoint that another number of
//! processes has written. Weights are safetensors, and no file is a pickle. An incomplete checkpoint never has its final name: `CheckpointWriter`
//! writes under a temporary name, hashes while it writes, writes the manifest last, and renames the folder.
//!
//! `Contents` (`training.rs`) lists what a rank writes. `LiveTensors` (`live.rs`) reads these tensors and gathers the parts that other ranks hold.
//! `Saver` (`save.rs`) writes the files: directly while training is paused, or in a thread from a `Snapshot` in pinned host memory. This thread never
//! uses the communicator. At the end of each step, the training threads of all ranks exchange the progress of their saves and advance them together.
//! On resume, `SavedStates` (`formats.rs`) converts the states of another storage. A run writes its durable files through the trait `Fs`, so tests
//! can make each operation fail in turn and simulate a power failure after each operation.
//!
//! **A checkpoint does not depend on the mesh.** `LiveTensors` gathers one weight at a time, over slices, parts of tensors and stages
//! (`Partition::whole_value`), on all ranks in the order of the model. Optimizer states are not gathered: each rank writes its `Regions` of the
//! folder's tensors (`slices.rs`), and reads the regions that its own mesh needs. Values that belong to a whole matrix, such as the scale of its
//! moments, are reduced over `Shared::Elements`, so they are equal on all ranks. `tests/promises/parallel/reopen.rs` reopens the checkpoints of each
//! mesh under another mesh and compares all bytes.
//!
//! **Loading.** `FolderWeights` reads a tensor through `Staging` to the device of the model, in the type of the file, and `Param::load` casts it
//! there. `ModelFiles::read_into` reads parts of a chunk in parallel. `DequantizedFiles` reads and dequantizes all weights of a folder, whatever their
//! type. `Quantization` (`models/quantization.rs`) describes the scales of FP8 weights.
//!
//! **Tensors that are not built.** `WeightFiles` divides the tensors of a folder. In a vision-language folder, tensors of the text model get the names of
//! a text model alone. All others, and tensors that predict further tokens, are `Carried`. `write_model` and `Contents` write the names of the folder
//! again, and copy the carried tensors. So no other code knows the prefix. `stacks.rs` reorders experts that a folder stacks in one tensor, and
//! finds the layout of a folder's experts. `expert_adapters.rs` does the same for adapters of experts, and `merge_experts.rs` merges them.
//!
//! `docs/checkpoints.md` describes the layout, and `docs/reliability.md` describes the promises and their tests.
#![forbid(unsafe_code)]

pub mod adapter;
mod adapter_config;
pub mod atomic;
mod average;
mod backup;
mod best;
mod carried;
mod dequantized;
mod expert_adapters;
mod formats;
mod four_bits;
pub mod live;
mod manifest;
pub mod merge;
mod merge_experts;
pub mod model;
mod mxfp4;
mod new_rows;
mod nf4;
mod packed_fp4;
mod progress;
pub mod safetensors;
pub mod safetensors_write;
pub mod save;
pub mod slices;
mod stacks;
pub mod template;
mod texts;
pub mod training;
pub mod weight_files;

pub use adapter::{AdapterFolder, LinearAdapter};
pub use atomic::{
    CheckpointFile, CheckpointWriter, FileStart, abandon_after, delete_old, holds_checkpoints, latest_complete,
    latest_complete_until, remove_leftovers,
};
pub use average::average;
pub use backup::{Backup, Uploads};
pub use best::{Best, Better};
pub use carried::Carried;
pub use dequantized::{DequantizedFiles, StoredScales};
pub use live::LiveTensors;
pub use manifest::{Manifest, Verify, verify, verify_model};
pub use merge::merge;
pub use model::{AdaptedWeights, FolderWeights, RandomWeights};
pub use progress::{Progress, RowsProgress};
pub use safetensors::{ModelFiles, TensorInfo};
pub use safetensors_write::{write_file, write_model, write_tensors};
pub use save::{Saved, Saver};
pub use stacks::with_experts_of;
pub use template::{FolderTemplate, POOLING_FILE};
pub use texts::Texts;
pub use training::Contents;
pub use weight_files::WeightFiles;
