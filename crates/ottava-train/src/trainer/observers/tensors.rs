//! Tensors that `[debug]` records.

use super::contract::{Observer, Watched};
use crate::objective::LoadedRows;
use crate::report::TensorStatistics;
use crate::trainer::files::DUMPS;
use ottava_checkpoint::write_file;
use ottava_common::error::Result;
use ottava_common::fs::{RealFs, create_dirs};
use ottava_recipe::scaling::Quantity;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Records tensors of the first rows of the step, where that is due: statistics of the tensors of the leading rank, and files of each rank.
pub(super) struct Tensors;

impl Observer for Tensors {
    fn before_step(&mut self, step: u64, rows: &LoadedRows, watched: &mut Watched) -> Result<()> {
        let (config, ranks) = (&watched.environment.config, &watched.environment.ranks);
        let Some(first) = rows.first.as_ref().filter(|_| config.debug.is_due(step)) else { return Ok(()) };
        let rows = first.first_rows(config.sentinel.sentinel_sequences);
        let (comparison, tensors) = watched.run.observe(&rows, &config.debug.debug_tensors)?;
        let casts = comparison.tensors.iter().filter(|compared| compared.quantity == Quantity::Cast);
        let errors: HashMap<&str, f64> = casts.map(|compared| (compared.name.as_str(), compared.error())).collect();
        if let Some(log) = watched.files.as_mut().and_then(|files| files.tensors.as_mut()) {
            let mut all = Map::new();
            for (name, tensor) in &tensors {
                let statistics = TensorStatistics::of(tensor, errors.get(name.as_str()).copied())?;
                all.insert(name.clone(), json!(statistics));
            }
            log.append(step, &[("tensors", Value::Object(all))])?;
        }
        if config.debug.dump_tensors {
            let folder = config.output_dir.join(DUMPS);
            let name = match ranks.size() {
                1 => format!("step-{step}.safetensors"),
                _ => format!("step-{step}-rank-{}.safetensors", ranks.rank()),
            };
            let write = || create_dirs(&RealFs, &folder).and_then(|()| write_file(&folder.join(name), &tensors));
            ranks.together("files of tensors", write())?;
        }
        Ok(())
    }
}
