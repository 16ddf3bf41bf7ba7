//! What a run's file leaves to the device, decided before anything is allocated.

use super::changes::{self, gib, proposals, time_of};
use super::memory::MemoryPlan;
use crate::config::{MemoryConfig, RunConfig};
use crate::error::{Error, Result};
use crate::models::DecoderConfig;
use crate::recompute::Recompute;
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::{Device, Error as TensorError};

/// A run whose memory is known.
#[derive(Clone, Debug)]
pub struct Settled {
    /// With the policy that was chosen, where it was left open.
    pub config: RunConfig,
    /// Its plan.
    pub memory: MemoryPlan,
    /// What settings that are `auto` have come to, in words.
    pub choice: Option<String>,
    sizes: DecoderConfig,
    device: Device,
}

impl Settled {
    /// Plans `config` for a model of `sizes` on `device`, and takes the cheapest policy that fits where it is `auto`. Where none fits,
    /// that which takes least.
    pub fn new(config: &RunConfig, sizes: &DecoderConfig, device: &Device) -> Result<Settled> {
        let plan = |policy, share| -> Result<(RunConfig, MemoryPlan)> {
            let mut config = config.clone();
            config.memory.recompute = Some(policy);
            config.memory.offload_optimizer = Some(share);
            let memory = MemoryPlan::new(&config, sizes, device)?;
            Ok((config, memory))
        };
        let MemoryConfig { recompute, offload_optimizer, .. } = config.memory;
        let share = offload_optimizer.unwrap_or(0.0);
        let mut choices = Vec::new();
        let mut chosen = plan(recompute.unwrap_or(Recompute::None), share)?;
        let (whole, there) = (gib(chosen.1.peak_bytes), gib(chosen.1.available_bytes));
        if recompute.is_none() {
            let mut policy = Recompute::None;
            for next in Recompute::ALL.into_iter().skip(1) {
                if !chosen.1.fits {
                    (chosen, policy) = (plan(next, share)?, next);
                }
            }
            let slower = (time_of(policy) - 1.0) * 100.0;
            choices.push(match policy {
                Recompute::None => {
                    format!("recompute = \"auto\" is \"none\": {whole:.1} GiB fit the {there:.1} GiB for tensors")
                }
                policy => format!(
                    "recompute = \"auto\" is \"{}\", which was about {slower:.0} % slower where it was measured: without, tensors take {whole:.1} GiB, and there are {there:.1} GiB for them",
                    policy.as_str(),
                ),
            });
        }
        if offload_optimizer.is_none() {
            let policy = chosen.0.memory.recompute.expect("chosen above");
            let without = gib(chosen.1.peak_bytes);
            // The least number of blocks, between one that does not fit and one that does.
            let (mut too_few, mut enough) = (0, sizes.layers);
            let share_of = |blocks: usize| blocks as f64 / sizes.layers as f64;
            if !chosen.1.fits && matches!(device, Device::Cuda(_)) {
                chosen = plan(policy, 1.0)?;
                while chosen.1.fits && enough - too_few > 1 {
                    let blocks = (too_few + enough).div_ceil(2);
                    let tried = plan(policy, share_of(blocks))?;
                    match tried.1.fits {
                        true => (chosen, enough) = (tried, blocks),
                        false => too_few = blocks,
                    }
                }
            }
            let share = chosen.0.memory.offload_optimizer.expect("chosen above");
            let host = gib(chosen.1.host_bytes);
            choices.push(match share > 0.0 {
                false => format!("offload_optimizer = \"auto\" is 0: {without:.1} GiB fit the {there:.1} GiB for tensors"),
                true => format!(
                    "offload_optimizer = \"auto\" is {share:.3}: without, tensors take {without:.1} GiB, and there are {there:.1} GiB for them. {host:.1} GiB of moments and masters are in the host's memory, and cross the bus twice in each update"
                ),
            });
        }
        if share > 0.0 && !matches!(device, Device::Cuda(_)) {
            choices.push("offload_optimizer changes nothing on the CPU, where there is one memory".into());
        }
        let (config, memory) = chosen;
        let choice = (!choices.is_empty()).then(|| choices.join(". "));
        Ok(Settled { config, memory, choice, sizes: sizes.clone(), device: device.clone() })
    }

    /// Errors when the run does not fit, with the changes that would make it.
    pub fn expect_fit(&self) -> Result<()> {
        if self.memory.fits {
            return Ok(());
        }
        let Settled { memory: MemoryPlan { peak_bytes, reserved_bytes, available_bytes, during, .. }, device, .. } =
            self;
        let (peak, there) = (gib(*peak_bytes), gib(*available_bytes));
        // Blocks of a pool leave gaps, which are part of what it takes.
        let gaps = match reserved_bytes > peak_bytes {
            true => format!(", {:.1} GiB with the gaps between them", gib(*reserved_bytes)),
            false => String::new(),
        };
        let proposals = proposals(&changes::changes(&self.config, &self.sizes, device)?);
        Err(Error::Memory(format!(
            "the run does not fit {device}: in {during} tensors take {peak:.1} GiB{gaps}, and there are {there:.1} GiB for them. {proposals}"
        )))
    }

    /// What to say of `error`, if it is that memory ran out in spite of the plan: planned against measured, and what would take less.
    pub fn explain(&self, error: Error) -> Error {
        let (Error::Tensor(TensorError::OutOfMemory { requested, free, .. }), Device::Cuda(gpu)) =
            (&error, &self.device)
        else {
            return error;
        };
        let measured = gpu.memory();
        // No more than there turned out to be, and less than the plan by what was asked for in vain.
        let planned = self.memory.reserved_bytes as usize;
        let there = (measured.reserved + free).min(planned.saturating_sub(*requested));
        let device = Device::dry_gpu(GpuModel { memory: there, ..gpu.model().clone() });
        let proposals = match changes::changes(&self.config, &self.sizes, &device) {
            Ok(changes) => proposals(&changes),
            Err(error) => error.to_string(),
        };
        let MemoryPlan { peak_bytes, during, available_bytes, .. } = &self.memory;
        let gib = |bytes: usize| gib(bytes as u64);
        Error::Memory(format!(
            "{error}. Planned were {:.1} GiB of tensors, in {during}, of {:.1} GiB for them; measured are {:.1} GiB at most, {:.1} GiB taken from the driver with the gaps between them, and {:.1} GiB free beside those. {proposals}",
            gib(*peak_bytes as usize),
            gib(*available_bytes as usize),
            gib(measured.peak),
            gib(measured.reserved),
            gib(*free),
        ))
    }
}
