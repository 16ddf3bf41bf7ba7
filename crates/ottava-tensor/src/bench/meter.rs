//! The costs of one run of an op: time, and power under load.

use super::{time, time_for, total};
use crate::{Device, Result};
use std::time::Instant;

/// The seconds of load before energy is counted, and while it is counted. The energy counter of a GPU changes only every 20 to 100 ms.
const WARM_UP: f64 = 0.3;
const COUNTED: f64 = 1.0;
/// The milliseconds between two readings of the clock.
const STRETCH: f64 = 50.0;

/// The costs of one run of an op.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Cost {
    /// The median time in milliseconds.
    pub milliseconds: f64,
    /// The power. `None` unless it was requested and can be measured.
    pub power: Option<Power>,
}

/// The power of a GPU that runs one op repeatedly.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Power {
    /// The power of the whole GPU in watts.
    pub watts: f64,
    /// The mean clock of the multiprocessors in megahertz.
    pub megahertz: f64,
    /// The energy of one run in millijoules.
    pub millijoules: f64,
}

/// Measures ops on a device.
#[derive(Clone, Copy)]
pub struct Meter<'a> {
    /// The device on which ops run.
    pub device: &'a Device,
    /// Whether to measure power as well, which takes 1.3 seconds per op.
    pub power: bool,
}

impl Meter<'_> {
    /// Measures the cost of `op` in rounds of `iterations`.
    pub(super) fn rounds_of(&self, iterations: usize, op: &mut dyn FnMut() -> Result<()>) -> Result<Cost> {
        let milliseconds = time(self.device, iterations, &mut *op)?;
        Ok(Cost { milliseconds, power: self.power(milliseconds, op)? })
    }

    /// Measures the cost of `op` in rounds of about `milliseconds`.
    pub(super) fn rounds_for(&self, milliseconds: f64, op: &mut dyn FnMut() -> Result<()>) -> Result<Cost> {
        let milliseconds = time_for(self.device, milliseconds, &mut *op)?;
        Ok(Cost { milliseconds, power: self.power(milliseconds, op)? })
    }

    fn power(&self, milliseconds: f64, op: &mut dyn FnMut() -> Result<()>) -> Result<Option<Power>> {
        let Device::Cuda(gpu) = self.device else { return Ok(None) };
        if !self.power {
            return Ok(None);
        }
        let iterations = (STRETCH / milliseconds).clamp(1.0, 1000.0) as usize;
        let mut op = op;
        let warm_up = Instant::now();
        while warm_up.elapsed().as_secs_f64() < WARM_UP {
            total(self.device, iterations, &mut op)?;
        }
        let Some(before) = gpu.energy() else { return Ok(None) };
        let (start, mut runs, mut clocks) = (Instant::now(), 0, Vec::new());
        while start.elapsed().as_secs_f64() < COUNTED {
            (0..iterations).try_for_each(|_| op())?;
            clocks.extend(gpu.clock());
            gpu.synchronize()?;
            runs += iterations;
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(gpu.energy().map(|after| Power {
            watts: (after - before) / seconds,
            megahertz: clocks.iter().sum::<f64>() / clocks.len().max(1) as f64,
            millijoules: (after - before) * 1e3 / runs as f64,
        }))
    }
}
