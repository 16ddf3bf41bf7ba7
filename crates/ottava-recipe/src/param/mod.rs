//! Parameters, the builder that creates them, and the description that a model records while it is built.
//!
//! A `Param` consists of an `Identity` that never changes, `Weights` (master weights, and the weights that layers read), a `Gradient`, and a
//! `WeightCast` to FP8 codes. A parameter is whole, sliced or frozen: this process updates all its elements, a slice, or none. The `ParamId` of an
//! `Identity` is a unit (embedding, block or head) and an index in the unit, so training looks nothing up by name.
//!
//! The life of a `Param`:
//!
//! 1. **Build.** A layer gives the `Split` of each tensor: by outputs, by inputs, by vocabulary, by experts, or none. `Builder::shard` returns the
//!    `Shard`: a tensor of the Hugging Face folder, a dimension, and the range of indices that this rank holds. On one rank, a shard is the whole
//!    tensor. Layers record themselves in the `Description`, which plans, warnings and benchmarks read, so there is no second list of a model's
//!    linears.
//! 2. **Divide.** `Partition::new` decides the slices of each rank, before any weight is in memory (`Param::keep_slice`).
//! 3. **Load.** `Param::load` asks a `WeightSource` for ranges of elements, so loading takes no more memory than training. A random weight depends
//!    on the seed, the tensor's name and the element, so a slice has the same bits as that part of the whole tensor.
//! 4. **Cast.** `Decoder::quantize_weights` casts a weight after loading, and each update casts the weight again. No weight is cast twice for one
//!    product.
//! 5. **Lend.** A block receives weights that are gathered from ranks or copied from host memory as a `Loan`, for one pass.
//! 6. **Update.** `optim/update.rs` updates the slice. The seed of stochastic rounding is a hash of the parameter's name (`Identity::seed`), so
//!    results do not depend on the order of parameters.
//!
//! An update consists of calls in an order that types check. `Param::begin_update` returns an `UpdateCast`, which `Param::finish_update` consumes.
//! `Param::begin_write` returns a `SliceWrite`, which `Param::finish_write` consumes to complete the slice in the buffer that ranks gather.
//!
//! A weight is always `[outputs, inputs]` in memory. Transposed tensors of folders, such as each linear of GPT-2, are transposed only while a
//! folder is read or written (`checkpoint/model.rs`). Experts that a folder stacks in one tensor are also reordered only then (`Stacked`,
//! `checkpoint/stacks.rs`). Q, K and V are one parameter of three shards, and gate and up are one parameter of two shards, so one product and one
//! scale replace several, as in inference engines. Folders are read and written by tensor, under Hugging Face's names.
//!
//! In two cases, each product that reads a weight casts it (`Param::codes_for_forward`, `Param::codes_for_backward`): if `memory.weight_codes`
//! is off, or if the weight is offloaded and not divided. A third case is `layers/linear/smooth.rs`, where the weight depends on the scales of the
//! input.
//!
//! A frozen weight is cast once, when it is loaded (`Decoder::load_each`). Its codes replace its values if products read only codes. Codes are
//! stored in one layout if the other layout has the same codes (`Granularity::shares_codes`); then `Param::codes_for_backward` transposes them. A
//! `WeightSource` may have FP8 codes (`WeightSource::codes`). A frozen weight keeps these codes if their scales match its cast. In ZeRO stage
//! 3, each rank stores a slice of a frozen weight (`parallel/frozen.rs`), and each pass gathers the weight.

mod builder;
mod cast;
mod description;
mod folder_codes;
mod gradient;
mod id;
mod identity;
mod loan;
mod ownership;
mod parameter;
pub mod scopes;
mod shard;
mod unit;
mod weights;

pub use builder::{Builder, FolderCodes, Init, MemoryPolicy, Purpose, WeightSource};
pub use cast::{UpdateCast, WeightCast};
pub use description::{Description, LayerCosts, STEP_RATES};
pub use folder_codes::FolderUse;
pub use gradient::{Grad, GradFormat, Gradient, WgradProduct};
pub use id::{ParamId, UnitId};
pub use identity::Identity;
pub use loan::{Loan, LoanedWeight};
pub use parameter::{ForwardWeight, Param, SliceWrite, SuspendedWeight, Writer};
pub use shard::{AdapterMatrix, ExpertAdapter, FolderLayout, FolderTensor, Region, Shard, Split, StackOrder, Stacked};
pub use unit::{Direction, Resident, Units};
pub use weights::{Master, StoredWeights, Weights};
