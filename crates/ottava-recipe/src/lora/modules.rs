//! The modules of a model that adapters can train whole.

use super::MAGNITUDE;
use super::targets::last_names;
use std::collections::{BTreeMap, BTreeSet};

/// The modules of a model with adapters, as its layers record them while they are built.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Modules {
    /// The modules of all other parameters, with the number of their values that are trained.
    plain: BTreeMap<String, usize>,
    /// The modules whose weights stay frozen: linears of blocks and experts, and modules whose weights a folder stores in another layout.
    frozen: BTreeSet<String>,
}

/// Returns the module of a tensor of a folder: its name without the last part.
pub fn module_of(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or("", |(module, _)| module)
}

/// Returns whether `tensor`, by its name in PEFT, belongs to an adapter of a linear. Other tensors of a PEFT folder are modules that are trained whole.
pub fn is_of_adapter(tensor: &str) -> bool {
    [".lora_A.weight", ".lora_B.weight"].iter().any(|end| tensor.ends_with(end)) || tensor.ends_with(MAGNITUDE)
}

impl Modules {
    /// Adds a tensor that can be trained with its module. `trained` is the number of its values that are trained.
    pub fn add(&mut self, tensor: &str, trained: usize) {
        *self.plain.entry(module_of(tensor).to_string()).or_default() += trained;
    }

    /// Adds a tensor that stays frozen.
    pub fn add_frozen(&mut self, tensor: &str) {
        self.frozen.insert(module_of(tensor).to_string());
    }

    /// Returns the number of values of modules that are trained whole.
    pub fn trained_values(&self) -> usize {
        self.plain.values().sum()
    }

    /// Returns whether `module` is trained whole.
    pub fn trains(&self, module: &str) -> bool {
        self.plain.get(module).is_some_and(|trained| *trained > 0)
    }

    /// Returns the modules with frozen weights and the modules that contain them, which cannot be trained whole.
    fn with_frozen(&self) -> BTreeSet<&str> {
        let mut all = BTreeSet::new();
        for module in &self.frozen {
            let mut module = module.as_str();
            while !module.is_empty() && all.insert(module) {
                module = module_of(module);
            }
        }
        all
    }

    /// Returns the names of the modules that can be trained whole.
    pub fn trainable(&self) -> Vec<&String> {
        let with_frozen = self.with_frozen();
        self.plain.keys().filter(|name| !with_frozen.contains(name.as_str())).collect()
    }

    /// Returns a sentence if one of the names `saved` is not the end of a module's name, or if a module with this end has frozen weights.
    pub(super) fn problem(&self, saved: &[String]) -> Option<String> {
        if saved.is_empty() {
            return None;
        }
        let with_frozen = self.with_frozen();
        let whole = self.trainable();
        let known = || last_names(whole.iter().copied());
        saved.iter().find_map(|end| {
            let of_frozen = with_frozen.iter().find(|module| module.ends_with(end.as_str()));
            match of_frozen {
                _ if end.is_empty() => Some(format!("an empty name matches every module; name some of {}", known())),
                Some(module) => Some(format!(
                    "`{end}` matches `{module}`, which has weights that stay frozen: linears of blocks, which have adapters (`target_modules`), and weights \
                     that folders store in another layout; {} can be trained whole",
                    known()
                )),
                None if !whole.iter().any(|module| module.ends_with(end.as_str())) => {
                    Some(format!("`{end}` is no module of this model; modules that can be trained whole are {}", known()))
                }
                None => None,
            }
        })
    }
}
