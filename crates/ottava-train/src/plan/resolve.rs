//! Resolves `auto` settings for a device before memory is allocated.

use super::changes::{self, bus_seconds, gib, proposals, time_of};
use super::larger;
use super::memory::MemoryPlan;
use ottava_common::error::{Error, Result};
use ottava_models::DecoderConfig;
use ottava_recipe::recompute::Recompute;
use ottava_settings::{ResolvedConfig, RunConfig};
use ottava_tensor::cuda::GpuModel;
use ottava_tensor::{Device, Error as TensorError};

/// A run with resolved settings and a plan of its memory.
#[derive(Clone, Debug)]
pub struct ResolvedRun {
    /// The settings, with resolved values in place of `auto`.
    pub config: ResolvedConfig,
    /// The plan of the run's memory.
    pub memory: MemoryPlan,
    /// A sentence for each `auto` setting, with its resolved value.
    pub choice: Option<String>,
    sizes: DecoderConfig,
    device: Device,
}

impl ResolvedRun {
    /// Plans `config` for a model of `sizes` on `device`, and resolves each `auto` to the fastest policy that fits. If no policy fits, resolves it to
    /// the policy that takes the least memory.
    pub fn new(config: &RunConfig, sizes: &DecoderConfig, device: &Device) -> Result<ResolvedRun> {
        let mut search = Search::new(ResolvedConfig::fastest(config), sizes, device)?;
        if config.memory.recompute.is_none() {
            search.choose_recompute()?;
        }
        if config.memory.offload_optimizer.is_none() {
            search.choose_share("offload_optimizer", |config| &mut config.offload_optimizer)?;
        }
        if config.memory.offload_parameters.is_none() {
            search.choose_share("offload_parameters", |config| &mut config.offload_parameters)?;
        }
        search.note_offloads_without_effect();
        if config.checkpoint.async_save.is_none() {
            search.choose_async_save();
        }
        let Search { config, memory, choices, .. } = search;
        let choice = (!choices.is_empty()).then(|| choices.join(". "));
        Ok(ResolvedRun { config, memory, choice, sizes: sizes.clone(), device: device.clone() })
    }

    /// Starts to compile the kernels of the run in the background, so that the first step does not compile them one after the other.
    pub fn prepare_device(&self) {
        if let Device::Cuda(gpu) = &self.device {
            gpu.prepare(self.memory.workload.clone());
        }
    }

    /// Errors if the run does not fit. The message proposes changes that make it fit.
    pub fn expect_fit(&self) -> Result<()> {
        if self.memory.fits {
            return match self.config.async_save && !self.memory.snapshots_fit {
                false => Ok(()),
                true => Err(Error::Memory(format!(
                    "`checkpoint.async_save` is true, and a snapshot of a checkpoint takes {:.1} GiB of the host's memory, which is more than is available for all ranks; set it to \"auto\" or to false",
                    gib(self.memory.snapshot_bytes)
                ))),
            };
        }
        let ResolvedRun {
            memory: MemoryPlan { peak_bytes, reserved_bytes, available_bytes, during, .. }, device, ..
        } = self;
        let (peak, available) = (gib(*peak_bytes), gib(*available_bytes));
        // The pool also holds the gaps between its blocks.
        let gaps = match reserved_bytes > peak_bytes {
            true => format!(", {:.1} GiB with the gaps between them", gib(*reserved_bytes)),
            false => String::new(),
        };
        if let Some(there) = self.memory.host_available_bytes.filter(|&there| self.memory.host_bytes > there) {
            return Err(Error::Memory(format!(
                "the run does not fit the host's memory: the offloaded tensors of each rank take {:.1} GiB, {:.1} GiB available for it; offload a smaller share in [memory]",
                gib(self.memory.host_bytes),
                gib(there)
            )));
        }
        let larger = larger::proposals(&self.config, &self.sizes, device)?;
        let changes = changes::changes(&self.config, &self.sizes, device)?;
        let proposals = match changes.is_empty() && !larger.is_empty() {
            true => format!("No setting that takes less memory makes this run fit.{larger}"),
            false => proposals(&changes) + &larger,
        };
        Err(Error::Memory(format!(
            "the run does not fit {device}: in {during} tensors take {peak:.1} GiB{gaps}; {available:.1} GiB available. {proposals}"
        )))
    }

    /// If `error` says that memory ran out although the plan fitted, adds the planned and the measured memory, and proposals that take less memory.
    pub fn explain(&self, error: Error) -> Error {
        let (Error::Tensor(TensorError::OutOfMemory { requested, free, .. }), Device::Cuda(gpu)) =
            (&error, &self.device)
        else {
            return error;
        };
        let measured = gpu.memory();
        // The run may use at most the memory that was available. It must also use less than the plan by at least the size of the request that failed.
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

/// A search for the values of `auto` settings, one setting after the other.
struct Search<'a> {
    sizes: &'a DecoderConfig,
    device: &'a Device,
    /// The settings, with the values chosen so far.
    config: ResolvedConfig,
    /// The plan with these settings.
    memory: MemoryPlan,
    /// A sentence for each choice, with its reason.
    choices: Vec<String>,
}

impl<'a> Search<'a> {
    fn new(config: ResolvedConfig, sizes: &'a DecoderConfig, device: &'a Device) -> Result<Search<'a>> {
        let memory = MemoryPlan::new(&config, sizes, device)?;
        Ok(Search { sizes, device, config, memory, choices: Vec::new() })
    }

    /// Returns the peak of tensors and the available memory, in GiB.
    fn peak_and_available(&self) -> (f64, f64) {
        (gib(self.memory.peak_bytes), gib(self.memory.available_bytes))
    }

    /// Chooses the first policy that fits, or else the last policy.
    fn choose_recompute(&mut self) -> Result<()> {
        let (peak, available) = self.peak_and_available();
        for policy in Recompute::ALL.into_iter().skip(1) {
            if !self.memory.fits {
                self.config.recompute = policy;
                self.memory = MemoryPlan::new(&self.config, self.sizes, self.device)?;
            }
        }
        let policy = self.config.recompute;
        let slower = (time_of(policy) - 1.0) * 100.0;
        self.choices.push(match policy {
            Recompute::None => {
                format!("recompute = \"auto\" is \"none\": tensors take {peak:.1} GiB, {available:.1} GiB available")
            }
            policy => format!(
                "recompute = \"auto\" is \"{}\", which was about {slower:.0} % slower where it was measured: without, tensors take {peak:.1} GiB, {available:.1} GiB available",
                policy.as_str(),
            ),
        });
        Ok(())
    }

    /// Chooses the smallest share of the blocks that fits, for the setting `key`. If no share fits, chooses all blocks.
    fn choose_share(&mut self, key: &str, share_in: fn(&mut ResolvedConfig) -> &mut f64) -> Result<()> {
        let ((peak, available), host) = (self.peak_and_available(), self.memory.host_bytes);
        if self.memory.fits || !matches!(self.device, Device::Cuda(_)) {
            self.choices
                .push(format!("{key} = \"auto\" is 0: tensors take {peak:.1} GiB, {available:.1} GiB available"));
            return Ok(());
        }
        let layers = self.sizes.layers.len();
        let share_of = |blocks: usize| blocks as f64 / layers as f64;
        let plan_with = |search: &Search, blocks| {
            let mut config = search.config.clone();
            *share_in(&mut config) = share_of(blocks);
            MemoryPlan::new(&config, search.sizes, search.device)
        };
        // Halves the range between a number of blocks that does not fit and a number that fits.
        let (mut too_few, mut enough) = (0, layers);
        self.memory = plan_with(self, layers)?;
        while self.memory.fits && enough - too_few > 1 {
            let blocks = (too_few + enough).div_ceil(2);
            let tried = plan_with(self, blocks)?;
            match tried.fits {
                true => (self.memory, enough) = (tried, blocks),
                false => too_few = blocks,
            }
        }
        *share_in(&mut self.config) = share_of(enough);
        let moved = self.memory.host_bytes.saturating_sub(host);
        let (share, moved_gib, milliseconds) = (share_of(enough), gib(moved), bus_seconds(moved) * 1000.0);
        self.choices.push(format!(
            "{key} = \"auto\" is {share:.3}: without, tensors take {peak:.1} GiB, {available:.1} GiB available. {moved_gib:.1} GiB are offloaded to the host's memory; one transfer of them takes about {milliseconds:.0} ms"
        ));
        Ok(())
    }

    fn note_offloads_without_effect(&mut self) {
        let ResolvedConfig { run, offload_optimizer, offload_parameters, .. } = &self.config;
        let offloads = *offload_optimizer > 0.0 || *offload_parameters > 0.0 || run.memory.offload_residuals;
        if offloads && !matches!(self.device, Device::Cuda(_)) {
            self.choices.push("offloading has no effect on the CPU, which has only host memory".into());
        }
    }

    /// Enables asynchronous saves if there is memory for the snapshot.
    fn choose_async_save(&mut self) {
        self.config.async_save = self.memory.snapshots_fit;
        if !self.memory.snapshots_fit {
            let bytes = std::mem::take(&mut self.memory.snapshot_bytes);
            self.choices.push(format!(
                "async_save = \"auto\" is false: a snapshot of a checkpoint takes {:.1} GiB of the host's memory, which is more than is available for all ranks",
                gib(bytes)
            ));
        }
    }
}
