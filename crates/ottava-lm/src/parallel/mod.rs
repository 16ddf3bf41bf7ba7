//! Training on several ranks.

mod amaxes;
mod bucket;
mod casts;
mod exchange;
mod frozen;
mod layer_axes;
mod load;
mod matrices;
mod norm;
mod partition;
mod pipeline;
mod prepare;
mod ranks;
mod reduction;
mod replicas;
mod schedule;
mod sent;
mod slices;
mod spans;
mod tensor;
mod whole;
mod zero;

pub use exchange::Exchange;
pub use layer_axes::LayerAxes;
pub use partition::{BufferBytes, Partition};
pub use pipeline::{Messages, Pipeline};
pub use ranks::{Ranks, Shared};
pub use reduction::ReduceFormat;
pub use schedule::{Message, Part, Schedule, ScheduleKind, Task};
pub use sent::SentActivations;
pub use slices::{GRANULE, Slices};
pub use spans::{divide, expect_blocks};
pub use zero::Zero;
