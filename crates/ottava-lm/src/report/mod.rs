//! What a run tells about itself: numbers for programs, for TensorBoard, and a picture.

pub mod casts;
pub mod metrics;
pub mod plot;
pub mod tensorboard;

pub use casts::CastLog;
pub use metrics::MetricsWriter;
pub use plot::loss_svg;
pub use tensorboard::EventWriter;
