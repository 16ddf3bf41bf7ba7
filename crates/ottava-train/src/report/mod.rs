//! Reports of a run: metrics, TensorBoard events, cast statistics and plots.

pub mod cast_table;
pub mod casts;
pub mod heat_map;
pub mod metrics;
pub mod plot;
pub mod run_comparison;
pub mod run_record;
pub mod sentinel;
pub mod sentinel_table;
pub mod summary;
pub mod tensor_statistics;
pub mod tensorboard;

pub use cast_table::{CastTable, Outlier};
pub use casts::CastLog;
pub use heat_map::{cast_maps, sentinel_maps};
pub use metrics::{MAX_METRICS_BYTES, MetricsWriter};
pub use plot::loss_svg;
pub use run_comparison::{ComparedCheckpoint, ComparedCost, Difference, Parting, RunComparison};
pub use run_record::{RunEnd, RunOutcome, RunRecord};
pub use sentinel::sentinel_line;
pub use sentinel_table::SentinelTable;
pub use summary::{Share, Summary};
pub use tensor_statistics::TensorStatistics;
pub use tensorboard::EventWriter;

#[cfg(test)]
mod power_tests;
