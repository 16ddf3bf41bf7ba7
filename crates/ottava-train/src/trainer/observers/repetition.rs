//! Repeated passes, which find unreliable hardware.

use super::contract::{Observer, Watched};
use crate::objective::LoadedRows;
use crate::step::Repeated;
use ottava_common::error::{Error, Result};
use ottava_tensor::Device;
use serde_json::{Value, json};

/// Computes the first micro-batch of the step twice, where that is due. Errors with [`Error::Corruption`] on all ranks if any bit differs.
pub(super) struct Repetition;

impl Observer for Repetition {
    fn before_step(&mut self, step: u64, rows: &LoadedRows, watched: &mut Watched) -> Result<()> {
        let config = &watched.environment.config;
        let Some(first) = rows.first.as_ref().filter(|_| config.sentinel.repeats(step)) else { return Ok(()) };
        // On a GPU, the order of sums in attention's backward may change from run to run.
        let is_cpu = matches!(watched.environment.device, Device::Cpu | Device::DryCpu(_));
        let (precision, deterministic) = (watched.run.precision(), is_cpu || config.precision.deterministic);
        let Repeated { different, digests } = watched.run.repeat(first, precision, deterministic)?;
        if let Some(log) = watched.files.as_mut().and_then(|files| files.digests.as_mut()) {
            let digests = digests.into_iter().map(|(name, bits)| (name, json!(format!("{bits:016x}")))).collect();
            log.append(step, &[("digests", Value::Object(digests))])?;
        }
        match different {
            None => Ok(()),
            Some(tensor) => Err(Error::Corruption(format!(
                "step {step}: the same micro-batch gave other bits when it was computed again: the first difference is in the {tensor}. \
                 A memory or a compute unit of this device is not reliable; resume from the last checkpoint on another one"
            ))),
        }
    }
}
