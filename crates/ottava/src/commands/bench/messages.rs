//! The time of messages between two ranks.

use ottava_common::Result;
use ottava_tensor::comm::Group;
use ottava_tensor::{DType, Device, Tensor};
use serde::Serialize;
use std::time::Instant;

/// The number of timed rounds. The median is reported.
const TIMED: usize = 11;

/// The number of messages of a round on a GPU, so that launches overlap.
const CALLS: usize = 8;

/// Messages of one size. Each rank of a group sends one to the next rank and receives one from the rank before, as along a pipeline or a ring of context.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct MessageRow {
    /// The size of a message in bytes.
    pub bytes: usize,
    /// The median time in milliseconds.
    pub milliseconds: f64,
    /// The bytes per second that each rank sends.
    pub bytes_per_second: f64,
}

/// Times messages of these sizes in `group`. All of its ranks call it with the same sizes. Times are measured on this rank.
pub(super) fn time_messages(group: &Group, device: &Device, sizes: &[usize]) -> Result<Vec<MessageRow>> {
    let ranks = group.size();
    let (next, before) = ((group.rank() + 1) % ranks, (group.rank() + ranks - 1) % ranks);
    let calls = if matches!(device, Device::Cuda(_)) { CALLS } else { 1 };
    let row = |&bytes: &usize| -> Result<MessageRow> {
        let input = Tensor::zeros(device, &[bytes], DType::E4M3)?;
        let mut output = Tensor::zeros(device, &[bytes], DType::E4M3)?;
        let mut rounds = Vec::new();
        // The first round warms up.
        for _ in 0..=TIMED {
            device.synchronize()?;
            group.barrier("a round of messages")?;
            let start = Instant::now();
            for _ in 0..calls {
                output = group.exchange("message", next, &input, before, output)?.wait()?;
            }
            device.synchronize()?;
            rounds.push(start.elapsed().as_secs_f64() * 1e3 / calls as f64);
        }
        let timed = &mut rounds[1..];
        timed.sort_by(f64::total_cmp);
        let milliseconds = timed[TIMED / 2];
        Ok(MessageRow { bytes, milliseconds, bytes_per_second: bytes as f64 / (milliseconds * 1e-3) })
    };
    sizes.iter().map(row).collect()
}
