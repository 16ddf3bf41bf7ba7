//! Rows of embedding and head for tokens that a model folder does not have.

use crate::WeightFiles;
use ottava_common::error::Result;
use ottava_models::DecoderConfig;
use ottava_recipe::param::FolderTensor;
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Staging, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;

/// The rows of the folder that are read at once for their mean.
const ROWS: usize = 4096;

/// The tables of a folder that have fewer rows than the model: embedding and head. The rows of each new token are the mean of the rows of the folder.
/// transformers' `resize_token_embeddings` with `mean_resizing` draws rows around this mean, with a billionth of the rows' covariance.
pub(super) struct NewRows {
    /// The names of the tables.
    tables: [String; 2],
    /// The number of rows in the folder.
    own: usize,
    /// The means of the rows of tables that were read.
    means: BTreeMap<String, Vec<f32>>,
}

impl NewRows {
    /// Returns the tables of a model of these `sizes`, if it has more tokens than its folder, which has `own`.
    pub(super) fn of(sizes: &DecoderConfig, own: usize) -> Option<NewRows> {
        let names = sizes.stream.names;
        let tables = [names.embedding, names.head].map(|name| format!("{name}.weight"));
        (sizes.vocabulary > own).then_some(NewRows { tables, own, means: BTreeMap::new() })
    }

    /// Returns the number of rows of `tensor` in the folder, if the model has more.
    pub(super) fn of_folder(&self, tensor: &FolderTensor) -> Option<usize> {
        (self.tables.contains(&tensor.name) && tensor.shape[0] > self.own).then_some(self.own)
    }

    /// Reads `elements` of a table `tensor` of the model. `name` is its name in `files`.
    pub(super) fn read(
        &mut self,
        files: &WeightFiles,
        staging: &mut Staging,
        (tensor, name): (&FolderTensor, &str),
        elements: Range<usize>,
    ) -> Result<Tensor> {
        let columns = tensor.elements() / tensor.shape[0];
        let [start, end] = [elements.start, elements.end].map(|at| at.min(self.own * columns));
        let known = (start < end).then(|| files.read_of(staging, name, start..end)).transpose()?;
        let new = elements.start.max(end)..elements.end;
        if let Some(known) = known.as_ref().filter(|_| new.is_empty()) {
            return Ok(known.clone());
        }
        let mean = self.mean(files, name, columns)?;
        let values: Vec<f32> = new.map(|at| mean[at % columns]).collect();
        let Some(known) = known else { return Ok(Tensor::from_slice(&Device::Cpu, &[values.len()], &values)?) };
        let device = known.device();
        let mut all = Tensor::empty(device, &[elements.len()], DType::F32)?;
        all.copy_from(0, &cast(&known, DType::F32)?)?;
        all.copy_from(known.len(), &Tensor::from_slice(device, &[values.len()], &values)?)?;
        Ok(all)
    }

    /// Returns the mean of the rows of the tensor `name`.
    fn mean(&mut self, files: &WeightFiles, name: &str, columns: usize) -> Result<&[f32]> {
        if !self.means.contains_key(name) {
            let mut sums = vec![0.0; columns];
            for start in (0..self.own).step_by(ROWS) {
                let end = (start + ROWS).min(self.own);
                let values = files.values_of(name, start * columns..end * columns)?.to_vec::<f32>()?;
                for row in values.chunks_exact(columns) {
                    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
                }
            }
            let mean = sums.into_iter().map(|sum| (sum / self.own as f64) as f32).collect();
            self.means.insert(name.to_string(), mean);
        }
        Ok(&self.means[name])
    }
}
