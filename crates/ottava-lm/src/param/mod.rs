//! Parameters, the builder that creates them, and the description that a model records while it is built.

mod builder;
mod cast;
mod description;
mod folder_codes;
mod gradient;
mod id;
mod loan;
mod parameter;
pub mod scopes;
mod shard;
mod unit;
mod weights;

pub use builder::{Builder, FolderCodes, Init, MemoryPolicy, Purpose, WeightSource};
pub use description::{Description, LayerCosts, STEP_RATES};
pub use folder_codes::FolderUse;
pub use gradient::{Grad, GradFormat, Gradient, WgradProduct};
pub use id::{ParamId, UnitId};
pub use loan::{Loan, LoanedWeight};
pub use parameter::{Param, Placement};
pub use shard::{FolderLayout, FolderTensor, Region, Shard, Split, Stacked};
pub use unit::{Direction, Resident, Units};
pub use weights::{Master, Weights};
