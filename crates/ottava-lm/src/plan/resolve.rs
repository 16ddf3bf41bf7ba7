//! Resolves `auto` settings for a device before anything is allocated.

use super::changes::{self, bus_seconds, gib, proposals, time_of};
use super::memory::MemoryPlan;
use crate::config::{MemoryConfig, RunConfig};
use crate::error::{Error, Result};
use crate::models::DecoderConfig;
use crate::recompute::Recompute;
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::{Device, Error as TensorError};

/// A run whose memory is known.
#[derive(Clone, Debug)]
pub struct ResolvedRun {
    /// With the policy that was chosen, where it was left open.
    pub config: RunConfig,
    /// Its plan.
    pub memory: MemoryPlan,
    /// The choices for settings that are `auto`, as text.
    pub choice: Option<String>,
    sizes: DecoderConfig,
    device: Device,
}

/// The field of a setting that is a share of the blocks.
type ShareIn = fn(&mut MemoryConfig) -> &mut Option<f64>;

impl ResolvedRun {
    /// Plans `config` for a model of `sizes` on `device`, and takes the cheapest policy that fits where it is `auto`. Where none fits,
    /// that which takes least.
    pub fn new(config: &RunConfig, sizes: &DecoderConfig, device: &Device) -> Result<ResolvedRun> {
        let plan = |memory: &MemoryConfig| -> Result<(RunConfig, MemoryPlan)> {
            let config = RunConfig { memory: memory.clone(), ..config.clone() };
            let memory = MemoryPlan::new(&config, sizes, device)?;
            Ok((config, memory))
        };
        let mut memory = config.memory.clone();
        let mut policy = *memory.recompute.get_or_insert(Recompute::None);
        memory.offload_optimizer.get_or_insert(0.0);
        memory.offload_parameters.get_or_insert(0.0);
        let mut choices = Vec::new();
        let mut chosen = plan(&memory)?;
        let (whole, available) = (gib(chosen.1.peak_bytes), gib(chosen.1.available_bytes));
        if config.memory.recompute.is_none() {
            for next in Recompute::ALL.into_iter().skip(1) {
                if !chosen.1.fits {
                    memory.recompute = Some(next);
                    (chosen, policy) = (plan(&memory)?, next);
                }
            }
            let slower = (time_of(policy) - 1.0) * 100.0;
            choices.push(match policy {
                Recompute::None => {
                    format!("recompute = \"auto\" is \"none\": tensors take {whole:.1} GiB, {available:.1} GiB available")
                }
                policy => format!(
                    "recompute = \"auto\" is \"{}\", measured to be about {slower:.0} % slower: without it, tensors take {whole:.1} GiB, {available:.1} GiB available",
                    policy.as_str(),
                ),
            });
        }
        let on_gpu = matches!(device, Device::Cuda(_));
        let shares: [(_, ShareIn); 2] = [
            ("offload_optimizer", |memory| &mut memory.offload_optimizer),
            ("offload_parameters", |memory| &mut memory.offload_parameters),
        ];
        let mut asked = config.memory.clone();
        for (key, share_in) in shares.into_iter().filter(|(_, share_in)| share_in(&mut asked).is_none()) {
            let mut plan_with = |share| {
                *share_in(&mut memory) = Some(share);
                plan(&memory)
            };
            let (without, host) = (gib(chosen.1.peak_bytes), chosen.1.host_bytes);
            let mut share = 0.0;
            if !chosen.1.fits && on_gpu {
                // The least number of blocks, between one that does not fit and one that does.
                let (mut too_few, mut enough) = (0, sizes.layers);
                let share_of = |blocks: usize| blocks as f64 / sizes.layers as f64;
                chosen = plan_with(1.0)?;
                while chosen.1.fits && enough - too_few > 1 {
                    let blocks = (too_few + enough).div_ceil(2);
                    let tried = plan_with(share_of(blocks))?;
                    match tried.1.fits {
                        true => (chosen, enough) = (tried, blocks),
                        false => too_few = blocks,
                    }
                }
                share = share_of(enough);
            }
            *share_in(&mut memory) = Some(share);
            choices.push(match share > 0.0 {
                false => format!("{key} = \"auto\" is 0: tensors take {without:.1} GiB, {available:.1} GiB available"),
                true => {
                    let moved = chosen.1.host_bytes.saturating_sub(host);
                    let (moved_gib, milliseconds) = (gib(moved), bus_seconds(moved) * 1000.0);
                    format!(
                        "{key} = \"auto\" is {share:.3}: without, tensors take {without:.1} GiB, {available:.1} GiB available. {moved_gib:.1} GiB are offloaded to the host's memory; one transfer of them takes about {milliseconds:.0} ms"
                    )
                }
            });
        }
        let offloads =
            shares.iter().any(|(_, share_in)| *share_in(&mut memory) > Some(0.0)) || memory.offload_residuals;
        if offloads && !on_gpu {
            choices.push("offloading changes nothing on the CPU, where there is one memory".into());
        }
        let (mut config, mut memory) = chosen;
        if config.training.async_save.is_none() {
            config.training.async_save = Some(memory.snapshots_fit);
            if !memory.snapshots_fit {
                let bytes = std::mem::take(&mut memory.snapshot_bytes);
                choices.push(format!(
                    "async_save = \"auto\" is false: a snapshot of a checkpoint takes {:.1} GiB of the host's memory, which is more than is available for all ranks",
                    gib(bytes)
                ));
            }
        }
        let choice = (!choices.is_empty()).then(|| choices.join(". "));
        Ok(ResolvedRun { config, memory, choice, sizes: sizes.clone(), device: device.clone() })
    }

    /// Starts compiling the kernels of the run in the background, so that its first step need not wait for each in turn.
    pub fn prepare_device(&self) {
        if let Device::Cuda(gpu) = &self.device {
            gpu.prepare(self.memory.workload.clone());
        }
    }

    /// Errors when the run does not fit, with the changes that would make it.
    pub fn expect_fit(&self) -> Result<()> {
        if self.memory.fits {
            return match self.config.training.async_save == Some(true) && !self.memory.snapshots_fit {
                false => Ok(()),
                true => Err(Error::Memory(format!(
                    "`training.async_save` is true, and a snapshot of a checkpoint takes {:.1} GiB of the host's memory, which is more than is available for all ranks; set it to \"auto\" or to false",
                    gib(self.memory.snapshot_bytes)
                ))),
            };
        }
        let ResolvedRun {
            memory: MemoryPlan { peak_bytes, reserved_bytes, available_bytes, during, .. }, device, ..
        } = self;
        let (peak, available) = (gib(*peak_bytes), gib(*available_bytes));
        // Blocks of a pool leave gaps, which are part of what it takes.
        let gaps = match reserved_bytes > peak_bytes {
            true => format!(", {:.1} GiB with the gaps between them", gib(*reserved_bytes)),
            false => String::new(),
        };
        if let Some(there) = self.memory.host_available_bytes.filter(|&there| self.memory.host_bytes > there) {
            return Err(Error::Memory(format!(
                "the run does not fit the host's memory: offloaded tensors take {:.1} GiB, {:.1} GiB available; offload a smaller share in [memory]",
                gib(self.memory.host_bytes),
                gib(there)
            )));
        }
        let proposals = proposals(&changes::changes(&self.config, &self.sizes, device)?);
        Err(Error::Memory(format!(
            "the run does not fit {device}: in {during} tensors take {peak:.1} GiB{gaps}; {available:.1} GiB available. {proposals}"
        )))
    }

    /// If `error` says that memory ran out in spite of the plan, adds planned and measured memory, and proposals that take less.
    pub fn explain(&self, error: Error) -> Error {
        let (Error::Tensor(TensorError::OutOfMemory { requested, free, .. }), Device::Cuda(gpu)) =
            (&error, &self.device)
        else {
            return error;
        };
        let measured = gpu.memory();
        // At most the memory that was available, and less than the plan by the request that failed.
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
            "{error}. Planned: {:.1} GiB of tensors in {during}, {:.1} GiB available. Measured: at most {:.1} GiB of tensors, {:.1} GiB taken from the driver with the gaps between them, and {:.1} GiB free. {proposals}",
            gib(*peak_bytes as usize),
            gib(*available_bytes as usize),
            gib(measured.peak),
            gib(measured.reserved),
            gib(*free),
        ))
    }
}
