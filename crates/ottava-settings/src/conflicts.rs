//! Settings that conflict with adapters.

use crate::demands::Problems;
use crate::{RunConfig, WeightInit};
use ottava_common::error::{Error, Result};
use ottava_parallel::Zero;
use ottava_recipe::lora::Targets;

impl RunConfig {
    /// Checks the adapters of a model with random weights. Errors if adapters cannot be trained with these settings, or if `lora.init_from`
    /// is set.
    pub fn expect_new_adapters(&self) -> Result<()> {
        let mut problems = Problems(self.lora_problems());
        problems.demand(
            self.lora.init_from.as_os_str().is_empty(),
            "`lora.init_from` is set; adapters of a model with random weights are new",
        );
        if problems.0.is_empty() { Ok(()) } else { Err(Error::Config(problems.0.join("\n"))) }
    }

    /// Lists the settings with which adapters cannot be trained, one sentence each.
    pub(super) fn lora_problems(&self) -> Vec<String> {
        let (lora, mut problems) = (&self.lora, Problems::default());
        if lora.r == 0 {
            problems.demand(
                !lora.load_in_4bit,
                "`lora.load_in_4bit` is true, and `lora.r` is 0; weights in four bits are frozen: set `lora.r`, such as 16",
            );
            return problems.0;
        }
        problems.demand(
            !lora.load_in_4bit || self.parallel.zero != Zero::Weights,
            "`lora.load_in_4bit` is true, and `parallel.zero` is 3, which divides weights in 16 bits or codes; set zero to 0, 1 or 2",
        );
        problems.demand(lora.r <= 4096, "`lora.r` is a rank from 1 to 4096, or 0 to train all weights");
        problems.demand(lora.lora_alpha.is_finite() && lora.lora_alpha > 0.0, "`lora.lora_alpha` must be above 0");
        problems.demand(
            (0.0..1.0).contains(&lora.lora_dropout),
            "`lora.lora_dropout` is a probability from 0 up to, but not including, 1",
        );
        problems.demand(
            lora.loraplus_lr_ratio.is_finite() && lora.loraplus_lr_ratio > 0.0,
            "`lora.loraplus_lr_ratio` is a finite factor above 0",
        );
        problems.demand(
            !lora.load_in_4bit || self.parallel.tensor == 1,
            "`lora.load_in_4bit` is true, and `parallel.tensor` is above 1; ranks that divide a matrix would quantize other blocks: set tensor to 1",
        );
        problems.demand(
            !(lora.load_in_4bit && lora.use_dora),
            "`lora.load_in_4bit` and `lora.use_dora` are true; magnitudes are the norms of weights that are not quantized: set one of them to false",
        );
        let names = match &lora.target_modules {
            Targets::AllLinear | Targets::Pattern(_) => true,
            Targets::Names(names) => {
                !(names.is_empty() && lora.target_parameters.is_empty()) && names.iter().all(|name| !name.is_empty())
            }
        };
        problems.demand(
            names,
            "`lora.target_modules` names no linear; write \"all-linear\", a list of names, or a regular expression",
        );
        problems.demand(
            lora.target_parameters.iter().all(|name| !name.is_empty()),
            "`lora.target_parameters` has an empty name; write ends of names of parameters, such as \"experts.down_proj\"",
        );
        problems.0.extend(lora.pattern_problems());
        let layers = lora.layers_to_transform.is_empty() || !matches!(lora.target_modules, Targets::Pattern(_));
        problems.demand(
            layers,
            "`lora.layers_to_transform` is set, and `lora.target_modules` is a regular expression; write the layers into it",
        );
        problems.demand(
            self.model.init == WeightInit::Pretrained,
            "`lora.r` is set, and `model.init` is \"random\"; adapters need the weights of a model folder",
        );
        let offloads = |share: Option<f64>| share != Some(0.0);
        problems.demand(
            !offloads(self.memory.offload_optimizer) && !offloads(self.memory.offload_parameters),
            "`lora.r` is set; `memory.offload_optimizer` and `memory.offload_parameters` must be 0, since weights stay on the device",
        );
        problems.demand(
            !self.precision.smooth_swiglu,
            "`lora.r` is set, and `precision.smooth_swiglu` is true; its products have no adapters",
        );
        problems.0
    }
}
