//! Streamed training data: the shards of each data set, and the checks of their settings.

use crate::demands::Problems;
use crate::{DatasetConfig, ObjectiveKind, RunConfig};
use ottava_common::error::Result;
use ottava_data::{
    DataSet, RowLayout, ShardSource, ShardStream, Shards, Split, SplitUse, StreamSizes, Tokenizer, expand, prepare,
};
use std::path::PathBuf;
use std::sync::Arc;

/// Local files as shards.
struct LocalFiles(Vec<PathBuf>);

impl ShardSource for LocalFiles {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn name(&self, shard: usize) -> String {
        self.0[shard].display().to_string()
    }

    fn version(&self, shard: usize) -> String {
        std::fs::metadata(&self.0[shard]).map_or_else(|_| String::new(), |found| found.len().to_string())
    }

    fn fetch(&self, shard: usize) -> Result<PathBuf> {
        Ok(self.0[shard].clone())
    }
}

impl RunConfig {
    /// Returns the shards of `set`, the data set with this `number`: one of [`DataConfig::shards`](crate::DataConfig::shards), or the local files of
    /// its `train_files`.
    ///
    /// Errors with [`Error::Data`](ottava_common::error::Error::Data) if a file or folder does not exist.
    fn shards(&self, number: usize, set: &DatasetConfig) -> Result<Shards> {
        match self.data.shards.get(number) {
            Some(shards) => Ok(shards.clone()),
            None => Ok(Shards::new(LocalFiles(expand(&set.train_files, SplitUse::Training)?))),
        }
    }

    fn stream(&self, shards: Shards, set: &DatasetConfig, layout: RowLayout) -> Result<ShardStream> {
        let sizes = StreamSizes { window: self.data.shuffle_shards.min(shards.count()), kept: self.data.cached_shards };
        let (config, options) = (self.clone(), self.source_options(set));
        let tokenizer = Tokenizer::load(self.tokenizer_path())?;
        let prepare = move |files: &[PathBuf]| {
            let dataset = Arc::new(prepare(files, &options, &tokenizer, &config.cache_dir())?);
            let split = Split::new(dataset.len(), 0.0)?;
            let set = DataSet::only(dataset, split, &layout, config.seed)?;
            set.statistics.check(&set.dataset, &layout, config.data.excess_length_strategy)?;
            if let Some(sentence) = set.statistics.describe_fit(&layout) {
                let names: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
                tracing::warn!("{}: {sentence}", names.join(", "));
            }
            Ok(set.dataset)
        };
        Ok(ShardStream::new(shards, sizes, &self.cache_dir(), prepare))
    }

    /// Returns the files of the data set with this `number` from which formats follow: all of `train_files`, or, of a stream, the first file that the
    /// run reads.
    pub(super) fn training_files(&self, number: usize, set: &DatasetConfig) -> Result<Vec<PathBuf>> {
        if !self.data.streaming {
            return expand(&set.train_files, SplitUse::Training);
        }
        let shards = self.shards(number, set)?;
        let first = ottava_data::order::Permutation::new(shards.count() as u64, self.seed, 0).get(0);
        Ok(vec![shards.fetch(first as usize)?])
    }

    /// Returns the data set with this `number` of a run with streamed training data: its validation documents, a sample of the training documents, and
    /// the stream.
    pub(super) fn streamed_set(
        &self,
        number: usize,
        set: &DatasetConfig,
        tokenizer: &Tokenizer,
        layout: &RowLayout,
    ) -> Result<DataSet> {
        let stream = self.stream(self.shards(number, set)?, set, *layout)?;
        let sample = DatasetConfig { train_files: self.training_files(number, set)?, ..set.clone() };
        let prepared = self.prepare_set(&sample, tokenizer, layout)?;
        let statistics = prepared.statistics.clone().of_stream(layout);
        Ok(DataSet { statistics, stream: Some(Arc::new(stream)), ..prepared })
    }

    /// Checks the settings of streamed data.
    pub(super) fn check_streaming(&self, problems: &mut Problems) {
        let data = &self.data;
        problems.demand_count("data.shuffle_shards", data.shuffle_shards as u64);
        if !data.streaming {
            return;
        }
        problems.demand(
            data.datasets.iter().all(|set| set.weight.is_some()),
            "`data.streaming` is true, so the tokens of the sets of [[data.datasets]] are not known; set the `weight` of each set",
        );
        problems.demand(
            self.training.max_steps.is_some(),
            "`data.streaming` is true, so the number of rows of an epoch is not known; set `training.max_steps`",
        );
        problems.demand(
            data.val_set_size == 0.0 || self.datasets().iter().all(|set| !set.val_files.is_empty()),
            "`data.streaming` is true, so no documents of `train_files` can be held out; name files in `val_files` of each data set, or set `data.val_set_size = 0.0`",
        );
        problems.demand(
            data.cached_shards == 0 || data.cached_shards >= data.shuffle_shards.saturating_mul(2),
            format!(
                "`data.cached_shards` is {}; it is at least twice `data.shuffle_shards` ({}), for the shards that are read and the shards that are read next, or 0",
                data.cached_shards, data.shuffle_shards
            ),
        );
        problems.demand(
            matches!(self.objective(), ObjectiveKind::NextToken | ObjectiveKind::Distillation)
                && !self.distillation.is_stored(),
            "`data.streaming` is true, and only texts, chats and completions are streamed; set `data.streaming = false`",
        );
    }
}
